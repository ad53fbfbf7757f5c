//! The directories where the runtime stores images.
//!
//! Invariant: only [`ImageDirectories::follow`] waits for the runtime's answer, for which the runtime may count
//! all images and layers. What the node lacks is found without it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tracing::warn;

use super::disk::is_one_file_system;
use crate::clients::cri::Cri;

const VALIDITY: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct ImageDirectories(watch::Sender<Option<Arc<[PathBuf]>>>);

impl ImageDirectories {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Asks every `period` until the runtime has named a directory, and again after [`VALIDITY`]: an
    /// administrator may have moved the directories. Never ends.
    pub(super) async fn follow(&self, cri: &Cri, period: Duration) {
        let mut is_reported = false;
        loop {
            let pause = match cri.image_directories().await {
                Ok(found) if !found.is_empty() => {
                    self.0.send_replace(Some(found.into()));
                    VALIDITY
                }
                Ok(_none) => period,
                Err(error) => {
                    if !std::mem::replace(&mut is_reported, true) {
                        warn!(%error, "cannot get the runtime's image directories: they are not looked at");
                    }
                    period
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// `None`: the runtime has not answered yet.
    pub(super) fn known(&self) -> Option<Arc<[PathBuf]>> {
        self.0.borrow().clone()
    }

    /// Waits until the runtime has answered, at most so long.
    pub(super) async fn wait(&self, limit: Duration) {
        let mut answers = self.0.subscribe();
        // Without an answer, the caller goes on with what it has.
        drop(timeout(limit, answers.wait_for(Option::is_some)).await);
    }

    /// Whether images and layers are on another disk than the kubelet's root directory, as far as known.
    pub(super) fn are_apart_from(&self, root_dir: &Path) -> bool {
        self.known().is_some_and(|known| known.iter().any(|path| !is_one_file_system(path, root_dir)))
    }
}
