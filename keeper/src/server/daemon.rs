//! The socket of a volume's daemon, which an attacker may control.
//!
//! Invariant: the socket reaches its own volume only. What waits for a daemon that does not read is
//! bounded, here and in the kernel. So is what is still to be closed for a daemon: further packets
//! of it are read afterwards.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::{DAEMON_PACKETS_A_TURN, LOGGED_REFUSALS, PACKETS_A_TURN, Turn};
use crate::descriptors;
use crate::held::{Held, NotRegistered};
use crate::log::Log;
use crate::packets::{self, Received};
use crate::wire::daemon::{DaemonPacket, DaemonRequest, Kind, MOST_NODES, VERSION};
use crate::wire::{Refusal, Role, VolumeKey, Wrong};

/// Refusals that wait for a daemon to read. Further ones are lost.
const MOST_REFUSALS: usize = 64;
/// Answers to registrations that wait for a daemon to read. Further requests are read afterwards.
const MOST_REGISTERED: usize = 64;
/// The kernel doubles it: some six packets, and so less than 400 descriptors, wait in the kernel for
/// one daemon. All that wait count against the same limit of root (unix(7), ETOOMANYREFS).
const SEND_BUFFER: usize = 4096;

#[derive(Debug)]
pub(super) struct Daemon {
    socket: OwnedFd,
    volume: VolumeKey,
    listing: Option<Listing>,
    refusals: VecDeque<(u64, Refusal)>,
    /// Of all times.
    refused: u32,
    closing: Closing,
    /// Its daemon registers backing files, and waits for each: it never rests.
    registers: bool,
    /// Answers to registrations that wait for the daemon to read.
    registered: VecDeque<(u64, Result<u32, Refusal>)>,
    /// Registrations that are to end: after the packets that are read at once.
    ended: Vec<u32>,
}

/// Descriptors of a daemon that wait to be closed. Its close may take long, if the daemon wants it to.
#[derive(Debug, Default)]
struct Closing {
    count: u64,
    /// All are closed once the closer has closed so many of all daemons.
    last: u64,
}

#[derive(Debug, Clone, Copy)]
struct Listing {
    number: u64,
    after: Option<u64>,
}

/// Ours and the daemon's. Neither blocks: the daemon waits with ppoll(2), as long as it wants to.
pub(super) fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    sockopt::set_socket_send_buffer_size(&pair.0, SEND_BUFFER)?;
    Ok(pair)
}

impl Daemon {
    pub(super) fn new(socket: OwnedFd, volume: VolumeKey) -> Self {
        Self {
            socket,
            volume,
            listing: None,
            refusals: VecDeque::new(),
            refused: 0,
            closing: Closing::default(),
            registers: false,
            registered: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub(super) fn volume(&self) -> VolumeKey {
        self.volume
    }

    /// Of the next event alone.
    pub(super) fn interest(&self) -> EventFlags {
        let reads = EventFlags::IN | EventFlags::RDHUP;
        let mut events = EventFlags::ONESHOT;
        events.set(reads, self.registered.len() < MOST_REGISTERED);
        events.set(EventFlags::OUT, self.is_owed_a_packet());
        events
    }

    fn is_owed_a_packet(&self) -> bool {
        self.listing.is_some() || !self.refusals.is_empty() || !self.registered.is_empty()
    }

    pub(super) fn take_turn(&mut self, held: &mut Held, log: Log, flags: EventFlags) -> Turn {
        // Those that could not be ended before. While they cannot, no more are read.
        self.end_registrations(held);
        let (mut has_read_all, mut waits_for_closer) = (false, !self.ended.is_empty());
        if !waits_for_closer
            && flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP)
        {
            for count in 0..DAEMON_PACKETS_A_TURN {
                waits_for_closer = self.waits_for_closer(held);
                if waits_for_closer || self.registered.len() >= MOST_REGISTERED {
                    break;
                }
                match self.read(held, log) {
                    Read::Packet => {}
                    Read::Registration => break,
                    Read::Nothing => {
                        has_read_all = count > 0;
                        break;
                    }
                    Read::End => {
                        self.end_registrations(held);
                        return Turn::Closed;
                    }
                }
            }
        }
        self.end_registrations(held);
        self.send_registered(held);
        self.send_refusals();
        for _ in 0..PACKETS_A_TURN {
            if !self.send_listing(held) {
                break;
            }
        }
        let is_done = has_read_all && !self.is_owed_a_packet() && !self.registers;
        if is_done || waits_for_closer { Turn::Rests } else { Turn::Open }
    }

    /// Of a socket that can receive no more. What its daemon sent is lost if too many descriptors wait to
    /// be closed even without those of before.
    pub(super) fn read_to_end(&mut self, held: &mut Held, log: Log) {
        self.closing.count = 0;
        while !self.waits_for_closer(held)
            && matches!(self.read(held, log), Read::Packet | Read::Registration)
        {}
        self.end_registrations(held);
    }

    fn waits_for_closer(&mut self, held: &Held) -> bool {
        if held.closer().closed() >= self.closing.last {
            self.closing.count = 0;
        }
        self.closing.count > 0 && self.closing.count >= held.share() as u64
    }

    fn read(&mut self, held: &mut Held, log: Log) -> Read {
        let before = held.closer().queued();
        let read = self.read_one(held, log);
        self.count_closing(held, before);
        read
    }

    /// What the closer was given since it had `before`.
    fn count_closing(&mut self, held: &Held, before: u64) {
        let queued = held.closer().queued();
        if queued > before {
            self.closing.count += queued - before;
            self.closing.last = queued;
        }
    }

    fn read_one(&mut self, held: &mut Held, log: Log) -> Read {
        // One byte more than a request, so that a longer one is known.
        let mut buffer = [0; DaemonRequest::SIZE + 1];
        let mut received = match packets::receive(&self.socket, &mut buffer) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Read::Nothing,
            // The daemon has ended, and had not read all. What it sent before is still to be read
            // (net/unix/af_unix.c, `unix_release_sock`).
            Err(Errno::CONNRESET) => return Read::Packet,
            Err(e) => {
                log.warn(format_args!("volume {}: receive from its daemon: {e}", self.volume));
                return Read::End;
            }
        };
        if received.is_empty() && packets::has_hung_up(&self.socket) {
            return Read::End;
        }
        let mut read = Read::Packet;
        let obeyed = DaemonRequest::decode(&buffer[..received.bytes]).and_then(|request| {
            if matches!(request, DaemonRequest::RegisterBacking { .. }) {
                read = Read::Registration;
            }
            let wrong = |refusal| Wrong { number: request.number(), refusal };
            self.obey(held, log, request, &mut received).map_err(wrong)
        });
        received.fds.into_iter().for_each(|fd| held.close(fd));
        if let Err(wrong) = obeyed {
            self.refuse(log, wrong);
        }
        read
    }

    fn obey(
        &mut self,
        held: &mut Held,
        log: Log,
        request: DaemonRequest,
        received: &mut Received,
    ) -> Result<(), Refusal> {
        let needs_descriptor =
            matches!(request, DaemonRequest::PutRemoved { .. } | DaemonRequest::RegisterBacking { .. });
        let fd = match (received.take_descriptor(needs_descriptor), request) {
            // Its daemon waits for an answer of this kind.
            (Err(refusal), DaemonRequest::RegisterBacking { number }) => {
                self.registered.push_back((number, Err(refusal)));
                return Ok(());
            }
            (fd, _) => fd?,
        };
        match request {
            DaemonRequest::PutRemoved { node } => {
                let fd = fd.ok_or(Refusal::NoDescriptor)?;
                let directory = held.get(self.volume, Role::Directory);
                if let Err(refusal) = descriptors::check_removed(fd.as_fd(), directory) {
                    held.close(fd);
                    return Err(refusal);
                }
                held.put_removed(self.volume, node, fd)?;
            }
            DaemonRequest::DropRemoved { node } => held.drop_removed(self.volume, node),
            DaemonRequest::ListRemoved { number } => self.listing = Some(Listing { number, after: None }),
            DaemonRequest::RegisterBacking { number } => {
                let fd = fd.ok_or(Refusal::NoDescriptor)?;
                let registered = held
                    .register_backing(self.volume, fd.as_fd())
                    .map_err(|not_registered| self.log_not_registered(log, &not_registered));
                self.registers |= registered.is_ok();
                self.registered.push_back((number, registered));
                // Before the close, which may wake another thread.
                self.send_registered(held);
                match registered {
                    Ok(_backing) => held.closer().close_registered(fd),
                    Err(_) => held.close(fd),
                }
            }
            DaemonRequest::UnregisterBacking { backing } => {
                held.get(self.volume, Role::Connection).ok_or(Refusal::NotHeld)?;
                self.ended.push(backing);
            }
        }
        Ok(())
    }

    /// The daemon is answered with the refusal alone, and goes on without passthrough.
    fn log_not_registered(&mut self, log: Log, NotRegistered { refusal, cause }: &NotRegistered) -> Refusal {
        let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
        self.log_refusal(log, format_args!("no file is registered: {refusal}{cause}"));
        *refusal
    }

    fn log_refusal(&mut self, log: Log, what: fmt::Arguments<'_>) {
        self.refused = self.refused.saturating_add(1);
        if self.refused <= LOGGED_REFUSALS {
            log.warn(format_args!("volume {}: {what}", self.volume));
        }
    }

    /// Those that cannot be ended now wait for the next turn. Each job of the closer has a descriptor.
    fn end_registrations(&mut self, held: &Held) {
        if self.ended.is_empty() {
            return;
        }
        let before = held.closer().queued();
        match held.unregister_backings(self.volume, &self.ended) {
            // Without its connection, nothing is registered any more.
            Ok(()) | Err(Refusal::NotHeld) => self.ended.clear(),
            Err(_) => {}
        }
        self.count_closing(held, before);
    }

    fn refuse(&mut self, log: Log, Wrong { number, refusal }: Wrong) {
        self.log_refusal(log, format_args!("refused a packet of its daemon ({number}): {refusal}"));
        if self.refusals.len() < MOST_REFUSALS {
            self.refusals.push_back((number, refusal));
        }
    }

    fn send_registered(&mut self, held: &Held) {
        while let Some(&(number, registered)) = self.registered.front() {
            let sent = match registered {
                Ok(backing) => self.send(Kind::Registered, number, &[backing.into()], &[]),
                Err(refusal) => self.send(Kind::NotRegistered(refusal), number, &[], &[]),
            };
            match sent {
                Ok(()) => drop(self.registered.pop_front()),
                Err(Errno::AGAIN) => return,
                // The daemon has ended, which is read next. It did not learn of these.
                Err(_) => {
                    for (_number, registered) in self.registered.drain(..) {
                        if let Ok(backing) = registered {
                            let _is_forgotten = held.unregister_backings(self.volume, &[backing]);
                        }
                    }
                }
            }
        }
    }

    fn send_refusals(&mut self) {
        while let Some(&(number, refusal)) = self.refusals.front() {
            match self.send(Kind::Refused(refusal), number, &[], &[]) {
                Ok(()) => {
                    self.refusals.pop_front();
                }
                Err(Errno::AGAIN) => return,
                // The daemon has ended, which is read next.
                Err(_) => self.refusals.clear(),
            }
        }
    }

    /// Sends the next packet of the listing. Returns whether another one may follow now.
    fn send_listing(&mut self, held: &Held) -> bool {
        let Some(Listing { number, after }) = self.listing else { return false };
        let (mut nodes, mut fds) = (Vec::new(), Vec::new());
        for (node, fd) in held.removed_after(self.volume, after).take(MOST_NODES) {
            nodes.push(node);
            fds.push(fd);
        }
        let kind = if nodes.is_empty() { Kind::End } else { Kind::Removed };
        match self.send(kind, number, &nodes, &fds) {
            Ok(()) => {
                self.listing = nodes.last().map(|last| Listing { number, after: Some(*last) });
                true
            }
            Err(Errno::AGAIN) => false,
            Err(e) => {
                self.listing = None;
                if !matches!(e, Errno::PIPE | Errno::CONNRESET) {
                    self.refusals.truncate(MOST_REFUSALS - 1);
                    self.refusals.push_front((number, Refusal::Interrupted));
                }
                false
            }
        }
    }

    fn send(&self, kind: Kind, number: u64, nodes: &[u64], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let count = u16::try_from(nodes.len()).expect("at most MOST_NODES");
        let header = DaemonPacket { version: VERSION, kind, count, number };
        let mut packet = [0; DaemonPacket::MOST_BYTES];
        packet[..DaemonPacket::HEADER].copy_from_slice(&header.encode());
        let (to, _) = packet[DaemonPacket::HEADER..].as_chunks_mut();
        for (to, node) in to.iter_mut().zip(nodes) {
            *to = u64::to_le_bytes(*node);
        }
        packets::send(&self.socket, &packet[..DaemonPacket::HEADER + 8 * nodes.len()], fds)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    Packet,
    /// The daemon waits for its answer, so probably no other packet is there.
    Registration,
    Nothing,
    End,
}
