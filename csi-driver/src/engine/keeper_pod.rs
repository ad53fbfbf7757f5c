//! The manifest of the keeper's pod, once a driver has started.
//!
//! A kubelet replaces the pod of a manifest that changes, or its container, and all that the keeper holds goes with it.
//! So the driver changes nothing before it holds the same itself. Nor does the pod get an image of which no
//! daemon has run: where the node lacks it, there would be no keeper.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, KeeperBinary, KeeperPod};
use crate::daemon::keeper::Keeper;
use crate::daemon::warm::WarmDaemons;
use crate::error::chain;

/// Until a keeper answers, or this driver holds all volumes.
const RETRY: Duration = Duration::from_secs(1);
/// After a daemon that was started for the image alone has not dialled in.
const IMAGE_RETRY: Duration = Duration::from_secs(60);

/// Makes the pod the one that the configuration names, or removes it. A driver that writes no manifests
/// changes nothing.
pub(crate) async fn settle(config: Arc<Config>, keeper: Arc<dyn Keeper>, warm: Arc<WarmDaemons>) {
    let Some(pod) = config.keeper_pod() else { return };
    while let Some(pause) = attempt(&config, &pod, &keeper, &warm).await {
        tokio::time::sleep(pause).await;
    }
}

/// `None` once the pod is settled, or else how long to wait.
async fn attempt(
    config: &Arc<Config>,
    pod: &KeeperPod,
    keeper: &Arc<dyn Keeper>,
    warm: &Arc<WarmDaemons>,
) -> Option<Duration> {
    let (config, pod, keeper, warm) = (config.clone(), pod.clone(), keeper.clone(), warm.clone());
    let attempt = tokio::task::spawn_blocking(move || {
        try_settle(&config.keeper, &pod, &*keeper, &warm).unwrap_or_else(|error| {
            tracing::error!(error = chain(&error), "the keeper's pod stays as it is");
            Some(RETRY)
        })
    });
    // A panic there is in the log.
    attempt.await.unwrap_or(None)
}

fn try_settle(
    configured: &KeeperBinary,
    pod: &KeeperPod,
    keeper: &dyn Keeper,
    warm: &WarmDaemons,
) -> linux::Result<Option<Duration>> {
    // Without a keeper, this driver holds nothing either.
    if *configured != KeeperBinary::None && !holds_the_same(keeper) {
        return Ok(Some(RETRY));
    }
    let KeeperBinary::Pod(wanted) = configured else { return pod.remove().map(|_| None) };
    if wanted.changes_image()? {
        match warm.try_program() {
            // It may have taken a minute.
            Ok(true) if holds_the_same(keeper) => {}
            Ok(_) => return Ok(Some(RETRY)),
            Err(error) => {
                tracing::error!(
                    error = chain(&error),
                    "the keeper's pod keeps its image: no daemon of --mount-image starts"
                );
                return Ok(Some(IMAGE_RETRY));
            }
        }
    }
    wanted.ensure().map(|_| None)
}

/// False also if no keeper answers: one that is stopped may hold anything.
fn holds_the_same(keeper: &dyn Keeper) -> bool {
    let holders = keeper.holders();
    keeper.daemons().is_ok() && holders.keeper.is_subset(&holders.driver)
}
