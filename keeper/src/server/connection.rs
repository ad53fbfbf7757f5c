//! A connection of the driver.
//!
//! Invariant: a request is read only when its reply can be sent, so no reply is ever stored.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::{LOGGED_REFUSALS, MOST_ATTENDING, PACKETS_A_TURN, Server, Turn};
use crate::descriptors;
use crate::packets;
use crate::wire::standby::Takeover;
use crate::wire::{Call, Entry, Refusal, ReplyHeader, Request, Role, Status, VolumeKey, Wrong};

#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// Increases from one turn of any connection to the next.
    last_used: u64,
    state: State,
    refusals: u32,
    /// It is the driver's: see [`Call::Attend`].
    attends: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    /// The client reads no replies.
    Full,
    Listing {
        what: Listed,
        number: u64,
        after: Option<VolumeKey>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    Volumes,
    Takeovers,
}

impl Listed {
    fn version(self) -> u16 {
        match self {
            Self::Volumes => Call::List.version(),
            Self::Takeovers => Call::Takeovers.version(),
        }
    }
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
        Self { socket, last_used: number, state: State::Reading, refusals: 0, attends: false }
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

    pub(super) fn attends(&self) -> bool {
        self.attends
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
                State::Listing { what, number, after } => self.list(server, what, number, after),
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
        if received.is_empty() && packets::has_hung_up(&self.socket) {
            return Err(End::Closed);
        }
        let packet = &buffer[..received.bytes];
        let version = Request::reply_version(packet);
        let decoded = Request::decode(packet).and_then(|request| {
            let fd = received.take_descriptor(request.call.has_descriptor());
            fd.map(|fd| (request, fd)).map_err(|refusal| Wrong { number: request.number, refusal })
        });
        received.fds.into_iter().for_each(|fd| server.held.close(fd));
        match decoded {
            Ok((Request { number, call: Call::List }, _)) => {
                self.state = State::Listing { what: Listed::Volumes, number, after: None };
                Ok(())
            }
            Ok((Request { number, call: Call::Takeovers }, _)) => {
                self.state = State::Listing { what: Listed::Takeovers, number, after: None };
                Ok(())
            }
            Ok((request, fd)) => self.answer(server, request, fd),
            Err(Wrong { number, refusal }) => {
                self.log_refusal(server, "a packet", refusal);
                self.send(version, number, &Reply::refused(refusal))
            }
        }
    }

    fn answer(&mut self, server: &mut Server, request: Request, fd: Option<OwnedFd>) -> Result<(), End> {
        let Request { number, call } = request;
        let version = call.version();
        if let Some(volume) = call.volume().filter(|_| !self.attends) {
            // A driver of an earlier version starts daemons without telling the keeper.
            server.disarm(volume);
        }
        let reply = match call {
            Call::Put { role: Role::Daemon, .. } | Call::PutSpare { .. } if !self.attends => {
                fd.into_iter().for_each(|fd| server.held.close(fd));
                Err(Refusal::NotAttending)
            }
            Call::Put { volume, role } => put(server, volume, role, fd),
            Call::Get { volume, role } => {
                // Here and not below: the reply borrows what is held.
                let held = server.held.get(volume, role).ok_or(Refusal::NotHeld);
                let reply = held.map(|fd| Reply { fd: Some(Fd::Held(fd)), ..Reply::done(0) });
                return self.send(version, number, &reply.unwrap_or_else(Reply::refused));
            }
            Call::Forget { volume, role: Role::Daemon } => Ok(Reply::done(u32::from(server.disarm(volume)))),
            Call::Forget { volume, role } => Ok(Reply::done(u32::from(server.held.forget(volume, role)))),
            Call::ForgetVolume { volume } => Ok(forget_volume(server, volume)),
            Call::DaemonSocket { volume } => daemon_socket(server, volume),
            Call::Ping => Ok(Reply::counts(&server.held.counts())),
            Call::Attend => self.attend(server),
            Call::PutSpare { launch } => {
                let put = fd.ok_or(Refusal::NoDescriptor).and_then(|fd| server.put_spare(launch, fd));
                put.map(|has_replaced| Reply::done(u32::from(has_replaced)))
            }
            Call::ForgetSpare { launch } => Ok(Reply::done(u32::from(server.forget_spare(launch)))),
            Call::ForgetSpares => Ok(Reply::done(crate::held::small(server.forget_spares()))),
            Call::List | Call::Takeovers => return Ok(()),
        };
        if let Err(refusal) = &reply {
            self.log_refusal(server, call.name(), *refusal);
        }
        self.send(version, number, &reply.unwrap_or_else(Reply::refused))
    }

    fn attend(&mut self, server: &Server) -> Result<Reply<'static>, Refusal> {
        // This one is not among them.
        let others = server.connections.values().filter(|other| other.attends).count();
        if others >= MOST_ATTENDING {
            return Err(Refusal::Full);
        }
        self.attends = true;
        Ok(Reply::done(0))
    }

    /// Sends the next packet of the listing.
    fn list(
        &mut self,
        server: &Server,
        what: Listed,
        number: u64,
        after: Option<VolumeKey>,
    ) -> Result<(), End> {
        let (body, status) = match what {
            Listed::Volumes => {
                let entries = server.held.entries_after(after).map(|entry| (entry.volume, entry.encode()));
                page(entries, Entry::MOST)
            }
            Listed::Takeovers => {
                let taken = server.standby.takeovers_after(after);
                page(taken.map(|taken| (taken.volume, taken.encode())), Takeover::MOST)
            }
        };
        let Page { bytes, count, last } = body;
        let header = ReplyHeader { version: what.version(), status, count, number };
        match packets::send(&self.socket, &[&header.encode()[..], &bytes].concat(), &[]) {
            Ok(()) if status == Status::More => {
                self.state = State::Listing { what, number, after: last };
                Ok(())
            }
            Err(Errno::AGAIN) => Err(End::NothingNow),
            sent => {
                self.state = State::Reading;
                sent.or_else(after_failed_send)
            }
        }
    }

    fn send(&mut self, version: u16, number: u64, reply: &Reply<'_>) -> Result<(), End> {
        let header = ReplyHeader { version, status: reply.status, count: reply.count, number };
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
            Err(Errno::TOOMANYREFS) if fd.is_some() => {
                self.send(version, number, &Reply::refused(Refusal::Full))
            }
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

/// Entries of one packet of a listing.
struct Page {
    bytes: Vec<u8>,
    count: u32,
    /// `None`: there are none.
    last: Option<VolumeKey>,
}

/// At most `most` entries, and whether more follow.
fn page<const SIZE: usize>(
    entries: impl Iterator<Item = (VolumeKey, [u8; SIZE])>,
    most: usize,
) -> (Page, Status) {
    let mut entries = entries.peekable();
    let mut page = Page { bytes: Vec::with_capacity(most * SIZE), count: 0, last: None };
    for (volume, entry) in entries.by_ref().take(most) {
        page.bytes.extend_from_slice(&entry);
        (page.count, page.last) = (page.count + 1, Some(volume));
    }
    let status = if entries.peek().is_some() { Status::More } else { Status::Done };
    (page, status)
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
    let has_replaced =
        if role == Role::Daemon { server.arm(volume, fd)? } else { server.held.put(volume, role, fd) };
    server.log.debug(format_args!("volume {volume}: holds {}", role.name()));
    Ok(Reply::done(u32::from(has_replaced)))
}

fn forget_volume(server: &mut Server, volume: VolumeKey) -> Reply<'static> {
    server.forget_standby(volume);
    let forgotten = server.held.forget_volume(volume);
    if let Some(daemon) = forgotten.daemon {
        server.close_daemon(daemon);
    }
    let closed = crate::held::small(forgotten.closed);
    server.log.info(format_args!("volume {volume}: released, {closed} descriptors"));
    Reply::done(closed)
}

fn daemon_socket(server: &mut Server, volume: VolumeKey) -> Result<Reply<'static>, Refusal> {
    // The daemon that was to be followed has one already.
    server.disarm(volume);
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
