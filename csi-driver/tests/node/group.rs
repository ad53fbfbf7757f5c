//! Groups that own a volume.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proto::csi::VolumeCapability;
use proto::csi::volume_capability::MountVolume;
use tonic::Code;

use crate::access::{capability_of, flags, publish, stage};
use crate::scene::{Flags, Scene};

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

#[test]
fn another_group_is_refused_while_one_is_in_use() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, group("2000")).unwrap();
    publish(&caller, &id, "one", group("2000")).unwrap();
    let refused = stage(&caller, &id, group("3000")).unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused:?}");
    let refused = publish(&caller, &id, "two", group("3000")).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("2000") && refused.message().contains("3000"), "{refused:?}");
    assert!(!caller.target_path("two").exists());
    publish(&caller, &id, "three", flags(&[])).expect("a pod without a group takes the volume as it is");
    let refused = stage(&caller, &id, group("staff")).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    caller.take_down(&id, &["one", "two", "three"]).unwrap();
    scene.assert_nothing_left();
}
