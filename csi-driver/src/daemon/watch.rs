//! Notices the end of daemons by their pidfds.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::AbortHandle;

use crate::model::counts::Counts;
use crate::model::ids::VolumeId;
use crate::model::launch::ProcessId;

#[derive(Debug, Clone)]
pub(crate) struct DaemonWatch {
    watched: Arc<Mutex<HashMap<VolumeId, AbortHandle>>>,
    counts: Arc<Counts>,
}

impl DaemonWatch {
    /// Counts daemons that die in `counts`.
    pub(crate) fn new(counts: Arc<Counts>) -> Self {
        Self { watched: Arc::default(), counts }
    }

    /// Reports the daemon's end until [`Self::stop`]. Must be called in a tokio context.
    pub(crate) fn start(&self, volume_id: &VolumeId, daemon: ProcessId, pidfd: OwnedFd) {
        let task = tokio::spawn(report_end(volume_id.clone(), daemon, pidfd, self.counts.clone()));
        if let Some(earlier) = self.locked().insert(volume_id.clone(), task.abort_handle()) {
            earlier.abort();
        }
    }

    /// From here on the daemon's end is intended and not reported.
    pub(crate) fn stop(&self, volume_id: &VolumeId) {
        if let Some(task) = self.locked().remove(volume_id) {
            task.abort();
        }
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<VolumeId, AbortHandle>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until the process behind `pidfd` ends. Must be called in a tokio context.
pub(crate) async fn ended(pidfd: OwnedFd) -> std::io::Result<()> {
    #[expect(
        deprecated,
        reason = "what it is deprecated for, a descriptor that changes under it, an OwnedFd excludes; \
                  its successor is unsafe, and unsafe is for `linux` alone"
    )]
    let registered = AsyncFd::with_interest(pidfd, Interest::READABLE);
    registered?.readable().await.map(drop)
}

async fn report_end(volume_id: VolumeId, daemon: ProcessId, pidfd: OwnedFd, counts: Arc<Counts>) {
    let pid = daemon.pid;
    match ended(pidfd).await {
        Ok(()) => {
            counts.daemon_deaths.inc();
            tracing::error!(
                %volume_id,
                pid,
                "the volume's daemon ended: its pods get ENOTCONN; the next stage or publish starts another"
            );
        }
        Err(error) => tracing::warn!(%volume_id, pid, %error, "cannot watch the volume's daemon"),
    }
}
