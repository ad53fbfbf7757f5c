//! Pools that cannot reflink: snapshots by a blocking copy, where a class allows it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use proto::csi::ListSnapshotsRequest;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{
    BLOCKING_COPY, assert_refused, data, delete_snapshot, from_snapshot, from_volume, get_snapshot, ids,
    list_snapshots, scene_on, snapshot, snapshot_with, wait_until_ready, with,
};
use tests::eventually;
use tests::loop_device::FileSystem;
use tonic::Code;

/// So much that its copy is seen under way.
const LARGE: usize = 300 << 20;

pub(crate) fn write_large(scene: &Scene, volume: &str) {
    let file = fs::File::create(data(scene, volume).join("large")).unwrap();
    let piece = vec![5; 1 << 20];
    for n in 0..LARGE / piece.len() {
        file.write_all_at(&piece, (n * piece.len()) as u64).unwrap();
    }
}

#[test]
fn ext4_refuses_without_the_class_and_copies_with_it() {
    let scene = scene_on(FileSystem::Ext4);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fs::write(data(&scene, &volume).join("file"), "at the cut").unwrap();
    let words = |class: &str| {
        format!(
            "pool {} is ext4, which cannot reflink: set snapshotMode to blocking-copy in the parameters of the {class}",
            scene.sandbox.path("pool").display()
        )
    };
    let of_snapshots = words("VolumeSnapshotClass, or for new volumes of their StorageClass");
    assert_refused(snapshot(&caller, "s", &volume), Code::FailedPrecondition, &of_snapshots);
    let reflink = snapshot_with(&caller, "s", &volume, &[("snapshotMode", "reflink")]);
    assert_refused(reflink, Code::FailedPrecondition, &of_snapshots);
    let of_clones = words("new volume's StorageClass");
    assert_refused(caller.create(from_volume("pvc-2", &volume)), Code::FailedPrecondition, &of_clones);

    let made = snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]).unwrap();
    wait_until_ready(&caller, &made.snapshot_id);
    fs::write(data(&scene, &volume).join("file"), "after it").unwrap();
    // To restore is to copy, and nobody waits for it: no class has to allow that.
    let restored = caller.create(from_snapshot("pvc-2", &made.snapshot_id)).unwrap();
    assert_eq!(fs::read(data(&scene, &restored.volume_id).join("file")).unwrap(), b"at the cut");
    let clone =
        retried(&scene, "clone", || caller.create(with(from_volume("pvc-3", &volume), &[BLOCKING_COPY])));
    assert_eq!(fs::read(data(&scene, &clone.volume_id).join("file")).unwrap(), b"after it");
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    for id in [volume, restored.volume_id, clone.volume_id] {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn the_storage_class_of_the_volume_may_allow_the_copy() {
    let scene = scene_on(FileSystem::Ext4);
    let caller = scene.caller();
    let volume = caller.create(with(create_request("pvc-1"), &[BLOCKING_COPY])).unwrap().volume_id;
    let made = snapshot(&caller, "s", &volume).unwrap();
    wait_until_ready(&caller, &made.snapshot_id);
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    // The copy has the volume's lock until it has told that it is ready.
    retried(&scene, "delete", || caller.delete(&volume));
    scene.assert_nothing_left();
}

/// What the view shows of snapshots, for which it asks the driver that makes the copy.
fn shown(scene: &Scene) -> serde_json::Value {
    let mut command = scene.sandbox.command(std::path::Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args(["snapshots", "-o", "json", "--state-dir"]).arg(scene.sandbox.path("state"));
    let done = command.arg("--run-dir").arg(scene.sandbox.path("run")).output().unwrap();
    serde_json::from_slice(&done.stdout).unwrap()
}

fn assert_progress(rows: &serde_json::Value, snapshot: &str) {
    let row = &rows[0];
    assert_eq!((&row["id"], &row["state"]), (&snapshot.into(), &"copying".into()), "{rows}");
    let copied = row["copied_bytes"].as_u64().expect("how far it is");
    let in_all = row["copy_bytes"].as_u64().expect("of how much");
    assert!(copied <= in_all && in_all >= LARGE as u64, "{row}");
}

#[test]
fn a_copy_reports_progress_and_becomes_ready() {
    let scene = Scene::start(Flags::process());
    // The copy may be over before all was asked: then another one.
    let met = (0..20).any(|_| is_met_under_way(&scene));
    assert!(met, "no copy was under way long enough");
    scene.assert_nothing_left();
}

/// Asks all that there is to ask of a copy under way; whether it was.
fn is_met_under_way(scene: &Scene) -> bool {
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    write_large(scene, &volume);
    let made = snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]).unwrap();
    assert!(!made.ready_to_use && made.creation_time.is_some(), "{made:?}");
    let again = snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]).unwrap();
    assert_eq!(again.creation_time, made.creation_time, "repeated");
    let rows = shown(scene);
    // What would change the volume under the copy waits, and is told how far it is.
    let stage = caller.stage(&volume);
    let delete = caller.delete(&volume);
    let restore = caller.create(from_snapshot("pvc-2", &made.snapshot_id));
    let met = !get_snapshot(&caller, &made.snapshot_id).unwrap().ready_to_use;
    if met {
        assert_progress(&rows, &made.snapshot_id);
        assert_refused(stage, Code::Aborted, &format!("volume {volume} is being copied: "));
        assert_refused(delete, Code::Aborted, "is being copied");
        assert_refused(restore, Code::Aborted, "is being copied");
    } else if let Ok(restored) = restore {
        caller.delete(&restored.volume_id).unwrap();
    }

    let ready = wait_until_ready(&caller, &made.snapshot_id);
    assert_eq!(ready.creation_time, made.creation_time);
    let copy = data(scene, &made.snapshot_id).join("large");
    assert!(fs::read(copy).unwrap().iter().all(|byte| *byte == 5));
    retried(scene, "unstage", || caller.unstage(&volume));
    retried(scene, "delete", || caller.delete(&volume));
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    met
}

/// A pod that has ended must not wait for a copy of its volume that takes hours.
#[test]
fn pods_come_and_go_while_their_volume_is_copied() {
    let Flags(mut flags) = Flags::process();
    flags.extend(["--overcommit", "4"].map(str::to_owned));
    let scene = Scene::start(Flags(flags));
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    write_large(&scene, &volume);
    caller.stage(&volume).unwrap();
    caller.publish(&volume, "one").unwrap();
    // The copy may be over before all was asked: then another one.
    let met = (0..20).any(|n| {
        let name = format!("s-{n}");
        let made = retried(&scene, "snapshot", || snapshot_with(&caller, &name, &volume, &[BLOCKING_COPY]));
        caller.publish(&volume, "two").unwrap();
        caller.unpublish(&volume, "one").unwrap();
        caller.publish(&volume, "one").unwrap();
        caller.unpublish(&volume, "two").unwrap();
        caller.stage(&volume).expect("it is staged");
        let stats = caller.stats(&volume, &caller.target_path("one")).unwrap();
        assert!(!stats.volume_condition.unwrap().abnormal);
        caller.unpublish(&volume, "one").unwrap();
        let refused = [
            caller.unstage(&volume),
            snapshot_with(&caller, "other", &volume, &[BLOCKING_COPY]).map(drop),
            caller.create(with(from_volume("pvc-2", &volume), &[BLOCKING_COPY])).map(drop),
        ];
        let met = !get_snapshot(&caller, &made.snapshot_id).unwrap().ready_to_use;
        if met {
            for refused in refused {
                assert_refused(refused, Code::Aborted, &format!("volume {volume} is being copied"));
            }
        }
        wait_until_ready(&caller, &made.snapshot_id);
        let copy = data(&scene, &made.snapshot_id).join("large");
        assert_eq!(fs::metadata(copy).unwrap().len(), LARGE as u64);
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        if !met {
            // What came too late to be refused.
            let other = list_snapshots(&caller, ListSnapshotsRequest::default()).unwrap();
            for id in ids(&other) {
                retried(&scene, "delete", || delete_snapshot(&caller, &id));
            }
            let clone = retried(&scene, "clone", || {
                caller.create(with(from_volume("pvc-2", &volume), &[BLOCKING_COPY]))
            });
            caller.delete(&clone.volume_id).unwrap();
            retried(&scene, "stage", || caller.stage(&volume));
            caller.publish(&volume, "one").unwrap();
        }
        met
    });
    assert!(met, "no copy was under way long enough");
    retried(&scene, "unstage", || caller.unstage(&volume));
    retried(&scene, "delete", || caller.delete(&volume));
    scene.assert_nothing_left();
}

#[test]
fn a_snapshot_is_deleted_while_it_is_copied() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    write_large(&scene, &volume);
    let made = snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]).unwrap();
    assert!(!made.ready_to_use);
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    assert_refused(get_snapshot(&caller, &made.snapshot_id), Code::NotFound, &made.snapshot_id);
    // The lock of the source is free with it.
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// As when its processors are taken away for longer than the lease of the pause.
#[test]
fn a_copy_whose_driver_stood_still_for_longer_than_the_pause_is_no_snapshot() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    write_large(&scene, &volume);
    caller.stage(&volume).unwrap();
    caller.publish(&volume, "one").unwrap();
    let file = caller.target_path("one").join("file");
    fs::write(&file, "before").unwrap();
    let driver = scene.driver.as_ref().unwrap().pid();
    let signal = |signal| kill(driver, signal).unwrap();
    let mut attempts = 0..20;
    let made = loop {
        let made = retried(&scene, "snapshot", || snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]));
        signal(Signal::SIGSTOP);
        tests::wait_until_stopped(driver.as_raw(), TIMEOUT).unwrap();
        let begun = Instant::now();
        fs::write(&file, "after the lease").unwrap();
        let waited = begun.elapsed();
        signal(Signal::SIGCONT);
        // Until the lease ended, at the earliest from the last renewal on.
        if waited > Duration::from_secs(9) {
            break made;
        }
        // The copy was over before the stop.
        retried(&scene, "delete", || delete_snapshot(&caller, &made.snapshot_id));
        assert!(attempts.next().is_some(), "no copy was under way long enough");
    };
    eventually("the copy has failed", TIMEOUT, || match get_snapshot(&caller, &made.snapshot_id) {
        Err(status) if status.code() == Code::Internal => Ok(()),
        other => anyhow::bail!("{other:?}"),
    })
    .unwrap();
    retried(&scene, "delete", || delete_snapshot(&caller, &made.snapshot_id));
    caller.take_down(&volume, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_driver_killed_during_a_copy_leaves_a_failed_snapshot_and_running_writers() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    write_large(&scene, &volume);
    caller.stage(&volume).unwrap();
    caller.publish(&volume, "one").unwrap();
    let file = caller.target_path("one").join("file");
    fs::write(&file, "before").unwrap();
    let mut attempts = 0..20;
    let made = loop {
        let made = retried(&scene, "snapshot", || snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]));
        assert!(!made.ready_to_use);
        scene.kill_driver();
        // The connection is gone, and with it the pause: no lease has to end first.
        let begun = std::time::Instant::now();
        fs::write(&file, "written on").unwrap();
        assert!(begun.elapsed().as_secs() < 10, "{:?}", begun.elapsed());
        scene.start_driver();
        if !get_snapshot(&caller, &made.snapshot_id).is_ok_and(|found| found.ready_to_use) {
            break made;
        }
        // The copy was over before the kill.
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        assert!(attempts.next().is_some(), "no copy was under way long enough");
    };

    let words = "the driver ended during the copy";
    let repeated = snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]);
    assert_refused(repeated, Code::Internal, words);
    assert_refused(get_snapshot(&caller, &made.snapshot_id), Code::Internal, words);
    let listed = list_snapshots(&caller, ListSnapshotsRequest::default()).unwrap();
    assert!(!listed.entries[0].snapshot.as_ref().unwrap().ready_to_use);
    assert_refused(caller.create(from_snapshot("pvc-2", &made.snapshot_id)), Code::Internal, words);
    assert_eq!(fs::read_dir(scene.sandbox.path("pool/incoming")).unwrap().count(), 0);
    delete_snapshot(&caller, &made.snapshot_id).unwrap();

    let made = retried(&scene, "snapshot", || snapshot_with(&caller, "s", &volume, &[BLOCKING_COPY]));
    wait_until_ready(&caller, &made.snapshot_id);
    assert_eq!(fs::read(data(&scene, &made.snapshot_id).join("file")).unwrap(), b"written on");
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    retried(&scene, "unpublish", || caller.unpublish(&volume, "one"));
    retried(&scene, "unstage", || caller.unstage(&volume));
    retried(&scene, "delete", || caller.delete(&volume));
    scene.assert_nothing_left();
}
