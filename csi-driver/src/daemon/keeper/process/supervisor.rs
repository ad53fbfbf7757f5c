//! Notices the end of the keeper at once, and gives another one all copies.
//!
//! A keeper that answers no longer, but lives, is left alone: it holds the same descriptors. The
//! supervisor connects to it again and again.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use keeper::client::Client;
use keeper::wire;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Shared, State, held_role, is_for_standby, key, program};
use crate::config::{KeeperProgram, KeeperStart};
use crate::daemon::keeper::{Role, duplicate};
use crate::daemon::process;

/// Before the first, second, … attempt in a row that gave no keeper which lived for [`LIVES`].
const PAUSES: [Duration; 6] = [
    Duration::ZERO,
    Duration::from_millis(10),
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_secs(5),
];
/// The longest of these if this process does not start the keeper: an attempt costs nothing then.
const LONGEST_OF_OTHERS: Duration = Duration::from_millis(250);
/// So many attempts, some two seconds, may pass until another program has started the keeper.
const OTHERS_START: usize = 8;
const LIVES: Duration = Duration::from_secs(10);
/// Of one poll(2); then it waits again.
const WAIT: Duration = Duration::from_secs(3600);

/// Interrupts the supervisor.
#[derive(Debug)]
pub(super) struct Wake {
    event: EventFd,
    stops: AtomicBool,
}

impl Wake {
    pub(super) fn new() -> linux::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| linux::Error::new("eventfd", "for the keeper", e))?;
        Ok(Self { event, stops: AtomicBool::new(false) })
    }

    /// The connection is of no use any more.
    pub(super) fn now(&self) {
        // It fails only if the counter is at its limit, and then it wakes too.
        let _wakes = self.event.write(1);
    }

    /// From here on no keeper is started.
    pub(super) fn stop(&self) {
        self.stops.store(true, Ordering::Relaxed);
        self.now();
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::Relaxed)
    }

    fn clear(&self) {
        // An error means that nothing has woken it.
        let _count = self.event.read();
    }
}

/// The process behind a connection.
struct Watched {
    /// `None`: it has ended.
    pidfd: Option<OwnedFd>,
    /// The keeper may close a connection and live.
    socket: OwnedFd,
    since: Instant,
}

impl Watched {
    fn new(client: &Client) -> linux::Result<Self> {
        let socket = client.as_fd().try_clone_to_owned();
        let socket = socket.map_err(|e| linux::Error::new("duplicate", "the keeper's connection", e))?;
        let pidfd = client.pidfd().map_err(|e| super::failed("watch", &e))?;
        Ok(Self { pidfd, socket, since: Instant::now() })
    }

    /// Until the process ends, the connection ends, or `wake` is called.
    fn wait(&self, wake: &Wake) -> linux::Result<()> {
        let Some(pidfd) = &self.pidfd else { return Ok(()) };
        let mut watched = [
            PollFd::new(pidfd.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.socket.as_fd(), PollFlags::empty()),
            PollFd::new(wake.event.as_fd(), PollFlags::POLLIN),
        ];
        while process::poll(&mut watched, WAIT)? == 0 {}
        Ok(())
    }
}

pub(super) struct Supervisor {
    program: KeeperProgram,
    shared: Arc<Shared>,
    /// Attempts in a row that gave no keeper which lived for [`LIVES`].
    in_a_row: usize,
}

impl Supervisor {
    pub(super) fn new(program: KeeperProgram, shared: Arc<Shared>) -> Self {
        Self { program, shared, in_a_row: 0 }
    }

    /// On a thread of its own, until [`Wake::stop`].
    pub(super) fn start(mut self, client: Option<Client>) -> linux::Result<()> {
        let watched = client.map(|client| self.hand_over(client)).transpose()?;
        std::thread::Builder::new()
            .name("keepers".to_owned())
            .spawn(move || self.run(watched))
            .map(drop)
            .map_err(|e| linux::Error::new("start a thread", "for the keeper", e))
    }

    fn run(&mut self, mut watched: Option<Watched>) {
        loop {
            if let Some(watched) = watched.take() {
                self.wait_for_end(&watched);
            }
            if !self.pause(self.next_pause()) {
                return;
            }
            self.in_a_row += 1;
            let why = match self.connect() {
                Ok(Some(found)) => {
                    watched = Some(found);
                    continue;
                }
                Ok(None) => "it does not answer".to_owned(),
                Err(error) => linux::chain(&error),
            };
            // Not every attempt: they may go on for long.
            if self.in_a_row.is_power_of_two() && self.in_a_row >= self.first_reported() {
                let attempts = self.in_a_row;
                tracing::error!(why, attempts, "no keeper: this driver alone holds the volumes' connections");
            }
        }
    }

    fn next_pause(&self) -> Duration {
        let pause = PAUSES[self.in_a_row.min(PAUSES.len() - 1)];
        if self.starts_keepers() { pause } else { pause.min(LONGEST_OF_OTHERS) }
    }

    /// The number of the first attempt whose failure is an error.
    fn first_reported(&self) -> usize {
        if self.starts_keepers() { 1 } else { OTHERS_START }
    }

    fn starts_keepers(&self) -> bool {
        match self.program.start {
            KeeperStart::Program { .. } => true,
            KeeperStart::Pod(_) | KeeperStart::Elsewhere => false,
        }
    }

    fn wait_for_end(&mut self, watched: &Watched) {
        if let Err(error) = watched.wait(&self.shared.wake) {
            tracing::error!(error = linux::chain(&error), "cannot watch the keeper");
        }
        if self.shared.wake.stops() {
            return;
        }
        self.shared.state().retire_client();
        self.shared.wake.clear();
        let lived = watched.since.elapsed();
        if lived >= LIVES {
            self.in_a_row = 0;
        }
        let lived_ms = lived.as_millis();
        tracing::error!(lived_ms, "the keeper has ended or does not answer: connects to another one");
    }

    /// False if the supervisor is to end.
    fn pause(&self, pause: Duration) -> bool {
        let mut wake = [PollFd::new(self.shared.wake.event.as_fd(), PollFlags::POLLIN)];
        if let Err(error) = process::poll(&mut wake, pause) {
            tracing::error!(error = linux::chain(&error), "cannot wait for a keeper");
            return false;
        }
        !self.shared.wake.stops()
    }

    fn connect(&self) -> linux::Result<Option<Watched>> {
        let client = program::connect_or_start(&self.program)?;
        client.map(|client| self.hand_over(client)).transpose()
    }

    /// Gives the process all copies. Calls use it from then on.
    fn hand_over(&self, mut client: Client) -> linux::Result<Watched> {
        let watched = Watched::new(&client)?;
        let process = watched.pidfd.as_ref().map(duplicate).transpose()?;
        let mut state = self.shared.state();
        give_all(&mut state, &mut client).map_err(|e| super::failed("hold descriptors in", &e))?;
        state.client = Some(client);
        (state.former, state.process) = (None, Some(process));
        drop(state);
        self.shared.connected.notify_all();
        let _driver_stops = self.shared.renewed.send(());
        Ok(watched)
    }
}

fn give_all(state: &mut State, client: &mut Client) -> Result<(), keeper::Error> {
    while let Some(volume_id) = state.unreleased.first() {
        client.forget_volume(key(volume_id)?)?;
        state.unreleased.pop_first();
    }
    if client.attends() {
        // Of an earlier daemon, if it could not be told to forget it.
        for volume_id in state.copies.keys().map(|(volume_id, _)| volume_id).collect::<BTreeSet<_>>() {
            client.forget(key(volume_id)?, wire::Role::Daemon)?;
        }
    }
    let mut copies: Vec<_> = state.copies.iter().collect();
    copies.sort_by_key(|((_, role), _)| match role {
        // Without the rest, these would only make requests to a dead daemon wait.
        Role::Connection => 1,
        Role::Daemon => 2,
        _ => 0,
    });
    let attends = client.attends();
    for ((volume_id, role), descriptor) in copies {
        let Some(held) = held_role(*role).filter(|_| attends || !is_for_standby(*role)) else { continue };
        match client.put(key(volume_id)?, held, descriptor.as_fd()) {
            Ok(_) => {}
            Err(error @ keeper::Error::Refused { .. }) => {
                tracing::error!(%volume_id, ?role, error = linux::chain(&error), "the keeper does not hold it");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
