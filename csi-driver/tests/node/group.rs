//! Groups that own a volume.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proto::csi::VolumeCapability;
use proto::csi::volume_capability::MountVolume;
use tests::csi::programs::install;
use tests::csi::scene::{Flags, Scene, TIMEOUT, mounted, retried, volume_binary};
use tests::wait_for_a_change;
use tonic::Code;

use crate::access::{capability_of, flags, publish, stage};
use crate::keepers::{kill_daemon, with_keeper};
use crate::killed::hold_changes_back;
use crate::takeover::with_own_program;

fn group(gid: &str) -> VolumeCapability {
    capability_of(MountVolume { volume_mount_group: gid.to_owned(), ..Default::default() })
}

#[track_caller]
fn assert_owned(path: &Path, gid: u32, mode: u32) {
    let found = fs::symlink_metadata(path).unwrap();
    assert_eq!((found.gid(), found.mode() & 0o7777), (gid, mode), "{}", path.display());
}

#[test]
fn a_group_owns_a_new_volume_and_an_old_one() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    let root = caller.staging_path(&id);
    assert_owned(&root, 2000, 0o2777);
    fs::write(root.join("file"), "x").unwrap();
    assert_eq!(fs::metadata(root.join("file")).unwrap().gid(), 2000, "new files belong to it");
    // What a pod made its own stays so as long as the root says that the walk was done.
    fs::set_permissions(root.join("file"), fs::Permissions::from_mode(0o400)).unwrap();
    caller.unstage(&id).unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    assert_owned(&root.join("file"), 2000, 0o400);

    // Another group's volume is walked whole.
    fs::create_dir_all(root.join("dir/deeper")).unwrap();
    fs::write(root.join("dir/deeper/file"), "x").unwrap();
    fs::set_permissions(root.join("dir/deeper/file"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(scene.sandbox.path("outside"), "x").unwrap();
    symlink(scene.sandbox.path("outside"), root.join("link")).unwrap();
    caller.unstage(&id).unwrap();
    stage(&caller, &id, group("3000")).unwrap();
    for (path, mode) in [("file", 0o660), ("dir/deeper/file", 0o660), ("dir/deeper", 0o2775), ("link", 0o777)]
    {
        assert_eq!(fs::symlink_metadata(root.join(path)).unwrap().gid(), 3000, "{path}");
        let found = fs::symlink_metadata(root.join(path)).unwrap().mode() & 0o7777;
        assert_eq!(found & mode, mode, "{path}: {found:o}");
    }
    assert_eq!(fs::metadata(scene.sandbox.path("outside")).unwrap().gid(), 0, "no link is followed");
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    fs::remove_file(scene.sandbox.path("outside")).unwrap();
    scene.assert_nothing_left();
}

fn group_of(path: impl AsRef<Path>) -> u32 {
    fs::symlink_metadata(path).unwrap().gid()
}

/// A file of the volume that the walk has not seen since.
fn take_back(path: &Path) {
    std::os::unix::fs::chown(path, None, Some(7)).unwrap();
}

#[test]
fn a_pod_of_another_group_gets_a_volume_that_others_use() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    let root = caller.staging_path(&id);
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("dir/file"), "").unwrap();
    publish(&caller, &id, "one", group("2000")).unwrap();
    publish(&caller, &id, "two", group("3000")).unwrap();
    for path in ["", "dir", "dir/file"] {
        assert_eq!(group_of(caller.target_path("one").join(path)), 3000, "{path:?}: the last pod wins");
    }
    // kubelet repeats the publishes of both pods: none of them walks.
    take_back(&root.join("dir/file"));
    for pod in ["one", "two", "one", "two"] {
        publish(&caller, &id, pod, group(if pod == "one" { "2000" } else { "3000" })).unwrap();
        assert_eq!((group_of(&root), group_of(root.join("dir/file"))), (3000, 7), "{pod}");
    }
    // Nor does kubelet's repetition of Stage, after its restart.
    stage(&caller, &id, group("2000")).unwrap();
    assert_eq!((group_of(&root), group_of(root.join("dir/file"))), (3000, 7));
    publish(&caller, &id, "none", flags(&[])).expect("a pod without a group takes the volume as it is");
    publish(&caller, &id, "reader", group_of_reader("4000")).unwrap();
    assert_eq!(group_of(&root), 3000, "a reader changes nothing");
    publish(&caller, &id, "three", group("2000")).unwrap();
    assert_eq!((group_of(&root), group_of(root.join("dir/file"))), (2000, 2000));
    let refused = stage(&caller, &id, group("staff")).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    caller.take_down(&id, &["one", "two", "three", "none", "reader"]).unwrap();
    scene.assert_nothing_left();
}

/// The walk asks the daemon for each file, and the publish has the volume's lock meanwhile.
#[test]
fn a_daemon_that_dies_while_its_volume_is_given_to_a_group_is_followed_at_once() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    let root = caller.staging_path(&id);
    let files = || (0..2000).map(|number| root.join(number.to_string()));
    files().for_each(|file| fs::write(file, "").unwrap());
    publish(&caller, &id, "one", group("2000")).unwrap();
    let minor = mounted(&root).unwrap().minor;
    scene.sandbox.switch_fuse_guard_off();
    let given = std::thread::scope(|scope| {
        // Until the daemon is killed, which is so in the middle of the walk.
        let _held = hold_changes_back(&scene, &id);
        let giving = scope.spawn(|| publish(&caller, &id, "two", group("3000")));
        wait_for_a_change(minor, TIMEOUT).unwrap();
        kill_daemon(&scene);
        giving.join().unwrap()
    });
    let refused = given.unwrap_err();
    assert!(refused.code() == Code::Aborted && refused.message().contains("given up"), "{refused:?}");
    retried(&scene, "publish", || publish(&caller, &id, "two", group("3000")));
    assert!(files().all(|file| group_of(file) == 3000));
    for pod in ["one", "two"] {
        caller.unpublish(&id, pod).unwrap();
    }
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

fn group_of_reader(gid: &str) -> VolumeCapability {
    let mount_flags = vec!["ro".to_owned()];
    capability_of(MountVolume { volume_mount_group: gid.to_owned(), mount_flags, ..Default::default() })
}

#[test]
fn a_volume_that_nobody_uses_is_staged_anew_for_another_group() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    let root = caller.staging_path(&id);
    fs::write(root.join("file"), "").unwrap();
    publish(&caller, &id, "one", group("2000")).unwrap();
    caller.unpublish(&id, "one").unwrap();
    publish(&caller, &id, "two", group("3000")).unwrap();
    assert_eq!(group_of(caller.target_path("two").join("file")), 3000);
    caller.unpublish(&id, "two").unwrap();
    stage(&caller, &id, group("4000")).unwrap();
    assert_eq!(group_of(root.join("file")), 4000);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_remounted_volume_has_the_group_of_the_last_first_publish() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    let root = caller.staging_path(&id);
    fs::write(root.join("file"), "").unwrap();
    publish(&caller, &id, "one", group("2000")).unwrap();
    publish(&caller, &id, "two", group("3000")).unwrap();
    scene.kill_daemon();
    publish(&caller, &id, "one", group("2000")).unwrap();
    let target = caller.target_path("one");
    assert_eq!((group_of(&target), group_of(target.join("file"))), (3000, 3000));
    publish(&caller, &id, "two", group("3000")).unwrap();
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet does not repeat a NodeStageVolume that was answered.
#[test]
fn a_publish_that_failed_to_stage_anew_for_a_group_is_repeated_without_a_stage() {
    let (scene, program) = with_own_program(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    fs::write(caller.staging_path(&id).join("file"), "").unwrap();
    publish(&caller, &id, "one", group("2000")).unwrap();
    publish(&caller, &id, "two", group("3000")).unwrap();
    caller.unpublish(&id, "one").unwrap();
    caller.unpublish(&id, "two").unwrap();
    install(&program, b"#!/bin/sh\nexit 1\n");
    for pod in ["one", "two"] {
        let refused = publish(&caller, &id, pod, group("4000")).unwrap_err();
        assert!(refused.message().contains("ended before it served"), "{refused:?}");
    }
    install(&program, &fs::read(volume_binary()).unwrap());
    publish(&caller, &id, "one", flags(&[])).unwrap();
    assert_eq!(group_of(caller.target_path("one").join("file")), 3000, "of the last publish that succeeded");
    caller.unpublish(&id, "one").unwrap();
    install(&program, b"#!/bin/sh\nexit 1\n");
    publish(&caller, &id, "two", group("4000")).unwrap_err();
    caller.unstage(&id).unwrap();
    caller.unstage(&id).unwrap();
    let refused = publish(&caller, &id, "two", group("4000")).unwrap_err();
    assert!(refused.message().contains("is not staged"), "{refused:?}");
    fs::remove_dir_all(scene.kubelet_dir().join("pods/two")).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
