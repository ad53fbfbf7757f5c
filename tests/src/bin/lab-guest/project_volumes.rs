//! Volumes that a project quota limits, with the driver, its keeper and its daemons.

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroU32;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use linux::project_quota::{Limits, find, project_of};
use nix::errno::Errno;
use proto::csi::{CapacityRange, ControllerExpandVolumeRequest};
use tests::csi::data_path;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{data, delete_snapshot, from_snapshot, from_volume, of_size, snapshot, with};
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tests::{Sandbox, eventually};
use tonic::{Code, Status};

const MIB: i64 = 1 << 20;
const POD: &str = "one";

/// The data path that the driver chooses for a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Passthrough,
    Daemon,
}

pub(super) fn passing_on_ext4() -> Result<()> {
    limited(FileSystem::Ext4, Way::Passthrough, Errno::EDQUOT)
}

pub(super) fn passing_on_xfs() -> Result<()> {
    limited(FileSystem::Xfs, Way::Passthrough, Errno::ENOSPC)
}

pub(super) fn by_daemon_on_ext4() -> Result<()> {
    limited(FileSystem::Ext4, Way::Daemon, Errno::ENOSPC)
}

pub(super) fn by_daemon_on_xfs() -> Result<()> {
    limited(FileSystem::Xfs, Way::Daemon, Errno::ENOSPC)
}

/// Created here, and created where the kernel had it.
pub(super) fn refused_without_passthrough() -> Result<()> {
    let sandbox = Sandbox::new();
    LoopMount::with_project_quotas(&sandbox, "pool", FileSystem::Ext4, IMAGE_BYTES)?;
    let mut scene = Scene::start_in(sandbox, Flags::process_with_keeper());
    let refusal = |refused: Result<(), Status>, words: &str| {
        let status = refused.err().context("it was not refused")?;
        ensure!(status.code() == Code::FailedPrecondition && status.message().contains(words), "{status:?}");
        Ok(())
    };
    let wanted = with(create_request("pvc-1"), &[("dataPath", "passthrough")]);
    refusal(scene.caller().create(wanted).map(drop), "needs a kernel with CONFIG_FUSE_PASSTHROUGH")?;

    let volume = scene.caller().create(create_request("pvc-1"))?.volume_id;
    scene.kill_driver();
    let entry = scene.sandbox.path("state/volumes").join(format!("{volume}.json"));
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&entry)?)?;
    record["policies"]["data_path"] = "passthrough".into();
    fs::write(&entry, serde_json::to_vec(&record)?)?;
    scene.start_driver();
    refusal(scene.caller().stage(&volume).map(drop), "the kernel has no FUSE_PASSTHROUGH")?;
    scene.caller().unstage(&volume)?;
    scene.caller().delete(&volume)?;
    scene.assert_nothing_left();
    Ok(())
}

/// `full`: what a write to a full volume fails with.
fn limited(kind: FileSystem, way: Way, full: Errno) -> Result<()> {
    let sandbox = Sandbox::new();
    let mount = LoopMount::with_project_quotas(&sandbox, "pool", kind, IMAGE_BYTES)?;
    let scene = Scene::start_in(sandbox, Flags::process_with_keeper());
    let caller = scene.caller();
    let [volume, small] = [("pvc-1", 32 * MIB), ("pvc-2", MIB)].map(|(name, bytes)| {
        caller.create(of_size(create_request(name), bytes, 0)).map(|volume| volume.volume_id)
    });
    let (volume, small) = (volume?, small?);
    let projects = [project(&scene, &volume)?, project(&scene, &small)?];
    ensure!(projects[0] != projects[1], "{projects:?}: two volumes are one project");
    let mounted = up(&caller, &volume)?;
    takes_way(&scene, &volume, &mounted, way)?;
    ensure!(total(&mounted)? == 32 << 20, "{} bytes in all", total(&mounted)?);
    let written = fill(&mounted.join("data"), full)?;
    ensure!(written > 24 << 20 && written <= 32 << 20, "refused after {written} bytes");
    eventually("statfs shows the use", TIMEOUT, || {
        let used = used(&mounted)?;
        ensure!(used >= written && used <= 32 << 20, "{used} bytes are used, {written} were written");
        Ok(())
    })?;

    expand(&caller, &volume, 64 * MIB)?;
    ensure!(total(&mounted)? == 64 << 20, "{} bytes in all", total(&mounted)?);
    fs::write(mounted.join("more"), vec![7; 16 << 20]).context("a volume that has grown")?;
    let of_project = find(File::open(mount.dir())?, projects[0])?.context("it is used")?;
    ensure!(of_project.limits.bytes == 64 << 20, "{of_project:?}");
    let more = fill(&mounted.join("rest"), full)?;
    ensure!(written + (16 << 20) + more <= 64 << 20, "{more} bytes more");
    if way == Way::Passthrough {
        scene.kill_daemon();
        ensure!(total(&mounted)? == 64 << 20, "another daemon: {} bytes in all", total(&mounted)?);
        fill(&mounted.join("rest"), full)?;
    }
    fs::remove_file(mounted.join("rest"))?;
    takes_way(&scene, &volume, &mounted, way)?;
    down(&caller, &volume)?;

    // One inode for each 4 KiB, and 1024 at least; the root is one.
    let mounted = up(&caller, &small)?;
    let mut made = 0;
    let refusal = loop {
        match File::create(mounted.join(format!("file-{made}"))) {
            Ok(_) => made += 1,
            Err(e) => break e,
        }
        ensure!(made <= 1100, "{made} files were made");
    };
    ensure!(refusal.raw_os_error() == Some(Errno::ENOSPC as i32), "{refusal}");
    ensure!(made > 900 && made < 1024, "{made} files were made");
    down(&caller, &small)?;

    if kind == FileSystem::Xfs {
        restore(&scene, &caller, &volume, full)?;
        restore_full(&scene, &caller, &small, MIB)?;
        let mounted = up(&caller, &volume)?;
        fill(&mounted.join("rest"), full)?;
        down(&caller, &volume)?;
        restore_full(&scene, &caller, &volume, 64 * MIB)?;
    }
    for id in [&volume, &small] {
        caller.delete(id)?;
    }
    for project in projects {
        // xfs frees the inodes of removed files some time later.
        eventually("nothing is left of the project", TIMEOUT, || {
            let left = find(File::open(mount.dir())?, project)?;
            ensure!(left.is_none(), "project {project} is left: {left:?}");
            Ok(())
        })?;
    }
    scene.assert_nothing_left();
    Ok(())
}

/// As the driver shows it, and as the volume's daemon sees it.
fn takes_way(scene: &Scene, volume: &str, mounted: &Path, way: Way) -> Result<()> {
    let (data_path, capacity) = scene.policies(volume)?;
    let wanted = if way == Way::Passthrough { "passthrough" } else { "daemon" };
    ensure!(data_path == wanted && capacity == "kernel", "{data_path}, limited by {capacity}");
    let metrics = scene.daemon_metrics(volume);
    match way {
        Way::Passthrough => data_path::ensure_it_passes(&metrics, mounted),
        Way::Daemon => data_path::ensure_daemon_answers(&metrics, mounted),
    }
}

/// A restored volume is a project of its own, and what it shares counts in full.
fn restore(scene: &Scene, caller: &Caller, volume: &str, full: Errno) -> Result<()> {
    let made = retried(scene, "snapshot", || snapshot(caller, "snap-1", volume)).snapshot_id;
    ensure!(project_of(File::open(data(scene, &made))?)?.is_none(), "a snapshot has a project");
    let restored = caller.create(of_size(from_snapshot("pvc-3", &made), 80 * MIB, 0))?.volume_id;
    ensure!(project(scene, &restored)? != project(scene, volume)?, "two volumes are one project");
    let mounted = up(caller, &restored)?;
    let before = used(&mounted)?;
    ensure!(total(&mounted)? == 80 << 20 && before > 40 << 20, "{before} of {}", total(&mounted)?);
    let more = fill(&mounted.join("beyond"), full)?;
    ensure!(before + more <= 80 << 20, "{before} and {more} bytes");
    down(caller, &restored)?;
    caller.delete(&restored)?;
    delete_snapshot(caller, &made)?;
    Ok(())
}

/// A volume without a free inode or byte is restored and cloned at its own size, and the copies have its
/// limits.
fn restore_full(scene: &Scene, caller: &Caller, volume: &str, bytes: i64) -> Result<()> {
    let limits = |id: &str| -> Result<Limits> {
        let root = File::open(data(scene, id))?;
        Ok(find(&root, project(scene, id)?)?.context("it is used")?.limits)
    };
    let made = retried(scene, "snapshot", || snapshot(caller, "snap-1", volume)).snapshot_id;
    for source in [from_snapshot("pvc-4", &made), from_volume("pvc-4", volume)] {
        let copy = caller.create(of_size(source, bytes, 0))?.volume_id;
        ensure!(limits(&copy)? == limits(volume)?, "{:?}", limits(&copy)?);
        let [names, wanted] =
            [copy.as_str(), volume].map(|id| fs::read_dir(data(scene, id)).map(Iterator::count));
        let (names, wanted) = (names?, wanted?);
        ensure!(names == wanted, "{names} of {wanted} files");
        caller.delete(&copy)?;
    }
    delete_snapshot(caller, &made)?;
    Ok(())
}

fn project(scene: &Scene, volume: &str) -> Result<NonZeroU32> {
    project_of(File::open(data(scene, volume))?)?.context("a volume without a project")
}

fn up(caller: &Caller, volume: &str) -> Result<std::path::PathBuf> {
    caller.stage(volume)?;
    caller.publish(volume, POD)?;
    Ok(caller.target_path(POD))
}

fn down(caller: &Caller, volume: &str) -> Result<()> {
    caller.unpublish(volume, POD)?;
    caller.unstage(volume)?;
    Ok(())
}

fn expand(caller: &Caller, volume_id: &str, required_bytes: i64) -> Result<()> {
    let request = ControllerExpandVolumeRequest {
        volume_id: volume_id.into(),
        capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_expand_volume(request).await)?;
    Ok(())
}

fn total(path: &Path) -> Result<u64> {
    let fs = nix::sys::statvfs::statvfs(path)?;
    Ok(fs.blocks() * fs.fragment_size())
}

fn used(path: &Path) -> Result<u64> {
    let fs = nix::sys::statvfs::statvfs(path)?;
    Ok((fs.blocks() - fs.blocks_free()) * fs.fragment_size())
}

/// Writes a new file until `full`: the bytes that fit.
fn fill(path: &Path, full: Errno) -> Result<u64> {
    let mut file = File::create(path)?;
    let piece = [7; 64 << 10];
    let mut written = 0;
    loop {
        match file.write(&piece) {
            Ok(count) => written += count as u64,
            Err(e) if e.raw_os_error() == Some(full as i32) => return Ok(written),
            Err(e) => return Err(e).with_context(|| format!("write after {written} bytes")),
        }
        ensure!(written <= 256 << 20, "{written} bytes were written, and the quota was not enforced");
    }
}
