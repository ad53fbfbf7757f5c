//! A disk with no free byte or no free inode, under the pool and the state directory:
//! deletion needs neither.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use proto::csi::ListSnapshotsRequest;
use tests::Sandbox;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{
    BLOCKING_COPY, data, delete_snapshot, get_snapshot, list_snapshots, of_size, snapshot_with,
    wait_until_ready, with,
};
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};

use crate::copies::write_large;

const MI: i64 = 1 << 20;
/// More than the small files that the rest of a disk takes once no large one fits.
const MOST_FILES: u32 = 200_000;

/// Takes every byte, to the last that a file can have.
fn take_bytes(dir: &Path) {
    let mut file = File::options().append(true).create(true).open(dir.join("filler")).unwrap();
    let mut piece = vec![1; 1 << 20];
    while piece.len() >= 512 {
        if file.write_all(&piece).is_err() {
            piece.truncate(piece.len() / 2);
        }
    }
    // Btrfs gives space to files when they are written to the disk.
    let _full = file.sync_all();
    take_inodes(dir, &[1; 4000]);
}

fn take_inodes(dir: &Path, content: &[u8]) {
    let fillers = dir.join("fillers");
    let _there_or_full = fs::create_dir(&fillers);
    let taken = fs::read_dir(&fillers).map_or(0, Iterator::count);
    for n in taken.. {
        if fs::write(fillers.join(n.to_string()), content).is_err() {
            return;
        }
        assert!(n < MOST_FILES as usize, "{} has no end", dir.display());
    }
}

/// Takes the metadata of Btrfs by names, which no file's size tells.
fn take_names(dir: &Path) {
    let fillers = dir.join("names");
    let _there_or_full = fs::create_dir(&fillers);
    let taken = fs::read_dir(&fillers).map_or(0, Iterator::count);
    for n in taken.. {
        // A new file after some names: one inode has 65,535 of them.
        let of = fillers.join(format!("file-{}", n / 10_000));
        let made = if of.exists() {
            fs::hard_link(&of, fillers.join(format!("{n:0>200}")))
        } else {
            File::create(&of).map(drop)
        };
        if made.is_err() {
            return;
        }
        assert!(n < 10 * MOST_FILES as usize, "{} has no end", dir.display());
    }
}

fn deletion_succeeds(kind: FileSystem, fill: impl Fn(&Path)) {
    deletion_of_copies_succeeds(kind, &[BLOCKING_COPY], |_| {}, fill);
}

fn deletion_of_copies_succeeds(
    kind: FileSystem,
    parameters: &[(&str, &str)],
    prepare: impl Fn(&Path),
    fill: impl Fn(&Path),
) {
    let sandbox = Sandbox::new();
    let disks = ["pool", "state"].map(|name| LoopMount::new(&sandbox, name, kind, IMAGE_BYTES).unwrap());
    disks.iter().for_each(|disk| prepare(disk.dir()));
    let mut scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let fill = || disks.iter().for_each(|disk| fill(disk.dir()));
    let [first, second] = ["pvc-1", "pvc-2"].map(|name| {
        let request = with(of_size(create_request(name), 8 * MI, 0), parameters);
        caller.create(request).unwrap().volume_id
    });
    let snapshots = ["snap-1", "snap-2"].map(|name| {
        // The copy before has the volume's lock for some time after it is ready.
        let made = retried(&scene, "snapshot", || snapshot_with(&caller, name, &first, parameters));
        wait_until_ready(&caller, &made.snapshot_id);
        made.snapshot_id
    });
    fill();
    delete_snapshot(&caller, &snapshots[0]).unwrap();
    fill();
    caller.delete(&first).unwrap();
    // One that has not yet seen what the pool can do.
    scene.kill_driver();
    fill();
    scene.start_driver();
    delete_snapshot(&caller, &snapshots[1]).unwrap();
    fill();
    caller.delete(&second).unwrap();
    assert!(list_snapshots(&caller, ListSnapshotsRequest::default()).unwrap().entries.is_empty());
    for dir in ["pool/volumes", "pool/snapshots", "pool/trash", "state/volumes", "state/snapshots"] {
        let dir = scene.sandbox.path(dir);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "{}", dir.display());
    }
    drop(scene);
}

#[test]
fn deletion_succeeds_without_a_free_byte_on_ext4() {
    deletion_succeeds(FileSystem::Ext4, take_bytes);
}

#[test]
fn deletion_succeeds_without_a_free_byte_on_xfs() {
    deletion_succeeds(FileSystem::Xfs, take_bytes);
}

#[test]
fn deletion_succeeds_without_a_free_inode() {
    deletion_succeeds(FileSystem::Ext4, |dir| take_inodes(dir, b""));
}

#[test]
fn deletion_succeeds_without_room_for_a_name_on_btrfs() {
    deletion_succeeds(FileSystem::Btrfs, |dir| {
        take_bytes(dir);
        take_names(dir);
    });
}

#[test]
fn deletion_succeeds_without_a_free_byte_on_btrfs() {
    deletion_succeeds(FileSystem::Btrfs, take_bytes);
}

/// The volumes are subvolumes with quota groups, and the snapshots are read-only ones.
#[test]
fn deletion_of_subvolumes_succeeds_without_room_for_a_name() {
    let enable = |dir: &Path| tests::subvolume::enable_quotas(dir).unwrap();
    deletion_of_copies_succeeds(FileSystem::Btrfs, &[], enable, |dir| {
        take_bytes(dir);
        take_names(dir);
    });
}

/// The journal's own disk is full when a copy ends.
#[test]
fn a_copy_whose_end_cannot_be_written_down_has_failed_and_takes_no_space() {
    let sandbox = Sandbox::new();
    let disk = LoopMount::new(&sandbox, "state", FileSystem::Ext4, IMAGE_BYTES).unwrap();
    let scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let volume = caller.create(with(create_request("pvc-1"), &[BLOCKING_COPY])).unwrap().volume_id;
    write_large(&scene, &volume);
    take_bytes(disk.dir());
    // The copy may be over before the disk is full: then another one.
    let met = (0..20).any(|_| {
        free_bytes(disk.dir());
        // The copy before has the volume's lock for some time after its end.
        let made =
            retried(&scene, "snapshot", || snapshot_with(&caller, "snap-1", &volume, &[BLOCKING_COPY]));
        take_bytes(disk.dir());
        let look = || match get_snapshot(&caller, &made.snapshot_id) {
            Ok(snapshot) if !snapshot.ready_to_use => anyhow::bail!("{snapshot:?}"),
            ended => Ok(ended),
        };
        let ended = tests::eventually("the copy ends", TIMEOUT, look).unwrap();
        let has_failed = match ended {
            Ok(_ready) => false,
            Err(failed) => {
                assert!(failed.message().contains("No space left"), "{failed}");
                // It is removed while the failure is shown already.
                let gone = || {
                    anyhow::ensure!(!data(&scene, &made.snapshot_id).exists());
                    Ok(())
                };
                tests::eventually("its data are removed", TIMEOUT, gone).unwrap();
                true
            }
        };
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        has_failed
    });
    assert!(met, "no copy was under way long enough");
    retried(&scene, "unstage", || caller.unstage(&volume));
    caller.delete(&volume).unwrap();
    drop(scene);
}

/// The journal's own directory becomes read-only while a copy runs, as after an error of its disk.
#[test]
fn a_copy_whose_end_the_journal_refuses_has_failed_and_takes_no_space() {
    let sandbox = Sandbox::new();
    let entries = sandbox.make_dir("state/snapshots").unwrap();
    linux::mount::bind(&entries, &entries).unwrap();
    let read_only = |read_only| {
        let flags = linux::mount::MountFlags { read_only, ..Default::default() };
        // EBUSY: the journal has a file there open for writing.
        let remount = || Ok(linux::mount::remount_bind(&entries, flags)?);
        tests::eventually("the directory is remounted", TIMEOUT, remount).unwrap();
    };
    let scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let volume = caller.create(with(create_request("pvc-1"), &[BLOCKING_COPY])).unwrap().volume_id;
    write_large(&scene, &volume);
    // The copy may be over before the directory is read-only: then another one.
    let met = (0..20).any(|_| {
        let made =
            retried(&scene, "snapshot", || snapshot_with(&caller, "snap-1", &volume, &[BLOCKING_COPY]));
        read_only(true);
        let look = || match get_snapshot(&caller, &made.snapshot_id) {
            Ok(snapshot) if !snapshot.ready_to_use => anyhow::bail!("{snapshot:?}"),
            ended => Ok(ended),
        };
        let ended = tests::eventually("the copy ends", TIMEOUT, look).unwrap();
        let has_failed = ended.is_err_and(|failed| {
            assert!(failed.message().contains("Read-only file system"), "{failed}");
            // It is removed while the failure is shown already.
            let gone = || {
                anyhow::ensure!(!data(&scene, &made.snapshot_id).exists());
                Ok(())
            };
            tests::eventually("its data are removed", TIMEOUT, gone).unwrap();
            true
        });
        read_only(false);
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        has_failed
    });
    assert!(met, "no copy was under way long enough");
    retried(&scene, "delete", || caller.delete(&volume));
    linux::mount::unmount(&entries, linux::mount::UnmountMode::Detach).unwrap();
    drop(scene);
}

/// Gives back some of what [`take_bytes`] took.
fn free_bytes(dir: &Path) {
    let filler = File::options().write(true).open(dir.join("filler")).unwrap();
    filler.set_len(filler.metadata().unwrap().len() - (1 << 20)).unwrap();
}
