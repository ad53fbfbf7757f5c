//! What a pod's process sees where a volume is not mounted: nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use linux::mount::{UnmountMode, unmount};
use tests::csi::scene::{Flags, Scene, mounted};

const SOMEBODY: u32 = 1000;

/// Whether a process of another user than root may list the directory, and write into it.
fn lets_in(scene: &Scene, dir: &Path) -> (bool, bool) {
    let succeeds = |program: &str, argument: &Path| {
        let mut command = scene.sandbox.command(Path::new(program));
        command.arg(argument).current_dir("/").uid(SOMEBODY).gid(SOMEBODY);
        command.output().unwrap().status.success()
    };
    (succeeds("ls", dir), succeeds("touch", &dir.join("by-somebody")))
}

#[test]
fn the_bare_directory_is_closed_to_everybody() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let (target, staging) = (caller.target_path("one"), caller.staging_path(&id));
    assert_eq!(lets_in(&scene, &target), (true, true), "the volume itself is open");

    // An operator, or the kernel's last rites for a container: the mount goes, the path stays.
    for path in [&target, &staging] {
        unmount(path, UnmountMode::Detach).unwrap();
        assert!(mounted(path).is_none());
        assert_eq!(lets_in(&scene, path), (false, false), "{}", path.display());
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o7777, 0, "{}", path.display());
    }
    // And whoever made the directories can remove them.
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet makes no target, but one that an earlier kubelet or driver left is closed too.
#[test]
fn a_target_that_was_left_open_is_closed_before_it_is_used() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let target = caller.target_path("one");
    fs::create_dir_all(&target).unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o755)).unwrap();
    caller.publish(&id, "one").unwrap();
    unmount(&target, UnmountMode::Plain).unwrap();
    assert_eq!(lets_in(&scene, &target), (false, false));
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet removes what a driver that does not come back left: with rmdir, and no more.
#[test]
fn a_crashed_drivers_target_can_be_removed_by_rmdir() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.kill_driver();
    let target = caller.target_path("one");
    unmount(&target, UnmountMode::Plain).unwrap();
    fs::remove_dir(&target).unwrap();
    scene.start_driver();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}
