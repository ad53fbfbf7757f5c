//! Snapshots and clones of volumes that are written to meanwhile.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tests::csi::scene::{Caller, Scene, retried};
use tests::csi::snapshots::{
    REFLINKING, data, delete_snapshot, fill, from_snapshot, from_volume, scene_on, snapshot,
};

const POD: &str = "one";
const RECORD: usize = 8;

/// Appends numbered records to two files in turn, each pair as fast as the
/// volume takes it, until told to stop; how many pairs.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Writer {
    fn start(dir: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let [mut first, mut second] = ["first", "second"].map(|name| File::create(dir.join(name)).unwrap());
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    first.write_all(&number.to_le_bytes()).unwrap();
                    second.write_all(&number.to_le_bytes()).unwrap();
                    number += 1;
                }
                number
            }
        });
        Self { stop, thread }
    }

    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Records in each of the two files of a tree: whole ones, numbered without a gap.
fn records(dir: &Path) -> [u64; 2] {
    ["first", "second"].map(|name| {
        let content = fs::read(dir.join(name)).unwrap();
        assert_eq!(content.len() % RECORD, 0, "a torn record in {name}");
        let numbers = content.chunks(RECORD).map(|record| u64::from_le_bytes(record.try_into().unwrap()));
        assert!(numbers.eq(0..(content.len() / RECORD) as u64), "a gap in {name}");
        (content.len() / RECORD) as u64
    })
}

/// One moment: the second file never has what the first has not, nor lags by more than a pair.
#[track_caller]
fn assert_one_moment(dir: &Path) -> u64 {
    let [first, second] = records(dir);
    assert!(first == second || first == second + 1, "{first} records in the first, {second} in the second");
    second
}

fn served(scene: &Scene, caller: &Caller) -> String {
    let volume = caller.create_named("pvc-1").unwrap();
    caller.stage(&volume).unwrap();
    caller.publish(&volume, POD).unwrap();
    assert_eq!(scene.daemons().len(), 1);
    volume
}

fn take_away(scene: &Scene, caller: &Caller, volume: &str) {
    caller.unpublish(volume, POD).unwrap();
    caller.unstage(volume).unwrap();
    caller.delete(volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_snapshot_under_writes_is_one_moment() {
    for kind in REFLINKING {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let volume = served(&scene, &caller);
        let mounted = caller.target_path(POD);
        // Between the two files of the pair lies all this, whatever the order of the copy.
        fill(&mounted, 400);
        let writer = Writer::start(&mounted);
        let mut last = 0;
        for n in 0..5 {
            let made = retried(&scene, "snapshot", || snapshot(&caller, &format!("snap-{n}"), &volume));
            assert!(made.ready_to_use);
            let pairs = assert_one_moment(&data(&scene, &made.snapshot_id));
            assert!(pairs > last, "the writer went on after the cut before: {pairs} pairs, {last} before");
            last = pairs;
            delete_snapshot(&caller, &made.snapshot_id).unwrap();
        }
        let clone = retried(&scene, "clone", || caller.create(from_volume("pvc-2", &volume)));
        assert_one_moment(&data(&scene, &clone.volume_id));
        caller.delete(&clone.volume_id).unwrap();
        let pairs = writer.end();
        assert_eq!(records(&mounted), [pairs, pairs], "no write was lost to a pause");
        take_away(&scene, &caller, &volume);
    }
}

#[test]
fn the_pause_is_reported() {
    let scene = scene_on(REFLINKING[1]);
    let caller = scene.caller();
    let volume = served(&scene, &caller);
    fill(&caller.target_path(POD), 100);
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &volume));
    let record =
        fs::read_to_string(scene.sandbox.path("state/snapshots").join(format!("{}.json", made.snapshot_id)));
    let record: serde_json::Value = serde_json::from_str(&record.unwrap()).unwrap();
    let pause_us = record["pause_us"].as_u64().unwrap();
    assert!((1..30_000_000).contains(&pause_us), "{record}");
    assert!(scene.log().contains(&format!("pause_us={pause_us}")), "the log tells it too");
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    take_away(&scene, &caller, &volume);
}

#[test]
fn a_restored_volume_is_served_with_what_the_snapshot_held() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume = served(&scene, &caller);
    fs::write(caller.target_path(POD).join("file"), "at the cut").unwrap();
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &volume));
    fs::write(caller.target_path(POD).join("file"), "after it").unwrap();
    let restored = caller.create(from_snapshot("pvc-2", &made.snapshot_id)).unwrap().volume_id;
    caller.stage(&restored).unwrap();
    caller.publish(&restored, "two").unwrap();
    assert_eq!(fs::read(caller.target_path("two").join("file")).unwrap(), b"at the cut");
    fs::write(caller.target_path("two").join("file"), "of the restored").unwrap();
    assert_eq!(fs::read(caller.target_path(POD).join("file")).unwrap(), b"after it");
    caller.unpublish(&restored, "two").unwrap();
    caller.unstage(&restored).unwrap();
    caller.delete(&restored).unwrap();
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    take_away(&scene, &caller, &volume);
}
