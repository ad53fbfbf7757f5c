//! A volume's daemon's side of its socket: the removed files that applications still have open, and
//! that a successor of the daemon could not open by name; and the files that the kernel reads and writes
//! without the daemon, since their registration needs CAP_SYS_ADMIN.
//!
//! Invariant: a call waits for the keeper at most the time limit, with system calls that the
//! daemon's seccomp filter allows (sendmsg, sendmmsg, recvmsg, recvfrom, ppoll, sched_yield, fcntl with F_GETFL).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::Error;
use crate::packets;
use crate::wire::Refusal;
use crate::wire::daemon::{DaemonPacket, DaemonRequest, Kind};

/// The number of a listing. A socket has one daemon, which lists once.
const LISTING: u64 = 1;
/// How long a registration is awaited without sleep. The keeper answers in some microseconds. If this
/// processor sleeps meanwhile, it takes longer to wake up, and the scheduler starts the keeper on another one.
const AWAKE: Duration = Duration::from_micros(150);

/// When a call ends, and the time that it had, for its error.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    fn after(limit: Duration) -> Self {
        Self { at: Instant::now() + limit, limit }
    }

    fn is_past(self) -> bool {
        Instant::now() >= self.at
    }

    fn missed(self, op: &'static str) -> Error {
        Error::TimedOut { op, limit: self.limit }
    }
}

/// The removed files of one volume, which the keeper holds. Threads may share it.
#[derive(Debug)]
pub struct Removed {
    socket: OwnedFd,
    limit: Duration,
}

impl Removed {
    /// `socket` is what [`crate::client::Client::daemon_socket`] returns. `limit` is for each packet
    /// that is sent, and for each pause between packets that arrive.
    pub fn new(socket: OwnedFd, limit: Duration) -> Result<Self, Error> {
        match rustix::fs::fcntl_getfl(&socket) {
            Ok(flags) if flags.contains(OFlags::NONBLOCK) => Ok(Self { socket, limit }),
            Ok(_) => Err(Error::Blocking),
            Err(e) => Err(socket_error("daemon socket", e)),
        }
    }

    /// Holds a duplicate of `file` for `node`. There is no answer: if the keeper refuses it,
    /// [`Self::refused`] returns that later. It is held even if this process is killed at once.
    pub fn put_removed(&self, node: u64, file: BorrowedFd<'_>) -> Result<(), Error> {
        self.send("PUT_REMOVED", DaemonRequest::PutRemoved { node }, &[file])
    }

    /// Closes what is held for `node`. There is no answer.
    pub fn drop_removed(&self, node: u64) -> Result<(), Error> {
        self.send("DROP_REMOVED", DaemonRequest::DropRemoved { node }, &[])
    }

    /// All that is held for the volume, in the order of the nodes. Must be called first, if at all.
    pub fn list_removed(&self) -> Result<Vec<(u64, OwnedFd)>, Error> {
        const OP: &str = "LIST_REMOVED";
        self.send(OP, DaemonRequest::ListRemoved { number: LISTING }, &[])?;
        let mut files = Vec::new();
        loop {
            let (packet, nodes, fds) = self.receive(OP)?;
            match packet.kind {
                Kind::End => return Ok(files),
                Kind::Removed if nodes.len() == fds.len() => files.extend(nodes.into_iter().zip(fds)),
                Kind::Removed => return Err(Error::Invalid { op: OP }),
                Kind::Refused(refusal) => return Err(Error::Refused { op: OP, refusal }),
                Kind::Registered | Kind::NotRegistered(_) => return Err(Error::Invalid { op: OP }),
            }
        }
    }

    /// Makes the kernel read and write `file` without this daemon; the number of the backing file, for the
    /// answer to an open. Only one thread at a time, and none beside it that calls [`Self::refused`].
    /// `number` is another one in each call. `limit` is for the whole call.
    ///
    /// # Errors
    ///
    /// `Refused`: the keeper or the kernel does not pass this file through. The file is not registered
    /// after any error; what is registered too late is ended by the next call.
    pub fn register_backing(&self, number: u64, file: BorrowedFd<'_>, limit: Duration) -> Result<u32, Error> {
        const OP: &str = "REGISTER_BACKING";
        let deadline = Deadline::after(limit);
        self.send_until(OP, DaemonRequest::RegisterBacking { number }, &[file], deadline)?;
        let awake_until = Instant::now() + AWAKE;
        std::thread::yield_now();
        loop {
            let (packet, numbers, _fds) = self.receive_awake(OP, awake_until, deadline)?;
            let is_this = packet.number == number;
            match (packet.kind, numbers.first()) {
                (Kind::Registered, Some(&backing)) => {
                    let backing = u32::try_from(backing).map_err(|_| Error::Invalid { op: OP })?;
                    if is_this {
                        return Ok(backing);
                    }
                    self.unregister_backings(&[backing], limit)?;
                }
                (Kind::NotRegistered(refusal), _) if is_this => {
                    return Err(Error::Refused { op: OP, refusal });
                }
                // Of an older keeper.
                (Kind::Refused(refusal @ Refusal::Operation), _) if is_this => {
                    return Err(Error::Refused { op: OP, refusal });
                }
                _ => {}
            }
        }
    }

    /// Ends registrations. There is no answer. Files that are open with them stay open. Returns how many
    /// requests the socket has taken: the first ones, and all unless it has no room within `limit`.
    ///
    /// # Errors
    ///
    /// None was taken.
    pub fn unregister_backings(&self, backings: &[u32], limit: Duration) -> Result<usize, Error> {
        const OP: &str = "UNREGISTER_BACKING";
        let deadline = Deadline::after(limit);
        let request = |&backing| DaemonRequest::UnregisterBacking { backing }.encode();
        let requests: Vec<_> = backings.iter().map(request).collect();
        let mut sent = 0;
        while sent < requests.len() {
            let taken = match packets::send_many(&self.socket, &requests[sent..]) {
                Ok(taken) => Ok(taken),
                Err(Errno::AGAIN) => self.wait(OP, PollFlags::OUT, deadline).map(|()| 0),
                Err(e) => Err(failed(OP, e)),
            };
            match taken {
                Ok(taken) => sent += taken,
                Err(_) if sent > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(sent)
    }

    /// The nodes that the keeper has refused since the last call, without waiting. It keeps at most 64
    /// for a daemon that does not ask.
    pub fn refused(&self) -> Result<Vec<(u64, Refusal)>, Error> {
        const OP: &str = "REFUSED";
        let mut refused = Vec::new();
        let mut buffer = [0; DaemonPacket::MOST_BYTES];
        loop {
            let received = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT)
            });
            match received {
                Ok((0, _)) => return Err(Error::Closed { op: OP }),
                Ok((bytes, _)) => match DaemonPacket::decode(&buffer[..bytes]) {
                    Some((DaemonPacket { kind: Kind::Refused(refusal), number, .. }, _)) => {
                        refused.push((number, refusal));
                    }
                    // What is left of a listing that was given up.
                    Some(_) => {}
                    None => return Err(Error::Invalid { op: OP }),
                },
                Err(Errno::AGAIN) => return Ok(refused),
                Err(e) => return Err(failed(OP, e)),
            }
        }
    }

    fn send(&self, op: &'static str, request: DaemonRequest, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.send_until(op, request, fds, Deadline::after(self.limit))
    }

    fn send_until(
        &self,
        op: &'static str,
        request: DaemonRequest,
        fds: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(), Error> {
        loop {
            match packets::send(&self.socket, &request.encode(), fds) {
                Ok(()) => return Ok(()),
                // Another thread may be faster, so this may happen again after the wait.
                Err(Errno::AGAIN) => self.wait(op, PollFlags::OUT, deadline)?,
                // As many descriptors as root's processes may have on their way (unix(7)) wait to be
                // received.
                Err(Errno::TOOMANYREFS) => self.wait_until_some_have_arrived(op, deadline)?,
                Err(e) => return Err(failed(op, e)),
            }
        }
    }

    fn wait_until_some_have_arrived(&self, op: &'static str, deadline: Deadline) -> Result<(), Error> {
        if deadline.is_past() {
            return Err(deadline.missed(op));
        }
        // No system call but ppoll(2) can wait here.
        let pause = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        match poll(&mut [], Some(&pause)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(socket_error(op, e)),
        }
    }

    fn receive(&self, op: &'static str) -> Result<(DaemonPacket, Vec<u64>, Vec<OwnedFd>), Error> {
        self.receive_awake(op, Instant::now(), Deadline::after(self.limit))
    }

    /// Lets other processes use this processor until `awake_until`, and sleeps from then on.
    fn receive_awake(
        &self,
        op: &'static str,
        awake_until: Instant,
        deadline: Deadline,
    ) -> Result<(DaemonPacket, Vec<u64>, Vec<OwnedFd>), Error> {
        let mut buffer = [0; DaemonPacket::MOST_BYTES];
        loop {
            match packets::receive(&self.socket, &mut buffer) {
                Ok(received) if received.is_empty() => return Err(Error::Closed { op }),
                Ok(received) if received.lost_fds => return Err(Error::TooManyDescriptors { op }),
                Ok(received) => {
                    let decoded = DaemonPacket::decode(&buffer[..received.bytes]);
                    let (packet, nodes) =
                        decoded.filter(|_| !received.is_longer).ok_or(Error::Invalid { op })?;
                    return Ok((packet, nodes, received.fds));
                }
                Err(Errno::AGAIN) if Instant::now() < awake_until => std::thread::yield_now(),
                Err(Errno::AGAIN) => self.wait(op, PollFlags::IN, deadline)?,
                Err(e) => return Err(failed(op, e)),
            }
        }
    }

    fn wait(&self, op: &'static str, event: PollFlags, deadline: Deadline) -> Result<(), Error> {
        let left = deadline.at.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| deadline.missed(op))?;
        let mut polled = [PollFd::new(&self.socket, event)];
        match poll(&mut polled, Some(&left)) {
            Ok(0) => Err(deadline.missed(op)),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(socket_error(op, e)),
        }
    }
}

impl AsFd for Removed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn failed(op: &'static str, e: Errno) -> Error {
    match e {
        Errno::PIPE | Errno::CONNRESET => Error::Closed { op },
        _ => socket_error(op, e),
    }
}

fn socket_error(op: &'static str, e: Errno) -> Error {
    Error::Socket { op, cause: e.into() }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn an_error_names_the_limit_of_the_call_and_not_that_of_the_socket() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, keepers) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let removed = Removed::new(own, Duration::from_secs(60)).unwrap();
        let limit = Duration::from_millis(2);
        // A keeper that does not answer.
        let late = removed.register_backing(1, keepers.as_fd(), limit);
        assert!(matches!(late, Err(Error::TimedOut { limit: named, .. }) if named == limit), "{late:?}");
        // Nor does it read.
        while packets::send(&removed.socket, b"x", &[]).is_ok() {}
        for late in [
            removed.register_backing(2, keepers.as_fd(), limit).map(drop),
            removed.unregister_backings(&[1], limit).map(drop),
        ] {
            assert!(matches!(late, Err(Error::TimedOut { limit: named, .. }) if named == limit), "{late:?}");
        }
    }
}
