//! Packets of the keeper's sockets: what a driver and the keeper send each other on the main
//! socket. [`daemon`] has the packets of a daemon's socket.
//!
//! Every packet has a fixed size, little-endian numbers, and its version in the first two bytes: the
//! first one that has its operation and its role. So an older keeper still does what it knows, and a
//! newer one serves an older driver; a reply has the version of its request. Fields that an operation
//! does not use are zero.
//!
//! Invariant: what is decoded encodes to the same bytes, so no two packets mean the same.

use std::fmt;

pub mod daemon;
mod refusal;
pub mod standby;

pub use refusal::Refusal;
use standby::LaunchKey;

/// The newest version. The first 16 bytes of requests and replies keep their layout in all versions,
/// so that each side can name the other's version.
pub const VERSION: u16 = 2;
const FIRST_VERSION: u16 = 1;
/// The first with spare daemons.
const STANDBY_VERSION: u16 = 2;

/// A volume's name: 32 lower-case hexadecimal digits, as in the driver's volume ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeKey(u128);

/// The purpose of a descriptor. A volume has at most one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The volume's FUSE connection: /dev/fuse, open for reading and writing.
    Connection = 1,
    /// The volume's directory: the root of a detached mount (O_PATH).
    Directory = 2,
    /// What a successor of the daemon must know: a memfd that cannot shrink.
    StateTable = 3,
    /// The file that keeps what the volume uses.
    UsageFile = 4,
    /// A detached mount of a parked volume (O_PATH). Its last close ends the FUSE connection.
    ParkedMount = 5,
    /// Where the volume's daemon listens for the driver (SOCK_SEQPACKET). From version 2, as all below.
    ControlListener = 6,
    /// Where it listens for readers of its metrics (SOCK_STREAM).
    MetricsListener = 7,
    /// What a spare daemon is to be sent: see [`standby::Assignment`].
    Assignment = 8,
    /// The pidfd of the volume's daemon. As long as it is held, a spare daemon gets the volume when
    /// the daemon ends and no driver attends.
    Daemon = 9,
}

/// A set of roles.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Roles(u16);

/// A request on the main socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the client, and returned in each reply to this request.
    pub number: u64,
    pub call: Call,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Holds the one descriptor beside the packet, and closes one with the same role.
    Put { volume: VolumeKey, role: Role },
    /// A duplicate of the descriptor, beside the reply.
    Get { volume: VolumeKey, role: Role },
    /// Closes the descriptor.
    Forget { volume: VolumeKey, role: Role },
    /// Closes all of the volume: descriptors, removed files and the daemon's socket.
    ForgetVolume { volume: VolumeKey },
    /// All volumes, in as many replies as needed.
    List,
    /// A new socket for the volume's daemon, beside the reply. The older one is closed.
    DaemonSocket { volume: VolumeKey },
    /// Counts.
    Ping,
    /// This connection is the driver's: while it is open, the keeper gives no volume to a daemon.
    Attend,
    /// Holds the one descriptor beside the packet, the socket of a daemon that waits for a volume.
    PutSpare { launch: LaunchKey },
    /// Closes the socket.
    ForgetSpare { launch: LaunchKey },
    /// Closes the sockets of all spare daemons.
    ForgetSpares,
    /// The volumes that spare daemons got, in as many replies as needed.
    Takeovers,
}

/// The beginning of every reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    /// The keeper's version.
    pub version: u16,
    pub status: Status,
    /// Put, Forget, ForgetVolume, and those of spares: how many descriptors were closed. List and
    /// Takeovers: how many entries follow.
    pub count: u32,
    /// Of the request; 0 if the request is too short to have one.
    pub number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The request is done. The last reply to it.
    Done,
    /// More replies follow.
    More,
    /// Nothing has changed.
    Refused(Refusal),
}

/// A volume in the replies to List. It shows the roles of version 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub volume: VolumeKey,
    pub roles: Roles,
    /// Whether a daemon has the other end of the volume's socket.
    pub has_daemon: bool,
    /// Number of removed files.
    pub removed: u32,
}

/// In the reply to Ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub volumes: u32,
    /// Descriptors with a role, of all volumes.
    pub descriptors: u32,
    /// Removed files, of all volumes.
    pub removed: u32,
    /// How many removed files there is still room for.
    pub room: u32,
    /// Daemons that are connected.
    pub daemons: u32,
}

/// Why a packet is refused, and the number of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wrong {
    pub number: u64,
    pub refusal: Refusal,
}

impl VolumeKey {
    pub const DIGITS: usize = 32;

    /// `None` unless `text` is 32 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        Self::from_digits(text.as_bytes())
    }

    fn from_digits(digits: &[u8]) -> Option<Self> {
        let is_key =
            digits.len() == Self::DIGITS && digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let number = u128::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        is_key.then_some(Self(number))
    }

    fn digits(self) -> [u8; Self::DIGITS] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut nibbles = self.0;
        let mut digits = [0; Self::DIGITS];
        for digit in digits.iter_mut().rev() {
            *digit = DIGITS[(nibbles & 0xf) as usize];
            nibbles >>= 4;
        }
        digits
    }
}

impl fmt::Display for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.digits().iter().try_for_each(|digit| fmt::Write::write_char(f, char::from(*digit)))
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Role {
    pub const ALL: [Self; 9] = [
        Self::Connection,
        Self::Directory,
        Self::StateTable,
        Self::UsageFile,
        Self::ParkedMount,
        Self::ControlListener,
        Self::MetricsListener,
        Self::Assignment,
        Self::Daemon,
    ];

    fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|role| *role as u16 == number)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Connection => "CONNECTION",
            Self::Directory => "DIRECTORY",
            Self::StateTable => "STATE_TABLE",
            Self::UsageFile => "USAGE_FILE",
            Self::ParkedMount => "PARKED_MOUNT",
            Self::ControlListener => "CONTROL_LISTENER",
            Self::MetricsListener => "METRICS_LISTENER",
            Self::Assignment => "ASSIGNMENT",
            Self::Daemon => "DAEMON",
        }
    }

    /// The first version that has it.
    pub(crate) fn version(self) -> u16 {
        match self {
            Self::Connection | Self::Directory | Self::StateTable | Self::UsageFile | Self::ParkedMount => {
                FIRST_VERSION
            }
            Self::ControlListener | Self::MetricsListener | Self::Assignment | Self::Daemon => {
                STANDBY_VERSION
            }
        }
    }
}

impl Roles {
    pub fn with(self, role: Role) -> Self {
        Self(self.0 | Self::bit(role))
    }

    pub fn contains(self, role: Role) -> bool {
        self.0 & Self::bit(role) != 0
    }

    pub fn iter(self) -> impl Iterator<Item = Role> {
        Role::ALL.into_iter().filter(move |role| self.contains(*role))
    }

    fn bit(role: Role) -> u16 {
        1 << (role as u16 - 1)
    }

    /// `None` if it has unknown roles.
    fn from_bits(bits: u16) -> Option<Self> {
        let known = Role::ALL.into_iter().fold(0, |known, role| known | Self::bit(role));
        (bits & !known == 0).then_some(Self(bits))
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        roles.into_iter().fold(Self::default(), Self::with)
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Request {
    /// version u16, operation u16, role u16, 0 u16, number u64, the 32 digits of the volume or launch.
    pub const SIZE: usize = 48;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let (role, volume) = match self.call {
            Call::Put { volume, role } | Call::Get { volume, role } | Call::Forget { volume, role } => {
                (role as u16, Some(volume))
            }
            Call::ForgetVolume { volume } | Call::DaemonSocket { volume } => (0, Some(volume)),
            Call::PutSpare { launch } | Call::ForgetSpare { launch } => (0, Some(launch.0)),
            Call::List | Call::Ping | Call::Attend | Call::ForgetSpares | Call::Takeovers => (0, None),
        };
        let mut packet = [0; Self::SIZE];
        packet[..2].copy_from_slice(&self.call.version().to_le_bytes());
        packet[2..4].copy_from_slice(&self.call.operation().to_le_bytes());
        packet[4..6].copy_from_slice(&role.to_le_bytes());
        packet[8..16].copy_from_slice(&self.number.to_le_bytes());
        if let Some(volume) = volume {
            packet[16..].copy_from_slice(&volume.digits());
        }
        packet
    }

    pub fn decode(packet: &[u8]) -> Result<Self, Wrong> {
        let number = if packet.len() < 16 { 0 } else { u64_at(packet, 8) };
        let wrong = |refusal| Wrong { number, refusal };
        // The version first: a successor may have longer packets.
        if packet.len() >= 2 && !(FIRST_VERSION..=VERSION).contains(&u16_at(packet, 0)) {
            return Err(wrong(Refusal::Version));
        }
        if packet.len() != Self::SIZE {
            return Err(wrong(Refusal::Size));
        }
        let call = Fields { role: u16_at(packet, 4), volume: &packet[16..] }
            .call(u16_at(packet, 2))
            .map_err(wrong)?;
        if u16_at(packet, 6) != 0 {
            return Err(wrong(Refusal::Unused));
        }
        if u16_at(packet, 0) != call.version() {
            return Err(wrong(Refusal::Version));
        }
        Ok(Self { number, call })
    }

    /// Of the reply to a packet: that of the packet if it is known, so that an older driver reads it.
    pub fn reply_version(packet: &[u8]) -> u16 {
        let version = if packet.len() < 2 { VERSION } else { u16_at(packet, 0) };
        if (FIRST_VERSION..=VERSION).contains(&version) { version } else { VERSION }
    }
}

impl Call {
    fn operation(self) -> u16 {
        match self {
            Self::Put { .. } => 1,
            Self::Get { .. } => 2,
            Self::Forget { .. } => 3,
            Self::ForgetVolume { .. } => 4,
            Self::List => 5,
            Self::DaemonSocket { .. } => 6,
            Self::Ping => 7,
            Self::Attend => 8,
            Self::PutSpare { .. } => 9,
            Self::ForgetSpare { .. } => 10,
            Self::ForgetSpares => 11,
            Self::Takeovers => 12,
        }
    }

    /// The first version that has it, with its role.
    pub fn version(self) -> u16 {
        match self {
            Self::Put { role, .. } | Self::Get { role, .. } | Self::Forget { role, .. } => role.version(),
            Self::ForgetVolume { .. } | Self::List | Self::DaemonSocket { .. } | Self::Ping => FIRST_VERSION,
            Self::Attend
            | Self::PutSpare { .. }
            | Self::ForgetSpare { .. }
            | Self::ForgetSpares
            | Self::Takeovers => STANDBY_VERSION,
        }
    }

    /// Whether a descriptor comes with it.
    pub(crate) fn has_descriptor(self) -> bool {
        matches!(self, Self::Put { .. } | Self::PutSpare { .. })
    }

    /// The volume that it uses or changes.
    pub(crate) fn volume(self) -> Option<VolumeKey> {
        match self {
            Self::Put { volume, .. }
            | Self::Get { volume, .. }
            | Self::Forget { volume, .. }
            | Self::ForgetVolume { volume }
            | Self::DaemonSocket { volume } => Some(volume),
            Self::List
            | Self::Ping
            | Self::Attend
            | Self::PutSpare { .. }
            | Self::ForgetSpare { .. }
            | Self::ForgetSpares
            | Self::Takeovers => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Put { .. } => "PUT",
            Self::Get { .. } => "GET",
            Self::Forget { .. } => "FORGET",
            Self::ForgetVolume { .. } => "FORGET_VOLUME",
            Self::List => "LIST",
            Self::DaemonSocket { .. } => "DAEMON_SOCKET",
            Self::Ping => "PING",
            Self::Attend => "ATTEND",
            Self::PutSpare { .. } => "PUT_SPARE",
            Self::ForgetSpare { .. } => "FORGET_SPARE",
            Self::ForgetSpares => "FORGET_SPARES",
            Self::Takeovers => "TAKEOVERS",
        }
    }
}

/// The fields of a request that only some operations use.
struct Fields<'a> {
    role: u16,
    volume: &'a [u8],
}

impl Fields<'_> {
    fn call(&self, operation: u16) -> Result<Call, Refusal> {
        match operation {
            1 => Ok(Call::Put { volume: self.volume()?, role: self.role()? }),
            2 => Ok(Call::Get { volume: self.volume()?, role: self.role()? }),
            3 => Ok(Call::Forget { volume: self.volume()?, role: self.role()? }),
            4 => self.no_role().and_then(|()| Ok(Call::ForgetVolume { volume: self.volume()? })),
            5 => self.nothing().map(|()| Call::List),
            6 => self.no_role().and_then(|()| Ok(Call::DaemonSocket { volume: self.volume()? })),
            7 => self.nothing().map(|()| Call::Ping),
            8 => self.nothing().map(|()| Call::Attend),
            9 => self.launch().map(|launch| Call::PutSpare { launch }),
            10 => self.launch().map(|launch| Call::ForgetSpare { launch }),
            11 => self.nothing().map(|()| Call::ForgetSpares),
            12 => self.nothing().map(|()| Call::Takeovers),
            _ => Err(Refusal::Operation),
        }
    }

    fn volume(&self) -> Result<VolumeKey, Refusal> {
        VolumeKey::from_digits(self.volume).ok_or(Refusal::Volume)
    }

    fn launch(&self) -> Result<LaunchKey, Refusal> {
        self.no_role().and_then(|()| self.volume().map(LaunchKey))
    }

    fn role(&self) -> Result<Role, Refusal> {
        Role::from_number(self.role).ok_or(Refusal::Role)
    }

    fn no_role(&self) -> Result<(), Refusal> {
        if self.role == 0 { Ok(()) } else { Err(Refusal::Unused) }
    }

    fn nothing(&self) -> Result<(), Refusal> {
        if self.volume.iter().any(|byte| *byte != 0) {
            return Err(Refusal::Unused);
        }
        self.no_role()
    }
}

impl ReplyHeader {
    /// version u16, status u16, count u32, number u64.
    pub const SIZE: usize = 16;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut header = [0; Self::SIZE];
        header[..2].copy_from_slice(&self.version.to_le_bytes());
        header[2..4].copy_from_slice(&self.status.number().to_le_bytes());
        header[4..8].copy_from_slice(&self.count.to_le_bytes());
        header[8..].copy_from_slice(&self.number.to_le_bytes());
        header
    }

    /// The header and what follows it. `None` for a packet that no keeper sends.
    pub fn decode(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (header, body) = packet.split_at_checked(Self::SIZE)?;
        let decoded = Self {
            version: u16_at(header, 0),
            status: Status::from_number(u16_at(header, 2))?,
            count: u32_at(header, 4),
            number: u64_at(header, 8),
        };
        Some((decoded, body))
    }
}

impl Status {
    fn number(self) -> u16 {
        match self {
            Self::Done => 0,
            Self::More => 1,
            Self::Refused(refusal) => refusal as u16,
        }
    }

    fn from_number(number: u16) -> Option<Self> {
        match number {
            0 => Some(Self::Done),
            1 => Some(Self::More),
            _ => Refusal::from_number(number).map(Self::Refused),
        }
    }
}

/// A body of `count` entries of the same size, and at most `most`.
fn decode_list<const SIZE: usize, T>(
    body: &[u8],
    count: u32,
    most: usize,
    decode: impl Fn(&[u8; SIZE]) -> Option<T>,
) -> Option<Vec<T>> {
    let (entries, rest) = body.as_chunks::<SIZE>();
    let count = usize::try_from(count).ok()?;
    if !rest.is_empty() || entries.len() != count || count > most {
        return None;
    }
    entries.iter().map(decode).collect()
}

impl Entry {
    /// the volume's 32 digits, roles u16, has_daemon u16, removed u32.
    pub const SIZE: usize = 40;
    /// In one packet.
    pub const MOST: usize = 64;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut entry = [0; Self::SIZE];
        entry[..32].copy_from_slice(&self.volume.digits());
        entry[32..34].copy_from_slice(&self.roles.0.to_le_bytes());
        entry[34..36].copy_from_slice(&u16::from(self.has_daemon).to_le_bytes());
        entry[36..].copy_from_slice(&self.removed.to_le_bytes());
        entry
    }

    /// The body of a packet that has `count` entries.
    pub fn decode_all(body: &[u8], count: u32) -> Option<Vec<Self>> {
        decode_list(body, count, Self::MOST, Self::decode)
    }

    fn decode(entry: &[u8; Self::SIZE]) -> Option<Self> {
        Some(Self {
            volume: VolumeKey::from_digits(&entry[..32])?,
            roles: Roles::from_bits(u16_at(entry, 32))?,
            has_daemon: match u16_at(entry, 34) {
                0 => false,
                1 => true,
                _ => return None,
            },
            removed: u32_at(entry, 36),
        })
    }
}

impl Counts {
    /// volumes, descriptors, removed, room, daemons: u32 each.
    pub const SIZE: usize = 20;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let Self { volumes, descriptors, removed, room, daemons } = *self;
        let mut body = [0; Self::SIZE];
        for (to, number) in
            body.as_chunks_mut().0.iter_mut().zip([volumes, descriptors, removed, room, daemons])
        {
            *to = u32::to_le_bytes(number);
        }
        body
    }

    pub fn decode(body: &[u8]) -> Option<Self> {
        if body.len() != Self::SIZE {
            return None;
        }
        let [volumes, descriptors, removed, room, daemons] = [0, 4, 8, 12, 16].map(|at| u32_at(body, at));
        Some(Self { volumes, descriptors, removed, room, daemons })
    }
}

fn bytes_at<const N: usize>(packet: &[u8], at: usize) -> [u8; N] {
    packet[at..at + N].try_into().expect("a slice of N bytes")
}

fn u16_at(packet: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(packet, at))
}

fn u32_at(packet: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(packet, at))
}

fn u64_at(packet: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(packet, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "00112233445566778899aabbccddeeff";

    fn key() -> VolumeKey {
        VolumeKey::parse(KEY).unwrap()
    }

    #[test]
    fn a_volume_is_32_lower_case_hexadecimal_digits() {
        assert_eq!(key().to_string(), KEY);
        for text in ["", &KEY[1..], &format!("{KEY}0"), &KEY.to_uppercase(), &KEY.replacen("00", "+0", 1)] {
            assert_eq!(VolumeKey::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_request_is_the_same_when_it_is_read_again() {
        let (volume, role) = (key(), Role::StateTable);
        for call in [
            Call::Put { volume, role },
            Call::Get { volume, role },
            Call::Forget { volume, role },
            Call::ForgetVolume { volume },
            Call::List,
            Call::DaemonSocket { volume },
            Call::Ping,
            Call::Put { volume, role: Role::Daemon },
            Call::Attend,
            Call::PutSpare { launch: LaunchKey(volume) },
            Call::ForgetSpare { launch: LaunchKey(volume) },
            Call::ForgetSpares,
            Call::Takeovers,
        ] {
            let request = Request { number: 0x0102_0304_0506_0708, call };
            assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
    }

    #[test]
    fn the_layout_of_a_request_is_fixed() {
        let request = Request { number: 7, call: Call::Put { volume: key(), role: Role::ParkedMount } };
        let mut bytes = vec![1, 0, 1, 0, 5, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(KEY.as_bytes());
        assert_eq!(request.encode().as_slice(), bytes);
    }

    #[test]
    fn a_wrong_request_is_refused_for_its_first_fault() {
        let put = Request { number: 7, call: Call::Put { volume: key(), role: Role::Connection } }.encode();
        let list = Request { number: 7, call: Call::List }.encode();
        let attend = Request { number: 7, call: Call::Attend }.encode();
        let forget = Request { number: 7, call: Call::ForgetVolume { volume: key() } }.encode();
        let with = |packet: &[u8], at: usize, byte: u8| {
            let mut packet = packet.to_vec();
            packet[at] = byte;
            packet
        };
        for (packet, number, refusal) in [
            (Vec::new(), 0, Refusal::Size),
            (vec![1], 0, Refusal::Size),
            (put[..15].to_vec(), 0, Refusal::Size),
            (put[..47].to_vec(), 7, Refusal::Size),
            ([&put[..], &[0]].concat(), 7, Refusal::Size),
            (with(&put, 0, 0), 7, Refusal::Version),
            (with(&put, 0, 3), 7, Refusal::Version),
            (with(&put[..20], 1, 1), 7, Refusal::Version),
            // Each has one version.
            (with(&put, 0, 2), 7, Refusal::Version),
            (with(&put, 4, 9), 7, Refusal::Version),
            (with(&attend, 0, 1), 7, Refusal::Version),
            (with(&put, 2, 0), 7, Refusal::Operation),
            (with(&put, 2, 13), 7, Refusal::Operation),
            (with(&put, 3, 1), 7, Refusal::Operation),
            (with(&put, 4, 0), 7, Refusal::Role),
            (with(&put, 4, 10), 7, Refusal::Role),
            (with(&put, 6, 1), 7, Refusal::Unused),
            (with(&put, 20, b'/'), 7, Refusal::Volume),
            (with(&put, 20, b'A'), 7, Refusal::Volume),
            (with(&put, 20, 0xff), 7, Refusal::Volume),
            (with(&list, 47, 1), 7, Refusal::Unused),
            (with(&list, 4, 1), 7, Refusal::Unused),
            (with(&forget, 4, 1), 7, Refusal::Unused),
        ] {
            assert_eq!(Request::decode(&packet), Err(Wrong { number, refusal }), "{packet:?}");
        }
    }

    #[test]
    fn a_reply_is_the_same_when_it_is_read_again() {
        for status in [Status::Done, Status::More, Status::Refused(Refusal::NotHeld)] {
            let header = ReplyHeader { version: VERSION, status, count: 3, number: 9 };
            let packet = [&header.encode()[..], b"body"].concat();
            assert_eq!(ReplyHeader::decode(&packet), Some((header, &b"body"[..])));
        }
        assert_eq!(ReplyHeader::decode(&[0; 15]), None);
        assert_eq!(ReplyHeader::decode(&[1, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn entries_are_the_same_when_they_are_read_again() {
        let roles: Roles = [Role::Connection, Role::UsageFile].into_iter().collect();
        let entry = Entry { volume: key(), roles, has_daemon: true, removed: 65_536 };
        let other = Entry { roles: Roles::default(), has_daemon: false, removed: 0, ..entry };
        let body = [entry.encode(), other.encode()].concat();
        assert_eq!(Entry::decode_all(&body, 2), Some(vec![entry, other]));
        assert_eq!(Entry::decode_all(&body, 1), None);
        assert_eq!(Entry::decode_all(&body[1..], 2), None);
        assert_eq!(Entry::decode_all(&[0; Entry::SIZE], 1), None);
        assert_eq!(entry.roles.iter().collect::<Vec<_>>(), [Role::Connection, Role::UsageFile]);
    }

    #[test]
    fn counts_are_the_same_when_they_are_read_again() {
        let counts = Counts { volumes: 1, descriptors: 2, removed: 3, room: 4, daemons: 5 };
        assert_eq!(Counts::decode(&counts.encode()), Some(counts));
        assert_eq!(Counts::decode(&[0; 19]), None);
    }
}
