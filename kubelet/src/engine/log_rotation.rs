//! Rotation of container logs, like kubelet's container log manager (kubernetes, pkg/kubelet/logs):
//! - rename a log that exceeds `max_size`, and make the runtime open a new one
//!   (ReopenContainerLog);
//! - compress older logs and remove the oldest.
//!
//! A fast-growing log is checked more often than every `PERIOD`, to limit how far it exceeds its
//! size with third-party runtimes. The embedded runtime enforces a ceiling itself.

mod rotate;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::cri::ContainerState;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::clients::cri::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use crate::logs::{log_directory, log_path};
use crate::worker::Tools;

/// kubelet's `containerLogMonitorInterval`.
const PERIOD: Duration = Duration::from_secs(10);
const LEAST_PERIOD: Duration = Duration::from_millis(500);
const ROTATED_AT_ONCE: usize = 8;

/// `--container-log-max-size` and `--container-log-max-files`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub max_size: u64,
    /// Includes the current log; at least 2.
    pub max_files: usize,
}

/// The log that a running container writes.
#[derive(Debug, Clone)]
struct Log {
    container_id: String,
    path: PathBuf,
    size: u64,
}

/// Never ends.
pub(crate) async fn keep_rotating(tools: Arc<Tools>, limits: Limits) {
    let mut sizes: BTreeMap<PathBuf, Sample> = BTreeMap::new();
    let mut pause = PERIOD;
    loop {
        tokio::time::sleep(pause).await;
        let logs = match running_logs(&tools).await {
            Ok(logs) => logs,
            Err(error) => {
                debug!(%error, "cannot list the containers' logs");
                continue;
            }
        };
        let large: Vec<_> = logs.iter().filter(|log| log.size > limits.max_size).cloned().collect();
        rotate_all(&tools, large, limits).await;
        let now = Instant::now();
        let seen: BTreeMap<_, _> =
            logs.into_iter().map(|log| (log.path, Sample { at: now, size: log.size })).collect();
        let due = seen.iter().map(|(path, now)| until_next(sizes.get(path), *now, limits));
        pause = due.min().unwrap_or(PERIOD);
        sizes = seen;
    }
}

/// Rotates a few at a time: a pod that delays the runtime's reopen delays few others.
async fn rotate_all(tools: &Arc<Tools>, logs: Vec<Log>, limits: Limits) {
    let mut rotating = JoinSet::new();
    for log in logs {
        if rotating.len() == ROTATED_AT_ONCE {
            rotating.join_next().await;
        }
        let tools = Arc::clone(tools);
        rotating.spawn(async move {
            if let Err(error) = rotate::rotate(&tools.cri, &log, limits).await {
                warn!(log = %log.path.display(), error = linux::chain(&error), "log not rotated");
            }
        });
    }
    rotating.join_all().await;
}

/// The size of a log at a moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    size: u64,
}

/// When the log reaches its size limit at the current growth rate.
fn until_next(before: Option<&Sample>, now: Sample, limits: Limits) -> Duration {
    let size = now.size;
    // After a rotation the log starts at zero.
    let (since, grown) = match before {
        Some(before) if size >= before.size => (now.at - before.at, size - before.size),
        Some(before) => (now.at - before.at, size),
        None => (PERIOD, size),
    };
    let left = if size > limits.max_size { limits.max_size } else { limits.max_size - size };
    let speed = grown as f64 / since.as_secs_f64().max(0.001);
    Duration::try_from_secs_f64(left as f64 / speed.max(1.0)).unwrap_or(PERIOD).clamp(LEAST_PERIOD, PERIOD)
}

async fn running_logs(tools: &Tools) -> crate::clients::cri::Result<Vec<Log>> {
    let pods: BTreeMap<String, _> =
        tools.store.pods().into_iter().map(|pod| (pod.metadata.uid.clone(), pod)).collect();
    let mut logs = Vec::new();
    for container in tools.cri.list_containers(None).await? {
        let label = |key| container.labels.get(key).map_or("", String::as_str);
        let Some(pod) = pods.get(label(POD_UID_LABEL)) else { continue };
        if container.state() != ContainerState::ContainerRunning {
            continue;
        }
        let instance = container.metadata.as_ref().map_or(0, |m| m.attempt);
        let dir = log_directory(&tools.log_dir, &pod.metadata);
        let path = dir.join(log_path(label(CONTAINER_NAME_LABEL), instance));
        if let Ok(metadata) = std::fs::metadata(&path) {
            logs.push(Log { container_id: container.id, path, size: metadata.len() });
        }
    }
    Ok(logs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_growing_log_is_checked_early() {
        let limits = Limits { max_size: 10 << 20, max_files: 5 };
        let now = Instant::now() + PERIOD;
        let before = |ago: u64, size| Sample { at: now - Duration::from_secs(ago), size };
        let sample = |size| Sample { at: now, size };
        assert_eq!(until_next(Some(&before(10, 1000)), sample(2000), limits), PERIOD);
        assert_eq!(until_next(None, sample(0), limits), PERIOD);
        // 1 MiB/s, 4 MiB left.
        let soon = until_next(Some(&before(2, 4 << 20)), sample(6 << 20), limits);
        assert_eq!(soon, Duration::from_secs(4));
        let flood = until_next(Some(&before(1, 0)), sample(500 << 20), limits);
        assert_eq!(flood, LEAST_PERIOD);
    }
}
