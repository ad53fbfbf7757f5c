//! The keeper in a process of its own (`hawser-keeper`), and copies in this one: a volume's
//! connection survives the daemon together with either of them.
//!
//! A thread notices the process's death, starts another one and gives it all copies ([`supervisor`]).
//! Until then this process alone holds the connections, and no call fails because of that. A daemon
//! holds the removed files alone until it gets a socket to the new process (`engine::renewal`).

mod program;
mod supervisor;

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keeper::client::Client;
use keeper::wire::{self, Entry, VolumeKey};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::sync::mpsc::UnboundedSender;

use self::supervisor::{Supervisor, Wake};
use super::{Holders, InProcess, Keeper, NextDaemon, Role, Takeover, duplicate};
use crate::config::{KeeperProgram, KeeperStart};
use crate::model::ids::VolumeId;
use crate::model::launch::LaunchKey;

/// How long a daemon's start waits for a keeper that the driver itself starts, while users of the volume
/// wait too. Starting one takes some 10 ms.
const APPEARS: Duration = Duration::from_millis(200);

const HELD: [Role; 4] = [Role::StateTable, Role::Directory, Role::UsageFile, Role::Connection];

#[derive(Debug)]
pub(crate) struct KeeperProcess {
    shared: Arc<Shared>,
    /// The mounts of parked volumes, which this driver's end is to close.
    parked: InProcess,
}

/// What the supervisor uses too.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A client has come.
    connected: Condvar,
    wake: Wake,
    /// Another process holds the copies now.
    renewed: UnboundedSender<()>,
    /// Where it listens.
    socket: PathBuf,
    /// How long a daemon's start waits for it.
    appears: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// What the process holds too.
    copies: HashMap<(VolumeId, Role), OwnedFd>,
    /// A process that did not answer may still hold something of them.
    unreleased: BTreeSet<VolumeId>,
    /// `None`: no process answers.
    client: Option<Client>,
    /// It answers no longer, but its process may live. It stays open until another one has attended:
    /// the process must not take this driver for dead.
    former: Option<Client>,
    /// The process behind the last client; its inner value is the pidfd, `None` if it has ended. `None`:
    /// there was no client yet.
    process: Option<Option<OwnedFd>>,
}

impl State {
    /// Whether the process answers, and knows takeovers without a driver.
    fn attends(&self) -> bool {
        self.client.as_ref().is_some_and(Client::attends)
    }

    fn retire_client(&mut self) {
        if let Some(client) = self.client.take() {
            self.former = Some(client);
        }
    }

    /// Whether a process that does not answer may give the volume to a daemon once this driver has
    /// ended.
    fn may_stand_in(&self, volume_id: &VolumeId, socket: &Path) -> linux::Result<bool> {
        match &self.process {
            // If there is one, an earlier driver may have prepared it for that.
            None => Ok(program::listens(socket)),
            Some(None) => Ok(false),
            Some(Some(process)) => {
                let is_armed = self.former.as_ref().is_some_and(Client::attends)
                    && self.copies.contains_key(&(volume_id.clone(), Role::Daemon));
                Ok(is_armed && !linux::process::wait_for_end(process, Duration::ZERO)?)
            }
        }
    }
}

/// Why a call has no result.
enum Failure {
    /// The process answers, and refuses.
    Refused(linux::Error),
    Unanswered(linux::Error),
}

impl From<Failure> for linux::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(error) | Failure::Unanswered(error) => error,
        }
    }
}

impl KeeperProcess {
    /// Connects to the process, or starts it, and sends to `renewed` whenever another process has
    /// taken its place. Fails only if the program cannot be started.
    pub(crate) fn start(program: KeeperProgram, renewed: UnboundedSender<()>) -> linux::Result<Self> {
        let client = program::connect_or_start(&program)?;
        let shared = Arc::new(Shared {
            socket: program.socket.clone(),
            appears: match program.start {
                KeeperStart::Program { .. } => APPEARS,
                KeeperStart::Pod(_) | KeeperStart::Elsewhere => Duration::ZERO,
            },
            state: Mutex::default(),
            connected: Condvar::new(),
            wake: Wake::new()?,
            renewed,
        });
        Supervisor::new(program, Arc::clone(&shared)).start(client)?;
        Ok(Self { shared, parked: InProcess::default() })
    }

    /// Runs `call` if a process answers.
    fn call<T>(
        &self,
        op: &'static str,
        state: &mut State,
        call: impl FnOnce(&mut Client) -> Result<T, keeper::Error>,
    ) -> Result<T, Failure> {
        let Some(mut client) = state.client.take() else {
            return Err(Failure::Unanswered(linux::Error::new(
                op,
                "the keeper",
                nix::errno::Errno::ENOTCONN,
            )));
        };
        match call(&mut client) {
            Ok(answer) => {
                state.client = Some(client);
                Ok(answer)
            }
            Err(error @ keeper::Error::Refused { .. }) => {
                state.client = Some(client);
                Err(Failure::Refused(failed(op, &error)))
            }
            Err(error) => {
                state.former = Some(client);
                // The supervisor connects again, or starts another process.
                self.shared.wake.now();
                Err(Failure::Unanswered(failed(op, &error)))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    fn entries(&self, state: &mut State) -> linux::Result<Vec<Entry>> {
        self.call("list", state, Client::list).map_err(linux::Error::from)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeeperProcess {
    fn drop(&mut self) {
        self.shared.wake.stop();
    }
}

impl Keeper for KeeperProcess {
    /// True also while no process answers: this one holds it, and the next process gets it.
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> linux::Result<bool> {
        let Some(held) = held_role(role) else { return self.parked.put(volume_id, role, descriptor) };
        let mut state = self.state();
        if is_for_standby(role) && !state.attends() {
            // For the next process.
            state.copies.insert((volume_id.clone(), role), descriptor);
            return Ok(false);
        }
        let put = self.call("hold a descriptor in", &mut state, |client| {
            client.put(key(volume_id)?, held, descriptor.as_fd())
        });
        match put {
            Ok(_) => {}
            Err(Failure::Refused(error)) => return Err(error),
            Err(Failure::Unanswered(error)) => {
                tracing::warn!(%volume_id, ?role, error = linux::chain(&error), "only this driver holds it for now");
            }
        }
        state.copies.insert((volume_id.clone(), role), descriptor);
        Ok(true)
    }

    fn keeps_connections(&self) -> bool {
        true
    }

    fn get(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        let Some(held) = held_role(role) else { return self.parked.get(volume_id, role) };
        let mut state = self.state();
        if let Some(copy) = state.copies.get(&(volume_id.clone(), role)) {
            return duplicate(copy).map(Some);
        }
        if is_for_standby(role) && !state.attends() {
            return Ok(None);
        }
        // Held since an earlier driver.
        let found = self
            .call("get a descriptor from", &mut state, |client| client.get(key(volume_id)?, held))
            .map_err(linux::Error::from)?;
        if let Some(found) = &found {
            state.copies.insert((volume_id.clone(), role), duplicate(found)?);
        }
        Ok(found)
    }

    fn daemon_socket(&self, volume_id: &VolumeId, next: NextDaemon) -> linux::Result<Option<OwnedFd>> {
        let state = self.state();
        let waits = |state: &mut State| state.client.is_none();
        let waited = self.shared.connected.wait_timeout_while(state, self.shared.appears, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let asked =
            self.call("get a socket from", &mut state, |client| client.daemon_socket(key(volume_id)?));
        match asked {
            Ok(socket) => {
                state.copies.remove(&(volume_id.clone(), Role::Daemon));
                Ok(Some(socket))
            }
            Err(Failure::Refused(error)) => Err(error),
            Err(Failure::Unanswered(error))
                if next == NextDaemon::Continues && state.may_stand_in(volume_id, &self.shared.socket)? =>
            {
                Err(error)
            }
            Err(Failure::Unanswered(error)) => {
                state.copies.remove(&(volume_id.clone(), Role::Daemon));
                tracing::warn!(%volume_id, error = linux::chain(&error), "the volume's daemon holds its removed files alone for now");
                without_peer().map(Some)
            }
        }
    }

    fn daemons(&self) -> linux::Result<BTreeSet<VolumeId>> {
        let entries = self.entries(&mut self.state())?;
        Ok(entries.iter().filter(|entry| entry.has_daemon).filter_map(volume_of).collect())
    }

    fn forget_connection(&self, volume_id: &VolumeId) -> linux::Result<()> {
        let mut state = self.state();
        state.copies.retain(|(id, _), _| id != volume_id);
        let forgotten =
            self.call("release descriptors of", &mut state, |client| client.forget_volume(key(volume_id)?));
        match forgotten {
            Ok(_) => Ok(()),
            Err(Failure::Refused(error)) => Err(error),
            Err(Failure::Unanswered(_)) => {
                state.unreleased.insert(volume_id.clone());
                Ok(())
            }
        }
    }

    fn take(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        let taken = self.get(volume_id, role)?;
        self.forget(volume_id, role)?;
        Ok(taken)
    }

    fn holds_parked(&self, volume_id: &VolumeId) -> bool {
        self.parked.holds_parked(volume_id)
    }

    fn list(&self, volume_id: &VolumeId) -> linux::Result<Vec<Role>> {
        let mut roles = self.parked.list(volume_id)?;
        let mut state = self.state();
        let copied: Vec<Role> =
            HELD.into_iter().filter(|role| state.copies.contains_key(&(volume_id.clone(), *role))).collect();
        if copied.len() == HELD.len() {
            roles.extend(copied);
            return Ok(roles);
        }
        let entries = self.entries(&mut state)?;
        let entry = entries.iter().find(|entry| volume_of(entry).as_ref() == Some(volume_id));
        let is_held = |role: &Role| {
            copied.contains(role)
                || entry.is_some_and(|entry| held_role(*role).is_some_and(|role| entry.roles.contains(role)))
        };
        roles.extend(HELD.into_iter().filter(is_held));
        Ok(roles)
    }

    fn forget(&self, volume_id: &VolumeId, role: Role) -> linux::Result<()> {
        let Some(held) = held_role(role) else { return self.parked.forget(volume_id, role) };
        let mut state = self.state();
        state.copies.remove(&(volume_id.clone(), role));
        if is_for_standby(role) && !state.attends() {
            return Ok(());
        }
        self.call("release a descriptor of", &mut state, |client| client.forget(key(volume_id)?, held))
            .map(drop)
            .map_err(linux::Error::from)
    }

    fn volumes(&self) -> linux::Result<BTreeSet<VolumeId>> {
        let entries = self.entries(&mut self.state())?;
        let mut volumes = self.parked.volumes()?;
        volumes.extend(entries.iter().filter_map(volume_of));
        Ok(volumes)
    }

    fn holders(&self) -> Holders {
        let mut state = self.state();
        let copied = state.copies.keys().map(|(volume_id, _)| volume_id.clone()).collect::<BTreeSet<_>>();
        let is_whole = |volume_id: &VolumeId| {
            HELD.iter().all(|role| state.copies.contains_key(&(volume_id.clone(), *role)))
        };
        let driver = copied.into_iter().filter(is_whole).collect();
        let keeper = self.entries(&mut state).map(|entries| held_in(&entries)).unwrap_or_default();
        Holders { driver, keeper }
    }

    fn lend(&self, launch: &LaunchKey, socket: BorrowedFd<'_>) -> linux::Result<bool> {
        let mut state = self.state();
        if !state.attends() {
            return Ok(false);
        }
        let lent =
            self.call("lend a daemon to", &mut state, |client| client.put_spare(spare(launch)?, socket));
        lent.map(|()| true).map_err(linux::Error::from)
    }

    fn reclaim(&self, launch: &LaunchKey) -> linux::Result<()> {
        let mut state = self.state();
        if !state.attends() {
            return Ok(());
        }
        self.call("reclaim a daemon from", &mut state, |client| client.forget_spare(spare(launch)?))
            .map(drop)
            .map_err(linux::Error::from)
    }

    fn reclaim_all(&self) -> linux::Result<()> {
        let mut state = self.state();
        if !state.attends() {
            return Ok(());
        }
        self.call("reclaim daemons from", &mut state, Client::forget_spares)
            .map(drop)
            .map_err(linux::Error::from)
    }

    fn stands_by(&self) -> bool {
        let state = self.state();
        state.attends() && state.copies.keys().any(|(_, role)| *role == Role::Daemon)
    }

    fn takeovers(&self) -> linux::Result<Vec<Takeover>> {
        let mut state = self.state();
        if !state.attends() {
            return Ok(Vec::new());
        }
        let found = self.call("list takeovers of", &mut state, Client::takeovers)?;
        let takeover = |found: &wire::standby::Takeover| {
            Some(Takeover {
                volume_id: VolumeId::from_key(&found.volume.to_string())?,
                launch: LaunchKey::parse(&found.launch.to_string())?,
                count: found.count,
                since: found.since,
            })
        };
        Ok(found.iter().filter_map(takeover).collect())
    }

    /// The process goes on.
    fn close(&self) {
        self.shared.wake.stop();
        self.parked.close();
    }
}

fn key(volume_id: &VolumeId) -> Result<VolumeKey, keeper::Error> {
    VolumeKey::parse(volume_id.key()).ok_or(keeper::Error::Invalid { op: "VOLUME" })
}

/// The volumes of which a keeper holds all that a successor needs.
pub(super) fn held_in(entries: &[Entry]) -> BTreeSet<VolumeId> {
    let is_whole = |entry: &&Entry| {
        HELD.iter().filter_map(|role| held_role(*role)).all(|role| entry.roles.contains(role))
    };
    entries.iter().filter(is_whole).filter_map(volume_of).collect()
}

fn volume_of(entry: &Entry) -> Option<VolumeId> {
    VolumeId::from_key(&entry.volume.to_string())
}

/// As the keeper calls it; `None` for what only this process holds.
fn held_role(role: Role) -> Option<wire::Role> {
    match role {
        Role::Connection => Some(wire::Role::Connection),
        Role::StateTable => Some(wire::Role::StateTable),
        Role::Directory => Some(wire::Role::Directory),
        Role::UsageFile => Some(wire::Role::UsageFile),
        Role::ControlListener => Some(wire::Role::ControlListener),
        Role::MetricsListener => Some(wire::Role::MetricsListener),
        Role::Assignment => Some(wire::Role::Assignment),
        Role::Daemon => Some(wire::Role::Daemon),
        Role::ParkedMount => None,
    }
}

/// Whether it is of use only to a keeper that knows takeovers without a driver.
fn is_for_standby(role: Role) -> bool {
    match role {
        Role::ControlListener | Role::MetricsListener | Role::Assignment | Role::Daemon => true,
        Role::Connection | Role::StateTable | Role::Directory | Role::UsageFile | Role::ParkedMount => false,
    }
}

fn spare(launch: &LaunchKey) -> Result<wire::standby::LaunchKey, keeper::Error> {
    wire::standby::LaunchKey::parse(launch.as_str()).ok_or(keeper::Error::Invalid { op: "LAUNCH" })
}

/// A daemon's socket that leads nowhere: each use of it fails at once.
fn without_peer() -> linux::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map(|(daemons, _closed)| daemons)
        .map_err(|e| linux::Error::new("socketpair", "for a volume's daemon", e))
}

fn failed(op: &'static str, error: &keeper::Error) -> linux::Error {
    let source = std::io::Error::other(linux::chain(error));
    linux::Error::new(op, "the keeper", source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let start = KeeperStart::Program { binary: dir.path().join("none"), cgroup: None };
        let program = KeeperProgram { start, socket: dir.path().join("s") };
        let error = KeeperProcess::start(program, tokio::sync::mpsc::unbounded_channel().0).unwrap_err();
        assert_eq!(error.errno(), nix::errno::Errno::ENOENT);
        assert!(error.to_string().contains("none"), "{error}");
    }
}
