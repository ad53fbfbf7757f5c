//! Who holds descriptors for volumes: of what must outlive the call that made it.
//!
//! A record of a volume's state is a descriptor too: of a memfd.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::ids::VolumeId;

/// What a descriptor is to its volume. There is one of each at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// /dev/fuse, open for the volume's connection.
    Connection,
    /// A detached mount of a parked volume, whose close ends the connection.
    ParkedMount,
}

pub(crate) trait Keeper: Send + Sync + std::fmt::Debug {
    /// Holds the descriptor, in the place of one with this role. False where the keeper does not
    /// hold such descriptors, or is closed: then it is closed too.
    fn put(&self, volume_id: &VolumeId, role: Role, descriptor: OwnedFd) -> bool;

    /// Gives the descriptor back, and holds it no longer.
    fn take(&self, volume_id: &VolumeId, role: Role) -> Option<OwnedFd>;

    /// What is held for the volume.
    fn list(&self, volume_id: &VolumeId) -> Vec<Role>;

    /// Closes what is held for all volumes, and holds nothing from now on.
    fn close(&self);
}

/// Holds them in this process: no longer than it lives.
///
/// It holds no [`Role::Connection`]. A connection ends when its last holder closes it, and no
/// other daemon can take it over yet: held here too, requests to a daemon that died would wait
/// for ever instead of failing with ENOTCONN at once.
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
        // The last close of a file system is no work to do under a lock.
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
