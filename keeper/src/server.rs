//! The keeper's loop: one thread, epoll, sockets that never block. Another thread closes files.
//!
//! Invariant: neither a peer nor a file system can make the loop wait. A peer that does not read stops only what is sent to
//! itself, and each turn handles a bounded number of its packets.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use linux::fuse_backing::Registrar;
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use crate::closer::Closer;
use crate::config::Config;
use crate::held::Held;
use crate::log::Log;
use crate::start::{self, StartError};
use crate::store::{Inherited, Store};
use crate::wire::VolumeKey;

mod connection;
mod daemon;
mod standby;

use connection::Connection;
use daemon::Daemon;
use standby::{MOST_SPARES, Standby};

const MOST_CONNECTIONS: usize = 16;
/// A driver has two while it connects again.
const MOST_ATTENDING: usize = 8;
/// Descriptors for no volume: stdio, epoll, signals, the listener, connections, spare daemons, and a
/// few that are open for one call.
const OWN_DESCRIPTORS: u64 = 16 + MOST_CONNECTIONS as u64 + 2 * MOST_SPARES as u64;
/// Packets of one connection in one turn.
const PACKETS_A_TURN: usize = 16;
/// Packets of one daemon in one turn: those of some sixty removed directories.
const DAEMON_PACKETS_A_TURN: usize = 128;
/// How long packets of a daemon may wait. A process that removes many directories would otherwise be
/// interrupted by this one for each of them. What waits is held already: by the socket.
const REST: Duration = Duration::from_millis(2);
const EVENTS: usize = 32;
/// Refusals of one peer that are logged.
const LOGGED_REFUSALS: u32 = 8;
/// Pause after a failed accept, for example for want of descriptors.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_secs(1);
/// Pause while the service manager takes nothing more.
const BEHIND: Duration = Duration::from_millis(10);

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const FIRST_PEER: u64 = 2;

#[derive(Debug)]
struct Server {
    log: Log,
    epoll: OwnedFd,
    listener: OwnedFd,
    signals: SignalFd,
    held: Held,
    /// By number, which no other peer gets again: an event of a closed one finds nothing.
    connections: BTreeMap<u64, Connection>,
    daemons: BTreeMap<u64, Daemon>,
    resting: Resting,
    standby: Standby,
    next_number: u64,
    /// No connections are accepted before.
    accepts_again: Option<Instant>,
    /// A signal asked for the end.
    is_ending: bool,
}

/// What remains of a peer after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Open,
    /// All packets were read, one at least; or the others wait until descriptors are closed.
    Rests,
    Closed,
}

/// The daemons whose sockets are not watched until their next turn.
#[derive(Debug, Default)]
struct Resting {
    daemons: Vec<u64>,
    /// Of the next turn of all of them.
    until: Option<Instant>,
}

impl Resting {
    fn add(&mut self, daemon: u64) {
        self.until.get_or_insert_with(|| Instant::now() + REST);
        self.daemons.push(daemon);
    }

    /// How long none of them has a turn; `None` if there is none.
    fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Those whose turn it is.
    fn take(&mut self) -> Vec<u64> {
        if self.left() != Some(Duration::ZERO) {
            return Vec::new();
        }
        self.until = None;
        std::mem::take(&mut self.daemons)
    }
}

/// Serves until a signal ends it, and removes the socket. `inherited` is what an earlier keeper has left
/// with the service manager.
pub fn run(config: &Config, inherited: Inherited) -> Result<(), StartError> {
    let log = Log { most: config.log_level };
    let mut server = Server::start(&config.socket, log)?;
    server.take_over(inherited);
    server.serve()?;
    server.held.end_registrations();
    if let Err(e) = std::fs::remove_file(&config.socket) {
        log.warn(format_args!("remove {}: {e}", config.socket.display()));
    }
    log.info(format_args!("ends: holds nothing"));
    Ok(())
}

impl Server {
    fn start(socket: &Path, log: Log) -> Result<Self, StartError> {
        if !rustix::process::geteuid().is_root() {
            return Err(StartError::NotRoot);
        }
        // Before anything that a signal could leave half done.
        let signals = linux::process::signal_descriptor(&[Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP])
            .map_err(|cause| StartError::Signals { cause })?;
        start::leave_session(log);
        start::lower_oom_score(log);
        let most_open = start::raise_descriptor_limit(log);
        let listener = start::bind(socket)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        for (source, number) in [(listener.as_fd(), LISTENER), (signals.as_fd(), SIGNALS)] {
            epoll::add(&epoll, source, EventData::new_u64(number), EventFlags::IN)
                .map_err(system("epoll_ctl"))?;
        }
        // With this thread's signals blocked, so that none is handled there.
        let closer = Closer::start().map_err(|cause| StartError::System { op: "start a thread", cause })?;
        let store = Store::of_environment(log);
        // Last: from here on this thread has few privileges.
        let registrar = Registrar::on_this_thread()
            .inspect_err(|e| log.warn(format_args!("no file can pass through: change credentials: {e}")))
            .ok();
        let room = most_open.saturating_sub(OWN_DESCRIPTORS);
        let held = Held::new(room, closer).stored_in(store).registered_by(registrar);
        log.info(format_args!(
            "version {} listens on {}; room for {} removed files",
            crate::wire::VERSION,
            socket.display(),
            held.room(),
        ));
        Ok(Self {
            log,
            epoll,
            listener,
            signals,
            held,
            connections: BTreeMap::new(),
            daemons: BTreeMap::new(),
            resting: Resting::default(),
            standby: Standby::default(),
            next_number: FIRST_PEER,
            accepts_again: None,
            is_ending: false,
        })
    }

    /// Holds what was inherited, if it passes the checks that it would pass if a peer sent it.
    fn take_over(&mut self, inherited: Inherited) {
        let (mut held, mut refused) = (0_usize, 0_usize);
        for (name, fd) in inherited.into_named(self.held.store()) {
            match self.held.take_over(name, fd) {
                Ok(()) => held += 1,
                Err(refusal) => {
                    refused += 1;
                    if refused <= LOGGED_REFUSALS as usize {
                        self.log.warn(format_args!("refused stored descriptor {name}: {refusal}"));
                    }
                }
            }
        }
        if held + refused > 0 {
            self.log.info(format_args!("{held} descriptors of an earlier keeper, {refused} refused"));
        }
        if let Some(store) = self.held.store() {
            store.ready();
        }
    }

    fn serve(&mut self) -> Result<(), StartError> {
        while !(self.is_ending && self.held.is_empty()) {
            let mut space = [MaybeUninit::<Event>::uninit(); EVENTS];
            let events = match epoll::wait(&self.epoll, &mut space, self.pause().as_ref()) {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(system("epoll_wait")(e)),
            };
            if self.accepts_again.is_some_and(|again| again <= Instant::now()) {
                self.accepts_again = None;
                self.watch_listener(EventFlags::IN);
            }
            if let Some(store) = self.held.store() {
                store.remove_the_rest();
            }
            for event in events {
                let (number, flags) = (event.data.u64(), event.flags);
                match number {
                    LISTENER => self.accept(),
                    SIGNALS => self.read_signals(),
                    peer if self.connections.contains_key(&peer) => self.turn_of_connection(peer, flags),
                    peer if self.turn_of_standby(peer) => {}
                    peer => self.turn_of_daemon(peer, flags),
                }
            }
            self.held.closer().close_what_waited();
            for daemon in self.resting.take() {
                self.turn_of_daemon(daemon, EventFlags::IN);
            }
            self.stand_in();
        }
        Ok(())
    }

    /// The longest wait for events; `None`: without an end.
    fn pause(&self) -> Option<Timespec> {
        let until_accept = self.accepts_again.map(|again| again.saturating_duration_since(Instant::now()));
        let is_behind = self.held.store().is_some_and(Store::is_behind);
        let until_close = self.held.closer().left();
        let pauses = [self.resting.left(), until_accept, until_close, is_behind.then_some(BEHIND)];
        // At most a second.
        pauses.into_iter().flatten().min().and_then(|pause| Timespec::try_from(pause).ok())
    }

    fn read_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGHUP as u32 {
                continue;
            }
            self.is_ending = true;
            let counts = self.held.counts();
            if !self.held.is_empty() {
                self.log.warn(format_args!(
                    "asked to end, but holds {} descriptors and {} removed files of {} volumes: ends after \
                     the last of them",
                    counts.descriptors, counts.removed, counts.volumes,
                ));
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..PACKETS_A_TURN {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                // A connection that ended in the queue.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(e) => {
                    self.log.warn(format_args!("accept a connection: {e}: not again for a second"));
                    self.close_least_used();
                    self.accepts_again = Some(Instant::now() + AFTER_FAILED_ACCEPT);
                    self.watch_listener(EventFlags::empty());
                    return;
                }
            }
        }
    }

    /// Only root's connections. Others cannot even open the socket, unless its mode was changed.
    fn admit(&mut self, socket: OwnedFd) {
        // Not by rustix: a process of another pid namespace has no pid here, for which it has no type.
        match getsockopt(&socket, PeerCredentials) {
            Ok(peer) if peer.uid() == 0 => {}
            Ok(peer) => {
                let (pid, uid) = (peer.pid(), peer.uid());
                return self.log.warn(format_args!("refused a connection of process {pid}, uid {uid}"));
            }
            Err(e) => return self.log.warn(format_args!("credentials of a connection: {e}")),
        }
        if self.connections.len() >= MOST_CONNECTIONS {
            self.close_least_used();
        }
        let number = self.new_number();
        let connection = Connection::new(socket, number);
        if self.watch(connection.socket(), number, connection.interest()) {
            self.connections.insert(number, connection);
        }
    }

    /// The one that was used the longest time ago, preferably none that is still owed a reply. Never a
    /// driver's: without it, the keeper would take the driver for dead.
    fn close_least_used(&mut self) {
        let others = self.connections.iter().filter(|(_, c)| !c.attends());
        let least = others.min_by_key(|(_, c)| (c.is_owed_a_reply(), c.last_used()));
        if let Some(number) = least.map(|(number, _)| *number) {
            self.connections.remove(&number);
            self.log.debug(format_args!("closed connection {number} in favour of another"));
        }
    }

    fn turn_of_connection(&mut self, number: u64, flags: EventFlags) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let before = connection.interest();
        let used = self.new_number();
        let turn = connection.take_turn(self, flags, used);
        let after = connection.interest();
        if turn == Turn::Open && (before == after || self.rewatch(connection.socket(), number, after)) {
            self.connections.insert(number, connection);
        }
    }

    fn turn_of_daemon(&mut self, number: u64, flags: EventFlags) {
        let Some(mut daemon) = self.daemons.remove(&number) else { return };
        let stays = match daemon.take_turn(&mut self.held, self.log, flags) {
            Turn::Rests => {
                self.resting.add(number);
                true
            }
            Turn::Open => self.rewatch(daemon.socket(), number, daemon.interest()),
            Turn::Closed => false,
        };
        if stays {
            self.daemons.insert(number, daemon);
        } else {
            self.log.info(format_args!("volume {}: its daemon is gone", daemon.volume()));
            self.held.unset_daemon(daemon.volume(), number);
            self.close(daemon);
        }
    }

    /// A new socket for the volume's daemon. The older one is read to its end, so that nothing that
    /// its daemon sent before its death is lost, and closed.
    fn new_daemon(&mut self, volume: VolumeKey) -> Result<OwnedFd, Errno> {
        let (ours, theirs) = daemon::socket_pair()?;
        let number = self.new_number();
        let daemon = Daemon::new(ours, volume);
        let (data, interest) = (EventData::new_u64(number), daemon.interest());
        epoll::add(&self.epoll, daemon.socket(), data, interest)?;
        if let Some(older) = self.held.daemon(volume) {
            self.read_daemon_to_end(older);
            self.close_daemon(older);
        }
        self.held.set_daemon(volume, number);
        self.daemons.insert(number, daemon);
        Ok(theirs)
    }

    fn read_daemon_to_end(&mut self, number: u64) {
        let Some(daemon) = self.daemons.get_mut(&number) else { return };
        // Its daemon, if it still lives, cannot send from here on.
        if rustix::net::shutdown(daemon.socket(), Shutdown::Read).is_ok() {
            daemon.read_to_end(&mut self.held, self.log);
        }
    }

    fn close_daemon(&mut self, number: u64) {
        if let Some(daemon) = self.daemons.remove(&number) {
            self.close(daemon);
        }
    }

    /// The daemon is cut off at once. The close of its socket, which also closes descriptors that it
    /// sent, is left to the other thread.
    fn close(&self, daemon: Daemon) {
        let socket = daemon.into_socket();
        // Refused only for a socket that is not connected, or not registered.
        let _shut_down = rustix::net::shutdown(&socket, Shutdown::Both);
        let _deleted = epoll::delete(&self.epoll, &socket);
        self.held.close(socket);
    }

    fn new_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn watch(&self, socket: impl AsFd, number: u64, interest: EventFlags) -> bool {
        self.was_watched(epoll::add(&self.epoll, socket, EventData::new_u64(number), interest))
    }

    fn rewatch(&self, socket: impl AsFd, number: u64, interest: EventFlags) -> bool {
        self.was_watched(epoll::modify(&self.epoll, socket, EventData::new_u64(number), interest))
    }

    fn was_watched(&self, watched: Result<(), Errno>) -> bool {
        if let Err(e) = watched {
            self.log.warn(format_args!("epoll_ctl: {e}: a connection is closed"));
        }
        watched.is_ok()
    }

    fn watch_listener(&self, interest: EventFlags) {
        // The listener is registered, so this needs no memory.
        self.rewatch(&self.listener, LISTENER, interest);
    }
}

fn system(op: &'static str) -> impl FnOnce(Errno) -> StartError {
    move |cause| StartError::System { op, cause: io::Error::from(cause) }
}
