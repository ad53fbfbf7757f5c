//! A volume's life, from CreateVolume to DeleteVolume.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::{NodeGetInfoRequest, ProbeRequest};
use tests::csi::scene::{Flags, GI, NODE, Scene, TIMEOUT, capability, create_request, mounted};

#[test]
fn two_pods_share_a_volume_and_nothing_is_left_of_it() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();

    fs::write(caller.target_path("one").join("file"), "from one").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"from one");
    assert_eq!(scene.daemons().len(), 1, "one daemon a volume");
    let lines = linux::mountinfo::read().unwrap();
    let lines = lines.iter().filter(|mount| mount.mount_point == caller.staging_path(&id)).count();
    assert_eq!(lines, 2, "one mount, and its peer beneath kubelet's own");
    let data = scene.sandbox.path("pool/volumes").join(&id).join("data/file");
    assert_eq!(fs::read(data).unwrap(), b"from one");

    caller.unpublish(&id, "one").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"from one");
    caller.unpublish(&id, "two").unwrap();
    assert_eq!(scene.daemons().len(), 1, "staged until it is unstaged");
    caller.unstage(&id).unwrap();
    assert_eq!(scene.daemons(), [] as [i32; 0], "gone when Unstage returns");
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn every_call_may_be_repeated() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    assert_eq!(caller.create_named("pvc-1").unwrap(), id);
    for _ in 0..3 {
        caller.stage(&id).unwrap();
        caller.publish(&id, "one").unwrap();
    }
    assert_eq!(scene.daemons().len(), 1);
    for _ in 0..3 {
        caller.unpublish(&id, "one").unwrap();
    }
    for _ in 0..3 {
        caller.unstage(&id).unwrap();
    }
    for _ in 0..3 {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn data_outlive_the_stage_and_volumes_do_not_see_each_other() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ids = ["a", "b"].map(|name| caller.create_named(name).unwrap());
    for (id, pod) in ids.iter().zip(["pod-a", "pod-b"]) {
        caller.stage(id).unwrap();
        caller.publish(id, pod).unwrap();
        fs::write(caller.target_path(pod).join(pod), pod).unwrap();
        assert_eq!(fs::read_dir(caller.target_path(pod)).unwrap().count(), 1);
    }
    caller.unpublish(&ids[0], "pod-a").unwrap();
    caller.unstage(&ids[0]).unwrap();
    caller.stage(&ids[0]).unwrap();
    caller.publish(&ids[0], "pod-c").unwrap();
    assert_eq!(fs::read(caller.target_path("pod-c").join("pod-a")).unwrap(), b"pod-a");
    for (id, pod) in ids.iter().zip(["pod-c", "pod-b"]) {
        caller.unpublish(id, pod).unwrap();
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn a_read_only_publish_refuses_writes_beside_a_writable_one() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["writer"]).unwrap();
    caller.publish_with(&id, "reader", |request| request.readonly = true).unwrap();
    fs::write(caller.target_path("writer").join("file"), "x").unwrap();
    let refused = fs::write(caller.target_path("reader").join("file"), "y").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(fs::read(caller.target_path("reader").join("file")).unwrap(), b"x");
    for pod in ["writer", "reader"] {
        let mount = mounted(&caller.target_path(pod)).unwrap();
        assert!(mount.options.contains("nosuid") && mount.options.contains("nodev"), "{}", mount.options);
        caller.unpublish(&id, pod).unwrap();
    }
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_stage_for_readers_only_is_read_only_for_everybody() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage_as(&id, Mode::MultiNodeReaderOnly).unwrap();
    let mode = Some(capability(Mode::MultiNodeReaderOnly));
    caller.publish_with(&id, "one", |request| request.volume_capability = mode).unwrap();
    let refused = fs::write(caller.target_path("one").join("file"), "y").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn any_user_may_write_and_modes_are_the_writers_own() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let file = caller.target_path("one").join("file");
    fs::write(&file, "x").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    let made = caller.target_path("one").join("dir");
    fs::create_dir(&made).unwrap();
    let root = fs::metadata(caller.target_path("one")).unwrap().permissions().mode();
    assert_eq!(root & 0o7777, 0o777);
    // The driver's umask of 0077 is not the daemon's business.
    let umask = nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    nix::sys::stat::umask(umask);
    let mode = fs::metadata(&made).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o777 & !umask.bits());
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_dead_daemon_is_noticed_and_the_next_pod_gets_a_fresh_mount() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    let healthy = caller.stats(&id, &caller.target_path("one")).unwrap();
    assert!(!healthy.volume_condition.unwrap().abnormal);
    assert_eq!(healthy.usage[0].total, GI, "what was claimed");

    scene.kill_daemon();
    let dead = fs::read(caller.target_path("one").join("file")).unwrap_err();
    assert_eq!(dead.raw_os_error(), Some(nix::errno::Errno::ENOTCONN as i32));
    tests::eventually("the death is logged", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("the volume's daemon ended"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    let sick = caller.stats(&id, &caller.target_path("one")).unwrap();
    assert!(sick.volume_condition.unwrap().abnormal);
    let figures: Vec<_> = sick.usage.iter().map(|one| (one.total, one.used, one.available)).collect();
    assert_eq!(figures, [(GI, 0, 0)], "kubelet reads the condition only beside a usage");

    // kubelet believes the volume staged: a new pod is a publish alone.
    caller.publish(&id, "two").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"x");
    assert_eq!(scene.daemons().len(), 1);
    // Published again, as kubelet does after its own restart, the old pod's target is healed too.
    caller.publish(&id, "one").unwrap();
    assert_eq!(fs::read(caller.target_path("one").join("file")).unwrap(), b"x");

    scene.kill_daemon();
    caller.stage(&id).unwrap();
    assert_eq!(scene.daemons().len(), 1);
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_dead_daemons_volume_can_be_taken_down_without_being_healed() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let open = fs::File::create(caller.target_path("one").join("file")).unwrap();
    scene.kill_daemon();
    // A process of the pod that still has a file open does not keep the dead mount.
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();
    drop(open);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn the_node_says_where_its_volumes_are() {
    let scene = Scene::start(Flags::process());
    let info = scene.caller().node(async |mut n| n.node_get_info(NodeGetInfoRequest {}).await).unwrap();
    let info = info.into_inner();
    assert_eq!(info.node_id, NODE);
    assert_eq!(info.accessible_topology.unwrap().segments["topology.csi.hawser.dev/node"], NODE);
}

#[test]
fn probe_fails_when_the_pool_is_gone() {
    let scene = Scene::start(Flags::process());
    let probe = || scene.caller().identity(async |mut i| i.probe(ProbeRequest {}).await);
    assert_eq!(probe().unwrap().into_inner().ready, Some(true));
    fs::rename(scene.sandbox.path("pool"), scene.sandbox.path("elsewhere")).unwrap();
    let refused = probe().unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("is away"), "{}", refused.message());
    fs::rename(scene.sandbox.path("elsewhere"), scene.sandbox.path("pool")).unwrap();
    probe().unwrap();
}

#[test]
fn sizes_are_exact_and_the_name_is_only_a_name() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let mut request = create_request(&format!("{}/../../{}", "n".repeat(60), "n".repeat(50)));
    request.capacity_range = Some(proto::csi::CapacityRange { required_bytes: 12_345, limit_bytes: 12_345 });
    let volume = caller.create(request).unwrap();
    assert_eq!(volume.capacity_bytes, 12_345);
    assert!(volume.volume_id.len() <= 128);
    let made: Vec<_> =
        fs::read_dir(scene.sandbox.path("pool/volumes")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(made, [std::ffi::OsString::from(&volume.volume_id)]);
    caller.delete(&volume.volume_id).unwrap();
    scene.assert_nothing_left();
}
