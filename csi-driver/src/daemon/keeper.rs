//! Holds volumes' descriptors that must outlive the call that made them.
//!
//! A record of a volume's state can be held too, as a memfd.

use std::collections::HashMap;
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

pub(crate) trait Keeper: Send + Sync + std::fmt::Debug {
    /// Holds the descriptor, and replaces one with the same role. Returns false, and closes the
    /// descriptor, if the keeper does not hold this role or is closed.
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> bool;

    /// Returns the descriptor and no longer holds it.
    fn take(&self, volume_id: &VolumeId, role: Role) -> Option<OwnedFd>;

    /// The roles that are held for the volume.
    fn list(&self, volume_id: &VolumeId) -> Vec<Role>;

    /// Closes all descriptors. The keeper holds none from then on.
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
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> bool {
        let mut state = self.locked();
        if state.is_closed || role == Role::Connection {
            return false;
        }
        let replaced = state.held.insert((volume_id.clone(), role), descriptor);
        // Closing may be the last close of a file system: not under the lock.
        drop(state);
        drop(replaced);
        true
    }

    fn take(&self, volume_id: &VolumeId, role: Role) -> Option<OwnedFd> {
        self.locked().held.remove(&(volume_id.clone(), role))
    }

    fn list(&self, volume_id: &VolumeId) -> Vec<Role> {
        self.locked().held.keys().filter(|(id, _)| id == volume_id).map(|(_, role)| *role).collect()
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
