//! How far a pull has come, in the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const PERIOD: Duration = Duration::from_secs(10);

/// Bytes of one image.
#[derive(Debug, Default)]
pub(super) struct Progress {
    fetched: AtomicU64,
}

impl Progress {
    pub(super) fn add(&self, bytes: usize) {
        self.fetched.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    /// Reports to the log while `work` runs. `total`: bytes that are to be fetched.
    pub(super) async fn report<T>(&self, host: &str, total: u64, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(PERIOD, &mut work).await {
                Ok(done) => return done,
                Err(_) => tracing::info!(host, bytes = self.fetched(), of = total, "pulling"),
            }
        }
    }
}
