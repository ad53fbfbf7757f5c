//! A pool that is a file system of its own, and is not always mounted.

use std::fs;

use proto::csi::{GetCapacityRequest, ListVolumesRequest, ProbeRequest};
use tests::Sandbox;
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tonic::Code;

use crate::kit::{assert_refused, data, delete_snapshot, from_volume, snapshot};
use crate::scene::{Caller, Flags, Scene};

const AWAY: &str = "is away: no .hawser-pool says that it is pool ";

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
