//! What is refused, with which code and which words.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use proto::csi::{
    CapacityRange, CreateSnapshotRequest, CreateVolumeRequest, NodeStageVolumeRequest, Topology,
    TopologyRequirement, VolumeCapability,
};
use tests::Sandbox;
use tests::csi::scene::{
    Caller, Flags, GI, Scene, TIMEOUT, capability, create_request, mounted, text, volume_binary,
};
use tonic::{Code, Status};

const UNKNOWN: &str = "vol-00000000000000000000000000000000";

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &str) {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(words), "{:?} in {:?}", words, status.message());
    assert!(status.details().is_empty());
}

/// The claim's events show the name, not the id.
#[test]
fn a_refused_creation_is_logged_with_the_name_in_its_request() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let mut unparsable = create_request("pvc-unparsable");
    unparsable.parameters = HashMap::from([("bakend".to_owned(), "local".to_owned())]);
    let mut too_large = create_request("pvc-large");
    too_large.capacity_range = Some(CapacityRange { required_bytes: 11 * GI, limit_bytes: 0 });
    for request in [unparsable, too_large] {
        caller.create(request).unwrap_err();
    }
    let snapshot = |name: &str, source: &str| {
        let request = CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: source.into(),
            ..Default::default()
        };
        caller.controller(async |mut c| c.create_snapshot(request).await).unwrap_err()
    };
    snapshot("snapshot-unparsable", "");
    snapshot("snapshot-unknown", UNKNOWN);
    let long = "n".repeat(4096);
    caller.create(create_request(&long)).unwrap_err();
    let log = scene.log();
    let refused: Vec<&str> = log.lines().filter(|line| line.contains(" refused ")).collect();
    let names = ["pvc-unparsable", "pvc-large", "snapshot-unparsable", "snapshot-unknown", &long[..128]];
    assert_eq!(refused.len(), names.len(), "{log}");
    for (line, name) in refused.iter().zip(names) {
        assert!(line.contains(&format!(" name=\"{name}\"")), "{name} in {line}");
    }
    scene.assert_nothing_left();
}

#[test]
fn create_refuses_each_wrong_field_by_name() {
    let scene = Scene::start(Flags::process());
    let with = |change: &dyn Fn(&mut CreateVolumeRequest)| {
        let mut request = create_request("pvc-1");
        change(&mut request);
        scene.caller().create(request)
    };
    let map = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
    let range = |required_bytes, limit_bytes| Some(CapacityRange { required_bytes, limit_bytes });
    let at = |node: &str| Topology { segments: map("topology.csi.hawser.dev/node", node) };
    let requisite = |node| Some(TopologyRequirement { requisite: vec![at(node)], preferred: vec![] });

    assert_refused(with(&|r| r.name.clear()), Code::InvalidArgument, "name is required");
    assert_refused(with(&|r| r.name = "n".repeat(129)), Code::InvalidArgument, "longer than 128 bytes");
    assert_refused(with(&|r| r.volume_capabilities.clear()), Code::InvalidArgument, "volume_capabilities");
    assert_refused(
        with(&|r| r.parameters = map("bakend", "local")),
        Code::InvalidArgument,
        "unknown parameter \"bakend\"",
    );
    assert_refused(with(&|r| r.mutable_parameters = map("qos", "x")), Code::InvalidArgument, "\"qos\"");
    assert_refused(
        with(&|r| r.capacity_range = range(-1, 0)),
        Code::InvalidArgument,
        "required_bytes: \"-1\"",
    );
    assert_refused(
        with(&|r| r.accessibility_requirements = requisite("elsewhere")),
        Code::ResourceExhausted,
        "topology.csi.hawser.dev/node=node-1 only",
    );
    assert_refused(
        with(&|r| r.capacity_range = range(11 * GI, 0)),
        Code::OutOfRange,
        "claim of 11811160064 bytes is larger than the pool of 10737418240 bytes",
    );
    // A caller that chooses nodes may choose another one.
    let here = "the volume cannot be created on topology.csi.hawser.dev/node=node-1: ";
    assert_refused(
        with(&|r| {
            r.capacity_range = range(11 * GI, 0);
            r.accessibility_requirements = requisite("node-1");
        }),
        Code::ResourceExhausted,
        &format!("{here}claim of 11811160064 bytes is larger than the pool of 10737418240 bytes"),
    );
    // The driver has no keeper.
    let passing = |r: &mut CreateVolumeRequest| {
        r.parameters = HashMap::from(
            [("dataPath", "passthrough"), ("capacity", "none")].map(|(k, v)| (k.to_owned(), v.to_owned())),
        );
    };
    let lacking = with(&passing).unwrap_err();
    assert_eq!(lacking.code(), Code::FailedPrecondition, "{lacking:?}");
    assert_refused(
        with(&|r| {
            passing(r);
            r.accessibility_requirements = requisite("node-1");
        }),
        Code::ResourceExhausted,
        &format!("{here}{}", lacking.message()),
    );
    with(&|r| {
        r.parameters = map("csi.storage.k8s.io/pvc/name", "claim");
        r.accessibility_requirements = requisite("node-1");
    })
    .unwrap();
    scene.caller().delete(&scene.caller().create_named("pvc-1").unwrap()).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn the_pool_is_committed_claim_by_claim() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let sized = |name: &str, bytes| {
        let mut request = create_request(name);
        request.capacity_range = Some(CapacityRange { required_bytes: bytes, limit_bytes: bytes });
        caller.create(request)
    };
    let first = sized("first", 6 * GI).unwrap();
    assert_refused(
        sized("second", 5 * GI),
        Code::ResourceExhausted,
        "claim of 5368709120 bytes exceeds what is left of the pool: 6442450944 of 10737418240",
    );
    assert_refused(sized("first", 7 * GI), Code::AlreadyExists, "exists with a capacity of 6442450944");
    caller.delete(&first.volume_id).unwrap();
    let second = sized("second", 10 * GI).unwrap();
    caller.delete(&second.volume_id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_claim_is_measured_against_the_file_system_when_no_capacity_is_given() {
    let scene = Scene::start(Flags(
        [
            "--launcher",
            "process",
            "--volume-binary",
            "/bin/false",
            "--keeper-binary",
            "none",
            "--warm-daemons",
            "0",
        ]
        .map(str::to_owned)
        .to_vec(),
    ));
    let mut request = create_request("huge");
    request.capacity_range = Some(CapacityRange { required_bytes: i64::MAX, limit_bytes: 0 });
    assert_refused(scene.caller().create(request), Code::OutOfRange, "is larger than the pool of");
}

#[test]
fn unknown_volumes_cannot_be_used_and_need_not_be_undone() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    for id in [UNKNOWN, "not-one-of-ours", "../../../etc"] {
        assert_refused(stage_with_paths_of(&caller, "x", id), Code::NotFound, id);
        assert_refused(caller.publish_with("x", "pod", |r| r.volume_id = id.into()), Code::NotFound, id);
        assert_refused(caller.stats(id, "some/path".as_ref()), Code::NotFound, id);
        let undo = |r: Result<(), Status>| r.unwrap();
        undo(node_unpublish_raw(&caller, id, "/nonexistent/target"));
        undo(node_unstage_raw(&caller, id, "/nonexistent/staging"));
        undo(caller.delete(id));
    }
}

#[test]
fn a_missing_field_wins_over_an_unknown_volume() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let publish =
        |change: fn(&mut proto::csi::NodePublishVolumeRequest)| caller.publish_with(UNKNOWN, "pod", change);
    assert_refused(publish(|r| r.target_path.clear()), Code::InvalidArgument, "target_path is required");
    assert_refused(publish(|r| r.volume_capability = None), Code::InvalidArgument, "volume_capability");
    assert_refused(publish(|r| r.target_path = "a/b".into()), Code::InvalidArgument, "\"a/b\"");
    assert_refused(publish(|r| r.target_path = "/a/../b".into()), Code::InvalidArgument, "`..`");
    assert_refused(caller.delete(""), Code::InvalidArgument, "volume_id is required");
    assert_refused(node_unpublish_raw(&caller, "x", ""), Code::InvalidArgument, "target_path is required");
}

#[test]
fn calls_out_of_order_are_refused() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    assert_refused(caller.publish(&id, "one"), Code::FailedPrecondition, "is not staged at");
    caller.stage(&id).unwrap();
    assert_refused(caller.delete(&id), Code::FailedPrecondition, "is still staged at");
    caller.publish(&id, "one").unwrap();
    assert_refused(caller.unstage(&id), Code::FailedPrecondition, "is still published at");
    assert_refused(caller.delete(&id), Code::FailedPrecondition, "is still published at");
    assert_refused(
        caller.publish_with(&id, "two", |r| r.staging_target_path.clear()),
        Code::FailedPrecondition,
        "is not staged",
    );
    assert!(mounted(&caller.target_path("one")).is_some(), "none of it ended the pod's volume");
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    fs::remove_dir_all(scene.kubelet_dir().join("pods/two")).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn the_same_path_with_another_capability_is_already_taken() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    assert_refused(
        caller.stage_as(&id, Mode::SingleNodeWriter),
        Code::AlreadyExists,
        "MULTI_NODE_MULTI_WRITER",
    );
    caller.publish(&id, "one").unwrap();
    assert_refused(
        caller.publish_with(&id, "one", |r| r.readonly = true),
        Code::AlreadyExists,
        "wanted MULTI_NODE_MULTI_WRITER read-only",
    );
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_single_writers_volume_has_one_target() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    for (mode, second_is_allowed) in [
        (Mode::SingleNodeSingleWriter, false),
        (Mode::SingleNodeWriter, false),
        (Mode::SingleNodeMultiWriter, true),
    ] {
        caller.stage_as(&id, mode).unwrap();
        let publish = |pod| caller.publish_with(&id, pod, |r| r.volume_capability = Some(capability(mode)));
        publish("one").unwrap();
        let second = publish("two");
        if second_is_allowed {
            second.unwrap();
        } else {
            assert_refused(second, Code::FailedPrecondition, "allows no second target");
        }
        caller.unpublish(&id, "one").unwrap();
        caller.unpublish(&id, "two").unwrap();
        caller.unstage(&id).unwrap();
    }
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn paths_that_are_something_else_are_left_alone() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();

    let staging = caller.staging_path(&id);
    fs::create_dir_all(staging.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("/tmp", &staging).unwrap();
    assert_refused(stage_with_paths_of(&caller, &id, &id), Code::FailedPrecondition, "not a directory");
    fs::remove_file(&staging).unwrap();
    assert_refused(stage_with_paths_of(&caller, &id, &id), Code::FailedPrecondition, "No such file");

    caller.stage(&id).unwrap();
    let target = caller.target_path("one");
    fs::create_dir_all(&target).unwrap();
    linux::mount::mount_fs("tmpfs", "somebody's", &target, linux::mount::MountFlags::default(), "").unwrap();
    assert_refused(
        caller.publish(&id, "one"),
        Code::FailedPrecondition,
        "is a mount of tmpfs from somebody's",
    );
    linux::mount::unmount(&target, linux::mount::UnmountMode::Plain).unwrap();
    fs::remove_dir(&target).unwrap();
    std::os::unix::fs::symlink("/tmp", &target).unwrap();
    assert_refused(caller.publish(&id, "one"), Code::FailedPrecondition, "not a directory");
    fs::remove_file(&target).unwrap();

    caller.publish(&id, "one").unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_target_that_cannot_be_mounted_on_is_refused_before_anything_is_done() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let journaled = || scene.journal(&id);
    let before = journaled();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;

    let used = caller.target_path("used");
    fs::create_dir_all(&used).unwrap();
    fs::write(used.join("precious"), "x").unwrap();
    let found = mode(&used);
    let publish = |path: &Path| {
        let path = text(path);
        caller.publish_with(&id, "used", |r| r.target_path = path)
    };
    let code = Code::FailedPrecondition;
    assert_refused(publish(&used), code, "pv/mount: not an empty directory");
    assert_eq!((mode(&used), fs::read(used.join("precious")).unwrap()), (found, b"x".to_vec()));
    assert_refused(publish(&used.join("no/parent")), code, "target_path");
    assert_refused(publish(&used.join("precious/below")), code, "target_path");
    assert_refused(publish(&used.join("n".repeat(256))), Code::InvalidArgument, "longer than 255 bytes");
    let staging = caller.staging_path(&id);
    for path in [staging.clone(), staging.join("below"), staging.parent().unwrap().into()] {
        assert_refused(publish(&path), Code::InvalidArgument, "not apart from staging_target_path");
    }
    assert!(mounted(&staging).is_some());
    assert_eq!(journaled(), before);

    fs::remove_dir_all(&used).unwrap();
    publish(&used).unwrap();
    caller.take_down(&id, &["used"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn an_exclusive_target_forbids_a_shared_one_and_contradictions_are_named() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let with = |mode, flags: &[&str]| {
        let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let mount = MountVolume { mount_flags, ..Default::default() };
        VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(mode) }
    };
    let publish = |pod, capability| caller.publish_with(&id, pod, |r| r.volume_capability = Some(capability));
    let (single, multi) = (Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter);
    fs::create_dir_all(caller.staging_path(&id)).unwrap();
    let stage = NodeStageVolumeRequest {
        volume_id: id.clone(),
        staging_target_path: text(&caller.staging_path(&id)),
        volume_capability: Some(with(multi, &["noatime"])),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(stage).await).unwrap();
    assert_refused(publish("one", with(multi, &["relatime"])), Code::AlreadyExists, "noatime");
    publish("one", with(single, &[])).unwrap();
    assert_refused(
        publish("two", with(multi, &[])),
        Code::FailedPrecondition,
        "SINGLE_NODE_SINGLE_WRITER allows no second target",
    );
    caller.unpublish(&id, "one").unwrap();
    publish("two", with(multi, &["noatime"])).unwrap();
    caller.take_down(&id, &["two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_busy_target_is_not_torn_from_its_user() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let open = fs::File::create(caller.target_path("one").join("file")).unwrap();
    assert_refused(caller.unpublish(&id, "one"), Code::Aborted, "is busy");
    assert!(mounted(&caller.target_path("one")).is_some());
    drop(open);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_daemon_that_cannot_start_leaves_nothing_and_says_why() {
    for (binary, code, words) in [
        ("/bin/false", Code::Internal, ", a process of /bin/false, ended before it served"),
        ("/bin/ls", Code::Internal, "its last log line: "),
    ] {
        let flags = Flags::process().with(&["--volume-binary".to_owned(), binary.to_owned()]);
        let scene = Scene::start(flags);
        let caller = scene.caller();
        let id = caller.create_named("pvc-1").unwrap();
        assert_refused(caller.stage(&id), code, words);
        assert!(mounted(&caller.staging_path(&id)).is_none());
        caller.unstage(&id).unwrap();
        caller.delete(&id).unwrap();
        scene.assert_nothing_left();
    }
}

/// kubelet forgets a target after a final error. One that still holds a dead mount must not be forgotten.
#[test]
fn a_published_target_that_cannot_be_healed_is_not_given_up() {
    let mut flags = Flags::process();
    // In the sandbox, which is the driver's working directory.
    flags.0[3] = "hawser-volume".to_owned();
    let sandbox = Sandbox::new();
    let binary = sandbox.path("hawser-volume");
    tests::csi::programs::install(&binary, &fs::read(volume_binary()).unwrap());
    let scene = Scene::start_in(sandbox, flags);
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    fs::rename(&binary, scene.sandbox.path("moved")).unwrap();
    scene.kill_daemon();
    assert_refused(
        caller.publish(&id, "one"),
        Code::Aborted,
        &format!("what an earlier call left is still there: start the daemon of volume {id}, a process of"),
    );
    // Nothing of this one was ever there.
    assert_refused(caller.publish(&id, "two"), Code::Internal, "start the daemon of volume");
    fs::remove_dir_all(scene.kubelet_dir().join("pods/two")).unwrap();
    assert_refused(caller.unstage(&id), Code::FailedPrecondition, "is still published at");
    fs::rename(scene.sandbox.path("moved"), &binary).unwrap();
    // kubelet does not repeat NodeStageVolume.
    caller.publish(&id, "one").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_daemon_that_never_dials_is_given_up_and_ended() {
    let mut flags = Flags::process();
    let sleeper = std::env::temp_dir().join(format!("hw-sleeper-{}", std::process::id()));
    tests::csi::programs::install(&sleeper, b"#!/bin/sh\nexec sleep 1000\n");
    flags.0[3] = text(&sleeper);
    flags.0.extend(["--start-timeout", "1"].map(str::to_owned));
    let scene = Scene::start(flags);
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let stage = std::thread::spawn({
        let (caller, id) = (caller.clone(), id.clone());
        move || caller.stage(&id)
    });
    tests::eventually("the stage is under way", TIMEOUT, || {
        anyhow::ensure!(scene.dial_dir(&id).join("dial.sock").exists(), "no socket");
        Ok(())
    })
    .unwrap();
    assert_refused(caller.stage(&id), Code::Aborted, "another operation on volume");
    assert_refused(stage.join().unwrap(), Code::DeadlineExceeded, ": waited for a process of");
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
    fs::remove_file(sleeper).unwrap();
}

#[test]
fn a_second_driver_is_refused_with_one_line() {
    let scene = Scene::start(Flags::process());
    let mut second = scene.spawn_driver();
    assert!(!second.wait(TIMEOUT).unwrap().success());
    let log = scene.log();
    let line = log.lines().find(|line| line.starts_with("hawser-csi: ")).unwrap();
    assert!(line.contains("another hawser-csi runs with this --state-dir"), "{line}");
    scene.caller().create_named("pvc-1").unwrap();
}

/// NodeStageVolume without making the staging path.
fn stage_with_paths_of(caller: &Caller, path_id: &str, volume_id: &str) -> Result<(), Status> {
    let request = NodeStageVolumeRequest {
        volume_id: volume_id.into(),
        staging_target_path: text(&caller.staging_path(path_id)),
        volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
}

fn node_unpublish_raw(caller: &Caller, volume_id: &str, target_path: &str) -> Result<(), Status> {
    let request = proto::csi::NodeUnpublishVolumeRequest {
        volume_id: volume_id.into(),
        target_path: target_path.into(),
    };
    caller.node(async |mut n| n.node_unpublish_volume(request).await).map(drop)
}

fn node_unstage_raw(caller: &Caller, volume_id: &str, staging_target_path: &str) -> Result<(), Status> {
    let request = proto::csi::NodeUnstageVolumeRequest {
        volume_id: volume_id.into(),
        staging_target_path: staging_target_path.into(),
    };
    caller.node(async |mut n| n.node_unstage_volume(request).await).map(drop)
}
