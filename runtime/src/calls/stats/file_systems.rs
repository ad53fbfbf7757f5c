//! Disk space: the writable layer of a container, and the image store.
//!
//! Invariant: a tree is read within bounds, and not again while its last measurement is valid. A
//! tree whose measurement is late has its last figure or none; the others have theirs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use linux::disk_usage::{self, Bounds, DiskUsage};
use proto::cri::{FilesystemIdentifier, FilesystemUsage, ImageFsInfoResponse, UInt64Value};

use super::value;
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::runtime::samples::Measured;
use crate::runtime::state::Container;
use crate::shim::protocol::now;

/// Limit for one tree; further entries are not counted.
const MAX_ENTRIES: u64 = 5_000_000;
const TIME_LIMIT: Duration = Duration::from_secs(30);
const BOUNDS: Bounds = Bounds { entries: MAX_ENTRIES, time: TIME_LIMIT };
/// How long ImageFsInfo waits for figures: longer than the count of one tree takes, and less than callers wait.
const IMAGE_FS_WAIT: Duration = Duration::from_secs(35);

/// What writable layers take, by the container's id. One without a figure is not there.
#[derive(Debug)]
pub(super) struct Layers(BTreeMap<String, FilesystemUsage>);

impl Layers {
    /// Waits for all of them together, for at most `time`.
    pub(super) async fn count(runtime: &Arc<Runtime>, containers: &[Arc<Container>], time: Duration) -> Self {
        let counts = containers.iter().map(|container| writable_layer(runtime, container, time));
        let counted = containers.iter().zip(join_all(counts).await);
        Self(counted.filter_map(|(container, usage)| Some((container.id.clone(), usage?))).collect())
    }

    pub(super) fn of(&self, container: &str) -> Option<FilesystemUsage> {
        self.0.get(container).cloned()
    }

    /// Of all of them.
    fn sum(&self) -> DiskUsage {
        let sum = |figure: fn(&FilesystemUsage) -> &Option<UInt64Value>| {
            self.0
                .values()
                .filter_map(|usage| *figure(usage))
                .fold(0, |sum: u64, more| sum.saturating_add(more.value))
        };
        DiskUsage {
            bytes: sum(|usage| &usage.used_bytes),
            inodes: sum(|usage| &usage.inodes_used),
            is_complete: true,
        }
    }
}

/// The container's own files, and for the first container of the pod also those that every one may
/// write. `None` once the sandbox is gone, and if there is no figure after `time`.
async fn writable_layer(
    runtime: &Arc<Runtime>,
    container: &Arc<Container>,
    time: Duration,
) -> Option<FilesystemUsage> {
    let sandbox = runtime.find_sandbox(&container.record.sandbox_id)?;
    let upper = sandbox.container_dir(&container.id).join("upper");
    let measure = move || Ok(disk_usage::measure(&upper, BOUNDS)?);
    let Measured { mut usage, taken_at, .. } =
        container.samples.layer.measured_in_turn(time, &sandbox.layer_turn, measure).await?;
    // Every container of the pod may write these files. They count once, for the first container.
    let first = runtime.containers_of(&sandbox.id).into_iter().min_by_key(|c| c.record.created_at);
    if first.is_some_and(|first| first.id == container.id) {
        for name in ["hostname", "hosts", "resolv.conf"] {
            // One that cannot be read is left out.
            let bytes = disk_usage::of_file(&sandbox.dir.join(name)).unwrap_or(0);
            usage.bytes = usage.bytes.saturating_add(bytes);
        }
    }
    Some(on(&runtime.root_dir, usage, taken_at))
}

/// ImageFsInfo: the image store, and the writable layers of all containers.
///
/// # Errors
///
/// There is no figure of the image store yet. kubelet 1.36 does not expect an answer without one
/// (cri_stats_provider.go, `ImageFsStats`).
pub(crate) async fn image_fs(runtime: &Arc<Runtime>) -> Result<ImageFsInfoResponse> {
    let dir = runtime.images.dir().to_owned();
    let measure = move || Ok(disk_usage::measure(&dir, BOUNDS)?);
    let containers = runtime.containers();
    let (images, layers) = tokio::join!(
        runtime.images_usage.measured(IMAGE_FS_WAIT, measure),
        Layers::count(runtime, &containers, IMAGE_FS_WAIT),
    );
    let images =
        images.ok_or(Error::Busy { what: "the files of the image store have not been counted yet" })?;
    Ok(ImageFsInfoResponse {
        image_filesystems: vec![on(runtime.images.dir(), images.usage, images.taken_at)],
        container_filesystems: vec![on(&runtime.root_dir, layers.sum(), now())],
    })
}

fn on(dir: &Path, usage: DiskUsage, timestamp: i64) -> FilesystemUsage {
    FilesystemUsage {
        timestamp,
        fs_id: Some(FilesystemIdentifier { mountpoint: dir.display().to_string() }),
        used_bytes: value(usage.bytes),
        inodes_used: value(usage.inodes),
    }
}
