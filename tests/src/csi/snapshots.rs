//! Pools of each kind, and the calls about snapshots.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test that uses it")]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use proto::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use proto::csi::{
    CapacityRange, CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotRequest, GetSnapshotRequest,
    ListSnapshotsRequest, ListSnapshotsResponse, Snapshot, Volume, VolumeContentSource,
};
use tonic::{Code, Status};

use super::scene::{Caller, Flags, Scene, TIMEOUT, create_request};
use crate::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use crate::{Sandbox, eventually, subvolume};

pub const REFLINKING: [FileSystem; 2] = [FileSystem::Btrfs, FileSystem::Xfs];
pub const BLOCKING_COPY: (&str, &str) = ("snapshotMode", "blocking-copy");

/// A driver whose pool is a new file system of this kind.
pub fn scene_on(kind: FileSystem) -> Scene {
    scene_on_with(kind, Flags::process())
}

pub fn scene_on_with(kind: FileSystem, flags: Flags) -> Scene {
    let sandbox = Sandbox::new();
    LoopMount::new(&sandbox, "pool", kind, IMAGE_BYTES).unwrap();
    Scene::start_in(sandbox, flags)
}

/// A driver whose pool is a new Btrfs with quota groups.
pub fn scene_with_quota_groups(flags: Flags) -> Scene {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Btrfs, IMAGE_BYTES).unwrap();
    subvolume::enable_quotas(mount.dir()).unwrap();
    Scene::start_in(sandbox, flags)
}

/// What kernels leave of the quota groups of deleted subvolumes is removed too.
pub fn leaves_no_quota_groups() -> anyhow::Result<()> {
    /// The file system's own tree (linux/btrfs_tree.h, `BTRFS_FS_TREE_OBJECTID`).
    const WHOLE: u64 = 5;
    let scene = scene_with_quota_groups(Flags::process());
    let (caller, pool) = (scene.caller(), scene.sandbox.path("pool"));
    let volume = caller.create_named("pvc-1")?;
    let made = snapshot(&caller, "snap-1", &volume)?;
    wait_until_ready(&caller, &made.snapshot_id);
    anyhow::ensure!(subvolume::groups(&pool)?.len() == 3, "{:?}", subvolume::groups(&pool)?);
    delete_snapshot(&caller, &made.snapshot_id)?;
    caller.delete(&volume)?;
    eventually("no group is left", TIMEOUT, || {
        subvolume::begin_clean_up(&pool)?;
        let left = subvolume::groups(&pool)?;
        anyhow::ensure!(left == [WHOLE], "{left:?}");
        Ok(())
    })?;
    scene.assert_nothing_left();
    Ok(())
}

pub fn snapshot_request(name: &str, source: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest { name: name.into(), source_volume_id: source.into(), ..Default::default() }
}

pub fn snapshot_with(
    caller: &Caller,
    name: &str,
    source: &str,
    parameters: &[(&str, &str)],
) -> Result<Snapshot, Status> {
    let mut request = snapshot_request(name, source);
    request.parameters = map(parameters);
    let reply = caller.controller(async |mut c| c.create_snapshot(request).await)?;
    Ok(reply.into_inner().snapshot.expect("a snapshot in the reply"))
}

pub fn snapshot(caller: &Caller, name: &str, source: &str) -> Result<Snapshot, Status> {
    snapshot_with(caller, name, source, &[])
}

pub fn delete_snapshot(caller: &Caller, id: &str) -> Result<(), Status> {
    let request = DeleteSnapshotRequest { snapshot_id: id.into(), ..Default::default() };
    caller.controller(async |mut c| c.delete_snapshot(request).await).map(drop)
}

pub fn get_snapshot(caller: &Caller, id: &str) -> Result<Snapshot, Status> {
    let request = GetSnapshotRequest { snapshot_id: id.into(), ..Default::default() };
    let reply = caller.controller(async |mut c| c.get_snapshot(request).await)?;
    Ok(reply.into_inner().snapshot.expect("a snapshot in the reply"))
}

pub fn list_snapshots(
    caller: &Caller,
    request: ListSnapshotsRequest,
) -> Result<ListSnapshotsResponse, Status> {
    caller.controller(async |mut c| c.list_snapshots(request).await).map(tonic::Response::into_inner)
}

/// Ids of what a list holds.
pub fn ids(list: &ListSnapshotsResponse) -> Vec<String> {
    list.entries.iter().map(|entry| entry.snapshot.as_ref().unwrap().snapshot_id.clone()).collect()
}

pub fn from_snapshot(name: &str, id: &str) -> CreateVolumeRequest {
    from(name, Type::Snapshot(SnapshotSource { snapshot_id: id.into() }))
}

pub fn from_volume(name: &str, id: &str) -> CreateVolumeRequest {
    from(name, Type::Volume(VolumeSource { volume_id: id.into() }))
}

fn from(name: &str, source: Type) -> CreateVolumeRequest {
    let source = VolumeContentSource { r#type: Some(source) };
    CreateVolumeRequest { volume_content_source: Some(source), ..create_request(name) }
}

pub fn of_size(mut request: CreateVolumeRequest, required: i64, limit: i64) -> CreateVolumeRequest {
    request.capacity_range = Some(CapacityRange { required_bytes: required, limit_bytes: limit });
    request
}

pub fn with(mut request: CreateVolumeRequest, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    request.parameters = map(parameters);
    request
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

pub fn volume_data(scene: &Scene, volume: &Volume) -> PathBuf {
    data(scene, &volume.volume_id)
}

/// The tree of a volume or snapshot in the pool.
pub fn data(scene: &Scene, id: &str) -> PathBuf {
    let parent = if id.starts_with("vol-") { "pool/volumes" } else { "pool/snapshots" };
    scene.sandbox.path(parent).join(id).join("data")
}

pub fn wait_until_ready(caller: &Caller, id: &str) -> Snapshot {
    let look = || {
        let snapshot = get_snapshot(caller, id)?;
        anyhow::ensure!(snapshot.ready_to_use, "{snapshot:?}");
        Ok(snapshot)
    };
    eventually("the snapshot is ready", TIMEOUT, look).unwrap()
}

/// Fills a directory so that a copy of it takes a while: `files` of 4 KiB.
pub fn fill(dir: &Path, files: usize) {
    for n in 0..files {
        let dir = dir.join(format!("d{}", n % 20));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(format!("f{n}")), content(n)).unwrap();
    }
}

/// Of file number `n`.
pub fn content(n: usize) -> [u8; 4096] {
    [n.to_le_bytes()[0]; 4096]
}

#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &str) {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(words), "{words:?} in {:?}", status.message());
}
