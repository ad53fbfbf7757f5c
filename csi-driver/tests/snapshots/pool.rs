//! A pool that is a file system of its own, and is not always mounted.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MsFlags, mount};
use proto::csi::{GetCapacityRequest, ListVolumesRequest, ProbeRequest};
use serde_json::{Value, json};
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT};
use tests::csi::snapshots::{
    assert_refused, data, delete_snapshot, from_snapshot, from_volume, get_snapshot, scene_on, snapshot,
};
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tests::{Sandbox, eventually};
use tonic::Code;

const AWAY: &str = "is away: no .hawser-pool identifies it as pool ";

/// Everything that needs the pool is UNAVAILABLE, and the rest goes on.
fn assert_away(scene: &Scene, caller: &Caller, volume: &str) {
    let code = Code::Unavailable;
    assert_refused(caller.create_named("pvc-new"), code, AWAY);
    assert_refused(caller.create(from_volume("pvc-clone", volume)), code, AWAY);
    assert_refused(snapshot(caller, "s-new", volume), code, AWAY);
    assert_refused(caller.stage(volume), code, AWAY);
    let capacity = caller.controller(async |mut c| c.get_capacity(GetCapacityRequest::default()).await);
    assert_refused(capacity, code, AWAY);
    let probe = caller.identity(async |mut i| i.probe(ProbeRequest {}).await);
    assert_refused(probe, Code::FailedPrecondition, AWAY);

    caller.unstage(volume).unwrap();
    let listed = caller.controller(async |mut c| c.list_volumes(ListVolumesRequest::default()).await);
    assert_eq!(listed.unwrap().into_inner().entries.len(), 1);
    assert_eq!(fs::read_dir(scene.sandbox.path("pool")).unwrap().count(), 0, "nothing is made beneath");
}

#[test]
fn a_pool_that_went_away_creates_nothing_beneath_and_is_used_again() {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Xfs, IMAGE_BYTES).unwrap();
    let mut scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fs::write(data(&scene, &volume).join("file"), "kept").unwrap();
    let made = snapshot(&caller, "s", &volume).unwrap().snapshot_id;

    mount.unmount().unwrap();
    assert_away(&scene, &caller, &volume);
    scene.restart_driver();
    assert_away(&scene, &caller, &volume);
    assert_refused(caller.delete(&volume), Code::Unavailable, AWAY);
    assert_refused(delete_snapshot(&caller, &made), Code::Unavailable, AWAY);

    mount.mount(&scene.sandbox, FileSystem::Xfs).unwrap();
    // What was refused is taken up where it was left.
    assert_eq!(fs::read(data(&scene, &volume).join("file")).unwrap(), b"kept");
    let created = caller.create_named("pvc-new").unwrap();
    for id in [&volume, &created] {
        caller.delete(id).unwrap();
    }
    delete_snapshot(&caller, &made).unwrap();
    scene.assert_nothing_left();
}

fn remount(pool: &Path, flags: MsFlags) {
    mount(None::<&str>, pool, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).unwrap();
}

#[test]
fn a_creation_that_failed_on_a_read_only_pool_is_made_when_it_is_writable() {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Xfs, IMAGE_BYTES).unwrap();
    let scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    remount(mount.dir(), MsFlags::MS_RDONLY);
    for _repeated in 0..2 {
        assert_refused(caller.create_named("pvc-1"), Code::Aborted, "Read-only file system");
    }
    remount(mount.dir(), MsFlags::empty());
    let volume = caller.create_named("pvc-1").unwrap();
    caller.stage(&volume).unwrap();
    caller.unstage(&volume).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// A pool becomes read-only by an error of its disk; its volumes have users all the same.
#[test]
fn a_driver_starts_on_a_read_only_pool_with_leftovers() {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Xfs, IMAGE_BYTES).unwrap();
    let mut scene = Scene::start_in(sandbox, Flags::process());
    let volume = scene.caller().create_named("pvc-1").unwrap();
    scene.kill_driver();
    let leftovers = ["trash", "incoming"]
        .map(|part| scene.sandbox.path("pool").join(part).join("vol-0123456789abcdef0123456789abcdef"));
    leftovers.iter().for_each(|leftover| fs::create_dir(leftover).unwrap());
    remount(mount.dir(), MsFlags::MS_RDONLY);
    scene.start_driver();
    assert!(leftovers.iter().all(|leftover| leftover.exists()));
    remount(mount.dir(), MsFlags::empty());
    scene.restart_driver();
    eventually("the leftovers are removed", TIMEOUT, || {
        anyhow::ensure!(leftovers.iter().all(|leftover| !leftover.exists()), "{leftovers:?}");
        Ok(())
    })
    .unwrap();
    scene.caller().delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// fsfreeze(8): writing waits, reading does not.
struct Frozen(PathBuf);

impl Frozen {
    fn new(pool: &Path) -> Self {
        assert!(Command::new("fsfreeze").arg("-f").arg(pool).status().unwrap().success());
        Self(pool.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        assert!(Command::new("fsfreeze").arg("-u").arg(&self.0).status().unwrap().success());
    }
}

#[test]
fn probes_of_a_frozen_pool_cost_one_thread_and_fail_at_once() {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Ext4, IMAGE_BYTES).unwrap();
    let scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let probe = || caller.identity(async |mut i| i.probe(ProbeRequest {}).await);
    let tasks = format!("/proc/{}/task", scene.driver.as_ref().unwrap().pid());
    let threads = || fs::read_dir(&tasks).unwrap().count();
    probe().unwrap();
    let frozen = Frozen::new(mount.dir());
    assert_refused(probe(), Code::DeadlineExceeded, "probe");
    let before = threads();
    for _ in 0..20 {
        assert_refused(probe(), Code::DeadlineExceeded, "probe");
    }
    assert!(threads() <= before + 2, "{} threads, {before} before", threads());
    drop(frozen);
    eventually("it is ready again", TIMEOUT, || Ok(probe().map(drop)?)).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_new_volume_never_begins_with_forgotten_data() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fs::write(data(&scene, &volume).join("file"), "old").unwrap();
    scene.kill_driver();
    fs::remove_file(scene.journal_path(&volume)).unwrap();
    scene.start_driver();
    let words = "but the journal has no entry for it";
    assert_refused(caller.create_named("pvc-1"), Code::FailedPrecondition, words);
    let stored = data(&scene, &volume);
    assert_eq!(fs::read(stored.join("file")).unwrap(), b"old", "nothing is lost");
    fs::rename(stored.parent().unwrap(), scene.sandbox.path("aside")).unwrap();
    assert_eq!(caller.create_named("pvc-1").unwrap(), volume);
    assert_eq!(fs::read_dir(data(&scene, &volume)).unwrap().count(), 0);
    caller.delete(&volume).unwrap();
    fs::remove_dir_all(scene.sandbox.path("aside")).unwrap();
    scene.assert_nothing_left();
}

/// Also a snapshot that an earlier version recorded as failed for that.
#[test]
fn a_snapshot_whose_data_is_put_back_is_ready_again_and_never_deleted() {
    const LOST: &str = "its data is not in the pool: a deletion began, or it was removed there";
    let mut scene = scene_on(FileSystem::Xfs);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fs::write(data(&scene, &volume).join("file"), "at the cut").unwrap();
    let made = ["new", "old"].map(|name| snapshot(&caller, name, &volume).unwrap().snapshot_id);
    let places = made.each_ref().map(|id| {
        let part = |name: &str| scene.sandbox.path("pool").join(name).join(id);
        (part("snapshots"), part("aside"))
    });
    scene.kill_driver();
    fs::create_dir(scene.sandbox.path("pool/aside")).unwrap();
    for (place, aside) in &places {
        fs::rename(place, aside).unwrap();
    }
    for (has_earlier_record, has_directory) in [(false, false), (true, false), (false, true)] {
        if has_directory {
            // A copy of the directory has begun.
            places.iter().for_each(|(place, _)| fs::create_dir(place).unwrap());
        }
        if has_earlier_record {
            let file = scene.sandbox.path("state/snapshots").join(format!("{}.json", made[1]));
            let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
            record["phase"] = json!({ "failed": { "reason": LOST } });
            fs::write(&file, record.to_string()).unwrap();
        }
        scene.start_driver();
        for id in &made {
            assert_refused(get_snapshot(&caller, id), Code::Internal, LOST);
            assert_refused(caller.create(from_snapshot("pvc-2", id)), Code::Internal, LOST);
        }
        scene.kill_driver();
    }
    for (place, aside) in &places {
        fs::remove_dir(place).unwrap();
        fs::rename(aside, place).unwrap();
    }
    scene.start_driver();
    scene.restart_driver();
    for id in &made {
        assert!(get_snapshot(&caller, id).unwrap().ready_to_use);
        let restored = caller.create(from_snapshot("pvc-2", id)).unwrap().volume_id;
        assert_eq!(fs::read(data(&scene, &restored).join("file")).unwrap(), b"at the cut");
        caller.delete(&restored).unwrap();
        delete_snapshot(&caller, id).unwrap();
    }
    fs::remove_dir(scene.sandbox.path("pool/aside")).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_pool_without_its_trash_deletes_all_the_same() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let stored = data(&scene, &volume);
    for part in ["trash", "incoming"] {
        fs::remove_dir(scene.sandbox.path("pool").join(part)).unwrap();
    }
    let other = caller.create_named("pvc-2").unwrap();
    caller.delete(&volume).unwrap();
    assert!(!stored.exists());
    caller.delete(&other).unwrap();
    scene.assert_nothing_left();
}
