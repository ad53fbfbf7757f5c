//! Disk space: the writable layer of a container, and the image store.
//!
//! Invariant: a tree is read within bounds, and not again while its last measurement is valid.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use linux::disk_usage::{self, Bounds, DiskUsage};
use proto::cri::{FilesystemIdentifier, FilesystemUsage, ImageFsInfoResponse};

use super::value;
use crate::blocking::blocking;
use crate::error::Result;
use crate::runtime::Runtime;
use crate::runtime::state::Container;
use crate::shim::protocol::now;

/// Limit for one tree; further entries are not counted.
const MAX_ENTRIES: u64 = 5_000_000;
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The container's own files, and for the first container of the pod also those that every one may
/// write. `None` once the sandbox is gone.
pub(super) async fn writable_layer(
    runtime: &Arc<Runtime>,
    container: &Arc<Container>,
    time: Duration,
) -> Result<Option<FilesystemUsage>> {
    let Some(sandbox) = runtime.find_sandbox(&container.record.sandbox_id) else { return Ok(None) };
    let upper = sandbox.container_dir(&container.id).join("upper");
    let bounds = Bounds { entries: MAX_ENTRIES, time: time.min(TIME_LIMIT) };
    let measure = blocking("count a writable layer", move || Ok(disk_usage::measure(&upper, bounds)?));
    let mut usage = container.samples.layer.usage(measure).await?;
    // Every container of the pod may write these files. They count once, for the first container.
    let first = runtime.containers_of(&sandbox.id).into_iter().min_by_key(|c| c.record.created_at);
    if first.is_some_and(|first| first.id == container.id) {
        for name in ["hostname", "hosts", "resolv.conf"] {
            usage.bytes = usage.bytes.saturating_add(disk_usage::of_file(&sandbox.dir.join(name))?);
        }
    }
    Ok(Some(on(&runtime.root_dir, usage)))
}

/// ImageFsInfo: the image store, and the writable layers of all containers.
pub(crate) async fn image_fs(runtime: &Arc<Runtime>) -> Result<ImageFsInfoResponse> {
    let dir = runtime.images.dir().to_owned();
    let bounds = Bounds { entries: MAX_ENTRIES, time: TIME_LIMIT };
    let measure = blocking("count the image store", move || Ok(disk_usage::measure(&dir, bounds)?));
    let images = runtime.images_usage.usage(measure).await?;
    let mut layers = DiskUsage { bytes: 0, inodes: 0, is_complete: true };
    let containers = runtime.containers();
    let mut shares = disk_usage::TimeShares::new(TIME_LIMIT, containers.len());
    for container in containers {
        let usage = writable_layer(runtime, &container, shares.next_share()).await?.unwrap_or_default();
        let add = |sum: u64, more: Option<proto::cri::UInt64Value>| {
            sum.saturating_add(more.map_or(0, |more| more.value))
        };
        layers.bytes = add(layers.bytes, usage.used_bytes);
        layers.inodes = add(layers.inodes, usage.inodes_used);
    }
    Ok(ImageFsInfoResponse {
        image_filesystems: vec![on(runtime.images.dir(), images)],
        container_filesystems: vec![on(&runtime.root_dir, layers)],
    })
}

fn on(dir: &Path, usage: DiskUsage) -> FilesystemUsage {
    FilesystemUsage {
        timestamp: now(),
        fs_id: Some(FilesystemIdentifier { mountpoint: dir.display().to_string() }),
        used_bytes: value(usage.bytes),
        inodes_used: value(usage.inodes),
    }
}
