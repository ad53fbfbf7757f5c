//! `hawser-csi doctor`: what it finds, that it changes nothing, and what `--repair` does.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use linux::mount::{FuseMountOptions, FuseName, MountFlags};
use linux::rootfs::MountsBelow;
use serde_json::Value;
use tests::csi::scene::{Flags, NODE, Scene, create_request, mounted, retried};
use tests::csi::snapshots::{
    delete_snapshot, from_volume, scene_on, scene_with_quota_groups, snapshot, with,
};
use tests::loop_device::FileSystem;
use tests::subvolume;

use crate::boot;

const NOBODYS: &str = "0123456789abcdef0123456789abcdef";

/// Runs the doctor with the driver's flags: its exit code, and what it printed to each side.
fn run(scene: &Scene, options: &[&str]) -> (i32, String, String) {
    run_with(scene, "state", options)
}

/// With a state directory of this name in the sandbox.
fn run_with(scene: &Scene, state_dir: &str, options: &[&str]) -> (i32, String, String) {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    let path = |name: &str| scene.sandbox.path(name);
    command.arg("doctor").args(options).args(["--node-id", NODE, "--log", "error"]);
    command.arg("--kubelet-dir").arg(path("k")).arg("--pool").arg(path("pool"));
    command.arg("--state-dir").arg(path(state_dir)).arg("--run-dir").arg(path("run"));
    let done = command.args(Flags::process().0).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
}

/// What is found, as `what` and `object`, in order.
pub(crate) fn found(scene: &Scene, options: &[&str]) -> (i32, Vec<[String; 2]>) {
    let (code, printed, said) = run(scene, &[options, &["-o", "json"]].concat());
    let rows: Vec<Value> = serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{e}: {printed}{said}"));
    let text = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
    (code, rows.iter().map(|row| [text(row, "what"), text(row, "object")]).collect())
}

fn expected(rows: &[(&str, &str)]) -> Vec<[String; 2]> {
    rows.iter().map(|(what, object)| [(*what).to_owned(), (*object).to_owned()]).collect()
}

/// A mount that looks like a volume's, of a journal that is lost.
fn mount_nobodys(target: &Path) -> OwnedFd {
    let device = linux::mount::open_fuse_device().unwrap();
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: true, default_permissions: true };
    let source = format!("vol-{NOBODYS}");
    linux::mount::mount_fuse(
        &device,
        FuseName { source: source.as_str(), subtype: "hawser" },
        target,
        options,
    )
    .unwrap();
    device
}

#[test]
fn a_healthy_node_has_no_findings_and_a_running_driver_is_not_repaired_under() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.bring_up("pvc-1", &["one"]).unwrap();
    assert_eq!(found(&scene, &[]), (0, vec![]));
    let (code, printed, said) = run(&scene, &[]);
    assert_eq!((code, said.as_str()), (0, ""));
    let (first, limits) = printed.split_once('\n').unwrap();
    assert_eq!(first, "Nothing is left to be repaired.");
    assert!(limits.starts_with("The daemons, not the kernel, keep new volumes of the pool "), "{limits}");
    let (code, printed, said) = run(&scene, &["--repair"]);
    assert_eq!((code, printed.as_str()), (2, ""));
    assert!(said.contains("a driver runs with --state-dir"), "{said}");
    // Nor with a directory that is not the driver's.
    let other = scene.sandbox.make_dir("other").unwrap();
    for name in ["volumes", "snapshots"] {
        fs::create_dir(other.join(name)).unwrap();
    }
    let (code, printed, said) = run_with(&scene, "other", &["--repair"]);
    assert_eq!((code, printed.as_str()), (2, ""));
    assert!(said.contains("give the driver's own --state-dir"), "{said}");
    fs::remove_dir_all(&other).unwrap();
    caller.take_down(&volume, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn volumes_whose_quota_is_off_are_found_with_the_command_that_turns_it_on() {
    let mut scene = scene_with_quota_groups(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let pool = scene.sandbox.path("pool");
    let limits = |scene: &Scene| run(scene, &[]).1.lines().last().unwrap().to_owned();
    for is_running in [true, false] {
        if !is_running {
            scene.kill_driver();
        }
        assert_eq!(found(&scene, &[]), (0, vec![]));
        assert_eq!(limits(&scene), format!("The kernel limits new volumes of the pool {}.", pool.display()));
        subvolume::disable_quotas(&pool).unwrap();
        assert_eq!(found(&scene, &[]), (1, expected(&[("volume is not limited", &volume)])));
        let command = format!("run \"btrfs quota enable {}\".", pool.display());
        assert!(limits(&scene).ends_with(&command), "{}", limits(&scene));
        subvolume::enable_quotas(&pool).unwrap();
    }
    scene.start_driver();
    scene.caller().delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// As after a restore by files. The steps are those that the doctor prints.
#[test]
fn a_volume_whose_data_are_a_copy_is_found_with_the_steps_that_limit_it_again() {
    let mut scene = scene_with_quota_groups(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let dir = scene.sandbox.path("pool/volumes").join(&volume);
    fs::write(dir.join("data/f"), "kept").unwrap();
    assert_eq!(found(&scene, &[]), (0, vec![]));
    scene.kill_driver();
    let shell = |script: &str| {
        let done = std::process::Command::new("sh").args(["-ec", script]).current_dir(&dir).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    shell("cp -a data copy && rm -r data && mv copy data");
    for options in [&["--repair"][..], &[]] {
        assert_eq!(found(&scene, options), (1, expected(&[("volume cannot be limited", &volume)])));
    }
    scene.start_driver();
    let refused = caller.stage(&volume).unwrap_err();
    assert!(refused.message().contains("is not a subvolume"), "{refused:?}");
    let (_, printed, _) = run(&scene, &["-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&printed).unwrap();
    shell(rows[0]["found"].as_str().unwrap().split('"').nth(1).unwrap());
    assert_eq!(found(&scene, &[]), (0, vec![]));
    caller.stage(&volume).unwrap();
    assert_eq!(fs::read(dir.join("data/f")).unwrap(), b"kept");
    caller.unstage(&volume).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn volumes_from_before_the_quotas_are_named_with_the_steps_that_limit_them() {
    let mut scene = scene_on(FileSystem::Btrfs);
    let caller = scene.caller();
    let old = caller.create_named("pvc-old").unwrap();
    let counted = with(create_request("pvc-counted"), &[("capacity", "daemon")]);
    let counted = caller.create(counted).unwrap().volume_id;
    assert_eq!(found(&scene, &[]), (0, vec![]));
    subvolume::enable_quotas(&scene.sandbox.path("pool")).unwrap();
    let wanted = (1, expected(&[("volume is not limited by the kernel", &old)]));
    for is_running in [true, false] {
        if !is_running {
            scene.kill_driver();
            assert_eq!(found(&scene, &["--repair"]), wanted);
        }
        assert_eq!(found(&scene, &[]), wanted);
        let (_, table, _) = run(&scene, &[]);
        assert!(table.contains("stop its pods, call CreateVolume with it as source"), "{table}");
    }
    scene.start_driver();

    let clone = retried(&scene, "clone", || caller.create(from_volume("pvc-new", &old))).volume_id;
    assert_eq!(found(&scene, &[]), wanted);
    caller.delete(&old).unwrap();
    assert_eq!(found(&scene, &[]), (0, vec![]));
    for volume in [clone, counted] {
        caller.delete(&volume).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn what_is_found_is_left_alone_without_repair_and_repaired_with_it() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let [kept, deleting, half, unfilled] =
        ["pvc-kept", "pvc-deleting", "pvc-half", "pvc-unfilled"].map(|n| caller.create_named(n).unwrap());
    caller.stage(&kept).unwrap();
    caller.publish(&kept, "one").unwrap();
    caller.stage(&half).unwrap();
    caller.publish(&half, "two").unwrap();
    scene.kill_driver();
    let edit = |file: &Path, from: &str, to: &str| {
        let text = fs::read_to_string(file).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(file, text.replace(from, to)).unwrap();
    };
    edit(&scene.journal_path(&deleting), "\"deleting\": false", "\"deleting\": true");
    edit(&scene.journal_path(&unfilled), "\"filled\": true", "\"filled\": false");
    edit(&boot::journal_path(&scene, &half), "\"published\":true", "\"published\":false");
    let stray = scene.sandbox.make_dir("k/stray").unwrap();
    drop(mount_nobodys(&stray));
    let left = scene.sandbox.make_dir(&format!("pool/incoming/vol-{NOBODYS}")).unwrap();
    scene.sandbox.make_dir(&format!("run/{NOBODYS}")).unwrap();

    let wanted = expected(&[
        ("deletion is not finished", &deleting),
        ("left in the pool", left.to_str().unwrap()),
        ("publish is half done", &half),
        ("unknown mount", stray.to_str().unwrap()),
        ("unused dial directory", NOBODYS),
        ("volume is not filled", &unfilled),
    ]);
    for _look in 0..2 {
        assert_eq!(found(&scene, &[]), (1, wanted.clone()));
    }
    assert!(left.exists() && mounted(&stray).is_some() && mounted(&caller.target_path("two")).is_some());
    let (_, table, _) = run(&scene, &[]);
    assert!(table.starts_with("WHAT ") && table.contains("unmount it: its daemon has ended"), "{table}");

    assert_eq!(found(&scene, &["--repair"]), (0, vec![]));
    assert!(!left.exists() && mounted(&stray).is_none() && mounted(&caller.target_path("two")).is_none());
    assert!(!scene.journal_path(&unfilled).exists());
    // What is well goes on through it all.
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    fs::remove_dir(&stray).unwrap();

    scene.start_driver();
    caller.delete(&deleting).unwrap();
    for (id, pod) in [(&kept, "one"), (&half, "two")] {
        caller.unpublish(id, pod).unwrap();
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn what_somebody_must_decide_is_told_and_stays() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let empty = caller.create_named("pvc-2").unwrap();
    caller.stage(&volume).unwrap();
    caller.publish(&volume, "one").unwrap();
    scene.kill_driver();
    scene.kill_daemon();
    let torn = scene.journal_path(&format!("vol-{NOBODYS}"));
    fs::write(&torn, "{").unwrap();
    let staging = scene.sandbox.make_dir("k/plugins/kubernetes.io/csi/csi.hawser.dev/stale").unwrap();
    let gone = format!("vol-{}", NOBODYS.replace('0', "f"));
    fs::write(staging.join("vol_data.json"), format!(r#"{{"volumeHandle":"{gone}"}}"#)).unwrap();
    let stored = |id: &str| scene.sandbox.path("pool/volumes").join(id);
    fs::rename(stored(&empty), stored(&gone)).unwrap();
    let wanted = expected(&[
        ("daemon is dead", &volume),
        ("journal entry is unreadable", &format!("vol-{NOBODYS}")),
        ("unknown data", &gone),
        ("unused staging directory", staging.to_str().unwrap()),
        ("volume has no data", &empty),
    ]);
    assert_eq!(found(&scene, &[]), (1, wanted.clone()));
    assert_eq!(found(&scene, &["--repair"]), (1, wanted));
    fs::remove_file(&torn).unwrap();
    fs::remove_dir_all(&staging).unwrap();
    fs::rename(stored(&gone), stored(&empty)).unwrap();

    scene.start_driver();
    caller.delete(&empty).unwrap();
    caller.take_down(&volume, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_snapshot_without_data_is_found_and_with_its_data_again_repaired() {
    let mut scene = scene_on(FileSystem::Btrfs);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let made = snapshot(&caller, "snap-1", &volume).unwrap().snapshot_id;
    scene.kill_driver();
    let [place, aside] = [format!("pool/snapshots/{made}"), "pool/aside".to_owned()];
    let [place, aside] = [place, aside].map(|name| scene.sandbox.path(&name));
    fs::rename(&place, &aside).unwrap();
    for options in [&[][..], &["--repair"], &[]] {
        assert_eq!(found(&scene, options), (1, expected(&[("snapshot has no data", &made)])));
    }
    // A copy of the directory has begun.
    fs::create_dir(&place).unwrap();
    assert_eq!(found(&scene, &["--repair"]), (1, expected(&[("snapshot has no data", &made)])));
    fs::remove_dir(&place).unwrap();
    fs::rename(&aside, &place).unwrap();
    assert_eq!(found(&scene, &[]), (1, expected(&[("snapshot was lost", &made)])));
    assert_eq!(found(&scene, &["--repair"]), (0, vec![]));
    scene.start_driver();
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn mounts_in_another_view_of_kubelets_directory_are_not_found() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    caller.stage(&volume).unwrap();
    caller.publish(&volume, "one").unwrap();
    let view = scene.sandbox.make_dir("elsewhere").unwrap();
    let tree = linux::rootfs::clone_tree(&scene.sandbox.path("k"), MountsBelow::With).unwrap();
    linux::rootfs::attach(&tree, linux::rootfs::open_root(&view).unwrap(), &view).unwrap();
    let copies = linux::mountinfo::read().unwrap();
    let copies = copies
        .iter()
        .filter(|mount| mount.mount_point.starts_with(&view) && mount.fs_type.starts_with("fuse"));
    assert_eq!(copies.count(), 2, "globalmount and the target are seen there, too");
    assert_eq!(found(&scene, &[]), (0, vec![]));
    // The same mounts outside of such a view are still found.
    let stray = scene.sandbox.make_dir("stray").unwrap();
    let tree = linux::rootfs::clone_tree(&caller.target_path("one"), MountsBelow::Without).unwrap();
    linux::rootfs::attach(&tree, linux::rootfs::open_root(&stray).unwrap(), &stray).unwrap();
    assert_eq!(found(&scene, &[]), (1, expected(&[("unknown mount", stray.to_str().unwrap())])));
    for path in [&stray, &view] {
        linux::mount::unmount(path, linux::mount::UnmountMode::Detach).unwrap();
        fs::remove_dir(path).unwrap();
    }
    caller.take_down(&volume, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet mounts a part of a volume (subPath) itself, and unmounts it before it unpublishes the volume.
#[test]
fn a_part_of_a_volume_is_found_only_if_it_is_not_of_a_pod_that_the_volume_serves_now() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.bring_up("pvc-1", &["one"]).unwrap();
    let mount_part = |pod: &str| {
        let part = scene.sandbox.make_dir(&format!("k/pods/{pod}/volume-subpaths/pv/main/0")).unwrap();
        linux::mount::bind(&caller.target_path("one").join("dir"), &part).unwrap();
        part
    };
    let unmount = |pod: &str, part: &Path| {
        linux::mount::unmount(part, linux::mount::UnmountMode::Plain).unwrap();
        fs::remove_dir_all(scene.sandbox.path(&format!("k/pods/{pod}/volume-subpaths"))).unwrap();
    };
    let unknown = |part: &Path| ("unknown mount", part.to_str().unwrap().to_owned());
    fs::create_dir(caller.target_path("one").join("dir")).unwrap();
    let part = mount_part("one");
    assert_eq!(found(&scene, &[]), (0, vec![]));
    // Of a pod for which the volume is not published.
    let left = mount_part("two");
    let (what, object) = unknown(&left);
    assert_eq!(found(&scene, &[]), (1, expected(&[(what, &object)])));
    unmount("two", &left);
    fs::remove_dir(scene.sandbox.path("k/pods/two")).unwrap();
    // Of a connection that has ended.
    scene.kill_daemon();
    retried(&scene, "publish", || caller.publish(&volume, "three"));
    let (what, object) = unknown(&part);
    let wanted = [("target of a daemon that died", volume.as_str()), (what, &object)];
    assert_eq!(found(&scene, &[]), (1, expected(&wanted)));
    unmount("one", &part);
    caller.unpublish(&volume, "one").unwrap();
    caller.take_down(&volume, &["three"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn what_another_driver_serves_and_what_may_be_in_use_stays() {
    let mut scene = Scene::start(Flags::process());
    let nobodys = scene.sandbox.make_dir("k/nobodys").unwrap();
    let staged = "k/plugins/kubernetes.io/csi/other.example.com/1/globalmount";
    let staged = scene.sandbox.make_dir(staged).unwrap();
    let published = scene.sandbox.make_dir("k/pods/1/volumes/kubernetes.io~csi/pv/mount").unwrap();
    let data = format!(r#"{{"driverName":"other.example.com","volumeHandle":"vol-{NOBODYS}"}}"#);
    fs::write(published.with_file_name("vol_data.json"), data).unwrap();
    // As a kubelet that has the volume's name in the pod there.
    let part = scene.sandbox.make_dir("k/pods/1/volume-subpaths/data/main/0").unwrap();
    let mut connections: Vec<OwnedFd> =
        [&nobodys, &staged, &published, &part].map(|path| mount_nobodys(path)).into();
    scene.kill_driver();
    // Its daemon may be stopped only: it does not answer.
    let wanted = expected(&[("unknown mount", nobodys.to_str().unwrap())]);
    assert_eq!(found(&scene, &["--repair"]), (1, wanted));
    // With their daemons gone, too, the other driver's mounts are not looked at.
    connections.clear();
    assert_eq!(found(&scene, &["--repair"]), (0, vec![]));
    assert!(mounted(&nobodys).is_none());
    for path in [&staged, &published, &part] {
        assert!(mounted(path).is_some(), "{}", path.display());
        linux::mount::unmount(path, linux::mount::UnmountMode::Plain).unwrap();
    }
    for dir in ["k/nobodys", "k/plugins/kubernetes.io", "k/pods/1"] {
        fs::remove_dir_all(scene.sandbox.path(dir)).unwrap();
    }
    scene.start_driver();
    scene.assert_nothing_left();
}

#[test]
fn a_target_of_a_daemon_that_died_is_told_when_another_pod_is_served_again() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.kill_daemon();
    retried(&scene, "publish", || caller.publish(&volume, "two"));
    assert_eq!(found(&scene, &[]), (1, expected(&[("target of a daemon that died", &volume)])));
    caller.unpublish(&volume, "one").unwrap();
    assert_eq!(found(&scene, &[]), (0, vec![]));
    caller.take_down(&volume, &["two"]).unwrap();
    scene.assert_nothing_left();
}
