//! Mount flags, and publishing twice.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::SystemTime;

use nix::errno::Errno;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use proto::csi::{NodeStageVolumeRequest, VolumeCapability};
use tests::csi::scene::{Caller, Flags, Scene, capability, mounted, text};
use tests::csi::snapshots::data;
use tonic::{Code, Status};

pub(crate) fn capability_of(mount: MountVolume) -> VolumeCapability {
    VolumeCapability { access_type: Some(AccessType::Mount(mount)), ..capability(Mode::MultiNodeMultiWriter) }
}

pub(crate) fn flags(flags: &[&str]) -> VolumeCapability {
    let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    capability_of(MountVolume { mount_flags, ..Default::default() })
}

pub(crate) fn stage(caller: &Caller, volume_id: &str, how: VolumeCapability) -> Result<(), Status> {
    let path = caller.staging_path(volume_id);
    if mounted(&path).is_none() {
        fs::create_dir_all(&path).unwrap();
    }
    let request = NodeStageVolumeRequest {
        volume_id: volume_id.into(),
        staging_target_path: text(&path),
        volume_capability: Some(how),
        ..Default::default()
    };
    caller.node(async |mut n| n.node_stage_volume(request).await).map(drop)
}

pub(crate) fn publish(
    caller: &Caller,
    volume_id: &str,
    pod: &str,
    how: VolumeCapability,
) -> Result<(), Status> {
    caller.publish_with(volume_id, pod, |request| request.volume_capability = Some(how))
}

fn options(path: &Path) -> Vec<String> {
    mounted(path).unwrap().options.split(',').map(str::to_owned).collect()
}

#[track_caller]
fn assert_options(path: &Path, wanted: &[&str]) {
    let found = options(path);
    for option in wanted {
        assert!(found.iter().any(|o| o == option), "{option} of {}: {found:?}", path.display());
    }
}

/// The access time of a file that was changed after it was read, and is read again.
fn access_time_after_a_read(pod: &Path) -> SystemTime {
    let (path, long_ago) = (pod.join("file"), SystemTime::UNIX_EPOCH);
    fs::write(&path, "content").unwrap();
    fs::File::open(&path).unwrap().set_times(fs::FileTimes::new().set_accessed(long_ago)).unwrap();
    // Not from the kernel's pages.
    let unused = fs::File::open(&path).unwrap();
    rustix::fs::fadvise(&unused, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    fs::read(&path).unwrap();
    fs::metadata(&path).unwrap().accessed().unwrap()
}

#[test]
fn noatime_and_relatime_of_a_stage_reach_the_files() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    for (name, option, changes) in [("pvc-1", "noatime", false), ("pvc-2", "relatime", true)] {
        let id = caller.create_named(name).unwrap();
        stage(&caller, &id, flags(&[option])).unwrap();
        publish(&caller, &id, "one", flags(&[option])).unwrap();
        let read_at = access_time_after_a_read(&caller.target_path("one"));
        assert_eq!(read_at > SystemTime::UNIX_EPOCH, changes, "{option}: {read_at:?}");
        caller.unpublish(&id, "one").unwrap();
    }
}

/// The access times, in the pool, of a file and of its directory that were long ago, once a pod has
/// read both.
fn access_times_in_the_pool_after_reads(pod: &Path, in_pool: &Path) -> [SystemTime; 2] {
    let directory = pod.join("d");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("file"), "content").unwrap();
    let opened = [directory.join("file"), directory.clone()].map(|path| fs::File::open(path).unwrap());
    for file in &opened {
        file.set_times(fs::FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH)).unwrap();
    }
    // Not from the kernel's pages.
    rustix::fs::fadvise(&opened[0], 0, None, rustix::fs::Advice::DontNeed).unwrap();
    fs::read(directory.join("file")).unwrap();
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    ["d/file", "d"].map(|name| fs::metadata(in_pool.join(name)).unwrap().accessed().unwrap())
}

#[test]
fn nodiratime_of_a_stage_reaches_the_directories_in_the_pool_and_not_the_files() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    for (name, options, changes) in [
        ("pvc-1", &["nodiratime"][..], false),
        ("pvc-2", &["relatime", "nodiratime"], false),
        ("pvc-3", &["relatime"], true),
    ] {
        let id = caller.create_named(name).unwrap();
        stage(&caller, &id, flags(options)).unwrap();
        publish(&caller, &id, "one", flags(options)).unwrap();
        let found = access_times_in_the_pool_after_reads(&caller.target_path("one"), &data(&scene, &id));
        let [file, directory] = found.map(|time| time > SystemTime::UNIX_EPOCH);
        assert_eq!(directory, changes, "the directory, with {options:?}: {found:?}");
        // Without relatime, the pool's mount says what becomes of files.
        assert!(file || !options.contains(&"relatime"), "the file, with {options:?}: {found:?}");
        caller.take_down(&id, &["one"]).unwrap();
    }
    scene.assert_nothing_left();
}

fn mounts_at(path: &Path) -> usize {
    linux::mountinfo::read().unwrap().iter().filter(|mount| mount.mount_point == path).count()
}

#[test]
fn a_read_only_publish_with_noexec_is_that() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, flags(&["noatime"])).unwrap();
    assert_options(&caller.staging_path(&id), &["rw", "nosuid", "nodev", "noatime"]);
    publish(&caller, &id, "one", flags(&["noatime"])).unwrap();
    publish(&caller, &id, "two", flags(&["ro", "noexec", "nodiratime"])).unwrap();
    let [writable, refusing] = ["one", "two"].map(|pod| caller.target_path(pod));
    assert_options(&writable, &["rw", "nosuid", "nodev", "noatime"]);
    assert_options(&refusing, &["ro", "nosuid", "nodev", "noexec", "nodiratime", "noatime"]);

    fs::write(writable.join("run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(writable.join("run"), fs::Permissions::from_mode(0o755)).unwrap();
    let run = |dir: &Path| scene.sandbox.command(&dir.join("run")).status();
    assert!(run(&writable).unwrap().success());
    assert_eq!(run(&refusing).unwrap_err().raw_os_error(), Some(Errno::EACCES as i32));
    let refused = fs::write(refusing.join("file"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

/// kubelet repeats both: after its own restart, and on requiresRepublish.
#[test]
fn republish_makes_no_second_mount() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let how = || flags(&["noexec", "ro"]);
    stage(&caller, &id, how()).unwrap();
    publish(&caller, &id, "one", how()).unwrap();
    let paths = [caller.staging_path(&id), caller.target_path("one")];
    let seen = |paths: &[std::path::PathBuf; 2]| {
        paths.each_ref().map(|path| (mounted(path).unwrap().mount_id, mounts_at(path)))
    };
    let (daemons, before) = (scene.daemons(), seen(&paths));
    let written = state_files(&scene);
    for _ in 0..10 {
        stage(&caller, &id, how()).unwrap();
        publish(&caller, &id, "one", how()).unwrap();
    }
    assert_eq!(seen(&paths), before);
    assert_eq!(scene.daemons(), daemons);
    assert_eq!(state_files(&scene), written, "nothing is journaled");
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// All files of the driver's state, with when each was last changed in any way.
fn state_files(scene: &Scene) -> Vec<(std::path::PathBuf, i64, i64)> {
    use std::os::unix::fs::MetadataExt;
    let (mut dirs, mut files) = (vec![scene.sandbox.path("state")], Vec::new());
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let found = fs::symlink_metadata(&path).unwrap();
            if found.is_dir() {
                dirs.push(path);
            } else {
                files.push((path, found.ctime(), found.ctime_nsec()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn an_incompatible_republish_is_already_exists() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    stage(&caller, &id, flags(&[])).unwrap();
    publish(&caller, &id, "one", flags(&["noexec"])).unwrap();
    for (other, named) in
        [(flags(&["noexec", "ro"]), "read-only"), (flags(&[]), "with"), (flags(&["noatime"]), "noatime")]
    {
        let refused = publish(&caller, &id, "one", other).unwrap_err();
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused:?}");
        assert!(refused.message().contains("noexec") && refused.message().contains(named), "{refused:?}");
    }
    assert_options(&caller.target_path("one"), &["rw", "noexec"]);
    // `sync` is the file system's: a publish cannot have it alone.
    let refused = publish(&caller, &id, "two", flags(&["sync"])).unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists, "{refused:?}");
    assert!(!caller.target_path("two").exists());
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}
