//! Holds the mounts of parked volumes, and the tasks that end parked volumes after their delay.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use crate::daemon::keeper::{Keeper, Role};
use crate::error::chain;
use crate::model::ids::VolumeId;

#[derive(Debug)]
pub(crate) struct Parking {
    keeper: Arc<dyn Keeper>,
    /// Never held while waiting.
    endings: Mutex<HashMap<VolumeId, AbortHandle>>,
}

impl Parking {
    pub(crate) fn new(keeper: Arc<dyn Keeper>) -> Self {
        Self { keeper, endings: Mutex::default() }
    }

    pub(crate) fn holds(&self, volume_id: &VolumeId) -> bool {
        self.keeper.holds_parked(volume_id)
    }

    /// False if parking is closed or the keeper does not answer: then `mount` is closed too.
    pub(crate) fn hold(&self, volume_id: &VolumeId, mount: OwnedFd, ending: AbortHandle) -> bool {
        let mut endings = self.locked();
        let is_held =
            logged(volume_id, self.keeper.put(volume_id, Role::ParkedMount, mount)).unwrap_or(false);
        if is_held {
            endings.insert(volume_id.clone(), ending);
        }
        is_held
    }

    /// Takes the mount; the caller must end it.
    pub(crate) fn take(&self, volume_id: &VolumeId) -> Option<OwnedFd> {
        self.locked().remove(volume_id)?.abort();
        logged(volume_id, self.keeper.take(volume_id, Role::ParkedMount)).flatten()
    }

    /// Closes the mount, which ends the connection. The task that ends the volume later continues.
    pub(crate) fn release(&self, volume_id: &VolumeId) {
        logged(volume_id, self.keeper.forget(volume_id, Role::ParkedMount));
    }

    /// Closes all mounts, and holds none from then on.
    pub(crate) fn close(&self) {
        self.keeper.close();
        self.locked().drain().for_each(|(_, ending)| ending.abort());
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<VolumeId, AbortHandle>> {
        self.endings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the keeper has answered. Where it has failed, the volume counts as not parked: its next
/// stage starts another daemon.
fn logged<T>(volume_id: &VolumeId, answer: linux::Result<T>) -> Option<T> {
    answer
        .inspect_err(
            |error| tracing::warn!(%volume_id, error = chain(error), "the keeper of descriptors has failed"),
        )
        .ok()
}
