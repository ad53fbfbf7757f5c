//! Snapshots, restores and clones of volumes that nobody serves.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;

use proto::csi::ListSnapshotsRequest;
use tests::csi::scene::{GI, create_request};
use tests::csi::snapshots::{
    REFLINKING, data, delete_snapshot, fill, from_snapshot, from_volume, get_snapshot, ids, list_snapshots,
    of_size, scene_on, snapshot, volume_data,
};
use tests::loop_device::FileSystem;

#[test]
fn a_snapshot_outlives_its_volume_and_what_is_made_of_it_outlives_the_snapshot() {
    for kind in REFLINKING {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let volume = caller.create(create_request("pvc-1")).unwrap();
        let root = volume_data(&scene, &volume);
        fill(&root, 50);
        fs::write(root.join("file"), "at the cut").unwrap();
        std::os::unix::fs::chown(root.join("file"), Some(1000), Some(2000)).unwrap();

        let made = snapshot(&caller, "snap-1", &volume.volume_id).unwrap();
        assert!(made.ready_to_use);
        assert_eq!((made.size_bytes, made.source_volume_id.as_str()), (GI, volume.volume_id.as_str()));
        assert!(made.creation_time.unwrap().seconds > 1_600_000_000);
        assert_eq!(snapshot(&caller, "snap-1", &volume.volume_id).unwrap(), made, "repeated");
        assert_eq!(get_snapshot(&caller, &made.snapshot_id).unwrap(), made);

        fs::write(root.join("file"), "after it").unwrap();
        caller.delete(&volume.volume_id).unwrap();
        let restore = from_snapshot("pvc-2", &made.snapshot_id);
        let restored = caller.create(restore.clone()).unwrap();
        assert_eq!(restored.content_source, restore.volume_content_source);
        assert_eq!(restored.capacity_bytes, GI);
        assert_eq!(caller.create(restore).unwrap(), restored, "repeated");

        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
        let root = volume_data(&scene, &restored);
        assert_eq!(fs::read(root.join("file")).unwrap(), b"at the cut");
        assert_eq!(fs::metadata(root.join("file")).unwrap().uid(), 1000);
        assert_eq!(fs::read(root.join("d3/f43")).unwrap(), [43; 4096]);
        caller.delete(&restored.volume_id).unwrap();
        scene.assert_nothing_left();
    }
}

#[test]
fn a_clone_is_independent_of_its_source() {
    for kind in REFLINKING {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let source = caller.create(create_request("pvc-1")).unwrap();
        let root = volume_data(&scene, &source);
        fs::write(root.join("file"), vec![1; 1 << 20]).unwrap();
        let request = of_size(from_volume("pvc-2", &source.volume_id), 2 * GI, 0);
        let clone = caller.create(request.clone()).unwrap();
        assert_eq!(clone.content_source, request.volume_content_source);
        assert_eq!(clone.capacity_bytes, 2 * GI);
        let copy = volume_data(&scene, &clone);
        fs::write(copy.join("file"), "of the clone").unwrap();
        assert_eq!(fs::read(root.join("file")).unwrap(), vec![1; 1 << 20]);
        fs::write(root.join("new"), "of the source").unwrap();
        assert!(!copy.join("new").exists());
        caller.delete(&source.volume_id).unwrap();
        assert_eq!(fs::read(copy.join("file")).unwrap(), b"of the clone");
        caller.delete(&clone.volume_id).unwrap();
        scene.assert_nothing_left();
    }
}

/// Without it, overwriting a block that a clone shares takes 128 KiB that nobody has reserved.
#[test]
fn all_directories_of_a_clone_on_xfs_copy_single_blocks() {
    let scene = scene_on(FileSystem::Xfs);
    let caller = scene.caller();
    let source = caller.create(create_request("pvc-1")).unwrap();
    fs::create_dir_all(volume_data(&scene, &source).join("a/b")).unwrap();
    let clone = caller.create(from_volume("pvc-2", &source.volume_id)).unwrap();
    for directory in ["", "a", "a/b"] {
        let path = volume_data(&scene, &clone).join(directory);
        let shown = Command::new("xfs_io").args(["-r", "-c", "cowextsize"]).arg(&path).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.starts_with("[4096] "), "{directory:?}: {shown}");
    }
    caller.delete(&source.volume_id).unwrap();
    caller.delete(&clone.volume_id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_link_out_of_the_pool_is_not_followed_by_copy_or_delete() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let outside = scene.sandbox.make_dir("outside").unwrap();
    fs::write(outside.join("kept"), "kept").unwrap();
    let volume = caller.create_named("pvc-1").unwrap();
    symlink(&outside, data(&scene, &volume).join("link")).unwrap();
    let made = snapshot(&caller, "snap-1", &volume).unwrap().snapshot_id;
    let copied = data(&scene, &made).join("link");
    assert_eq!(fs::read_link(&copied).unwrap(), outside);
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&volume).unwrap();
    assert_eq!(fs::read(outside.join("kept")).unwrap(), b"kept");

    // The snapshot's whole tree replaced by a link: nothing of the other side is touched or copied.
    let volume = caller.create_named("pvc-2").unwrap();
    let made = snapshot(&caller, "snap-2", &volume).unwrap().snapshot_id;
    let tree = data(&scene, &made);
    fs::remove_dir(&tree).unwrap();
    symlink(&outside, &tree).unwrap();
    let status = caller.create(from_snapshot("pvc-3", &made)).unwrap_err();
    assert!(status.message().contains("Not a directory"), "{status:?}");
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&volume).unwrap();
    assert_eq!(fs::read(outside.join("kept")).unwrap(), b"kept");
    fs::remove_dir_all(&outside).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn snapshots_are_listed_in_pages_and_by_id_and_by_source() {
    let scene = scene_on(REFLINKING[1]);
    let caller = scene.caller();
    let volumes = ["pvc-1", "pvc-2"].map(|name| caller.create_named(name).unwrap());
    let mut all = Vec::new();
    for n in 0..5 {
        all.push(snapshot(&caller, &format!("snap-{n}"), &volumes[n % 2]).unwrap().snapshot_id);
    }
    let list = |change: &dyn Fn(&mut ListSnapshotsRequest)| {
        let mut request = ListSnapshotsRequest::default();
        change(&mut request);
        list_snapshots(&caller, request).unwrap()
    };
    let by_source = list(&|r| r.source_volume_id = volumes[0].clone());
    let mut of_first: Vec<String> = all.iter().step_by(2).cloned().collect();
    of_first.sort();
    assert_eq!(ids(&by_source), of_first);
    assert_eq!(ids(&list(&|r| r.snapshot_id = all[3].clone())), [all[3].clone()]);
    assert_eq!(ids(&list(&|r| r.snapshot_id = "snap-of-nobody".into())), [""; 0]);
    assert_eq!(ids(&list(&|r| r.source_volume_id = "vol-of-nobody".into())), [""; 0]);

    all.sort();
    let first = list(&|r| r.max_entries = 2);
    assert_eq!(ids(&first), all[..2]);
    // What the token names goes: the next page begins where it would have.
    delete_snapshot(&caller, &all[1]).unwrap();
    let rest = list(&|r| r.starting_token = first.next_token.clone());
    assert_eq!((ids(&rest), rest.next_token.as_str()), (all[2..].to_vec(), ""));
    for id in &all {
        delete_snapshot(&caller, id).unwrap();
    }
    volumes.iter().for_each(|id| caller.delete(id).unwrap());
    scene.assert_nothing_left();
}
