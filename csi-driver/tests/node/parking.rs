//! Daemons that wait for their volume's next user: who gets them, what ends them,
//! and that there is never a second one.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateSnapshotRequest, CreateVolumeRequest, NodeStageVolumeRequest,
};
use serde_json::Value;
use tests::csi::scene::{
    Caller, Flags, GI, NODE, Scene, TIMEOUT, capability, create_request, mounted, retried, text,
};
use tests::{as_soon_as, eventually};
use tonic::Status;

use crate::access::{flags, stage};

/// Longer than any test.
const LONG: &str = "3600";

fn create(caller: &Caller, name: &str, delay: &str) -> String {
    let parameters = [("mountPodDeleteDelaySeconds".to_owned(), delay.to_owned())].into();
    caller.create(CreateVolumeRequest { parameters, ..create_request(name) }).unwrap().volume_id
}

/// What the view of volumes says of this one, beside the driver or without it.
fn shown(scene: &Scene, volume_id: &str) -> Value {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args(["volumes", "-o", "json", "--state-dir"]).arg(scene.sandbox.path("state"));
    let done = command.output().unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"));
    rows.into_iter().find(|row| row["id"] == volume_id).unwrap()
}

fn wait_for_state(scene: &Scene, volume_id: &str, state: &str) {
    eventually(state, TIMEOUT, || {
        let row = shown(scene, volume_id);
        anyhow::ensure!(row["state"] == state, "{row}\n{}", scene.log());
        Ok(())
    })
    .unwrap();
}

/// By the driver itself, which is ABORTED for callers until it is done with it.
fn wait_until_cleared_away(scene: &Scene, volume_id: &str) {
    wait_for_state(scene, volume_id, "unstaged");
    eventually("its daemon and its directory are gone", TIMEOUT, || {
        let (daemons, dial_dir) = (scene.daemons(), scene.dial_dir(volume_id));
        anyhow::ensure!(daemons.is_empty() && !dial_dir.exists(), "{daemons:?}, {}", dial_dir.display());
        Ok(())
    })
    .unwrap();
}

/// Used by one pod, which has left; parked with this daemon.
fn parked(scene: &Scene, volume_id: &str) -> i32 {
    let caller = scene.caller();
    caller.stage(volume_id).unwrap();
    caller.publish(volume_id, "one").unwrap();
    fs::write(caller.target_path("one").join("file"), "kept").unwrap();
    caller.unpublish(volume_id, "one").unwrap();
    caller.unstage(volume_id).unwrap();
    let row = shown(scene, volume_id);
    assert_eq!(row["state"], "parked", "{row}\n{}", scene.log());
    let [daemon] = scene.daemons()[..] else { panic!("one daemon: {:?}", scene.daemons()) };
    assert_eq!(row["daemon_pid"], daemon);
    daemon
}

/// Its file is there, and what is written now.
#[track_caller]
fn assert_serves(scene: &Scene, volume_id: &str) {
    let caller = scene.caller();
    caller.publish(volume_id, "one").unwrap();
    let target = caller.target_path("one");
    assert_eq!(fs::read(target.join("file")).unwrap(), b"kept");
    fs::write(target.join("more"), "x").unwrap();
    fs::remove_file(target.join("more")).unwrap();
    caller.unpublish(volume_id, "one").unwrap();
}

/// What the doctor finds, which needs the driver's flags: its exit code, and what each is.
fn found(scene: &Scene, options: &[&str]) -> (i32, Vec<String>) {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    let path = |name: &str| scene.sandbox.path(name);
    command.arg("doctor").args(options).args(["-o", "json", "--node-id", NODE, "--log", "error"]);
    command.arg("--kubelet-dir").arg(path("k")).arg("--pool").arg(path("pool"));
    command.arg("--state-dir").arg(path("state")).arg("--run-dir").arg(path("run"));
    let done = command.args(Flags::process().0).output().unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"));
    let what = |row: &Value| row["what"].as_str().unwrap().to_owned();
    (done.status.code().unwrap(), rows.iter().map(what).collect())
}

#[test]
fn the_next_stage_gets_the_daemon_that_is_parked() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    let daemon = parked(&scene, &id);
    let staging = caller.staging_path(&id);
    assert!(!staging.exists(), "kubelet could remove it");
    let seen = linux::mountinfo::read().unwrap();
    assert!(seen.iter().all(|mount| mount.source != id.as_str()), "mounted nowhere: {seen:?}");
    assert_eq!(found(&scene, &[]), (0, vec![]), "as it should be");
    caller.unstage(&id).expect("repeated");

    caller.stage(&id).unwrap();
    caller.stage(&id).expect("repeated");
    assert_eq!(scene.daemons(), [daemon]);
    assert_eq!(shown(&scene, &id)["state"], "staged");
    assert_serves(&scene, &id);
    // What was taken is watched and taken down like any other, and parked again.
    caller.unstage(&id).unwrap();
    wait_for_state(&scene, &id, "parked");
    assert!(shown(&scene, &id)["parked_until"].as_i64().is_some());
    caller.stage(&id).unwrap();
    scene.kill_daemon();
    eventually("the death is logged", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("the volume's daemon ended: its pods"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    retried(&scene, "unstage", || caller.unstage(&id));
    assert_eq!(shown(&scene, &id)["state"], "unstaged", "a dead daemon is not parked");
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_parked_daemon_ends_when_its_time_is_over() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", "1");
    caller.stage(&id).unwrap();
    caller.unstage(&id).unwrap();
    wait_until_cleared_away(&scene, &id);
    retried(&scene, "stage", || caller.stage(&id));
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_deletion_ends_a_parked_daemon() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    parked(&scene, &id);
    caller.delete(&id).unwrap();
    assert_eq!(scene.daemons(), [] as [i32; 0]);
    scene.assert_nothing_left();
}

#[test]
fn a_stage_with_other_settings_gets_another_daemon_and_there_is_one() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    for options in [&["hawser.log-level=debug"][..], &["ro"], &["noexec"]] {
        let before = parked(&scene, &id);
        stage(&caller, &id, flags(options)).unwrap();
        assert!(
            scene.daemons().len() == 1 && scene.daemons() != [before],
            "{options:?}: {:?}",
            scene.daemons()
        );
        // It is the mount options' word that counts for the daemon that they started.
        caller.unstage(&id).unwrap();
        wait_for_state(&scene, &id, "parked");
    }
    let before = scene.daemons();
    stage(&caller, &id, flags(&["noexec", "hawser.delete-delay=0"])).unwrap();
    assert_eq!(scene.daemons(), before, "how long it is to wait is no daemon's setting");
    caller.unstage(&id).unwrap();
    assert_eq!(shown(&scene, &id)["state"], "unstaged");
    assert_eq!(scene.daemons(), [] as [i32; 0]);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_driver_that_is_killed_takes_what_is_parked_with_it() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    parked(&scene, &id);
    scene.kill_driver();
    eventually("the daemon ends by itself", TIMEOUT, || {
        anyhow::ensure!(scene.daemons().is_empty(), "{:?}", scene.daemons());
        Ok(())
    })
    .unwrap();
    assert_eq!(shown(&scene, &id)["state"], "parked", "nobody has told the journal");
    assert_eq!(found(&scene, &[]), (1, vec!["parked, and no driver holds it".to_owned()]));
    assert_eq!(found(&scene, &["--repair"]), (0, vec![]));
    assert_eq!(shown(&scene, &id)["state"], "unstaged");
    scene.start_driver();
    assert_eq!(shown(&scene, &id)["state"], "unstaged");
    assert!(!scene.dial_dir(&id).exists());
    caller.stage(&id).unwrap();
    assert_serves(&scene, &id);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn sigterm_ends_all_that_is_parked_and_nothing_that_is_staged() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let used = caller.bring_up("pvc-used", &["two"]).unwrap();
    let serving = scene.daemons();
    let ids = ["a", "b", "c", "d"].map(|name| create(&caller, name, LONG));
    for id in &ids {
        caller.stage(id).unwrap();
        caller.unstage(id).unwrap();
    }
    assert_eq!(scene.daemons().len(), 5);
    assert!(scene.driver.take().unwrap().stop(TIMEOUT).unwrap().success());
    assert_eq!(scene.daemons(), serving);
    for id in &ids {
        assert_eq!(shown(&scene, id)["state"], "unstaged");
        assert!(!scene.dial_dir(id).exists());
    }
    fs::write(caller.target_path("two").join("file"), "x").unwrap();
    scene.start_driver();
    for id in &ids {
        caller.delete(id).unwrap();
    }
    caller.take_down(&used, &["two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_daemon_that_dies_while_it_is_parked_is_cleared_away() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    parked(&scene, &id);
    scene.kill_daemon();
    wait_until_cleared_away(&scene, &id);
    retried(&scene, "stage", || caller.stage(&id));
    assert_serves(&scene, &id);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// With `--attach`: nothing of a volume stays on a node that it is not attached to.
#[test]
fn a_detachment_ends_a_parked_daemon() {
    let Flags(mut flags) = Flags::process();
    flags.push("--attach".to_owned());
    let scene = Scene::start(Flags(flags));
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    let request = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
        ..Default::default()
    };
    let reply = caller.controller(async |mut c| c.controller_publish_volume(request).await).unwrap();
    let staging = caller.staging_path(&id);
    fs::create_dir_all(&staging).unwrap();
    let request = NodeStageVolumeRequest {
        volume_id: id.clone(),
        staging_target_path: text(&staging),
        volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
        publish_context: reply.into_inner().publish_context,
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).unwrap();
    caller.unstage(&id).unwrap();
    assert_eq!(shown(&scene, &id)["state"], "parked");
    let request = ControllerUnpublishVolumeRequest {
        volume_id: id.clone(),
        node_id: NODE.into(),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_unpublish_volume(request).await).unwrap();
    assert_eq!(shown(&scene, &id)["state"], "unstaged");
    assert_eq!(scene.daemons(), [] as [i32; 0]);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// It would serve nobody: the stage proves that it answers before it takes it.
#[test]
fn a_parked_daemon_that_is_stopped_is_not_taken() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    let before = parked(&scene, &id);
    scene.sandbox.switch_fuse_guard_off();
    scene.signal_daemon(Signal::SIGSTOP);
    caller.stage(&id).unwrap();
    assert!(scene.daemons().len() == 1 && scene.daemons() != [before], "{:?}", scene.daemons());
    assert_serves(&scene, &id);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// Then it has a user still, and nobody knows what it does there.
#[test]
fn a_volume_with_a_stranger_in_it_is_not_parked() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    caller.stage(&id).unwrap();
    let stranger = fs::File::open(caller.staging_path(&id)).unwrap();
    caller.unstage(&id).unwrap();
    assert_eq!(shown(&scene, &id)["state"], "unstaged");
    assert!(mounted(&caller.staging_path(&id)).is_none());
    drop(stranger);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_parked_volume_grows_and_is_copied_like_any_other() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    let daemon = parked(&scene, &id);
    let request = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(CapacityRange { required_bytes: 2 * GI, limit_bytes: 0 }),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_expand_volume(request).await).unwrap();
    let request = CreateSnapshotRequest {
        name: "s".into(),
        source_volume_id: id.clone(),
        parameters: [("snapshotMode".to_owned(), "blocking-copy".to_owned())].into(),
        ..Default::default()
    };
    let made = caller.controller(async |mut c| c.create_snapshot(request).await).unwrap().into_inner();
    let snapshot = made.snapshot.unwrap().snapshot_id;
    let copy = scene.sandbox.path("pool/snapshots").join(&snapshot).join("data/file");
    let copied = || {
        anyhow::ensure!(fs::read(&copy)? == b"kept");
        Ok(())
    };
    eventually("the copy is there", TIMEOUT, copied).unwrap();

    retried(&scene, "stage", || caller.stage(&id));
    assert_eq!(scene.daemons(), [daemon]);
    let size = nix::sys::statvfs::statvfs(&caller.staging_path(&id)).unwrap();
    assert_eq!(i64::try_from(size.blocks() * size.fragment_size()).unwrap(), 2 * GI);
    assert_serves(&scene, &id);
    // All of its bytes are there before the copy is done.
    retried(&scene, "unstage", || caller.unstage(&id));
    retried(&scene, "delete", || caller.delete(&id));
    let request = proto::csi::DeleteSnapshotRequest { snapshot_id: snapshot, ..Default::default() };
    caller.controller(async |mut c| c.delete_snapshot(request).await).unwrap();
    scene.assert_nothing_left();
}

/// The daemon holds the directory that it was given, wherever the path leads by now.
#[test]
fn a_parked_daemon_of_another_directory_is_not_taken() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    let before = parked(&scene, &id);
    let data = scene.sandbox.path("pool/volumes").join(&id).join("data");
    let aside = data.with_file_name("aside");
    fs::rename(&data, &aside).unwrap();
    fs::create_dir(&data).unwrap();
    fs::write(data.join("file"), "restored").unwrap();
    caller.stage(&id).unwrap();
    assert!(scene.daemons().len() == 1 && scene.daemons() != [before], "{:?}", scene.daemons());
    assert_eq!(fs::read(caller.staging_path(&id).join("file")).unwrap(), b"restored");
    fs::remove_dir_all(&aside).unwrap();
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn another_access_mode_gets_a_mount_of_its_own() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", LONG);
    parked(&scene, &id);
    caller.stage_as(&id, Mode::MultiNodeReaderOnly).unwrap();
    assert!(mounted(&caller.staging_path(&id)).unwrap().is_read_only());
    caller.unstage(&id).unwrap();
    caller.stage(&id).unwrap();
    assert!(!mounted(&caller.staging_path(&id)).unwrap().is_read_only());
    assert_eq!(scene.daemons().len(), 1);
    assert_serves(&scene, &id);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// Parked and taken, each at moments that are spread over what it takes: what the
/// driver was killed in is repeated, and there is never a second daemon.
#[test]
fn killed_at_any_moment_of_parking_and_taking() {
    const MOMENTS: u32 = 10;
    type Call = fn(&Caller, &str) -> Result<(), Status>;
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let calls: [(&str, Call); 2] = [("unstage", Caller::unstage), ("stage", Caller::stage)];
    for (name, call) in calls {
        let mut span = Duration::ZERO;
        for moment in 0..=MOMENTS {
            let id = create(&caller, "pvc-kill", LONG);
            if name == "stage" {
                parked(&scene, &id);
            } else {
                caller.stage(&id).unwrap();
                fs::write(caller.staging_path(&id).join("file"), "kept").unwrap();
            }
            // The first time to its end, which is measured.
            let begun = Instant::now();
            if moment == 0 {
                call(&caller, &id).unwrap();
                span = begun.elapsed();
            } else {
                let running = std::thread::spawn({
                    let (caller, id) = (caller.clone(), id.clone());
                    move || call(&caller, &id)
                });
                let after = span * (moment - 1) / MOMENTS;
                as_soon_as("the moment", TIMEOUT, || begun.elapsed() >= after).unwrap();
                scene.kill_driver();
                drop(running.join().unwrap());
                scene.start_driver();
                retried(&scene, name, || call(&caller, &id));
            }
            retried(&scene, "stage", || caller.stage(&id));
            assert_eq!(scene.daemons().len(), 1, "{}", scene.log());
            assert_serves(&scene, &id);
            retried(&scene, "unstage", || caller.unstage(&id));
            retried(&scene, "delete", || caller.delete(&id));
            scene.assert_nothing_left();
        }
    }
}

#[test]
fn many_are_parked_taken_and_left_at_once() {
    const VOLUMES: usize = 24;
    let Flags(mut flags) = Flags::process();
    flags.extend(["--overcommit", "4"].map(str::to_owned));
    let scene = Scene::start(Flags(flags));
    let caller = scene.caller();
    let ids: Vec<String> = (0..VOLUMES).map(|n| create(&caller, &format!("pvc-{n}"), LONG)).collect();
    let all = |call: &(dyn Fn(&str) -> Result<(), Status> + Sync)| {
        std::thread::scope(|scope| {
            let running: Vec<_> = ids.iter().map(|id| scope.spawn(move || call(id))).collect();
            running.into_iter().for_each(|call| call.join().unwrap().unwrap());
        });
    };
    all(&|id| caller.stage(id));
    let mut daemons = scene.daemons();
    daemons.sort_unstable();
    for _ in 0..3 {
        all(&|id| caller.unstage(id));
        all(&|id| caller.stage(id));
        let mut now = scene.daemons();
        now.sort_unstable();
        assert_eq!(now, daemons);
    }
    all(&|id| caller.unstage(id));
    all(&|id| caller.delete(id));
    scene.assert_nothing_left();
}
