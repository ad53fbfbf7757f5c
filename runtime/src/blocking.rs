//! Runs work that waits for the kernel or a disk.

pub(crate) mod in_place;

use crate::error::{Error, Result};

/// Runs `work` outside the threads that serve calls.
pub(crate) async fn blocking<T: Send + 'static>(
    task: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(Error::Task { task }),
    }
}
