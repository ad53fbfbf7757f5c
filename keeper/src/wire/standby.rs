//! What the keeper needs to give a volume to a spare daemon while no driver runs, and what it tells the
//! next driver.

use std::fmt;

use super::{Role, VolumeKey, decode_list, u16_at, u32_at, u64_at};

/// The key of a daemon's launch: it has the form of a volume's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaunchKey(pub(super) VolumeKey);

/// A descriptor beside the packet for a spare daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// What is held for the volume.
    Held(Role),
    /// A new socket to the keeper.
    KeeperSocket,
}

/// The content of [`Role::Assignment`]: a packet, which the keeper does not read, and which descriptors
/// go beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    beside: Vec<Beside>,
    packet: Vec<u8>,
}

/// A volume that spare daemons got while no driver attended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Takeover {
    pub volume: VolumeKey,
    /// Of the last one. [`Role::Daemon`] is its pidfd.
    pub launch: LaunchKey,
    /// How many of them, one after another.
    pub count: u32,
    /// When the last one got it: seconds since 1970.
    pub since: u64,
}

impl LaunchKey {
    /// `None` unless `text` is 32 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        VolumeKey::parse(text).map(Self)
    }
}

impl fmt::Display for LaunchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Beside {
    const KEEPER_SOCKET: u8 = 0xff;

    fn number(self) -> u8 {
        match self {
            Self::Held(role) => role as u8,
            Self::KeeperSocket => Self::KEEPER_SOCKET,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        match number {
            Self::KEEPER_SOCKET => Some(Self::KeeperSocket),
            // A daemon has no use for these.
            _ => Role::from_number(number.into())
                .filter(|role| !matches!(role, Role::ParkedMount | Role::Assignment | Role::Daemon))
                .map(Self::Held),
        }
    }
}

impl Assignment {
    /// version u16, the number of descriptors u16, what they are u8 each, then zeros.
    pub const HEADER: usize = 16;
    pub const MOST_PACKET_BYTES: usize = 16 << 10;
    pub const MOST_BYTES: usize = Self::HEADER + Self::MOST_PACKET_BYTES;
    const VERSION: u16 = 1;
    const MOST_BESIDE: usize = Self::HEADER - 4;

    /// `None` for one that no keeper would hold.
    pub fn new(beside: &[Beside], packet: &[u8]) -> Option<Self> {
        let is_double = |at: usize| beside[..at].contains(&beside[at]);
        let has_all = [Beside::Held(Role::Connection), Beside::KeeperSocket]
            .iter()
            .all(|needed| beside.contains(needed));
        let is_good = has_all
            && beside.len() <= Self::MOST_BESIDE
            && !(0..beside.len()).any(is_double)
            && (1..=Self::MOST_PACKET_BYTES).contains(&packet.len());
        is_good.then(|| Self { beside: beside.to_vec(), packet: packet.to_vec() })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::HEADER];
        bytes[..2].copy_from_slice(&Self::VERSION.to_le_bytes());
        let count = u16::try_from(self.beside.len()).expect("at most MOST_BESIDE");
        bytes[2..4].copy_from_slice(&count.to_le_bytes());
        for (to, beside) in bytes[4..].iter_mut().zip(&self.beside) {
            *to = beside.number();
        }
        bytes.extend_from_slice(&self.packet);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, packet) = bytes.split_at_checked(Self::HEADER)?;
        if u16_at(header, 0) != Self::VERSION {
            return None;
        }
        let (beside, rest) = header[4..].split_at_checked(usize::from(u16_at(header, 2)))?;
        let beside = beside.iter().map(|number| Beside::from_number(*number)).collect::<Option<Vec<_>>>()?;
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        Self::new(&beside, packet)
    }

    pub fn beside(&self) -> &[Beside] {
        &self.beside
    }

    pub fn packet(&self) -> &[u8] {
        &self.packet
    }
}

impl Takeover {
    /// the volume's 32 digits, the launch's 32 digits, count u32, 0 u32, since u64.
    pub const SIZE: usize = 80;
    /// In one packet.
    pub const MOST: usize = 32;

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut entry = [0; Self::SIZE];
        entry[..32].copy_from_slice(&self.volume.digits());
        entry[32..64].copy_from_slice(&self.launch.0.digits());
        entry[64..68].copy_from_slice(&self.count.to_le_bytes());
        entry[72..].copy_from_slice(&self.since.to_le_bytes());
        entry
    }

    /// The body of a packet that has `count` entries.
    pub fn decode_all(body: &[u8], count: u32) -> Option<Vec<Self>> {
        decode_list(body, count, Self::MOST, Self::decode)
    }

    fn decode(entry: &[u8; Self::SIZE]) -> Option<Self> {
        let decoded = Self {
            volume: VolumeKey::from_digits(&entry[..32])?,
            launch: LaunchKey(VolumeKey::from_digits(&entry[32..64])?),
            count: u32_at(entry, 64),
            since: u64_at(entry, 72),
        };
        (u32_at(entry, 68) == 0).then_some(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "00112233445566778899aabbccddeeff";

    fn beside() -> Vec<Beside> {
        let held = [Role::Connection, Role::ControlListener, Role::StateTable].map(Beside::Held);
        [&held[..], &[Beside::KeeperSocket]].concat()
    }

    #[test]
    fn an_assignment_is_the_same_when_it_is_read_again() {
        let assignment = Assignment::new(&beside(), b"packet").unwrap();
        let bytes = assignment.encode();
        assert_eq!(bytes[..10], [1, 0, 4, 0, 1, 6, 3, 0xff, 0, 0]);
        assert_eq!(Assignment::decode(&bytes), Some(assignment));
        let most = Assignment::new(&beside(), &[7; Assignment::MOST_PACKET_BYTES]).unwrap().encode();
        assert_eq!(most.len(), Assignment::MOST_BYTES);
        Assignment::decode(&most).unwrap();
    }

    #[test]
    fn a_wrong_assignment_is_none() {
        let good = Assignment::new(&beside(), b"p").unwrap().encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        for (bytes, what) in [
            (Vec::new(), "empty"),
            (good[..15].to_vec(), "no header"),
            (good[..16].to_vec(), "no packet"),
            ([&good[..], &vec![0; Assignment::MOST_PACKET_BYTES]].concat(), "too long"),
            (with(0, 2), "version"),
            (with(2, 3), "no socket to the keeper"),
            (with(2, 5), "role 0"),
            (with(3, 1), "more than the header has"),
            (with(4, 2), "no connection"),
            (with(5, 1), "twice"),
            (with(5, 5), "a parked mount"),
            (with(5, 8), "the assignment itself"),
            (with(5, 9), "a pidfd"),
            (with(15, 1), "unused"),
        ] {
            assert_eq!(Assignment::decode(&bytes), None, "{what}");
        }
    }

    #[test]
    fn takeovers_are_the_same_when_they_are_read_again() {
        let (volume, launch) = (VolumeKey::parse(KEY).unwrap(), LaunchKey::parse(KEY).unwrap());
        let takeover = Takeover { volume, launch, count: 3, since: 1 << 40 };
        let mut body = takeover.encode();
        assert_eq!(Takeover::decode_all(&body, 1), Some(vec![takeover]));
        assert_eq!(Takeover::decode_all(&body, 2), None);
        body[68] = 1;
        assert_eq!(Takeover::decode_all(&body, 1), None);
    }
}
