//! The driver's side of the main socket.
//!
//! Invariant: a reply belongs to the request with its number. One that comes after the time limit
//! is dropped by the next call, with its descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use linux::fd_passing::PacketSocket;
use nix::errno::Errno;
use rustix::fs::{Mode, OFlags};

use crate::Error;
use crate::wire::standby::{LaunchKey, Takeover};
use crate::wire::{Call, Counts, Entry, Refusal, ReplyHeader, Request, Role, Status, VolumeKey};

/// A connection to the keeper. Each call takes at most the time limit, and a little more.
#[derive(Debug)]
pub struct Client {
    socket: PacketSocket,
    limit: Duration,
    last_number: u64,
    attends: bool,
}

/// What a Put did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    New,
    /// An older descriptor with this role was closed.
    Replaced,
}

/// What stands at `path`. A keeper in a pod can put anything there, also a link to a socket of another
/// program: connecting to that fails, since the link is not followed.
fn find(path: &Path) -> linux::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|e| linux::Error::at("open", path, e))
}

struct Answer {
    header: ReplyHeader,
    packet: Vec<u8>,
    fd: Option<OwnedFd>,
}

impl Answer {
    fn body(&self) -> &[u8] {
        &self.packet[ReplyHeader::SIZE..]
    }
}

/// The end of a call.
struct Deadline {
    op: &'static str,
    limit: Duration,
    at: Instant,
    /// Of the replies.
    version: u16,
}

impl Client {
    /// `limit` is for connecting, and for each call.
    pub fn connect(path: &Path, limit: Duration) -> Result<Self, Error> {
        let connect = || {
            let found = find(path)?;
            let found = Path::new("/proc/self/fd").join(found.as_raw_fd().to_string());
            PacketSocket::connect_within(&found, limit)
        };
        let socket = connect().map_err(|cause| Error::Connect { cause })?;
        Ok(Self { socket, limit, last_number: 0, attends: false })
    }

    /// Holds a duplicate of `fd`. The keeper checks it as [`crate::descriptors::check`] does.
    pub fn put(&mut self, volume: VolumeKey, role: Role, fd: BorrowedFd<'_>) -> Result<Put, Error> {
        if role == Role::Directory {
            load_permissions(fd);
        }
        let answer = self.call(Call::Put { volume, role }, &[fd])?;
        Ok(if answer.header.count == 0 { Put::New } else { Put::Replaced })
    }

    /// A duplicate of the descriptor, which the keeper goes on holding; `None` if it holds none.
    pub fn get(&mut self, volume: VolumeKey, role: Role) -> Result<Option<OwnedFd>, Error> {
        match self.call(Call::Get { volume, role }, &[]) {
            Ok(Answer { fd: Some(fd), .. }) => Ok(Some(fd)),
            Ok(Answer { fd: None, .. }) => Err(Error::Invalid { op: "GET" }),
            Err(Error::Refused { refusal: Refusal::NotHeld, .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Closes the descriptor. Returns whether there was one.
    pub fn forget(&mut self, volume: VolumeKey, role: Role) -> Result<bool, Error> {
        self.call(Call::Forget { volume, role }, &[]).map(|answer| answer.header.count > 0)
    }

    /// Closes all of the volume: descriptors, removed files and its daemon's socket. Returns how many
    /// descriptors and removed files there were.
    pub fn forget_volume(&mut self, volume: VolumeKey) -> Result<u32, Error> {
        self.call(Call::ForgetVolume { volume }, &[]).map(|answer| answer.header.count)
    }

    /// All volumes, in their order. A volume that is put meanwhile may be missing.
    pub fn list(&mut self) -> Result<Vec<Entry>, Error> {
        self.list_of(Call::List, Entry::decode_all)
    }

    fn list_of<T>(
        &mut self,
        call: Call,
        decode: impl Fn(&[u8], u32) -> Option<Vec<T>>,
    ) -> Result<Vec<T>, Error> {
        let deadline = self.deadline(call);
        let number = self.send(&deadline, call, &[])?;
        let mut entries = Vec::new();
        loop {
            let answer = self.receive(&deadline, number)?;
            let more = decode(answer.body(), answer.header.count);
            entries.extend(more.ok_or(Error::Invalid { op: deadline.op })?);
            if answer.header.status == Status::Done {
                return Ok(entries);
            }
        }
    }

    /// Makes this the driver's connection: as long as it is open, the keeper gives no volume to a spare
    /// daemon. On any other connection, a call for a volume ends that for the volume. Fails with
    /// [`Error::Version`] if the keeper knows no spare daemons.
    pub fn attend(&mut self) -> Result<(), Error> {
        self.call(Call::Attend, &[])?;
        self.attends = true;
        Ok(())
    }

    /// Whether the keeper has agreed to that.
    pub fn attends(&self) -> bool {
        self.attends
    }

    /// Holds a duplicate of a socket to a daemon that waits for a volume. It gets one that has lost its
    /// daemon while no driver attends, if the volume has [`Role::Daemon`] and all that its
    /// [`Role::Assignment`] needs.
    pub fn put_spare(&mut self, launch: LaunchKey, socket: BorrowedFd<'_>) -> Result<(), Error> {
        self.call(Call::PutSpare { launch }, &[socket]).map(drop)
    }

    /// From here on, the keeper sends the daemon nothing. Returns whether it held the socket.
    pub fn forget_spare(&mut self, launch: LaunchKey) -> Result<bool, Error> {
        self.call(Call::ForgetSpare { launch }, &[]).map(|answer| answer.header.count > 0)
    }

    /// Returns how many there were.
    pub fn forget_spares(&mut self) -> Result<u32, Error> {
        self.call(Call::ForgetSpares, &[]).map(|answer| answer.header.count)
    }

    /// The volumes that spare daemons got since a driver has put their [`Role::Daemon`].
    pub fn takeovers(&mut self) -> Result<Vec<Takeover>, Error> {
        self.list_of(Call::Takeovers, Takeover::decode_all)
    }

    /// A new socket for the volume's daemon: see [`crate::daemon::Removed`]. From then on, a daemon
    /// with an older one can change nothing.
    pub fn daemon_socket(&mut self, volume: VolumeKey) -> Result<OwnedFd, Error> {
        let answer = self.call(Call::DaemonSocket { volume }, &[])?;
        answer.fd.ok_or(Error::Invalid { op: "DAEMON_SOCKET" })
    }

    pub fn ping(&mut self) -> Result<Counts, Error> {
        let answer = self.call(Call::Ping, &[])?;
        Counts::decode(answer.body()).ok_or(Error::Invalid { op: "PING" })
    }

    /// Becomes readable when the process that listens on the main socket ends; `None` if it has ended.
    pub fn pidfd(&self) -> Result<Option<OwnedFd>, Error> {
        linux::peer_process::peer_pidfd(&self.socket).map_err(|cause| Error::Connect { cause })
    }

    fn call(&mut self, call: Call, fds: &[BorrowedFd<'_>]) -> Result<Answer, Error> {
        let deadline = self.deadline(call);
        let number = self.send(&deadline, call, fds)?;
        let answer = self.receive(&deadline, number)?;
        if answer.header.status == Status::Done {
            Ok(answer)
        } else {
            Err(Error::Invalid { op: deadline.op })
        }
    }

    fn deadline(&self, call: Call) -> Deadline {
        Deadline {
            op: call.name(),
            limit: self.limit,
            at: Instant::now() + self.limit,
            version: call.version(),
        }
    }

    fn send(&mut self, deadline: &Deadline, call: Call, fds: &[BorrowedFd<'_>]) -> Result<u64, Error> {
        self.last_number += 1;
        let request = Request { number: self.last_number, call };
        self.allow(deadline)?;
        self.socket.send(&request.encode(), fds).map_err(|e| deadline.failed(e))?;
        Ok(request.number)
    }

    /// The next reply to the request with this number. A refusal is an error.
    fn receive(&self, deadline: &Deadline, number: u64) -> Result<Answer, Error> {
        let op = deadline.op;
        loop {
            self.allow(deadline)?;
            let received = self.socket.receive_with_fds(1).map_err(|e| deadline.failed(e))?;
            let (packet, mut fds) = received.ok_or(Error::Closed { op })?;
            let (header, _) = ReplyHeader::decode(&packet).ok_or(Error::Invalid { op })?;
            if header.number != number {
                continue;
            }
            return match header.status {
                Status::Refused(Refusal::Version) => Err(Error::Version { op, keepers: header.version }),
                _ if header.version != deadline.version => {
                    Err(Error::Version { op, keepers: header.version })
                }
                Status::Refused(refusal) => Err(Error::Refused { op, refusal }),
                Status::Done | Status::More => Ok(Answer { header, packet, fd: fds.pop() }),
            };
        }
    }

    /// The next send or receive may take what is left of the time.
    fn allow(&self, deadline: &Deadline) -> Result<(), Error> {
        let Deadline { op, limit, at, .. } = *deadline;
        let left = at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TimedOut { op, limit });
        }
        // Zero would mean no limit.
        let left = left.max(Duration::from_millis(1));
        self.socket.set_timeout(left).map_err(|e| Error::Socket { op, cause: e.source })
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Deadline {
    fn failed(&self, e: linux::Error) -> Error {
        let op = self.op;
        match e.errno() {
            Errno::EAGAIN => Error::TimedOut { op, limit: self.limit },
            Errno::EPIPE | Errno::ECONNRESET => Error::Closed { op },
            _ => Error::Socket { op, cause: e.source },
        }
    }
}

/// The keeper looks `..` up without waiting, which fails while the kernel has not yet loaded the
/// access control list of the directory.
fn load_permissions(directory: BorrowedFd<'_>) {
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    // The keeper reports what is wrong.
    let _looked_up = rustix::fs::statx(directory, c"..", flags, rustix::fs::StatxFlags::empty());
}
