//! Which calls may wait long, and how many at once: a stage waits for a mount pod, a
//! volume from a source for its copy.
//!
//! Invariant: calls that wait long never hold all threads ([`THREADS`]), so that an
//! Unpublish, an Unstage, a Probe or statistics always find one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, Result};
use crate::limits;

/// All threads for calls that may block; what `MOST_LONG` leaves of them is for short ones.
pub const THREADS: usize = 512;
const MOST_LONG: usize = 384;
/// Calls that wait for their turn, without a thread. One more is refused at once.
const MOST_QUEUED: usize = 512;
const LONG: [&str; 4] =
    ["csi.NodeStageVolume", "csi.NodePublishVolume", "csi.CreateVolume", "csi.CreateSnapshot"];

#[derive(Debug)]
pub(crate) struct Admission {
    turns: Arc<Semaphore>,
    queue: Semaphore,
    limit: Duration,
}

impl Default for Admission {
    fn default() -> Self {
        Self::new(MOST_LONG, MOST_QUEUED, limits::TURN)
    }
}

impl Admission {
    fn new(turns: usize, queued: usize, limit: Duration) -> Self {
        Self { turns: Arc::new(Semaphore::new(turns)), queue: Semaphore::new(queued), limit }
    }

    /// The turn of the RPC `name`, to be held until its work has ended; `None` for a short
    /// one. ABORTED where too many are under way: the caller comes back.
    pub(crate) async fn turn(&self, name: &'static str) -> Result<Option<OwnedSemaphorePermit>> {
        if !LONG.contains(&name) {
            return Ok(None);
        }
        let crowded = || Error::Crowded { operation: name, most: MOST_LONG };
        if let Ok(turn) = self.turns.clone().try_acquire_owned() {
            return Ok(Some(turn));
        }
        let _place = self.queue.try_acquire().map_err(|_full| crowded())?;
        match tokio::time::timeout(self.limit, self.turns.clone().acquire_owned()).await {
            Ok(Ok(turn)) => Ok(Some(turn)),
            // Late, or never: the semaphore is not closed.
            Ok(Err(_)) | Err(_) => Err(crowded()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_calls_wait_for_a_turn_and_short_ones_do_not() {
        let admission = Admission::new(1, 1, Duration::from_millis(50));
        let first = admission.turn(LONG[0]).await.unwrap();
        assert!(first.is_some());
        assert!(admission.turn("csi.NodeUnpublishVolume").await.unwrap().is_none());
        let (second, third) = tokio::join!(admission.turn(LONG[1]), admission.turn(LONG[2]));
        for refused in [second, third] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Crowded { .. }), "{error}");
        }
        drop(first);
        assert!(admission.turn(LONG[3]).await.unwrap().is_some());
    }
}
