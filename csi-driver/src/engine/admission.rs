//! Limits how many slow calls run at once. A stage waits for a mount pod, a volume from a source
//! for its copy, a deletion for its last file.
//!
//! Invariant: slow calls never occupy all threads ([`THREADS`]), so that an Unpublish, an Unstage,
//! a Probe or statistics always find one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{Error, Result};
use crate::model::limits;

/// Threads for calls that may block. Slow calls leave some of them to fast ones.
pub const THREADS: usize = 512;
const MOST_WAITING: usize = 384;
/// A limit of their own, so that deletions cannot keep pods from starting, nor the reverse.
const MOST_DELETIONS: usize = 64;
/// Calls that wait for a turn, without a thread. Further calls are refused at once.
const MOST_QUEUED: usize = 512;
const WAITING: [&str; 4] =
    ["csi.NodeStageVolume", "csi.NodePublishVolume", "csi.CreateVolume", "csi.CreateSnapshot"];
const DELETIONS: [&str; 2] = ["csi.DeleteVolume", "csi.DeleteSnapshot"];

#[derive(Debug)]
pub(crate) struct Admission {
    waiting: Turns,
    deletions: Turns,
}

impl Default for Admission {
    fn default() -> Self {
        let turns = |most| Turns::new(most, MOST_QUEUED, limits::TURN);
        Self { waiting: turns(MOST_WAITING), deletions: turns(MOST_DELETIONS) }
    }
}

impl Admission {
    /// Waits for the turn of RPC `name`. The caller holds the permit until its work has ended.
    /// `None` for a fast RPC. ABORTED if too many are under way: the caller retries.
    pub(crate) async fn turn(&self, name: &'static str) -> Result<Option<OwnedSemaphorePermit>> {
        let turns = if WAITING.contains(&name) {
            &self.waiting
        } else if DELETIONS.contains(&name) {
            &self.deletions
        } else {
            return Ok(None);
        };
        turns.take(name).await.map(Some)
    }
}

#[derive(Debug)]
struct Turns {
    free: Arc<Semaphore>,
    most: usize,
    queue: Semaphore,
    limit: Duration,
}

impl Turns {
    fn new(most: usize, queued: usize, limit: Duration) -> Self {
        Self { free: Arc::new(Semaphore::new(most)), most, queue: Semaphore::new(queued), limit }
    }

    async fn take(&self, operation: &'static str) -> Result<OwnedSemaphorePermit> {
        let crowded = || Error::Crowded { operation, most: self.most };
        if let Ok(turn) = self.free.clone().try_acquire_owned() {
            return Ok(turn);
        }
        let _place = self.queue.try_acquire().map_err(|_full| crowded())?;
        match tokio::time::timeout(self.limit, self.free.clone().acquire_owned()).await {
            Ok(Ok(turn)) => Ok(turn),
            // The wait took too long. The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(crowded()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn long_calls_wait_for_a_turn_and_short_ones_do_not() {
        let turns = || Turns::new(1, 1, Duration::from_millis(50));
        let admission = Admission { waiting: turns(), deletions: turns() };
        let first = admission.turn(WAITING[0]).await.unwrap();
        assert!(first.is_some());
        assert!(admission.turn("csi.NodeUnpublishVolume").await.unwrap().is_none());
        let (second, third) = tokio::join!(admission.turn(WAITING[1]), admission.turn(WAITING[2]));
        for refused in [second, third] {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Crowded { most: 1, .. }), "{error}");
        }
        drop(first);
        assert!(admission.turn(WAITING[3]).await.unwrap().is_some());
    }

    #[tokio::test]
    async fn deletions_leave_threads_to_all_other_calls() {
        let admission = Admission::default();
        let mut turns = Vec::new();
        for _ in 0..MOST_DELETIONS {
            turns.push(admission.turn(DELETIONS[0]).await.unwrap().expect("a turn"));
        }
        for _ in 0..MOST_WAITING {
            turns.push(admission.turn(WAITING[0]).await.unwrap().expect("a turn"));
        }
        assert!(turns.len() < THREADS, "short calls find a thread");
        let next = admission.turn(DELETIONS[1]);
        assert!(tokio::time::timeout(Duration::from_millis(50), next).await.is_err(), "it waits");
    }
}
