//! Holds volumes' descriptors that must outlive the call that made them.
//!
//! A record of a volume's state can be held too, as a memfd.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::ids::VolumeId;

/// The purpose of a descriptor. A volume has at most one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// The volume's FUSE connection (/dev/fuse).
    Connection,
    /// A detached mount of a parked volume. Closing it ends the connection.
    ParkedMount,
}

/// A call fails if the keeper is another process and does not answer.
pub(crate) trait Keeper: Send + Sync + std::fmt::Debug {
    /// Holds the descriptor, and replaces one with the same role. Returns false, and closes the
    /// descriptor, if the keeper does not hold this role or is closed.
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> linux::Result<bool>;

    /// Returns the descriptor and no longer holds it.
    fn take(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>>;

    /// The roles that are held for the volume.
    fn list(&self, volume_id: &VolumeId) -> linux::Result<Vec<Role>>;

    /// Closes the descriptor. No error if it is not held.
    fn forget(&self, volume_id: &VolumeId, role: Role) -> linux::Result<()>;

    /// The volumes for which something is held.
    fn volumes(&self) -> linux::Result<BTreeSet<VolumeId>>;

    /// Called when the driver stops. A keeper in this process closes all descriptors, and holds
    /// none from then on.
    fn close(&self);
}

/// Holds descriptors in this process, so they do not outlive it.
///
/// It holds no [`Role::Connection`]. A connection ends when its last holder closes it. No other
/// daemon can take it over yet, so a copy held here would make requests to a dead daemon wait
/// forever instead of failing with ENOTCONN at once.
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
        if state.is_closed || role == Role::Connection {
            return Ok(false);
        }
        let replaced = state.held.insert((volume_id.clone(), role), descriptor);
        // Closing may be the last close of a file system: not under the lock.
        drop(state);
        drop(replaced);
        Ok(true)
    }

    fn take(&self, volume_id: &VolumeId, role: Role) -> linux::Result<Option<OwnedFd>> {
        Ok(self.locked().held.remove(&(volume_id.clone(), role)))
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
