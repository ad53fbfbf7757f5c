//! Passes what the kernel counts of volumes on to their daemons, which may not ask it: they show it in
//! statfs(2).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::backend::VolumeBackend;
use crate::journal::Journal;
use crate::model::ids::VolumeId;
use crate::model::policies::{Allowance, CapacityPolicy};

const EVERY: Duration = Duration::from_secs(1);

/// Does so until the driver stops.
pub(crate) async fn serve(
    journal: Arc<Journal>,
    backend: Arc<dyn VolumeBackend>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => return,
            () = tokio::time::sleep(EVERY) => {}
        }
        let (journal, backend) = (journal.clone(), backend.clone());
        let round = tokio::task::spawn_blocking(move || {
            backend.publish_use(&limited_by_kernel(&journal));
        });
        tokio::select! {
            // The pool may be stuck.
            _ = stopped.wait_for(|stop| *stop) => return,
            // A panic there is in the log; the next round starts anew.
            _ = round => {}
        }
    }
}

fn limited_by_kernel(journal: &Journal) -> Vec<(VolumeId, Allowance)> {
    let served = journal.list().into_iter().filter(|(_, record)| {
        let is_served = record.stage.as_ref().is_some_and(|stage| stage.serving.is_some());
        is_served && record.policies().capacity == CapacityPolicy::Kernel
    });
    served.map(|(id, record)| (id, record.allowance())).collect()
}
