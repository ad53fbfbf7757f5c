//! `stop`.

use std::io::Write;
use std::path::PathBuf;

use proto::kubelet::StopRequest;

use super::{Error, client};
use crate::config::StopArgs;

/// Returns once the daemon has released the root directory.
pub(super) async fn stop(args: &StopArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let request = StopRequest { pods: args.pods, grace_seconds: Some(args.grace_period) };
    let mut progress = kubelet.stop(request).await?.into_inner();
    while let Some(step) = progress.message().await? {
        writeln!(out, "{}", step.message).and_then(|()| out.flush()).map_err(Error::Output)?;
    }
    drop((kubelet, progress));
    wait_for_end(args.root.private().join("lock")).await?;
    writeln!(out, "hawser-kubelet stopped").map_err(Error::Output)
}

/// The daemon holds the lock until it exits.
async fn wait_for_end(lock: PathBuf) -> Result<(), Error> {
    let waited =
        tokio::task::spawn_blocking(move || linux::lock::FileLock::exclusive(&lock, 0o600).map(drop));
    match waited.await {
        Ok(result) => result.map_err(Error::WaitForEnd),
        Err(_) => Err(Error::Usage("interrupted while waiting for the kubelet to exit")),
    }
}
