//! The descriptors of parked volumes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use crate::model::ids::VolumeId;

/// The descriptors of parked volumes, and who ends each in time.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    /// Never held while waiting.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: HashMap<VolumeId, Held>,
    is_closed: bool,
}

#[derive(Debug)]
struct Held {
    /// None once the volume is being ended.
    mount: Option<OwnedFd>,
    ending: AbortHandle,
}

impl Parking {
    pub(crate) fn holds(&self, volume_id: &VolumeId) -> bool {
        self.locked().held.get(volume_id).is_some_and(|held| held.mount.is_some())
    }

    /// False once it is closed: then `mount` is, too.
    pub(crate) fn hold(&self, volume_id: &VolumeId, mount: OwnedFd, ending: AbortHandle) -> bool {
        let mut state = self.locked();
        if state.is_closed {
            return false;
        }
        state.held.insert(volume_id.clone(), Held { mount: Some(mount), ending });
        true
    }

    /// The mount, which is now the caller's to end.
    pub(crate) fn take(&self, volume_id: &VolumeId) -> Option<OwnedFd> {
        let held = self.locked().held.remove(volume_id)?;
        held.ending.abort();
        held.mount
    }

    /// Ends the connection. The task that ends the volume in time goes on.
    pub(crate) fn let_go(&self, volume_id: &VolumeId) {
        let mount = self.locked().held.get_mut(volume_id).and_then(|held| held.mount.take());
        // The last close of a file system is no work to do under a lock.
        drop(mount);
    }

    /// Lets all go, and takes no more.
    pub(crate) fn close(&self) {
        let held = {
            let mut state = self.locked();
            state.is_closed = true;
            std::mem::take(&mut state.held)
        };
        held.values().for_each(|held| held.ending.abort());
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
