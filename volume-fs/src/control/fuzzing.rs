//! Requests to a serving daemon: packets of two connections, the time between them, and changes of
//! the volume.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use keeper::daemon::Removed;
use linux::credentials::Caller;
use prost::Message;
use proto::control::{Reply as Packet, reply};
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::pauses::Who;
use super::{Connection, Control, Listeners, Subject};
use crate::backend::{Backend, CannotPause, DataReply, Held, KnownListing, Listing, Pausing, Reply};
use crate::figures::{Counted, Figures, KnownNow, Limits, Shrinks, UsageNow};
use crate::file::{Attributes, Handle, Known, LookedUp, Name, NodeId, Opened, OpenedDirectory, Statistics};
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::notifications::{Kernel, MountPoints};
use crate::request::{Changes, Data, Permissions, Position, RequestId, Requester, Special, Xattr};

const LONGEST_REPLY_BYTES: usize = 4096;

/// Steps, each a byte and what it takes. Every request is answered once, by one short line if it is
/// refused; the volume is paused exactly while a pause lasts, and not once both connections are
/// closed.
pub fn control_requests(mut input: &[u8]) {
    let mut scene = Scene::new();
    let gate = Arc::clone(&scene.control.subject.backend.gate);
    let mut change = None;
    while let Some((step, rest)) = input.split_first() {
        input = rest;
        let client = usize::from(step % 2);
        match step / 2 % 4 {
            0 => {
                let Some((length, rest)) = input.split_first_chunk() else { break };
                let (packet, rest) = rest.split_at(rest.len().min(u16::from_le_bytes(*length).into()));
                input = rest;
                scene.send(client, packet);
            }
            1 => {
                let Some((quarters, rest)) = input.split_first() else { break };
                input = rest;
                scene.now += Duration::from_millis(250) * u32::from(*quarters);
            }
            2 => change = if change.is_some() { None } else { gate.enter().ok() },
            _ => scene.close(client),
        }
        scene.settle();
        assert_eq!(gate.enter().is_err(), scene.control.pauses.ends().is_some());
    }
    (0..2).for_each(|client| scene.close(client));
    assert!(gate.enter().is_ok(), "no connection is left, and the volume is paused");
}

struct Scene {
    control: Control<Limited>,
    clients: [Option<Client>; 2],
    now: Instant,
}

struct Client {
    who: Who,
    socket: OwnedFd,
    unanswered: usize,
}

impl Scene {
    fn new() -> Self {
        let unused = || rustix::fs::memfd_create("listener", MemfdFlags::CLOEXEC).expect("a file in memory");
        let listeners = Listeners { control: unused(), metrics: unused() };
        let backend = Arc::new(Limited { gate: Arc::new(Gate::new(false)), limits: Mutex::default() });
        let (metrics, mount_points) = (Arc::new(Metrics::default()), Arc::new(MountPoints::default()));
        let subject = Subject { backend, metrics, mount_points };
        let control = Control::new(listeners, subject).expect("an eventfd");
        Self { control, clients: [None, None], now: Instant::now() }
    }

    /// Sends from a client, which connects first if it is not connected.
    fn send(&mut self, client: usize, packet: &[u8]) {
        if self.clients[client].is_none() {
            let pair = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            );
            let (socket, fd) = pair.expect("a pair of sockets");
            let who = self.control.next;
            self.control.next += 1;
            self.control.connections.push(Connection { who, fd });
            self.clients[client] = Some(Client { who, socket, unanswered: 0 });
        }
        let Some(client) = &mut self.clients[client] else { return };
        if rustix::net::send(&client.socket, packet, SendFlags::NOSIGNAL).is_ok() {
            client.unanswered += 1;
            self.control.receive(client.who, self.now);
        }
    }

    fn close(&mut self, client: usize) {
        if let Some(Client { who, socket, .. }) = self.clients[client].take() {
            drop(socket);
            self.control.receive(who, self.now);
        }
    }

    /// What [`Control::turn`] does beside requests, then reads the replies.
    fn settle(&mut self) {
        let answer = self.control.pauses.take_answer(self.now);
        self.control.send(answer, self.now);
        let overdue = self.control.pauses.lease_ended(self.now);
        self.control.send(overdue, self.now);
        for place in &mut self.clients {
            let is_over = place.as_mut().is_some_and(Client::read_replies);
            if is_over {
                *place = None;
            }
        }
    }
}

impl Client {
    /// Returns whether the daemon has closed the connection.
    fn read_replies(&mut self) -> bool {
        let mut packet = [0; LONGEST_REPLY_BYTES];
        loop {
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match rustix::net::recv(&self.socket, &mut packet, flags) {
                Err(Errno::AGAIN) => return false,
                Err(_) | Ok((_, 0)) => return true,
                Ok((_, length)) => {
                    self.unanswered = self.unanswered.checked_sub(1).expect("one reply for each request");
                    let packet = Packet::decode(&packet[..length]).expect("a reply");
                    let kind = packet.kind.expect("a reply of a kind");
                    if let reply::Kind::Refused(refused) = kind {
                        assert!(!refused.reason.contains('\n'), "{}", refused.reason);
                    }
                }
            }
        }
    }
}

/// A backend with limits and pauses. Nothing mounts it, so no file request reaches it.
struct Limited {
    gate: Arc<Gate>,
    limits: Mutex<Limits>,
}

impl Pausing for Limited {
    fn pause(
        &self,
        _held: Held,
        paused: impl FnOnce(std::result::Result<Counted, CannotPause>) + Send + 'static,
    ) {
        self.gate.pause(move || paused(Ok(Counted::default())));
    }

    fn resume(&self) {
        self.gate.resume();
    }

    fn pause_waits_for(&self) -> &'static str {
        "a change"
    }
}

impl Backend for Limited {
    fn figures(&self) -> Figures {
        let limits = *self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let usage = UsageNow { limits, used: Counted::default(), counting: false };
        Figures { usage, open_files: 0, known: KnownNow::default() }
    }

    fn written(&self, NodeId(after): NodeId, most: usize) -> std::result::Result<Vec<(NodeId, u64)>, String> {
        Ok((after..100).take(most).map(|id| (NodeId(id + 1), u64::MAX)).collect())
    }

    fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        limits.check_growth(wanted)?;
        *limits = wanted;
        Ok(())
    }

    fn lookup(&self, _: RequestId, _: Name<'_>, _: impl Reply<LookedUp>) {}
    fn forget(&self, _: NodeId, _: u64) {}
    fn getattr(&self, _: NodeId, _: Option<Handle>, _: impl Reply<Attributes>) {}
    fn setattr(&self, _: Caller, _: NodeId, _: Option<Handle>, _: Changes, _: impl Reply<Attributes>) {}
    fn getxattr(&self, _: NodeId, _: &OsStr, _: usize, _: impl Reply<Xattr>) {}
    fn setxattr(&self, _: Requester, _: NodeId, _: &OsStr, _: &[u8], _: XattrFlags, _: impl Reply<()>) {}
    fn listxattr(&self, _: NodeId, _: usize, _: impl Reply<Xattr>) {}
    fn removexattr(&self, _: RequestId, _: NodeId, _: &OsStr, _: impl Reply<()>) {}
    fn readlink(&self, _: NodeId, _: impl DataReply) {}
    fn mknod(&self, _: Requester, _: Name<'_>, _: Special, _: Permissions, _: impl Reply<Known>) {}
    fn mkdir(&self, _: Requester, _: Name<'_>, _: Permissions, _: impl Reply<Known>) {}
    fn symlink(&self, _: Requester, _: Name<'_>, _: &OsStr, _: impl Reply<Known>) {}
    fn link(&self, _: RequestId, _: NodeId, _: Name<'_>, _: impl Reply<Known>) {}
    fn unlink(&self, _: Requester, _: Name<'_>, _: impl Reply<()>) {}
    fn rmdir(&self, _: Requester, _: Name<'_>, _: impl Reply<()>) {}
    fn rename(&self, _: Requester, _: Name<'_>, _: Name<'_>, _: RenameFlags, _: impl Reply<()>) {}
    fn create(&self, _: Requester, _: Name<'_>, _: Permissions, _: OFlags, _: impl Reply<(Known, Opened)>) {}
    fn open(&self, _: RequestId, _: NodeId, _: OFlags, _: impl Reply<Opened>) {}
    fn read(&self, _: Handle, _: u64, _: u32, _: impl DataReply) {}
    fn write(&self, _: Handle, _: Data<'_>, _: impl Reply<usize>) {}
    fn copy_file_range(&self, _: Position, _: Position, _: u64, _: impl Reply<usize>) {}
    fn fallocate(&self, _: Handle, _: Range<u64>, _: FallocateFlags, _: impl Reply<()>) {}
    fn lseek(&self, _: Handle, _: SeekFrom, _: impl Reply<u64>) {}
    fn flush(&self, _: Handle, _: impl Reply<()>) {}
    fn fsync(&self, _: Handle, _: bool, _: impl Reply<()>) {}
    fn release(&self, _: Handle, _: impl Reply<()>) {}
    fn opendir(&self, _: Requester, _: NodeId, _: impl Reply<OpenedDirectory>) {}
    fn readdir(&self, _: Handle, _: u64, _: impl Listing) {}
    fn readdirplus(&self, _: NodeId, _: Handle, _: u64, _: impl KnownListing) {}
    fn fsyncdir(&self, _: Handle, _: bool, _: impl Reply<()>) {}
    fn releasedir(&self, _: Handle, _: impl Reply<()>) {}
    fn statfs(&self, _: impl Reply<Statistics>) {}

    fn start(self: Arc<Self>, _: Kernel) -> crate::Result<()> {
        Ok(())
    }

    fn replace_keeper(&self, _keeper: Removed) -> std::result::Result<usize, String> {
        Ok(0)
    }

    fn end(&self) {}
}

#[cfg(test)]
mod tests {
    #[test]
    fn seeds_of_requests_to_daemons_hold() {
        tests::seeds::run("control_requests", super::control_requests);
    }
}
