//! How long a client's connection has been idle: nothing came from the client, and nothing was sent to it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// kubelet's `streamingConnectionIdleTimeout`.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(4 * 60 * 60);

/// When something came or was sent last.
#[derive(Debug)]
pub(super) struct Activity(Mutex<Instant>);

impl Activity {
    pub(super) fn begins() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    pub(super) fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// What `work` returns, and that it came; `None` once the connection has been idle for [`IDLE_TIMEOUT`].
    pub(super) async fn wait_for<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(work);
        loop {
            let end = *self.0.lock().unwrap_or_else(PoisonError::into_inner) + IDLE_TIMEOUT;
            if end <= Instant::now() {
                return None;
            }
            tokio::select! {
                done = &mut work => {
                    self.note();
                    return Some(done);
                }
                () = sleep_until(end) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_when_neither_side_has_sent_for_the_idle_timeout() {
        let (activity, begun) = (Activity::begins(), Instant::now());
        let sending = async {
            sleep(IDLE_TIMEOUT - Duration::from_secs(1)).await;
            activity.note();
            pending::<()>().await;
        };
        tokio::select! {
            waited = activity.wait_for(pending::<()>()) => assert_eq!(waited, None),
            () = sending => {}
        }
        assert_eq!(begun.elapsed(), 2 * IDLE_TIMEOUT - Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_keeps_the_connection() {
        let (activity, begun) = (Activity::begins(), Instant::now());
        for _ in 0..3 {
            let came = async {
                sleep(IDLE_TIMEOUT - Duration::from_secs(1)).await;
                7
            };
            assert_eq!(activity.wait_for(came).await, Some(7));
        }
        assert!(begun.elapsed() > 2 * IDLE_TIMEOUT);
    }
}
