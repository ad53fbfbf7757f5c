//! A connection of the driver.
//!
//! Invariant: a request is read only when its reply can be sent, so no reply is ever stored.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::{LOGGED_REFUSALS, PACKETS_A_TURN, Server, Turn};
use crate::descriptors;
use crate::packets;
use crate::wire::{Call, Entry, Refusal, ReplyHeader, Request, Role, Status, VERSION, VolumeKey, Wrong};

#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// Increases from one turn of any connection to the next.
    last_used: u64,
    state: State,
    refusals: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    /// The client reads no replies.
    Full,
    Listing {
        number: u64,
        after: Option<VolumeKey>,
    },
}

/// A reply to a request.
struct Reply<'fd> {
    status: Status,
    count: u32,
    body: [u8; crate::wire::Counts::SIZE],
    body_len: usize,
    fd: Option<Fd<'fd>>,
}

enum Fd<'fd> {
    Held(BorrowedFd<'fd>),
    New(OwnedFd),
}

impl Connection {
    pub(super) fn new(socket: OwnedFd, number: u64) -> Self {
        Self { socket, last_used: number, state: State::Reading, refusals: 0 }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn last_used(&self) -> u64 {
        self.last_used
    }

    pub(super) fn is_owed_a_reply(&self) -> bool {
        self.state != State::Reading
    }

    pub(super) fn interest(&self) -> EventFlags {
        match self.state {
            State::Reading => EventFlags::IN | EventFlags::RDHUP,
            // Without RDHUP, which would be reported again and again.
            State::Full | State::Listing { .. } => EventFlags::OUT,
        }
    }

    pub(super) fn take_turn(&mut self, server: &mut Server, flags: EventFlags, used: u64) -> Turn {
        self.last_used = used;
        if self.state != State::Reading && flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            self.state = State::Reading;
        }
        if self.state == State::Full {
            self.state = State::Reading;
        }
        for _ in 0..PACKETS_A_TURN {
            let turn = match self.state {
                State::Reading if !packets::is_writable(&self.socket) => {
                    self.state = State::Full;
                    return Turn::Open;
                }
                State::Reading => self.read(server),
                State::Listing { number, after } => self.list(server, number, after),
                State::Full => return Turn::Open,
            };
            match turn {
                Ok(()) => {}
                Err(End::NothingNow) => return Turn::Open,
                Err(End::Closed) => return Turn::Closed,
            }
        }
        Turn::Open
    }

    /// Reads and answers one request.
    fn read(&mut self, server: &mut Server) -> Result<(), End> {
        // One byte more than a request, so that a longer one is known.
        let mut buffer = [0; Request::SIZE + 1];
        let mut received = match packets::receive(&self.socket, &mut buffer) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Err(End::NothingNow),
            // The client has closed, and had not read all replies. What it sent before is still to
            // be read (net/unix/af_unix.c, `unix_release_sock`).
            Err(Errno::CONNRESET) => return Ok(()),
            Err(e) => {
                server.log.warn(format_args!("receive a request: {e}"));
                return Err(End::Closed);
            }
        };
        if received.bytes == 0 && packets::has_hung_up(&self.socket) {
            return Err(End::Closed);
        }
        let decoded = Request::decode(&buffer[..received.bytes]).and_then(|request| {
            let fd = received.take_descriptor(matches!(request.call, Call::Put { .. }));
            fd.map(|fd| (request, fd)).map_err(|refusal| Wrong { number: request.number, refusal })
        });
        received.fds.into_iter().for_each(|fd| server.held.close(fd));
        match decoded {
            Ok((request, _)) if request.call == Call::List => {
                self.state = State::Listing { number: request.number, after: None };
                Ok(())
            }
            Ok((request, fd)) => self.answer(server, request, fd),
            Err(Wrong { number, refusal }) => {
                self.log_refusal(server, "a packet", refusal);
                self.send(number, &Reply::refused(refusal))
            }
        }
    }

    fn answer(&mut self, server: &mut Server, request: Request, fd: Option<OwnedFd>) -> Result<(), End> {
        let Request { number, call } = request;
        let reply = match call {
            Call::Put { volume, role } => put(server, volume, role, fd),
            Call::Get { volume, role } => {
                // Here and not below: the reply borrows what is held.
                let held = server.held.get(volume, role).ok_or(Refusal::NotHeld);
                let reply = held.map(|fd| Reply { fd: Some(Fd::Held(fd)), ..Reply::done(0) });
                return self.send(number, &reply.unwrap_or_else(Reply::refused));
            }
            Call::Forget { volume, role } => Ok(Reply::done(u32::from(server.held.forget(volume, role)))),
            Call::ForgetVolume { volume } => Ok(forget_volume(server, volume)),
            Call::DaemonSocket { volume } => daemon_socket(server, volume),
            Call::Ping => Ok(Reply::counts(&server.held.counts())),
            Call::List => return Ok(()),
        };
        if let Err(refusal) = &reply {
            self.log_refusal(server, call.name(), *refusal);
        }
        self.send(number, &reply.unwrap_or_else(Reply::refused))
    }

    /// Sends the next packet of the listing.
    fn list(&mut self, server: &Server, number: u64, after: Option<VolumeKey>) -> Result<(), End> {
        let mut packet = [0; ReplyHeader::SIZE + Entry::MOST * Entry::SIZE];
        let mut entries = server.held.entries_after(after).peekable();
        let (mut count, mut last) = (0, after);
        for entry in entries.by_ref().take(Entry::MOST) {
            let at = ReplyHeader::SIZE + count * Entry::SIZE;
            packet[at..at + Entry::SIZE].copy_from_slice(&entry.encode());
            (count, last) = (count + 1, Some(entry.volume));
        }
        let status = if entries.peek().is_some() { Status::More } else { Status::Done };
        let header = ReplyHeader { version: VERSION, status, count: crate::held::small(count), number };
        packet[..ReplyHeader::SIZE].copy_from_slice(&header.encode());
        let len = ReplyHeader::SIZE + count * Entry::SIZE;
        match packets::send(&self.socket, &packet[..len], &[]) {
            Ok(()) if status == Status::More => {
                self.state = State::Listing { number, after: last };
                Ok(())
            }
            Err(Errno::AGAIN) => Err(End::NothingNow),
            sent => {
                self.state = State::Reading;
                sent.or_else(after_failed_send)
            }
        }
    }

    fn send(&mut self, number: u64, reply: &Reply<'_>) -> Result<(), End> {
        let header = ReplyHeader { version: VERSION, status: reply.status, count: reply.count, number };
        let mut packet = [0; ReplyHeader::SIZE + crate::wire::Counts::SIZE];
        packet[..ReplyHeader::SIZE].copy_from_slice(&header.encode());
        packet[ReplyHeader::SIZE..].copy_from_slice(&reply.body);
        let packet = &packet[..ReplyHeader::SIZE + reply.body_len];
        let fd = reply.fd.as_ref().map(|fd| match fd {
            Fd::Held(fd) => *fd,
            Fd::New(fd) => fd.as_fd(),
        });
        match packets::send(&self.socket, packet, fd.as_slice()) {
            // Too many descriptors are on their way to processes that do not read them (unix(7)).
            Err(Errno::TOOMANYREFS) if fd.is_some() => self.send(number, &Reply::refused(Refusal::Full)),
            sent => sent.or_else(after_failed_send),
        }
    }

    fn log_refusal(&mut self, server: &Server, what: &str, refusal: Refusal) {
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals <= LOGGED_REFUSALS {
            server.log.warn(format_args!("refused {what} of the driver: {refusal}"));
        }
    }
}

/// Why a turn ends.
enum End {
    NothingNow,
    Closed,
}

/// A client that has closed needs no reply; its requests count all the same.
fn after_failed_send(e: Errno) -> Result<(), End> {
    match e {
        Errno::PIPE | Errno::CONNRESET => Ok(()),
        _ => Err(End::Closed),
    }
}

fn put(
    server: &mut Server,
    volume: VolumeKey,
    role: Role,
    fd: Option<OwnedFd>,
) -> Result<Reply<'static>, Refusal> {
    let fd = fd.ok_or(Refusal::NoDescriptor)?;
    if let Err(refusal) = descriptors::check(role, fd.as_fd()) {
        server.held.close(fd);
        return Err(refusal);
    }
    let has_replaced = server.held.put(volume, role, fd);
    server.log.debug(format_args!("volume {volume}: holds {}", role.name()));
    Ok(Reply::done(u32::from(has_replaced)))
}

fn forget_volume(server: &mut Server, volume: VolumeKey) -> Reply<'static> {
    let forgotten = server.held.forget_volume(volume);
    if let Some(daemon) = forgotten.daemon {
        server.close_daemon(daemon);
    }
    let closed = crate::held::small(forgotten.closed);
    server.log.info(format_args!("volume {volume}: released, {closed} descriptors"));
    Reply::done(closed)
}

fn daemon_socket(server: &mut Server, volume: VolumeKey) -> Result<Reply<'static>, Refusal> {
    match server.new_daemon(volume) {
        Ok(socket) => {
            server.log.info(format_args!("volume {volume}: a socket for a new daemon"));
            Ok(Reply { fd: Some(Fd::New(socket)), ..Reply::done(0) })
        }
        Err(Errno::MFILE | Errno::NFILE) => Err(Refusal::Full),
        Err(e) => {
            server.log.warn(format_args!("volume {volume}: a socket for a new daemon: {e}"));
            Err(Refusal::System)
        }
    }
}

impl Reply<'_> {
    fn new(status: Status, count: u32) -> Self {
        Self { status, count, body: [0; crate::wire::Counts::SIZE], body_len: 0, fd: None }
    }

    fn done(count: u32) -> Self {
        Self::new(Status::Done, count)
    }

    fn refused(refusal: Refusal) -> Self {
        Self::new(Status::Refused(refusal), 0)
    }

    fn counts(counts: &crate::wire::Counts) -> Self {
        Self { body: counts.encode(), body_len: crate::wire::Counts::SIZE, ..Self::done(0) }
    }
}
