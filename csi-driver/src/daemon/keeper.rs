//! Holds volumes' descriptors that must outlive the call that made them: [`InProcess`] as long as the
//! driver runs, [`process`] also beyond that.
//!
//! A record of a volume's state can be held too, as a memfd.

pub(crate) mod process;

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keeper::client::Client;

use crate::model::ids::VolumeId;
use crate::model::launch::LaunchKey;

/// A command that shows something does not wait longer for a keeper.
const KEEPER_ANSWERS: Duration = Duration::from_millis(500);

/// The purpose of a descriptor. A volume has at most one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// The volume's FUSE connection (/dev/fuse).
    Connection,
    /// The memfd in which the daemon writes down what a successor needs.
    StateTable,
    /// The detached mount of the volume's directory: each daemon gets the same one.
    Directory,
    /// The file for the daemon's count.
    UsageFile,
    /// A detached mount of a parked volume. Closing it ends the connection.
    ParkedMount,
    /// Where the daemon listens for the driver. A successor listens on the same socket.
    ControlListener,
    /// Where it listens for readers of its metrics.
    MetricsListener,
    /// The packet that a waiting daemon gets if it is to take the volume over while no driver runs.
    Assignment,
    /// The pidfd of the daemon: the keeper may give the volume to a waiting daemon once it has ended
    /// and no driver runs.
    Daemon,
}

/// Whose socket to the keeper is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextDaemon {
    /// That of a new connection, or of the connection that it has already.
    Own,
    /// Another daemon has had its connection.
    Continues,
}

/// A volume that the keeper has given to a waiting daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Takeover {
    pub(crate) volume_id: VolumeId,
    /// Of the daemon, which [`Role::Daemon`] is.
    pub(crate) launch: LaunchKey,
    /// How many daemons got it, one after another.
    pub(crate) count: u32,
    /// Since when the last one has it: seconds since 1970.
    pub(crate) since: u64,
}

/// Volumes, by who besides the daemon holds their connections.
#[derive(Debug, Default)]
pub(crate) struct Holders {
    pub(crate) driver: BTreeSet<VolumeId>,
    pub(crate) keeper: BTreeSet<VolumeId>,
}

impl Holders {
    /// Asks the keeper itself, which has a little time to answer: for when no driver runs.
    pub(crate) fn of_keeper_at(socket: &Path) -> Self {
        let listed = Client::connect(socket, KEEPER_ANSWERS).and_then(|mut client| client.list());
        let keeper = listed.map(|entries| process::held_in(&entries)).unwrap_or_default();
        Self { keeper, ..Self::default() }
    }
}

/// A call fails if the keeper is another process and does not answer.
pub(crate) trait Keeper: Send + Sync + std::fmt::Debug {
    /// Holds the descriptor, and replaces one with the same role. Returns false, and closes the
    /// descriptor, if the keeper does not hold this role or is closed.
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> linux::Result<bool>;

    /// Whether it holds connections, so that a daemon can follow another one.
    fn keeps_connections(&self) -> bool;

    /// A duplicate of the descriptor, which stays held.
    fn get(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>>;

    /// The socket on which the volume's next daemon gives the keeper its removed files. An earlier
    /// daemon's socket is closed. `None`: this keeper holds no connection, so no daemon can follow
    /// another one. While no keeper answers, the socket leads nowhere. From here on the keeper gives the
    /// volume to no daemon, until it gets another [`Role::Daemon`]; an error if that is not sure and the
    /// next daemon continues a connection.
    fn daemon_socket(&self, volume_id: &VolumeId, next: NextDaemon) -> linux::Result<Option<OwnedFd>>;

    /// The volumes whose daemons have a socket that leads to the keeper.
    fn daemons(&self) -> linux::Result<BTreeSet<VolumeId>>;

    /// Closes all that is held for the volume, but a [`Role::ParkedMount`]. No error if nothing is.
    fn forget_connection(&self, volume_id: &VolumeId) -> linux::Result<()>;

    /// Returns the descriptor and no longer holds it.
    fn take(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>>;

    /// Whether it holds the volume's [`Role::ParkedMount`]. Never waits.
    fn holds_parked(&self, volume_id: &VolumeId) -> bool;

    /// The roles that are held for the volume.
    fn list(&self, volume_id: &VolumeId) -> linux::Result<Vec<Role>>;

    /// Closes the descriptor. No error if it is not held.
    fn forget(&self, volume_id: &VolumeId, role: Role) -> linux::Result<()>;

    /// The volumes for which something is held.
    fn volumes(&self) -> linux::Result<BTreeSet<VolumeId>>;

    /// Has the keeper give a volume to this waiting daemon while no driver runs. Returns false if it
    /// does not.
    fn lend(&self, _launch: &LaunchKey, _socket: BorrowedFd<'_>) -> linux::Result<bool> {
        Ok(false)
    }

    /// From here on the keeper gives the daemon nothing.
    fn reclaim(&self, _launch: &LaunchKey) -> linux::Result<()> {
        Ok(())
    }

    /// As [`Self::reclaim`], for all daemons: also those of an earlier driver, which end if no other
    /// process has their sockets.
    fn reclaim_all(&self) -> linux::Result<()> {
        Ok(())
    }

    /// Whether waiting daemons are of use when this driver ends.
    fn stands_by(&self) -> bool {
        false
    }

    /// The volumes that the keeper has given to waiting daemons, since a driver has put a
    /// [`Role::Daemon`] for them.
    fn takeovers(&self) -> linux::Result<Vec<Takeover>> {
        Ok(Vec::new())
    }

    /// The volumes whose connection is held, with what a successor of the daemon needs beside it.
    fn holders(&self) -> Holders {
        Holders::default()
    }

    /// Called when the driver stops. A keeper in this process closes all descriptors, and holds
    /// none from then on.
    fn close(&self);
}

/// Holds descriptors in this process, so they do not outlive it.
///
/// It holds no [`Role::Connection`]. A connection ends when its last holder closes it, and without a
/// keeper that outlives the driver no other daemon takes it over. So a copy held here would make
/// requests to a dead daemon wait forever instead of failing with ENOTCONN at once.
#[derive(Debug, Default)]
pub(crate) struct InProcess {
    /// Never held while waiting.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: HashMap<(VolumeId, Role), OwnedFd>,
    is_closed: bool,
}

impl InProcess {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for InProcess {
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> linux::Result<bool> {
        let mut state = self.locked();
        if state.is_closed || role != Role::ParkedMount {
            return Ok(false);
        }
        let replaced = state.held.insert((volume_id.clone(), role), descriptor);
        // Closing may be the last close of a file system: not under the lock.
        drop(state);
        drop(replaced);
        Ok(true)
    }

    fn keeps_connections(&self) -> bool {
        false
    }

    fn get(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        self.locked().held.get(&(volume_id.clone(), role)).map(duplicate).transpose()
    }

    fn daemon_socket(&self, _volume_id: &VolumeId, _next: NextDaemon) -> linux::Result<Option<OwnedFd>> {
        Ok(None)
    }

    fn daemons(&self) -> linux::Result<BTreeSet<VolumeId>> {
        Ok(BTreeSet::new())
    }

    fn forget_connection(&self, _volume_id: &VolumeId) -> linux::Result<()> {
        Ok(())
    }

    fn take(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        Ok(self.locked().held.remove(&(volume_id.clone(), role)))
    }

    fn holds_parked(&self, volume_id: &VolumeId) -> bool {
        self.locked().held.contains_key(&(volume_id.clone(), Role::ParkedMount))
    }

    fn list(&self, volume_id: &VolumeId) -> linux::Result<Vec<Role>> {
        let state = self.locked();
        Ok(state.held.keys().filter(|(id, _)| id == volume_id).map(|(_, role)| *role).collect())
    }

    fn forget(&self, volume_id: &VolumeId, role: Role) -> linux::Result<()> {
        self.take(volume_id, role).map(drop)
    }

    fn volumes(&self) -> linux::Result<BTreeSet<VolumeId>> {
        Ok(self.locked().held.keys().map(|(id, _)| id.clone()).collect())
    }

    fn close(&self) {
        let held = {
            let mut state = self.locked();
            state.is_closed = true;
            std::mem::take(&mut state.held)
        };
        drop(held);
    }
}

fn duplicate(descriptor: &OwnedFd) -> linux::Result<OwnedFd> {
    descriptor.try_clone().map_err(|e| linux::Error::new("duplicate", "a held descriptor", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn what_is_put_is_listed_until_it_is_taken_or_forgotten() {
        let keeper = InProcess::default();
        let [a, b] = ["a", "b"].map(|digit| VolumeId::from_key(&digit.repeat(32)).unwrap());
        for id in [&a, &b] {
            assert!(keeper.put(id, Role::ParkedMount, descriptor()).unwrap());
        }
        assert!(!keeper.put(&a, Role::Connection, descriptor()).unwrap());
        assert_eq!(keeper.list(&a).unwrap(), [Role::ParkedMount]);
        assert_eq!(keeper.volumes().unwrap(), [a.clone(), b.clone()].into());
        assert!(keeper.take(&a, Role::ParkedMount).unwrap().is_some());
        assert!(keeper.take(&a, Role::ParkedMount).unwrap().is_none());
        keeper.forget(&b, Role::ParkedMount).unwrap();
        keeper.forget(&b, Role::ParkedMount).unwrap();
        assert!(keeper.volumes().unwrap().is_empty());
        keeper.close();
        assert!(!keeper.put(&a, Role::ParkedMount, descriptor()).unwrap());
    }
}
