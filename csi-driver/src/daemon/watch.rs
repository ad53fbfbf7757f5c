//! Notices the end of daemons by their pidfds.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;

use crate::model::counts::Counts;
use crate::model::ids::VolumeId;
use crate::model::launch::ProcessId;

/// A daemon that ended and was not meant to.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) volume_id: VolumeId,
    pub(crate) daemon: ProcessId,
}

#[derive(Debug, Clone)]
pub(crate) struct DaemonWatch {
    watched: Arc<Mutex<HashMap<VolumeId, (ProcessId, AbortHandle)>>>,
    counts: Arc<Counts>,
    ended: UnboundedSender<Ended>,
}

impl DaemonWatch {
    /// Counts daemons that die in `counts`, and sends each to `ended`.
    pub(crate) fn new(counts: Arc<Counts>, ended: UnboundedSender<Ended>) -> Self {
        Self { watched: Arc::default(), counts, ended }
    }

    /// Reports the daemon's end until [`Self::stop`]. Must be called in a tokio context.
    pub(crate) fn start(&self, volume_id: &VolumeId, daemon: ProcessId, pidfd: OwnedFd) {
        let ended = Ended { volume_id: volume_id.clone(), daemon };
        let task = tokio::spawn(report_end(ended, pidfd, self.counts.clone(), self.ended.clone()));
        if let Some((_, earlier)) = self.locked().insert(volume_id.clone(), (daemon, task.abort_handle())) {
            earlier.abort();
        }
    }

    /// From here on the daemon's end is intended and not reported.
    pub(crate) fn stop(&self, volume_id: &VolumeId) {
        if let Some((_, task)) = self.locked().remove(volume_id) {
            task.abort();
        }
    }

    pub(crate) fn is_watched(&self, volume_id: &VolumeId) -> bool {
        self.locked().get(volume_id).is_some_and(|(_, task)| !task.is_finished())
    }

    /// Reports again, or for the first time, the end of a daemon that another one must follow.
    pub(crate) fn report(&self, volume_id: &VolumeId, daemon: ProcessId) {
        let _receiver_gone = self.ended.send(Ended { volume_id: volume_id.clone(), daemon });
    }

    /// Reports a daemon that was killed and [cannot end](ProcessId::cannot_end).
    pub(crate) fn report_killed(&self, volume_id: &VolumeId, daemon: ProcessId) {
        // It is counted once, and its later end is not reported.
        let mut watched = self.locked();
        if watched.get(volume_id).is_some_and(|(watched, task)| *watched == daemon && !task.is_finished()) {
            watched.remove(volume_id).inspect(|(_, task)| task.abort());
            self.counts.daemon_deaths.inc();
        }
        drop(watched);
        self.report(volume_id, daemon);
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<VolumeId, (ProcessId, AbortHandle)>> {
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

async fn report_end(ended: Ended, pidfd: OwnedFd, counts: Arc<Counts>, receiver: UnboundedSender<Ended>) {
    let (volume_id, pid) = (ended.volume_id.clone(), ended.daemon.pid);
    match self::ended(pidfd).await {
        Ok(()) => {
            counts.daemon_deaths.inc();
            let _receiver_gone = receiver.send(ended);
        }
        Err(error) => tracing::warn!(%volume_id, pid, %error, "cannot watch the volume's daemon"),
    }
}
