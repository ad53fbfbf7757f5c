//! kill -9 of the driver at every step of a snapshot and of a restore that can be
//! seen from outside: a retry completes, and delete leaves nothing.

use std::fs;
use std::path::Path;

use proto::csi::{GetCapacityRequest, ListSnapshotsRequest};
use tests::as_soon_as;
use tests::csi::scene::{Scene, TIMEOUT, retried};
use tests::csi::snapshots::{
    REFLINKING, content, data, delete_snapshot, fill, from_snapshot, list_snapshots, scene_on, snapshot,
};

const FILES: usize = 300;

/// Runs `call` until `is_moment`, or to its end, and kills the driver; whether the moment was met.
fn killed_in<T: Send + 'static>(
    scene: &mut Scene,
    call: impl FnOnce() -> T + Send + 'static,
    is_moment: impl Fn(&Path) -> bool,
) -> bool {
    let dir = scene.sandbox.dir().to_owned();
    let running = std::thread::spawn(call);
    let mut is_met = false;
    as_soon_as("the moment or the end", TIMEOUT, || {
        is_met = is_moment(&dir);
        is_met || running.is_finished()
    })
    .unwrap();
    scene.kill_driver();
    // Answered before the kill, or interrupted by it.
    drop(running.join().unwrap());
    scene.start_driver();
    is_met
}

fn assert_whole(root: &Path) {
    for n in [0, 77, FILES - 1] {
        let file = root.join(format!("d{}/f{n}", n % 20));
        assert_eq!(fs::read(&file).unwrap(), content(n), "{}", file.display());
    }
}

/// Kills at the moment until it was met: some are shorter than a time slice.
#[track_caller]
fn killed_in_snapshot_when(is_moment: impl Fn(&Path) -> bool) {
    const ATTEMPTS: usize = 100;
    let mut scene = scene_on(REFLINKING[1]);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fill(&data(&scene, &volume), FILES);
    let is_met = (0..ATTEMPTS).any(|_| {
        let (by, of) = (caller.clone(), volume.clone());
        let is_met = killed_in(&mut scene, move || snapshot(&by, "s", &of), &is_moment);
        let made = retried(&scene, "snapshot", || snapshot(&caller, "s", &volume));
        assert!(made.ready_to_use);
        assert_whole(&data(&scene, &made.snapshot_id));
        let (by, id) = (caller.clone(), made.snapshot_id.clone());
        // And in its deletion, as far as the call has come when its name is gone.
        let gone = made.snapshot_id.clone();
        killed_in(
            &mut scene,
            move || delete_snapshot(&by, &id),
            move |dir| !dir.join("pool/snapshots").join(&gone).exists(),
        );
        retried(&scene, "delete", || delete_snapshot(&caller, &made.snapshot_id));
        is_met
    });
    assert!(is_met, "the moment was not seen in {ATTEMPTS} attempts");
    retried(&scene, "delete", || caller.delete(&volume));
    scene.assert_nothing_left();
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

fn journal_says(dir: &Path, of: &str, words: &str) -> bool {
    let Ok(files) = fs::read_dir(dir.join("state").join(of)) else { return false };
    files.flatten().any(|file| fs::read_to_string(file.path()).is_ok_and(|text| text.contains(words)))
}

#[test]
fn killed_when_the_journal_names_the_snapshot() {
    killed_in_snapshot_when(|dir| journal_says(dir, "snapshots", "\"begun\""));
}

#[test]
fn killed_when_the_snapshot_is_being_copied() {
    killed_in_snapshot_when(|dir| entries(&dir.join("pool/incoming")) > 0);
}

#[test]
fn killed_when_the_snapshot_is_in_its_place() {
    killed_in_snapshot_when(|dir| entries(&dir.join("pool/snapshots")) > 0);
}

#[test]
fn killed_when_the_journal_says_that_the_snapshot_is_ready() {
    killed_in_snapshot_when(|dir| journal_says(dir, "snapshots", "\"ready\""));
}

#[track_caller]
fn killed_in_restore_when(is_moment: impl Fn(&Path) -> bool) {
    const ATTEMPTS: usize = 100;
    let mut scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fill(&data(&scene, &volume), FILES);
    let made = snapshot(&caller, "s", &volume).unwrap().snapshot_id;
    caller.delete(&volume).unwrap();
    let is_met = (0..ATTEMPTS).any(|_| {
        let (by, request) = (caller.clone(), from_snapshot("pvc-2", &made));
        let is_met = killed_in(&mut scene, move || by.create(request), &is_moment);
        let restored = retried(&scene, "restore", || caller.create(from_snapshot("pvc-2", &made)));
        assert_whole(&data(&scene, &restored.volume_id));
        retried(&scene, "delete", || caller.delete(&restored.volume_id));
        is_met
    });
    assert!(is_met, "the moment was not seen in {ATTEMPTS} attempts");
    retried(&scene, "delete", || delete_snapshot(&caller, &made));
    scene.assert_nothing_left();
}

#[test]
fn killed_when_the_journal_names_the_restored_volume() {
    killed_in_restore_when(|dir| journal_says(dir, "volumes", "\"filled\": false"));
}

#[test]
fn killed_when_the_restored_volume_is_being_filled() {
    killed_in_restore_when(|dir| entries(&dir.join("pool/incoming")) > 0);
}

#[test]
fn killed_when_the_restored_volume_is_in_its_place() {
    killed_in_restore_when(|dir| entries(&dir.join("pool/volumes")) > 0);
}

/// Its claim may be gone: then no call comes that would finish it or delete it.
#[test]
fn a_restore_that_was_killed_leaves_nothing_of_its_volume_and_its_claim() {
    let mut scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fill(&data(&scene, &volume), FILES);
    let made = snapshot(&caller, "s", &volume).unwrap().snapshot_id;
    let free = || {
        let asked = caller.controller(async |mut c| c.get_capacity(GetCapacityRequest::default()).await);
        asked.unwrap().into_inner().available_capacity
    };
    let before = free();
    let restored = caller.create(from_snapshot("pvc-2", &made)).unwrap().volume_id;
    scene.kill_driver();
    let file = scene.journal_path(&restored);
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\"filled\": true"), "{text}");
    fs::write(&file, text.replace("\"filled\": true", "\"filled\": false")).unwrap();
    scene.start_driver();
    assert_eq!(free(), before);
    assert!(!file.exists() && !data(&scene, &restored).exists());
    let restored = caller.create(from_snapshot("pvc-2", &made)).unwrap().volume_id;
    assert_whole(&data(&scene, &restored));
    delete_snapshot(&caller, &made).unwrap();
    for id in [volume, restored] {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
}

/// As a deletion leaves it that is killed on a disk where its mark had no room.
#[test]
fn killed_in_a_deletion_without_a_mark() {
    let mut scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    fill(&data(&scene, &volume), FILES);
    let [kept, lost] = ["kept", "lost"].map(|name| snapshot(&caller, name, &volume).unwrap().snapshot_id);
    let restored = caller.create(from_snapshot("pvc-2", &kept)).unwrap().volume_id;
    scene.kill_driver();
    for place in [format!("snapshots/{lost}"), format!("volumes/{restored}")] {
        fs::remove_dir_all(scene.sandbox.path("pool").join(place)).unwrap();
    }
    scene.start_driver();
    let listed = list_snapshots(&caller, ListSnapshotsRequest::default()).unwrap().entries;
    let ready = listed.into_iter().filter_map(|entry| entry.snapshot);
    let mut ready: Vec<_> = ready.map(|snapshot| (snapshot.snapshot_id, snapshot.ready_to_use)).collect();
    ready.sort_by_key(|(_, is_ready)| *is_ready);
    assert_eq!(ready, [(lost.clone(), false), (kept.clone(), true)]);
    let error = caller.create(from_snapshot("pvc-3", &lost)).unwrap_err();
    assert!(error.message().contains("its data is not in the pool"), "{error}");
    // No empty volume in its place.
    let again = caller.create(from_snapshot("pvc-2", &kept)).unwrap().volume_id;
    assert_whole(&data(&scene, &again));
    delete_snapshot(&caller, &lost).unwrap();
    delete_snapshot(&caller, &kept).unwrap();
    for volume in [volume, again] {
        caller.delete(&volume).unwrap();
    }
    scene.assert_nothing_left();
}
