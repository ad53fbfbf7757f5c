//! Disk space: the writable layer of a container, and the image store.
//!
//! Invariant: a tree is read within bounds, and not again while its last measurement is valid. A
//! tree whose measurement is late has its last figure or none; the others have theirs.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use linux::disk_usage::{self, Bounds, DiskUsage};
use proto::cri::{FilesystemIdentifier, FilesystemUsage, ImageFsInfoResponse};

use super::value;
use crate::error::Result;
use crate::runtime::Runtime;
use crate::runtime::state::Container;
use crate::shim::protocol::now;

/// Limit for one tree; further entries are not counted.
const MAX_ENTRIES: u64 = 5_000_000;
const TIME_LIMIT: Duration = Duration::from_secs(30);
const BOUNDS: Bounds = Bounds { entries: MAX_ENTRIES, time: TIME_LIMIT };
/// How long ImageFsInfo waits for the image store, and again for all writable layers: longer than
/// the count of one tree takes, and in all less than callers wait.
const IMAGE_FS_WAIT: Duration = Duration::from_secs(35);

/// The container's own files, and for the first container of the pod also those that every one may
/// write. `None` once the sandbox is gone, and if there is no figure after `time`.
pub(super) async fn writable_layer(
    runtime: &Arc<Runtime>,
    container: &Arc<Container>,
    time: Duration,
) -> Result<Option<FilesystemUsage>> {
    let Some(sandbox) = runtime.find_sandbox(&container.record.sandbox_id) else { return Ok(None) };
    let upper = sandbox.container_dir(&container.id).join("upper");
    let measure = move || Ok(disk_usage::measure(&upper, BOUNDS)?);
    let Some(mut usage) = container.samples.layer.usage(time, measure).await else { return Ok(None) };
    // Every container of the pod may write these files. They count once, for the first container.
    let first = runtime.containers_of(&sandbox.id).into_iter().min_by_key(|c| c.record.created_at);
    if first.is_some_and(|first| first.id == container.id) {
        for name in ["hostname", "hosts", "resolv.conf"] {
            usage.bytes = usage.bytes.saturating_add(disk_usage::of_file(&sandbox.dir.join(name))?);
        }
    }
    Ok(Some(on(&runtime.root_dir, Some(usage))))
}

/// ImageFsInfo: the image store, and the writable layers of all containers.
pub(crate) async fn image_fs(runtime: &Arc<Runtime>) -> Result<ImageFsInfoResponse> {
    let dir = runtime.images.dir().to_owned();
    let measure = move || Ok(disk_usage::measure(&dir, BOUNDS)?);
    let images = runtime.images_usage.usage(IMAGE_FS_WAIT, measure).await;
    let mut layers = DiskUsage { bytes: 0, inodes: 0, is_complete: true };
    let containers = runtime.containers();
    let mut shares = disk_usage::TimeShares::new(IMAGE_FS_WAIT, containers.len());
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
        container_filesystems: vec![on(&runtime.root_dir, Some(layers))],
    })
}

/// `None`: the figures are left out.
fn on(dir: &Path, usage: Option<DiskUsage>) -> FilesystemUsage {
    FilesystemUsage {
        timestamp: now(),
        fs_id: Some(FilesystemIdentifier { mountpoint: dir.display().to_string() }),
        used_bytes: usage.and_then(|usage| value(usage.bytes)),
        inodes_used: usage.and_then(|usage| value(usage.inodes)),
    }
}
