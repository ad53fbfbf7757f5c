//! Notices the death of daemons, by pidfd.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

use crate::process::ProcessId;
use crate::volume::VolumeId;

#[derive(Debug, Clone, Default)]
pub(crate) struct DaemonWatch {
    watched: Arc<Mutex<HashMap<VolumeId, AbortHandle>>>,
}

impl DaemonWatch {
    /// Reports the daemon's end, until [`Self::stop`]. Needs the runtime's context.
    pub(crate) fn start(&self, volume_id: &VolumeId, daemon: ProcessId, pidfd: OwnedFd) {
        let task = tokio::spawn(report_end(volume_id.clone(), daemon, pidfd));
        if let Some(earlier) = self.locked().insert(volume_id.clone(), task.abort_handle()) {
            earlier.abort();
        }
    }

    /// From here on the daemon's end is intended.
    pub(crate) fn stop(&self, volume_id: &VolumeId) {
        if let Some(task) = self.locked().remove(volume_id) {
            task.abort();
        }
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<VolumeId, AbortHandle>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn report_end(volume_id: VolumeId, daemon: ProcessId, pidfd: OwnedFd) {
    let pid = daemon.pid;
    #[expect(
        deprecated,
        reason = "what it is deprecated for, a descriptor that changes under it, an OwnedFd excludes; \
                  its successor is unsafe, and unsafe is for `linux` alone"
    )]
    let registered = AsyncFd::with_interest(pidfd, Interest::READABLE);
    let ended = match registered {
        Ok(pidfd) => pidfd.readable().await.map(drop),
        Err(e) => Err(e),
    };
    match ended {
        Ok(()) => tracing::error!(
            %volume_id,
            pid,
            "the volume's daemon ended: its pods get ENOTCONN; the next stage or publish starts another"
        ),
        Err(error) => tracing::warn!(%volume_id, pid, %error, "cannot watch the volume's daemon"),
    }
}
