//! Volumes that a quota group of Btrfs limits: each is a subvolume of the pool.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use proto::csi::{CapacityRange, ControllerExpandVolumeRequest};
use tests::csi::data_path;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{
    assert_refused, data, delete_snapshot, from_snapshot, from_volume, of_size, scene_on,
    scene_with_quota_groups, snapshot, with,
};
use tests::loop_device::FileSystem;
use tests::{eventually, subvolume};
use tonic::Code;

const MI: u64 = 1 << 20;
const POD: &str = "one";
/// The inode of each subvolume's root.
const SUBVOLUME: u64 = 256;
/// So many that Btrfs counts what it has cloned before the last one.
const FILES: usize = 4000;

fn create(caller: &Caller, name: &str, bytes: u64, parameters: &[(&str, &str)]) -> String {
    let request = with(of_size(create_request(name), bytes.try_into().unwrap(), 0), parameters);
    caller.create(request).unwrap().volume_id
}

fn expand(caller: &Caller, volume_id: &str, bytes: u64) {
    let request = ControllerExpandVolumeRequest {
        volume_id: volume_id.into(),
        capacity_range: Some(CapacityRange { required_bytes: bytes.try_into().unwrap(), limit_bytes: 0 }),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_expand_volume(request).await).unwrap();
}

fn up(caller: &Caller, volume: &str) -> std::path::PathBuf {
    caller.stage(volume).unwrap();
    caller.publish(volume, POD).unwrap();
    caller.target_path(POD)
}

fn down(caller: &Caller, volume: &str) {
    caller.unpublish(volume, POD).unwrap();
    caller.unstage(volume).unwrap();
}

/// What fits into a new file, and the errno of the first write that does not.
fn fill(path: &Path, most: u64) -> (u64, Option<i32>) {
    data_path::fill(path, most).unwrap()
}

/// Total and used bytes.
fn statfs(path: &Path) -> (u64, u64) {
    let fs = nix::sys::statvfs::statvfs(path).unwrap();
    (fs.blocks() * fs.fragment_size(), (fs.blocks() - fs.blocks_free()) * fs.fragment_size())
}

fn policies(scene: &Scene, volume: &str) -> (String, String) {
    let record: serde_json::Value = serde_json::from_str(&scene.journal(volume)).unwrap();
    let text = |name: &str| record["policies"][name].as_str().unwrap().to_owned();
    (text("data_path"), text("capacity"))
}

#[test]
fn a_volume_never_exceeds_its_size_shows_its_use_and_grows_while_it_is_used() {
    is_limited(&[], "passthrough", Errno::EDQUOT);
}

#[test]
fn a_volume_whose_daemon_writes_is_limited_alike_and_is_full_like_any_disk() {
    is_limited(&[("dataPath", "daemon")], "daemon", Errno::ENOSPC);
}

fn is_limited(parameters: &[(&str, &str)], way: &str, full: Errno) {
    let scene = scene_with_quota_groups(Flags::process_with_keeper());
    let caller = scene.caller();
    let volume = create(&caller, "pvc-1", 32 * MI, parameters);
    assert_eq!(policies(&scene, &volume), (way.to_owned(), "kernel".to_owned()));
    let root = data(&scene, &volume);
    assert_eq!(subvolume::group(&root).unwrap().1, Some(32 * MI));

    let mounted = up(&caller, &volume);
    let metrics = scene.daemon_metrics(&volume);
    match way {
        "passthrough" => data_path::ensure_it_passes(&metrics, &mounted).unwrap(),
        _ => data_path::ensure_daemon_answers(&metrics, &mounted).unwrap(),
    }
    assert_eq!(statfs(&mounted).0, 32 * MI);
    // Where data pass the daemon by, a file that takes its way has another errno.
    let fill_up = |name: &str| match way {
        "passthrough" => data_path::fill_passing(&metrics, &mounted.join(name), 64 * MI).unwrap(),
        _ => fill(&mounted.join(name), 64 * MI),
    };
    let (written, refusal) = fill_up("data");
    assert_eq!(refusal, Some(full as i32), "after {written} bytes");
    assert!(written > 24 * MI && written <= 32 * MI, "{written}");
    assert!(subvolume::group(&root).unwrap().0 <= 32 * MI);
    let is_shown = |total: u64, least: u64| {
        eventually("statfs shows the use", TIMEOUT, || {
            let (shown, used) = statfs(&mounted);
            anyhow::ensure!(shown == total && used >= least && used <= total, "{used} of {shown}");
            Ok(())
        })
        .unwrap();
    };
    is_shown(32 * MI, written);
    let usage = caller.stats(&volume, &mounted).unwrap().usage;
    assert_eq!(usage[0].total, i64::try_from(32 * MI).unwrap());
    assert!(usage[0].used >= i64::try_from(written).unwrap(), "{usage:?}");

    expand(&caller, &volume, 64 * MI);
    assert_eq!(subvolume::group(&root).unwrap().1, Some(64 * MI));
    assert_eq!(statfs(&mounted).0, 64 * MI);
    assert_eq!(fill(&mounted.join("more"), 16 * MI), (16 * MI, None));

    // Another daemon shows the same, and is limited all the same. The volume's user waits for it.
    scene.sandbox.switch_fuse_guard_off();
    scene.kill_daemon();
    is_shown(64 * MI, written + 15 * MI);
    assert_eq!(fill_up("rest").1, Some(full as i32));
    fs::remove_file(mounted.join("data")).unwrap();
    is_shown(64 * MI, 0);
    // The driver may still record the takeover.
    retried(&scene, "unpublish", || caller.unpublish(&volume, POD));
    caller.unstage(&volume).unwrap();
    caller.delete(&volume).unwrap();
    assert_eq!(subvolume::list(&scene.sandbox.path("pool")).unwrap(), Vec::<String>::new());
    scene.assert_nothing_left();
}

#[test]
fn a_pool_without_quotas_counts_by_daemons_and_names_the_command_that_changes_this() {
    for (kind, command) in [
        (FileSystem::Btrfs, "run \"btrfs quota enable "),
        (FileSystem::Ext4, "run \"tune2fs -O quota,project /dev/loop"),
        (FileSystem::Xfs, "mount it with the option prjquota"),
    ] {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let volume = create(&caller, "pvc-1", 32 * MI, &[]);
        assert_eq!(policies(&scene, &volume), ("daemon".to_owned(), "daemon".to_owned()));
        for (name, value) in [("capacity", "kernel"), ("dataPath", "passthrough")] {
            let request = with(of_size(create_request("pvc-2"), 1 << 20, 0), &[(name, value)]);
            let refused = caller.create(request).unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
            let words = format!("parameters.{name} {value:?}: the kernel cannot limit it");
            assert!(refused.message().starts_with(&words), "{refused:?}");
            assert!(refused.message().contains(command), "{refused:?}");
        }
        let both = with(create_request("pvc-2"), &[("dataPath", "passthrough"), ("capacity", "kernel")]);
        assert_refused(caller.create(both), Code::FailedPrecondition, ", or choose capacity none");
        caller.delete(&volume).unwrap();
        scene.assert_nothing_left();
    }
}

#[test]
fn a_volume_from_before_the_quotas_stays_as_it_is() {
    let scene = scene_on(FileSystem::Btrfs);
    let caller = scene.caller();
    let pool = scene.sandbox.path("pool");
    let old = create(&caller, "pvc-1", 32 * MI, &[]);
    subvolume::enable_quotas(&pool).unwrap();
    let mounted = up(&caller, &old);
    assert_eq!(fill(&mounted.join("data"), 64 * MI).1, Some(Errno::ENOSPC as i32));
    assert_eq!(subvolume::list(&pool).unwrap(), Vec::<String>::new());
    // Its clone is limited by the kernel, and none of the two shares a name with the other.
    fs::hard_link(mounted.join("data"), mounted.join("link")).unwrap();
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &old)).snapshot_id;
    let new =
        caller.create(of_size(from_snapshot("pvc-2", &made), (64 * MI).try_into().unwrap(), 0)).unwrap();
    let new = new.volume_id;
    assert_eq!(policies(&scene, &new).1, "kernel");
    let names = |root: &Path| {
        let mut names: Vec<_> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&data(&scene, &new)), ["data", "link"]);
    let modified = |id: &str| fs::metadata(data(&scene, id)).unwrap().modified().unwrap();
    assert_eq!(modified(&new), modified(&made));
    let (used, limit) = subvolume::group(&data(&scene, &new)).unwrap();
    assert!(used > 24 * MI && used < 40 * MI, "{used}");
    assert_eq!(limit, Some(64 * MI));

    // And the other way round.
    let counted = with(from_volume("pvc-3", &new), &[("capacity", "daemon")]);
    let counted = caller.create(of_size(counted, (64 * MI).try_into().unwrap(), 0)).unwrap().volume_id;
    assert_eq!(names(&data(&scene, &counted)), ["data", "link"]);
    assert_eq!(subvolume::list(&pool).unwrap(), [format!("volumes/{new}/data")]);
    down(&caller, &old);
    delete_snapshot(&caller, &made).unwrap();
    for volume in [old, new, counted] {
        caller.delete(&volume).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn a_volume_with_more_inodes_than_a_daemon_allows_is_cloned_for_one_that_has_room() {
    let scene = scene_with_quota_groups(Flags::process());
    let caller = scene.caller();
    let volume = create(&caller, "pvc-1", 8 * MI, &[]);
    let root = data(&scene, &volume);
    (0..FILES).for_each(|n| fs::write(root.join(format!("file-{n}")), "").unwrap());
    let request = with(from_volume("pvc-2", &volume), &[("capacity", "daemon")]);
    let clone = caller.create(of_size(request, (32 * MI).try_into().unwrap(), 0)).unwrap().volume_id;
    assert_eq!(fs::read_dir(data(&scene, &clone)).unwrap().count(), FILES);
    for id in [volume, clone] {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
}

/// Copied by files, and cut by the file system, where the data of the source pass its daemon by.
#[test]
fn a_volume_without_a_limit_is_copied_into_one_with_a_limit_only_if_it_has_room() {
    for way in ["daemon", "passthrough"] {
        let scene = scene_with_quota_groups(Flags::process_with_keeper());
        let caller = scene.caller();
        let volume = create(&caller, "pvc-1", 8 * MI, &[("dataPath", way), ("capacity", "none")]);
        let root = data(&scene, &volume);
        assert_eq!(fs::metadata(&root).unwrap().ino() == SUBVOLUME, way == "passthrough");
        fs::write(root.join("data"), vec![7; (32 * MI).try_into().unwrap()]).unwrap();
        let made = snapshot(&caller, "snap-1", &volume).unwrap().snapshot_id;
        for source in [from_snapshot("pvc-2", &made), from_volume("pvc-2", &volume)] {
            let limited = |bytes: u64| {
                let source = with(source.clone(), &[("capacity", "kernel")]);
                caller.create(of_size(source, bytes.try_into().unwrap(), 0))
            };
            assert_refused(limited(8 * MI), Code::Internal, "Disk quota exceeded");
            let stored = |part| fs::read_dir(scene.sandbox.path(part)).unwrap().count();
            assert_eq!([stored("pool/volumes"), stored("pool/incoming")], [1, 0], "{way}");
            let copy = limited(64 * MI).unwrap().volume_id;
            assert_eq!(fs::metadata(data(&scene, &copy).join("data")).unwrap().len(), 32 * MI);
            // What has a limit has been kept within it, with its metadata.
            let request = from_volume("pvc-3", &copy);
            let again = caller.create(request).unwrap().volume_id;
            for id in [copy, again] {
                caller.delete(&id).unwrap();
            }
        }
        delete_snapshot(&caller, &made).unwrap();
        caller.delete(&volume).unwrap();
        scene.assert_nothing_left();
    }
}

/// The kernel counts metadata too, so the copy takes more than the volume's size.
#[test]
fn a_full_volume_is_restored_and_cloned_at_its_own_size() {
    let scene = scene_on(FileSystem::Btrfs);
    let caller = scene.caller();
    let old = create(&caller, "pvc-1", 32 * MI, &[]);
    let root = data(&scene, &old);
    fs::write(root.join("data"), vec![7; (32 * MI - (64 << 10)).try_into().unwrap()]).unwrap();
    (0..FILES).for_each(|n| fs::write(root.join(format!("file-{n}")), "").unwrap());
    subvolume::enable_quotas(&scene.sandbox.path("pool")).unwrap();
    let made = snapshot(&caller, "snap-1", &old).unwrap().snapshot_id;
    for (name, source) in [("pvc-2", from_snapshot("pvc-2", &made)), ("pvc-3", from_volume("pvc-3", &old))] {
        let new = caller.create(of_size(source, (32 * MI).try_into().unwrap(), 0)).unwrap().volume_id;
        let root = data(&scene, &new);
        let (used, limit) = subvolume::group(&root).unwrap();
        assert_eq!(limit, Some(32 * MI), "{name}");
        assert!(used > 32 * MI, "{name}: {used} bytes are no more than its size");
        assert_eq!(fs::read_dir(&root).unwrap().count(), FILES + 1, "{name}");
        let mounted = up(&caller, &new);
        let refused = fs::write(mounted.join("more"), "").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ENOSPC as i32), "{name}");
        fs::remove_file(mounted.join("data")).unwrap();
        // Btrfs counts it until its next commit.
        eventually("the removed file is not counted", TIMEOUT, || {
            nix::unistd::syncfs(fs::File::open(&root)?)?;
            let (used, _) = subvolume::group(&root)?;
            anyhow::ensure!(used < 24 * MI, "{used}");
            Ok(())
        })
        .unwrap();
        assert_eq!(fill(&mounted.join("other"), 8 * MI), (8 * MI, None), "{name}");
        down(&caller, &new);
        caller.delete(&new).unwrap();
    }
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&old).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn snapshots_are_cut_by_the_file_system_and_their_volumes_have_limits_of_their_own() {
    let scene = scene_with_quota_groups(Flags::process());
    let caller = scene.caller();
    let volume = create(&caller, "pvc-1", 32 * MI, &[]);
    let mounted = up(&caller, &volume);
    assert_eq!(fill(&mounted.join("data"), 16 * MI), (16 * MI, None));
    fs::write(mounted.join("file"), "at the cut").unwrap();
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &volume));
    fs::write(mounted.join("file"), "after it").unwrap();
    let cut = data(&scene, &made.snapshot_id);
    assert_eq!(fs::read(cut.join("file")).unwrap(), b"at the cut");
    let refused = fs::write(cut.join("file"), "").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::EROFS as i32));
    let used: u64 = made.size_bytes.try_into().unwrap();
    assert_eq!(used, 32 * MI, "the size of a volume for it");
    down(&caller, &volume);
    // The snapshot outlives its volume.
    caller.delete(&volume).unwrap();

    let request = of_size(from_snapshot("pvc-2", &made.snapshot_id), (40 * MI).try_into().unwrap(), 0);
    let restored = caller.create(request).unwrap().volume_id;
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    let mounted = up(&caller, &restored);
    assert_eq!(fs::read(mounted.join("file")).unwrap(), b"at the cut");
    let (total, used) = statfs(&mounted);
    assert!(total == 40 * MI && used >= 16 * MI, "{used} of {total}");
    let (written, refusal) = fill(&mounted.join("more"), 64 * MI);
    assert_eq!(refusal, Some(Errno::ENOSPC as i32));
    assert!(written > 16 * MI && written <= 24 * MI, "{written}: what it shares counts in full");

    let request = of_size(from_volume("pvc-3", &restored), (64 * MI).try_into().unwrap(), 0);
    let clone = retried(&scene, "clone", || caller.create(request.clone())).volume_id;
    assert_eq!(subvolume::group(&data(&scene, &clone)).unwrap().1, Some(64 * MI));
    assert_eq!(fs::read(data(&scene, &clone).join("file")).unwrap(), b"at the cut");
    down(&caller, &restored);
    caller.delete(&restored).unwrap();
    caller.delete(&clone).unwrap();
    assert_eq!(subvolume::list(&scene.sandbox.path("pool")).unwrap(), Vec::<String>::new());
    scene.assert_nothing_left();
}

#[test]
fn subvolumes_that_a_killed_driver_left_are_removed_with_what_is_in_them() {
    let mut scene = scene_with_quota_groups(Flags::process());
    let pool = scene.sandbox.path("pool");
    scene.kill_driver();
    let id = |digit: &str| format!("vol-{}", digit.repeat(32));
    for (part, digit) in [("incoming", "1"), ("trash", "2"), ("trash", "3")] {
        let place = pool.join(part).join(id(digit));
        fs::create_dir(&place).unwrap();
        subvolume::create(&place.join("data")).unwrap();
        fs::write(place.join("data/file"), "content").unwrap();
    }
    // Made on the node, not through the volume.
    subvolume::create(&pool.join("trash").join(id("3")).join("data/inner")).unwrap();
    let place = pool.join("trash/left-1-0");
    fs::create_dir(&place).unwrap();
    subvolume::snapshot(&pool.join("trash").join(id("2")).join("data"), &place.join("data")).unwrap();
    scene.start_driver();
    eventually("the leftovers are gone", TIMEOUT, || {
        let left = subvolume::list(&pool)?;
        anyhow::ensure!(left.is_empty(), "{left:?}");
        for part in ["incoming", "trash"] {
            anyhow::ensure!(fs::read_dir(pool.join(part))?.count() == 0, "{part}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_volume_whose_quotas_were_turned_off_is_not_staged_without_its_limit() {
    let scene = scene_with_quota_groups(Flags::process());
    let caller = scene.caller();
    let pool = scene.sandbox.path("pool");
    let volume = create(&caller, "pvc-1", 32 * MI, &[]);
    subvolume::disable_quotas(&pool).unwrap();
    assert_refused(caller.stage(&volume), Code::FailedPrecondition, "run \"btrfs quota enable ");
    subvolume::enable_quotas(&pool).unwrap();
    assert_eq!(subvolume::group(&data(&scene, &volume)).unwrap().1, None);
    up(&caller, &volume);
    assert_eq!(subvolume::group(&data(&scene, &volume)).unwrap().1, Some(32 * MI));

    // While it is served.
    subvolume::disable_quotas(&pool).unwrap();
    subvolume::enable_quotas(&pool).unwrap();
    eventually("it has its limit again", TIMEOUT, || {
        let limit = subvolume::group(&data(&scene, &volume))?.1;
        anyhow::ensure!(limit == Some(32 * MI), "{limit:?}");
        Ok(())
    })
    .unwrap();
    down(&caller, &volume);
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn deleted_volumes_and_snapshots_leave_no_quota_groups() {
    tests::csi::snapshots::leaves_no_quota_groups().unwrap();
}
