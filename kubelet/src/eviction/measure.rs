//! What a pod takes of the disk: emptyDirs and logs by path, since both are the
//! kubelet's own directories; writable layers by the runtime's word (CRI).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use linux::disk_usage::{self, Bounds, DiskUsage};

use super::limits::{self, Usage};
use crate::container_config::log_directory;
use crate::cri::CONTAINER_NAME_LABEL;
use crate::objects::Pod;
use crate::worker::Tools;

/// Of one directory.
const BOUNDS: Bounds = Bounds { entries: 5_000_000, time: Duration::from_secs(30) };

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    #[error(transparent)]
    Cri(#[from] crate::cri::Error),
    #[error("a thread ended early")]
    Thread,
}

pub(super) async fn of_pod(tools: &Arc<Tools>, pod: &Pod) -> Result<Usage, Error> {
    let mut usage = Usage { is_complete: true, ..Usage::default() };
    let uid = &pod.metadata.uid;
    for volume in pod.spec.volumes.iter().filter(|volume| limits::disk_empty_dir(volume).is_some()) {
        let used = of_directory(tools.volumes.empty_dir(uid, &volume.name)).await?;
        usage.is_complete &= used.is_complete;
        usage.empty_dirs.insert(volume.name.clone(), used.bytes);
    }
    if !limits::has_storage_limit(pod) {
        return Ok(usage);
    }
    let logs = log_directory(&tools.log_dir, &pod.metadata);
    for container in &pod.spec.containers {
        let used = of_directory(logs.join(&container.name)).await?;
        usage.containers.insert(container.name.clone(), used.bytes);
    }
    let layers = tools.cri.writable_layers(uid).await?;
    for container in tools.cri.list_containers(Some(uid)).await? {
        let name = container.labels.get(CONTAINER_NAME_LABEL).cloned().unwrap_or_default();
        if let (Some(used), Some(layer)) = (usage.containers.get_mut(&name), layers.get(&container.id)) {
            *used = used.saturating_add(*layer);
        }
    }
    Ok(usage)
}

async fn of_directory(dir: PathBuf) -> Result<DiskUsage, Error> {
    let measure = move || disk_usage::measure(&dir, BOUNDS);
    Ok(tokio::task::spawn_blocking(measure).await.map_err(|_| Error::Thread)??)
}
