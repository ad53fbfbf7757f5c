//! Measures a pod's disk usage: emptyDirs and logs by path, since both are the kubelet's own
//! directories; writable layers as the runtime reports them (CRI).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::disk_usage::{self, Bounds, DiskUsage, TimeShares};
use tokio::time::timeout;

use super::limits::{self, Usage};
use crate::clients::cri::{CONTAINER_NAME_LABEL, Layer};
use crate::logs::log_directory;
use crate::objects::Pod;
use crate::worker::Tools;

/// For one directory.
const MAX_ENTRIES: u64 = 5_000_000;
/// For all directories of a pod.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);
/// For the runtime's count of a pod's layers, without which the node's pressure is judged: the embedded runtime
/// answers after 35 s.
pub(super) const LAYERS_TIME: Duration = Duration::from_secs(40);
/// A pod that moves directories during a count makes it incomplete: use the largest of this many
/// counts.
const TRIES: u32 = 5;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    #[error(transparent)]
    Cri(#[from] crate::clients::cri::Error),
    #[error("the measuring thread panicked")]
    Thread,
}

/// What of a pod is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// What its limits are about.
    Limited,
    Whole,
    /// What is not on the disk of the images, if that is another one.
    WithoutLayers,
    /// What is on the disk of the images, if that is another one.
    Layers,
}

pub(super) async fn of_pod(tools: &Arc<Tools>, pod: &Pod, scope: Scope) -> Result<Usage, Error> {
    let mut usage = Usage { is_complete: true, ..Usage::default() };
    let has_containers = scope != Scope::Limited || limits::has_storage_limit(pod);
    if has_containers {
        usage.containers = pod.spec.all_containers().map(|c| (c.name.clone(), 0)).collect();
    }
    let directories = async {
        match scope {
            Scope::Layers => Ok(()),
            Scope::Limited | Scope::Whole | Scope::WithoutLayers => {
                add_directories(tools, pod, &mut usage).await
            }
        }
    };
    let layers = async {
        let layers = layers(tools, &pod.metadata.uid);
        match scope {
            Scope::Limited if !has_containers => Ok(Layers::new()),
            Scope::Limited => layers.await,
            Scope::WithoutLayers => Ok(Layers::new()),
            // The pod is not the cause if the runtime does not answer.
            Scope::Whole | Scope::Layers => {
                Ok(timeout(LAYERS_TIME, layers).await.ok().and_then(Result::ok).unwrap_or_default())
            }
        }
    };
    let (directories, layers) = tokio::join!(directories, layers);
    directories?;
    for (name, layer) in layers? {
        if let Some(used) = usage.containers.get_mut(&name) {
            *used = used.saturating_add(layer.bytes);
            usage.inodes = usage.inodes.saturating_add(layer.inodes);
        }
    }
    Ok(usage)
}

/// Adds the emptyDirs, and the kubelet's files of the containers that `usage` has.
async fn add_directories(tools: &Arc<Tools>, pod: &Pod, usage: &mut Usage) -> Result<(), Error> {
    let uid = &pod.metadata.uid;
    let empty_dirs: Vec<_> =
        pod.spec.volumes.iter().filter(|volume| limits::disk_empty_dir(volume).is_some()).collect();
    let mut shares = TimeShares::new(TIME_LIMIT, empty_dirs.len() + 2 * usage.containers.len());
    for volume in empty_dirs {
        let used = of_directory(tools.volumes.empty_dir(uid, &volume.name), &mut shares).await?;
        usage.is_complete &= used.is_complete;
        usage.inodes = usage.inodes.saturating_add(used.inodes);
        usage.empty_dirs.insert(volume.name.clone(), used.bytes);
    }
    let logs = log_directory(&tools.log_dir, &pod.metadata);
    for (container, total) in &mut usage.containers {
        let logs = of_directory(logs.join(container), &mut shares).await?;
        let own_files = of_directory(tools.own_files_dir(uid, container), &mut shares).await?;
        usage.inodes = usage.inodes.saturating_add(logs.inodes).saturating_add(own_files.inodes);
        *total = total.saturating_add(logs.bytes).saturating_add(own_files.bytes);
    }
    Ok(())
}

/// Writable layers by the name of their container, of all its instances.
type Layers = Vec<(String, Layer)>;

async fn layers(tools: &Tools, uid: &str) -> Result<Layers, Error> {
    let mut by_id: HashMap<String, Layer> = tools.cri.writable_layers(uid).await?;
    let containers = tools.cri.list_containers(Some(uid)).await?.into_iter();
    let layers = containers.filter_map(|container| {
        let name = container.labels.get(CONTAINER_NAME_LABEL).cloned().unwrap_or_default();
        Some((name, by_id.remove(&container.id)?))
    });
    Ok(layers.collect())
}

async fn of_directory(dir: PathBuf, shares: &mut TimeShares) -> Result<DiskUsage, Error> {
    let deadline = Instant::now() + shares.next_share();
    let measure = move || -> linux::Result<DiskUsage> {
        let mut most: Option<DiskUsage> = None;
        for _ in 0..TRIES {
            let time = deadline.saturating_duration_since(Instant::now());
            let usage = disk_usage::measure(&dir, Bounds { entries: MAX_ENTRIES, time })?;
            let is_last = usage.is_complete || Instant::now() >= deadline;
            if is_last || most.is_none_or(|most| usage.bytes > most.bytes) {
                most = Some(DiskUsage { bytes: usage.bytes.max(most.map_or(0, |m| m.bytes)), ..usage });
            }
            if is_last {
                break;
            }
        }
        Ok(most.unwrap_or(DiskUsage { bytes: 0, inodes: 0, is_complete: false }))
    };
    Ok(tokio::task::spawn_blocking(measure).await.map_err(|_| Error::Thread)??)
}
