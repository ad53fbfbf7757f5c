//! What CreateSnapshot, GetSnapshot and CreateVolume from a source refuse, and how.

use std::fs;

use proto::csi::{CreateSnapshotRequest, ListSnapshotsRequest};
use tests::csi::scene::{GI, create_request};
use tests::csi::snapshots::{
    REFLINKING, assert_refused, data, delete_snapshot, from_snapshot, from_volume, get_snapshot,
    list_snapshots, of_size, scene_on, snapshot, snapshot_request, snapshot_with,
};
use tonic::Code;

const NOBODYS: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn what_is_missing_unknown_or_another_is_named() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let create =
        |request: CreateSnapshotRequest| caller.controller(async |mut c| c.create_snapshot(request).await);
    let code = Code::InvalidArgument;
    assert_refused(create(snapshot_request("", "vol-x")), code, "name is required");
    assert_refused(create(snapshot_request("s", "")), code, "source_volume_id is required");
    assert_refused(create(snapshot_request(&"n".repeat(129), "vol-x")), code, "longer than 128 bytes");
    let wrong = snapshot_with(&caller, "s", "vol-x", &[("snapshotMode", "copy")]);
    assert_refused(wrong, code, "parameters.snapshotMode: \"copy\"");
    assert_refused(delete_snapshot(&caller, ""), code, "snapshot_id is required");
    assert_refused(get_snapshot(&caller, ""), code, "snapshot_id is required");

    let long = "i".repeat(129);
    assert_refused(delete_snapshot(&caller, &long), code, "snapshot_id: \"129 bytes\"");
    assert_refused(get_snapshot(&caller, &long), code, "snapshot_id: \"129 bytes\"");
    assert_refused(snapshot(&caller, "s", &long), code, "source_volume_id: \"129 bytes\"");
    assert_refused(caller.create(from_volume("v", &long)), code, "volume_id: \"129 bytes\"");
    assert_refused(caller.create(from_snapshot("v", &long)), code, "snapshot_id: \"129 bytes\"");

    for source in ["fake-vol-id", "../../etc", &format!("vol-{NOBODYS}")] {
        assert_refused(snapshot(&caller, "s", source), Code::NotFound, source);
        assert_refused(caller.create(from_volume("v", source)), Code::NotFound, source);
    }
    for id in ["fake-snap-id", "snap-../../../volumes", &format!("snap-{NOBODYS}")] {
        assert_refused(get_snapshot(&caller, id), Code::NotFound, id);
        assert_refused(caller.create(from_snapshot("v", id)), Code::NotFound, id);
        delete_snapshot(&caller, id).unwrap();
    }
    let bad_token = ListSnapshotsRequest { starting_token: "invalid-token".into(), ..Default::default() };
    assert_refused(list_snapshots(&caller, bad_token), Code::Aborted, "invalid-token");
    scene.assert_nothing_left();
}

#[test]
fn the_same_name_of_another_source_is_taken() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let [a, b] = ["pvc-a", "pvc-b"].map(|name| caller.create_named(name).unwrap());
    let made = snapshot(&caller, "s", &a).unwrap().snapshot_id;
    assert_refused(snapshot(&caller, "s", &b), Code::AlreadyExists, &b);

    let clone = caller.create(from_volume("pvc-c", &a)).unwrap();
    assert_refused(caller.create(from_volume("pvc-c", &b)), Code::AlreadyExists, &b);
    assert_refused(caller.create(from_snapshot("pvc-c", &made)), Code::AlreadyExists, &made);
    assert_refused(caller.create(create_request("pvc-c")), Code::AlreadyExists, "wanted none");
    assert_refused(
        caller.create(from_volume("pvc-a", &b)),
        Code::AlreadyExists,
        "exists with the content source none",
    );
    for id in [a, b, clone.volume_id] {
        caller.delete(&id).unwrap();
    }
    delete_snapshot(&caller, &made).unwrap();
    scene.assert_nothing_left();
}

/// A code that is final makes external-snapshotter forget the snapshot, whose data would stay.
#[test]
fn what_an_earlier_call_left_and_cannot_be_removed_yet_is_aborted() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let made = snapshot(&caller, "s", &volume).unwrap().snapshot_id;
    let (trash, away) = (scene.sandbox.path("pool/trash"), scene.sandbox.path("pool/elsewhere"));
    fs::rename(&trash, &away).unwrap();
    fs::write(&trash, "no directory").unwrap();
    assert_refused(delete_snapshot(&caller, &made), Code::Internal, "os error");
    let left = format!("snapshot {made}: what an earlier call left is still there: ");
    assert_refused(snapshot(&caller, "s", &volume), Code::Aborted, &left);
    fs::remove_file(&trash).unwrap();
    fs::rename(&away, &trash).unwrap();
    assert_eq!(snapshot(&caller, "s", &volume).unwrap().snapshot_id, made);
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn restoring_into_less_room_is_out_of_range_and_into_none_given_takes_the_sources() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let source = caller.create(of_size(create_request("pvc-1"), GI + 1, 0)).unwrap().volume_id;
    let made = snapshot(&caller, "s", &source).unwrap().snapshot_id;
    for request in [from_snapshot("pvc-2", &made), from_volume("pvc-2", &source)] {
        let small = caller.create(of_size(request.clone(), GI, 0));
        assert_refused(small, Code::OutOfRange, "needs 1073741825 bytes, and the claim has 1073741824");
        assert_refused(caller.create(of_size(request.clone(), 0, GI)), Code::OutOfRange, "1073741824");
        let restored = caller.create(of_size(request, 0, 0)).unwrap();
        assert_eq!(restored.capacity_bytes, GI + 1);
        caller.delete(&restored.volume_id).unwrap();
    }
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&source).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn what_snapshots_hold_is_taken_from_the_pool() {
    let scene = scene_on(REFLINKING[1]);
    let caller = scene.caller();
    let volume = caller.create(of_size(create_request("pvc-1"), 9 * GI, 0)).unwrap().volume_id;
    fs::write(data(&scene, &volume).join("file"), vec![1; 8 << 20]).unwrap();
    let made = snapshot(&caller, "s", &volume).unwrap().snapshot_id;
    // 10 Gi, 9 Gi of them the volume's: what is left beside the snapshot is less than 1 Gi.
    let refused = caller.create(create_request("pvc-2"));
    assert_refused(refused, Code::ResourceExhausted, "exceeds what is left of the pool");
    let fits = caller.create(of_size(create_request("pvc-2"), GI - (9 << 20), 0)).unwrap();
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&fits.volume_id).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}
