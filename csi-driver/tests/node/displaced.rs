//! A served volume that somebody unmounted where it is staged, or hid: its pods are
//! not disturbed by whoever puts it in order.

use std::fs;
use std::io::Write;

use linux::mount::{FuseConnections, MountFlags, UnmountMode};
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, mounted, retried};
use tests::eventually;
use tonic::{Code, Status};

use crate::hung::{BOUND, connection_of, within};
use crate::size::{MI, bytes_of, create, expand};

/// Staged, published to "one", and unmounted where it is staged; a file that the pod has open.
fn displaced(scene: &Scene, caller: &Caller) -> (String, fs::File) {
    let id = create(caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    caller.publish_with(&id, "one", |request| request.readonly = false).unwrap();
    let open = fs::File::create_new(caller.target_path("one").join("file")).unwrap();
    linux::mount::unmount(&caller.staging_path(&id), UnmountMode::Detach).unwrap();
    assert_eq!(scene.daemons().len(), 1);
    (id, open)
}

fn in_order_again(repair: impl FnOnce(&mut Scene, &Caller, &str)) {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let (id, mut open) = displaced(&scene, &caller);
    let daemons = scene.daemons();
    repair(&mut scene, &caller, &id);
    assert_eq!(scene.daemons(), daemons);
    open.write_all(b"all the time").unwrap();
    drop(open);
    let staged = mounted(&caller.staging_path(&id)).expect("mounted again");
    assert!(staged.same_root(&mounted(&caller.target_path("one")).unwrap()));
    assert_eq!(fs::read(caller.staging_path(&id).join("file")).unwrap(), b"all the time");
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_restart_mounts_a_displaced_volume_again() {
    in_order_again(|scene, _, _| scene.restart_driver());
}

#[test]
fn a_publish_mounts_a_displaced_volume_again() {
    in_order_again(|_, caller, id| caller.publish(id, "two").unwrap());
}

#[test]
fn a_stage_mounts_a_displaced_volume_again() {
    in_order_again(|_, caller, id| caller.stage(id).unwrap());
}

#[test]
fn what_a_target_refuses_the_stage_does_not() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    caller.publish_with(&id, "one", |request| request.readonly = true).unwrap();
    linux::mount::unmount(&caller.staging_path(&id), UnmountMode::Detach).unwrap();
    caller.publish(&id, "two").unwrap();
    fs::write(caller.target_path("two").join("file"), "x").unwrap();
    fs::write(caller.target_path("one").join("file"), "x").unwrap_err();
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_displaced_volume_is_measured_and_expanded() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let (id, open) = displaced(&scene, &caller);
    let target = caller.target_path("one");
    assert_eq!(bytes_of(&caller, &id, &target).0, 8 * MI);
    assert_eq!(expand(&caller, &id, 16 * MI).unwrap(), 16 * MI);
    assert_eq!(bytes_of(&caller, &id, &target).0, 16 * MI);
    let elsewhere = caller.stats(&id, &caller.staging_path(&id)).unwrap();
    assert!(elsewhere.volume_condition.unwrap().abnormal);
    crate::hung::assert_unmeasured(&elsewhere.usage, 16 * MI);
    drop(open);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// A volume that is mounted nowhere in the driver's namespace, and a file in it.
fn with_open_file_and_no_mount(caller: &Caller) -> (String, fs::File) {
    let id = create(caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    let open = fs::File::create_new(caller.staging_path(&id).join("file")).unwrap();
    linux::mount::unmount(&caller.staging_path(&id), UnmountMode::Detach).unwrap();
    (id, open)
}

#[test]
fn a_volume_with_open_files_that_is_mounted_nowhere_is_not_deleted() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let (id, mut open) = with_open_file_and_no_mount(&caller);
    let refused = caller.delete(&id).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("is still staged at"), "{refused:?}");
    assert_eq!(scene.daemons().len(), 1);
    open.write_all(b"still written").unwrap();
    drop(open);
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// As above, and its daemon has died: the driver waits before it starts the third and the fourth one, and
/// holds no lock meanwhile.
#[test]
fn a_volume_with_open_files_is_not_deleted_between_two_of_its_daemons() {
    let scene = Scene::start(crate::keepers::with_keeper());
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let (id, mut open) = with_open_file_and_no_mount(&caller);
    for _ in 0..4 {
        scene.kill_daemon();
        let refused = retried(&scene, "delete", || match caller.delete(&id) {
            Err(status) if status.code() == Code::FailedPrecondition => Ok(status),
            Ok(()) => Err(Status::internal("it was deleted")),
            Err(status) => Err(status),
        });
        assert!(refused.message().contains("is still staged at"), "{refused:?}");
        open.write_all(b"still written").unwrap();
    }
    drop(open);
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// As kubelet leaves it that was restarted between NodeUnpublishVolume and NodeUnstageVolume.
#[test]
fn a_volume_that_is_unmounted_by_hand_where_it_is_staged_can_be_deleted() {
    for flags in [Flags::process(), crate::keepers::with_keeper()] {
        let scene = Scene::start(flags);
        let caller = scene.caller();
        let id = create(&caller, "pvc-1", 8 * MI);
        caller.stage(&id).unwrap();
        let refused = caller.delete(&id).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
        let staging = caller.staging_path(&id);
        assert!(refused.message().contains(staging.to_str().unwrap()), "{refused:?}");
        linux::mount::unmount(&staging, UnmountMode::Plain).unwrap();
        eventually("it is deleted", TIMEOUT, || Ok(caller.delete(&id)?)).unwrap();
        // Only for kubelet's directories.
        caller.unstage(&id).unwrap();
        scene.assert_nothing_left();
    }
}

#[test]
fn what_is_mounted_on_a_target_or_a_stage_does_not_make_the_volume_free() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let (target, staging) = (caller.target_path("one"), caller.staging_path(&id));
    let mut open = fs::File::create_new(target.join("file")).unwrap();
    for hidden in [&target, &staging] {
        linux::mount::mount_fs("tmpfs", "stranger", hidden, MountFlags::default(), "").unwrap();
        let daemons = scene.daemons();
        let refused = caller.unstage(&id).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
        assert!(refused.message().contains(target.to_str().unwrap()), "{refused:?}");
        scene.restart_driver();
        assert_eq!(scene.daemons(), daemons);
        open.write_all(b"x").unwrap();
        linux::mount::unmount(hidden, UnmountMode::Plain).unwrap();
    }
    drop(open);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// Beneath what somebody mounted on it, the volume would be mounted for ever.
#[test]
fn a_stage_that_something_is_mounted_on_is_not_unstaged() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    let staging = caller.staging_path(&id);
    linux::mount::mount_fs("tmpfs", "stranger", &staging, MountFlags::default(), "").unwrap();
    for refused in [caller.unstage(&id), caller.delete(&id)] {
        assert_eq!(refused.unwrap_err().code(), Code::FailedPrecondition);
    }
    assert_eq!(scene.daemons().len(), 1);
    linux::mount::unmount(&staging, UnmountMode::Plain).unwrap();
    fs::write(staging.join("file"), "x").unwrap();
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// An expansion that nobody was told of has not happened.
#[test]
fn an_expansion_that_a_daemon_cannot_be_told_is_an_error_until_it_is_staged_anew() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    fs::remove_file(scene.dial_dir(&id).join("ctl.sock")).unwrap();
    let refused = expand(&caller, &id, 16 * MI).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    caller.unstage(&id).unwrap();
    caller.stage(&id).unwrap();
    assert_eq!(expand(&caller, &id, 16 * MI).unwrap(), 16 * MI);
    assert_eq!(bytes_of(&caller, &id, &caller.staging_path(&id)).0, 16 * MI);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// A pod's container has mounts of its own, which an unmount on the host does not take.
#[test]
fn a_restart_spares_a_volume_that_is_mounted_nowhere_and_in_use() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let (id, mut open) = displaced(&scene, &caller);
    linux::mount::unmount(&caller.target_path("one"), UnmountMode::Detach).unwrap();
    let daemons = scene.daemons();
    scene.restart_driver();
    assert_eq!(scene.daemons(), daemons);
    open.write_all(b"x").unwrap();
    drop(open);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// The driver ended the connection itself: it does not take the daemon for a server.
#[test]
fn after_an_abort_the_next_publish_is_served() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let target = caller.target_path("one");
    fs::write(target.join("file"), "x").unwrap();
    let open = fs::File::open(&target).unwrap();
    let aborted = connection_of(&target);
    scene.stop_daemon();
    let waiting = std::thread::spawn(move || fs::metadata(target.join("absent")).map(drop));
    let requests = || anyhow::Ok(FuseConnections::open()?.waiting(aborted)?.unwrap_or_default());
    eventually("a request waits", TIMEOUT, || {
        anyhow::ensure!(requests()? > 0);
        Ok(())
    })
    .unwrap();
    within(BOUND, || caller.unpublish(&id, "one")).unwrap();
    waiting.join().unwrap().unwrap_err();
    drop(open);
    within(BOUND, || caller.publish(&id, "two")).unwrap();
    let target = caller.target_path("two");
    assert_eq!(fs::read(target.join("file")).unwrap(), b"x");
    caller.take_down(&id, &["two"]).unwrap();
    scene.assert_nothing_left();
}
