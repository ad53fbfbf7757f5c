//! Retries failed volume operations: with back-off, or at once when a missing object or driver
//! appears.

use std::time::Duration;

use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::watch;
use tokio::time::timeout;

use super::error::Error;
use crate::backoff::Backoff;
use crate::clients::plugins::Plugins;
use crate::objects::Kind;
use crate::store::{Change, Store};

/// The usual duration of provisioning, binding, and a driver's start.
const USUAL_TIME: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Retry {
    backoff: Backoff,
    objects: Receiver<Change>,
    drivers: watch::Receiver<u64>,
}

impl Retry {
    /// Call before the first attempt, so that no change is missed.
    pub(super) fn new(store: &Store, plugins: &Plugins) -> Self {
        Self { backoff: Backoff::operation(), objects: store.subscribe(), drivers: plugins.changes() }
    }

    /// Waits briefly for a claim to be bound or a driver to start; returns whether there was a
    /// change.
    pub(super) async fn wait_briefly(&mut self, error: &Error) -> bool {
        match error {
            Error::ClaimPending { .. } => {
                timeout(USUAL_TIME, next_change(&mut self.objects, &STORAGE)).await.is_ok()
            }
            Error::ObjectMissing { .. } | Error::Secrets(_) => {
                timeout(USUAL_TIME, next_change(&mut self.objects, &CONFIGURATION)).await.is_ok()
            }
            Error::DriverMissing { .. } => timeout(USUAL_TIME, self.drivers.changed()).await.is_ok(),
            _ => false,
        }
    }

    pub(super) async fn wait(&mut self, error: &Error) {
        if depends_on_objects(error) {
            next_change(&mut self.objects, &STORAGE).await;
            return;
        }
        if error.depends_on_configuration() {
            next_change(&mut self.objects, &CONFIGURATION).await;
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(self.backoff.step()) => {}
            Ok(()) = self.drivers.changed() => self.backoff.reset(),
        }
    }
}

/// Whether only a change of a claim or volume can help.
fn depends_on_objects(error: &Error) -> bool {
    matches!(
        error,
        Error::ClaimMissing { .. }
            | Error::ClaimPending { .. }
            | Error::ClaimDeleted { .. }
            | Error::ClaimOfOther { .. }
            | Error::ClaimLost { .. }
            | Error::VolumeField { .. }
    )
}

const STORAGE: [Kind; 2] = [Kind::PersistentVolumeClaim, Kind::PersistentVolume];
const CONFIGURATION: [Kind; 2] = [Kind::ConfigMap, Kind::Secret];

async fn next_change(changes: &mut Receiver<Change>, kinds: &[Kind]) {
    loop {
        match changes.recv().await {
            Ok(change) if !kinds.contains(&change.kind) => {}
            Err(RecvError::Closed) => std::future::pending().await,
            Ok(_) | Err(RecvError::Lagged(_)) => return,
        }
    }
}
