//! The keeper in a process of its own (`hawser-keeper`), and copies in this one: a volume's
//! connection survives the daemon together with either of them.
//!
//! The driver starts the process if none answers, in a process group of its own, and never ends it.
//! After the process's death, which the next call notices, it starts another one and gives it all
//! copies. A daemon that was given the old process's socket then holds its removed files alone.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use keeper::client::Client;
use keeper::wire::{self, VolumeKey};

use super::{InProcess, Keeper, Role, duplicate};
use crate::config::KeeperProgram;
use crate::model::ids::VolumeId;

/// For connecting and for each call: the keeper waits for nothing.
const TIMEOUT: Duration = Duration::from_secs(2);
/// From its start until it answers.
const START: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct KeeperProcess {
    program: KeeperProgram,
    /// The mounts of parked volumes, which this driver's end is to close.
    parked: InProcess,
    /// What the process holds too. Locked before `client`.
    copies: Mutex<HashMap<(VolumeId, Role), OwnedFd>>,
    client: Mutex<Option<Client>>,
}

impl KeeperProcess {
    /// Connects to the process, or starts it.
    pub(crate) fn start(program: KeeperProgram) -> linux::Result<Self> {
        let client = connect_or_start(&program)?;
        Ok(Self {
            program,
            parked: InProcess::default(),
            copies: Mutex::default(),
            client: Mutex::new(Some(client)),
        })
    }

    /// Calls the process. If it has died, starts another one, which gets all copies, and calls that.
    fn call<T>(
        &self,
        op: &'static str,
        copies: &HashMap<(VolumeId, Role), OwnedFd>,
        call: impl Fn(&mut Client) -> Result<T, keeper::Error>,
    ) -> linux::Result<T> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connected) = client.as_mut() {
            match call(connected) {
                Ok(answer) => return Ok(answer),
                Err(error @ (keeper::Error::Closed { .. } | keeper::Error::Socket { .. })) => {
                    tracing::error!(
                        error = linux::chain(&error),
                        "the keeper has ended: starting another one"
                    );
                }
                Err(error) => return Err(failed(op, &error)),
            }
        }
        *client = None;
        let mut connected = connect_or_start(&self.program)?;
        // Connections last: without the rest, one would only make requests to a dead daemon wait.
        let (connections, rest): (Vec<_>, Vec<_>) =
            copies.iter().partition(|((_, role), _)| *role == Role::Connection);
        for ((volume_id, role), descriptor) in rest.into_iter().chain(connections) {
            let put = held_role(*role).map(|role| connected.put(key(volume_id)?, role, descriptor.as_fd()));
            if let Some(Err(error)) = put {
                tracing::error!(%volume_id, ?role, error = linux::chain(&error), "the keeper does not hold it");
            }
        }
        let answer = call(&mut connected).map_err(|error| failed(op, &error));
        *client = Some(connected);
        answer
    }

    fn copies(&self) -> MutexGuard<'_, HashMap<(VolumeId, Role), OwnedFd>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for KeeperProcess {
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> linux::Result<bool> {
        let Some(held) = held_role(role) else { return self.parked.put(volume_id, role, descriptor) };
        let mut copies = self.copies();
        let put = self.call("hold a descriptor in", &copies, |client| {
            client.put(key(volume_id)?, held, descriptor.as_fd())
        });
        copies.insert((volume_id.clone(), role), descriptor);
        put.map(|_| true)
    }

    fn keeps_connections(&self) -> bool {
        true
    }

    fn get(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        let Some(held) = held_role(role) else { return self.parked.get(volume_id, role) };
        let mut copies = self.copies();
        if let Some(copy) = copies.get(&(volume_id.clone(), role)) {
            return duplicate(copy).map(Some);
        }
        // Held since an earlier driver.
        let found =
            self.call("get a descriptor from", &copies, |client| client.get(key(volume_id)?, held))?;
        if let Some(found) = &found {
            copies.insert((volume_id.clone(), role), duplicate(found)?);
        }
        Ok(found)
    }

    fn daemon_socket(&self, volume_id: &VolumeId) -> linux::Result<Option<OwnedFd>> {
        let copies = self.copies();
        self.call("get a socket from", &copies, |client| client.daemon_socket(key(volume_id)?)).map(Some)
    }

    fn forget_connection(&self, volume_id: &VolumeId) -> linux::Result<()> {
        let mut copies = self.copies();
        copies.retain(|(id, _), _| id != volume_id);
        self.call("release descriptors of", &copies, |client| client.forget_volume(key(volume_id)?)).map(drop)
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
        let copies = self.copies();
        let entries = self.call("list", &copies, Client::list)?;
        let wanted = key(volume_id).map_err(|error| failed("list", &error))?;
        let entry = entries.into_iter().find(|entry| entry.volume == wanted);
        let held = [Role::Connection, Role::StateTable, Role::Directory, Role::UsageFile];
        let is_held = |role: &Role| {
            entry
                .as_ref()
                .is_some_and(|entry| held_role(*role).is_some_and(|role| entry.roles.contains(role)))
        };
        roles.extend(held.into_iter().filter(is_held));
        Ok(roles)
    }

    fn forget(&self, volume_id: &VolumeId, role: Role) -> linux::Result<()> {
        let Some(held) = held_role(role) else { return self.parked.forget(volume_id, role) };
        let mut copies = self.copies();
        copies.remove(&(volume_id.clone(), role));
        self.call("release a descriptor of", &copies, |client| client.forget(key(volume_id)?, held)).map(drop)
    }

    fn volumes(&self) -> linux::Result<BTreeSet<VolumeId>> {
        let copies = self.copies();
        let entries = self.call("list", &copies, Client::list)?;
        let mut volumes = self.parked.volumes()?;
        volumes.extend(entries.iter().filter_map(|entry| VolumeId::from_key(&entry.volume.to_string())));
        Ok(volumes)
    }

    /// The process goes on.
    fn close(&self) {
        self.parked.close();
    }
}

fn key(volume_id: &VolumeId) -> Result<VolumeKey, keeper::Error> {
    VolumeKey::parse(volume_id.key()).ok_or(keeper::Error::Invalid { op: "VOLUME" })
}

/// As the keeper calls it; `None` for what only this process holds.
fn held_role(role: Role) -> Option<wire::Role> {
    match role {
        Role::Connection => Some(wire::Role::Connection),
        Role::StateTable => Some(wire::Role::StateTable),
        Role::Directory => Some(wire::Role::Directory),
        Role::UsageFile => Some(wire::Role::UsageFile),
        Role::ParkedMount => None,
    }
}

fn connect_or_start(program: &KeeperProgram) -> linux::Result<Client> {
    if let Ok(client) = Client::connect(&program.socket, TIMEOUT) {
        return Ok(client);
    }
    start(program)?;
    let deadline = Instant::now() + START;
    loop {
        match Client::connect(&program.socket, TIMEOUT) {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() >= deadline => return Err(failed("connect to", &error)),
            // No event tells when a socket listens.
            Err(_) => std::thread::park_timeout(RETRY),
        }
    }
}

/// Starts the keeper in a process group of its own, so that no signal to the driver's group reaches it.
/// The keeper may outlive this driver; the process that adopts orphans then becomes its parent.
fn start(program: &KeeperProgram) -> linux::Result<()> {
    let KeeperProgram { binary, socket } = program;
    let mut command = Command::new(binary);
    command.arg("--socket").arg(socket).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(|e| linux::Error::at("start", binary, e))?;
    tracing::info!(pid = child.id(), socket = %socket.display(), "the keeper was started");
    // Reaps it if it ends while this driver runs.
    std::thread::Builder::new()
        .name("keeper".to_owned())
        .spawn(move || {
            let _reaped = child.wait();
        })
        .map(drop)
        .map_err(|e| linux::Error::at("watch", binary, e))
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
        let program = KeeperProgram { binary: dir.path().join("none"), socket: dir.path().join("s") };
        let error = KeeperProcess::start(program).unwrap_err();
        assert_eq!(error.errno(), nix::errno::Errno::ENOENT);
        assert!(error.to_string().contains("none"), "{error}");
    }
}
