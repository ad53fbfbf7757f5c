//! The manifest of the keeper's pod, once a driver has started.
//!
//! A kubelet replaces the pod of a manifest that changes, or its container, and all that the keeper holds goes with it.
//! So the driver changes nothing before it holds the same itself.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, KeeperBinary, KeeperPod};
use crate::daemon::keeper::Keeper;
use crate::error::chain;

/// Until a keeper answers, or this driver holds all volumes.
const RETRY: Duration = Duration::from_secs(1);

/// Makes the pod the one that the configuration names, or removes it. A driver that writes no manifests
/// changes nothing.
pub(crate) async fn settle(config: Arc<Config>, keeper: Arc<dyn Keeper>) {
    let Some(pod) = config.keeper_pod() else { return };
    while !is_settled(&config, &pod, &keeper).await {
        tokio::time::sleep(RETRY).await;
    }
}

async fn is_settled(config: &Arc<Config>, pod: &KeeperPod, keeper: &Arc<dyn Keeper>) -> bool {
    let (config, pod, keeper) = (config.clone(), pod.clone(), keeper.clone());
    let attempt = tokio::task::spawn_blocking(move || {
        // Without a keeper, this driver holds nothing either.
        if config.keeper != KeeperBinary::None && !holds_the_same(&*keeper) {
            return false;
        }
        let changed = match &config.keeper {
            KeeperBinary::Pod(wanted) => wanted.ensure(),
            _ => pod.remove(),
        };
        changed
            .inspect_err(|error| tracing::error!(error = chain(error), "the keeper's pod stays as it is"))
            .is_ok()
    });
    // A panic there is in the log.
    attempt.await.unwrap_or(true)
}

/// False also if no keeper answers: one that is stopped may hold anything.
fn holds_the_same(keeper: &dyn Keeper) -> bool {
    let holders = keeper.holders();
    keeper.daemons().is_ok() && holders.keeper.is_subset(&holders.driver)
}
