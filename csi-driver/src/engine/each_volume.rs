//! Work on many volumes at the same time, so that no volume waits for another one's daemon.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use tokio::runtime::Handle;

use crate::engine::locks::{Lock, Locks};
use crate::error::{Result, Step, chain};
use crate::model::ids::VolumeId;

/// Does `work`, which is to `purpose`, on each volume, on a thread of its own and with the volume's lock.
/// True once all of it has ended. False at `deadline`: the rest continues, and calls for its volumes are
/// ABORTED until it ends. Must be called in a tokio context.
pub(crate) fn work_on_each<T: Send + Sync + 'static>(
    worker: &Arc<T>,
    locks: &Locks,
    volume_ids: impl IntoIterator<Item = VolumeId>,
    deadline: Instant,
    purpose: &'static str,
    work: fn(&T, &VolumeId) -> Result<()>,
) -> bool {
    // Carries no message: it closes when the last thread ends.
    let (running, all_ended) = mpsc::channel::<Infallible>();
    for volume_id in volume_ids {
        if let Err(error) = start(worker.clone(), locks, &volume_id, running.clone(), purpose, work) {
            tracing::warn!(%volume_id, error = chain(&error), "could not {purpose}");
        }
    }
    drop(running);
    let left = deadline.saturating_duration_since(Instant::now());
    all_ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
}

/// Starts `work`, and drops `running` when it has ended.
fn start<T: Send + Sync + 'static>(
    worker: Arc<T>,
    locks: &Locks,
    volume_id: &VolumeId,
    running: impl Send + 'static,
    purpose: &'static str,
    work: fn(&T, &VolumeId) -> Result<()>,
) -> Result<()> {
    let guard = locks.hold(Lock::Volume(volume_id.as_str()))?;
    let (runtime, id) = (Handle::current(), volume_id.clone());
    let started = std::thread::Builder::new().name("volume".to_owned()).spawn(move || {
        let _context = runtime.enter();
        if let Err(error) = work(&worker, &id) {
            tracing::warn!(volume_id = %id, error = chain(&error), "could not {purpose}");
        }
        // First, so that the volume is unlocked when the wait ends.
        drop(guard);
        drop(running);
    });
    started.map(drop).map_err(|e| linux::Error::new("start thread for", volume_id, e)).step("start thread")
}
