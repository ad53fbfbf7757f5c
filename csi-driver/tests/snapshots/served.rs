//! Snapshots and clones of volumes that are written to meanwhile.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proto::csi::CreateVolumeRequest;
use tests::csi::data_path;
use tests::csi::scene::{Caller, Flags, GI, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{
    BLOCKING_COPY, REFLINKING, assert_refused, data, delete_snapshot, fill, from_snapshot, from_volume,
    of_size, scene_on, scene_on_with, scene_with_quota_groups, snapshot, wait_until_ready, with,
};
use tests::eventually;
use tests::loop_device::FileSystem;
use tonic::Code;

const POD: &str = "one";
const RECORD: usize = 8;

/// Appends numbered records to two files in turn, each pair as fast as the volume takes it, until
/// [`Self::end`], which returns the number of pairs.
struct Writer {
    stop: Arc<AtomicBool>,
    /// Pairs that are written.
    written: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Between {
    Nothing,
    /// The first file is synchronised before the record is added to the second.
    Sync,
}

impl Writer {
    fn start(dir: &Path, between: Between) -> Self {
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let [mut first, mut second] = ["first", "second"].map(|name| File::create(dir.join(name)).unwrap());
        let thread = std::thread::spawn({
            let (stop, written) = (stop.clone(), written.clone());
            move || {
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    first.write_all(&number.to_le_bytes()).unwrap();
                    if between == Between::Sync {
                        first.sync_data().unwrap();
                    }
                    second.write_all(&number.to_le_bytes()).unwrap();
                    number += 1;
                    written.store(number, Ordering::Relaxed);
                }
                number
            }
        });
        Self { stop, written, thread }
    }

    /// Waits until more than `pairs` are written, and returns how many are.
    fn goes_beyond(&self, pairs: u64) -> u64 {
        let look = || {
            let written = self.written.load(Ordering::Relaxed);
            anyhow::ensure!(written > pairs, "{written} pairs are written");
            Ok(written)
        };
        eventually("the writer goes on", TIMEOUT, look).unwrap()
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
    served_as(scene, caller, create_request("pvc-1"))
}

fn served_as(scene: &Scene, caller: &Caller, request: CreateVolumeRequest) -> String {
    let volume = caller.create(request).unwrap().volume_id;
    caller.stage(&volume).unwrap();
    caller.publish(&volume, POD).unwrap();
    assert_eq!(scene.daemons().len(), 1);
    volume
}

/// A file was written past the daemon. One for which the keeper answers too late takes the daemon's way.
fn ensure_one_has_passed(scene: &Scene, caller: &Caller, volume: &str) {
    data_path::ensure_it_passes(&scene.daemon_metrics(volume), &caller.target_path(POD)).unwrap();
}

fn take_away(scene: &Scene, caller: &Caller, volume: &str) {
    caller.unpublish(volume, POD).unwrap();
    caller.unstage(volume).unwrap();
    caller.delete(volume).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_snapshot_under_writes_is_one_moment() {
    let pools: [fn() -> Scene; 3] = [
        || scene_on(FileSystem::Btrfs),
        || scene_on(FileSystem::Xfs),
        || scene_with_quota_groups(Flags::process()),
    ];
    for scene in pools {
        let scene = scene();
        let caller = scene.caller();
        let volume = served(&scene, &caller);
        let mounted = caller.target_path(POD);
        // Between the two files of the pair lies all this, whatever the order of the copy.
        fill(&mounted, 400);
        let writer = Writer::start(&mounted, Between::Nothing);
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

/// Through the daemon, past it, and through the daemon later.
#[test]
fn what_is_synchronised_before_a_write_is_in_every_cut_that_has_the_write() {
    for (data_path, cache, flags) in [
        ("daemon", "false", Flags::process()),
        ("passthrough", "false", Flags::process_with_keeper()),
        ("daemon", "true", Flags::process_with_keeper()),
    ] {
        let scene = scene_with_quota_groups(flags);
        let caller = scene.caller();
        let request = with(create_request("pvc-1"), &[("dataPath", data_path), ("writebackCache", cache)]);
        let volume = served_as(&scene, &caller, request);
        let mounted = caller.target_path(POD);
        fill(&mounted, 100);
        let writer = Writer::start(&mounted, Between::Sync);
        let mut last = 0;
        let check = |id: &str, before: u64| {
            let [first, second] = records(&data(&scene, id));
            assert!(second <= first, "{data_path}: {first} records in the first, {second} in the second");
            assert!(before <= second, "{data_path}: {second} records, and {before} were written before");
            second
        };
        for n in 0..5 {
            let before = writer.goes_beyond(last);
            let made = retried(&scene, "snapshot", || snapshot(&caller, &format!("snap-{n}"), &volume));
            let pairs = check(&made.snapshot_id, before);
            last = pairs;
            delete_snapshot(&caller, &made.snapshot_id).unwrap();
        }
        let before = writer.goes_beyond(last);
        let clone = retried(&scene, "clone", || caller.create(from_volume("pvc-2", &volume))).volume_id;
        check(&clone, before);
        caller.delete(&clone).unwrap();
        let pairs = writer.end();
        assert_eq!(records(&mounted), [pairs, pairs]);
        take_away(&scene, &caller, &volume);
    }
}

/// Btrfs itself would leave out what is not on the disk yet, most often in a new subvolume.
#[test]
fn what_was_written_just_before_a_cut_is_in_it() {
    for (data_path, flags) in [("daemon", Flags::process()), ("passthrough", Flags::process_with_keeper())] {
        let scene = scene_with_quota_groups(flags);
        let caller = scene.caller();
        for n in 0..8 {
            let request = with(create_request(&format!("pvc-{n}")), &[("dataPath", data_path)]);
            let volume = served_as(&scene, &caller, request);
            let mounted = caller.target_path(POD);
            fill(&mounted, 100);
            let writer = Writer::start(&mounted, Between::Nothing);
            let before = writer.goes_beyond(0);
            let made = retried(&scene, "snapshot", || snapshot(&caller, &format!("snap-{n}"), &volume));
            let found = records(&data(&scene, &made.snapshot_id));
            assert!(found.iter().all(|found| *found >= before), "{data_path}, {n}: {found:?} of {before}");
            delete_snapshot(&caller, &made.snapshot_id).unwrap();
            writer.end();
            caller.unpublish(&volume, POD).unwrap();
            caller.unstage(&volume).unwrap();
            caller.delete(&volume).unwrap();
        }
        scene.assert_nothing_left();
    }
}

/// The kernel is made to send it, and the cut waits for the daemon's answers.
#[test]
fn what_was_written_to_the_writeback_cache_is_in_the_cut() {
    let scene = scene_with_quota_groups(Flags::process_with_keeper());
    let caller = scene.caller();
    let request = with(create_request("pvc-1"), &[("writebackCache", "true")]);
    let volume = served_as(&scene, &caller, request);
    let mounted = caller.target_path(POD);
    let large = vec![7; 48 << 20];
    let mut file = File::create(mounted.join("large")).unwrap();
    file.write_all(&large).unwrap();
    let writer = Writer::start(&mounted, Between::Nothing);
    let mut last = 0;
    for n in 0..5 {
        let before = writer.goes_beyond(last + 1000);
        let made = retried(&scene, "snapshot", || snapshot(&caller, &format!("snap-{n}"), &volume));
        let cut = data(&scene, &made.snapshot_id);
        assert!(fs::read(cut.join("large")).unwrap() == large, "cut {n}");
        let expected: Vec<u8> = (0..before).flat_map(u64::to_le_bytes).collect();
        for name in ["first", "second"] {
            let content = fs::read(cut.join(name)).unwrap();
            assert!(
                content.starts_with(&expected),
                "cut {n}: {name}: {} bytes of {before} pairs",
                content.len()
            );
        }
        last = before;
        delete_snapshot(&caller, &made.snapshot_id).unwrap();
    }
    drop(file);
    let pairs = writer.end();
    assert_eq!(records(&mounted), [pairs, pairs]);
    take_away(&scene, &caller, &volume);
}

/// A cut would lack what the volume could not take. The application learns of it by fsync(2).
#[test]
fn a_volume_that_cannot_take_what_was_written_has_no_cut() {
    let scene = scene_with_quota_groups(Flags::process_with_keeper());
    let caller = scene.caller();
    let class = [("writebackCache", "true"), ("capacity", "daemon")];
    let request = with(of_size(create_request("pvc-1"), 1 << 20, 0), &class);
    let volume = served_as(&scene, &caller, request);
    let mut file = File::create(caller.target_path(POD).join("file")).unwrap();
    file.write_all(&vec![7; 4 << 20]).unwrap();
    assert_refused(snapshot(&caller, "snap-1", &volume), Code::FailedPrecondition, "No space left on device");
    assert_eq!(file.sync_all().unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    drop(file);
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &volume));
    delete_snapshot(&caller, &made.snapshot_id).unwrap();
    take_away(&scene, &caller, &volume);
}

/// What the kernel has not sent would be lost with the daemon.
#[test]
fn a_volume_with_a_writeback_cache_needs_a_keeper() {
    let scene = scene_on(REFLINKING[0]);
    let caller = scene.caller();
    let volume =
        caller.create(with(create_request("pvc-1"), &[("writebackCache", "true")])).unwrap().volume_id;
    assert_refused(caller.stage(&volume), Code::FailedPrecondition, "writebackCache");
    caller.unstage(&volume).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// Copied file by file, a volume that is written to past the daemon would be of no one moment.
#[test]
fn a_copy_without_a_cut_is_refused_once_a_file_was_opened_for_writing_past_the_daemon() {
    let scene = scene_with_quota_groups(Flags::process_with_keeper());
    let caller = scene.caller();
    let volume = served(&scene, &caller);
    fs::write(caller.target_path(POD).join("file"), "").unwrap();
    ensure_one_has_passed(&scene, &caller, &volume);
    let request = with(from_volume("pvc-2", &volume), &[("capacity", "daemon")]);
    // A mapping may have outlived the descriptor.
    assert_refused(caller.create(request.clone()), Code::FailedPrecondition, "dataPath: daemon");
    caller.unpublish(&volume, POD).unwrap();
    caller.unstage(&volume).unwrap();
    let clone = retried(&scene, "clone", || caller.create(request.clone())).volume_id;
    assert!(data(&scene, &clone).join("file").exists());
    caller.delete(&clone).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// Where the file system cannot cut a volume, the daemon would have to see every write.
#[test]
fn a_snapshot_is_refused_once_a_file_was_opened_for_writing_past_the_daemon() {
    let scene = scene_on_with(FileSystem::Xfs, Flags::process_with_keeper());
    let caller = scene.caller();
    let parameters = [("dataPath", "passthrough"), ("capacity", "none")];
    let volume = served_as(&scene, &caller, with(create_request("pvc-1"), &parameters));
    let before = retried(&scene, "snapshot", || snapshot(&caller, "before", &volume)).snapshot_id;
    fs::write(caller.target_path(POD).join("file"), "").unwrap();
    ensure_one_has_passed(&scene, &caller, &volume);
    assert_refused(snapshot(&caller, "snap", &volume), Code::FailedPrecondition, "dataPath: daemon");
    assert_refused(
        caller.create(from_volume("pvc-2", &volume)),
        Code::FailedPrecondition,
        "dataPath: daemon",
    );
    caller.unpublish(&volume, POD).unwrap();
    caller.unstage(&volume).unwrap();
    let after = retried(&scene, "snapshot", || snapshot(&caller, "snap", &volume)).snapshot_id;
    assert!(data(&scene, &after).join("file").exists());
    assert!(!data(&scene, &before).join("file").exists());
    for made in [before, after] {
        delete_snapshot(&caller, &made).unwrap();
    }
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// Its daemon remembers what was opened for writing, but nothing writes to the volume any more.
#[test]
fn a_parked_volume_is_copied_after_writes_past_its_daemon() {
    let scene = scene_on_with(FileSystem::Xfs, Flags::process_with_keeper());
    let caller = scene.caller();
    let parameters =
        [("dataPath", "passthrough"), ("capacity", "none"), ("mountPodDeleteDelaySeconds", "3600")];
    let volume = served_as(&scene, &caller, with(create_request("pvc-1"), &parameters));
    let write_and_park = |content: &str| {
        fs::write(caller.target_path(POD).join("file"), content).unwrap();
        caller.unpublish(&volume, POD).unwrap();
        caller.unstage(&volume).unwrap();
        assert_eq!(scene.daemons().len(), 1, "the parked one\n{}", scene.log());
    };
    write_and_park("first");
    let made = retried(&scene, "snapshot", || snapshot(&caller, "snap", &volume)).snapshot_id;
    assert_eq!(fs::read(data(&scene, &made).join("file")).unwrap(), b"first");
    caller.stage(&volume).unwrap();
    caller.publish(&volume, POD).unwrap();
    write_and_park("second");
    let clone = retried(&scene, "clone", || caller.create(from_volume("pvc-2", &volume))).volume_id;
    assert_eq!(fs::read(data(&scene, &clone).join("file")).unwrap(), b"second");
    delete_snapshot(&caller, &made).unwrap();
    for volume in [clone, volume] {
        caller.delete(&volume).unwrap();
    }
    scene.assert_nothing_left();
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

/// More bytes and more inodes than a volume of its size may have elsewhere.
#[test]
fn a_volume_without_a_limit_is_copied_with_all_it_holds() {
    const WRITTEN: usize = 4 << 20;
    const FILES: usize = 2000;
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let scene = scene_on(kind);
        let caller = scene.caller();
        let unlimited = |request| with(of_size(request, 1 << 20, 0), &[("capacity", "none"), BLOCKING_COPY]);
        let volume = caller.create(unlimited(create_request("pvc-1"))).unwrap().volume_id;
        caller.stage(&volume).unwrap();
        caller.publish(&volume, POD).unwrap();
        fs::write(caller.target_path(POD).join("file"), vec![7; WRITTEN]).unwrap();
        (0..FILES).for_each(|n| fs::write(caller.target_path(POD).join(n.to_string()), "").unwrap());
        let made = retried(&scene, "snapshot", || snapshot(&caller, "snap-1", &volume)).snapshot_id;
        wait_until_ready(&caller, &made);
        let restored = caller.create(unlimited(from_snapshot("pvc-2", &made))).unwrap().volume_id;
        let request = unlimited(from_volume("pvc-3", &volume));
        let clone = retried(&scene, "clone", || caller.create(request.clone())).volume_id;
        for copy in [&restored, &clone] {
            let root = data(&scene, copy);
            assert_eq!(fs::metadata(root.join("file")).unwrap().len(), WRITTEN as u64);
            assert_eq!(fs::read_dir(root).unwrap().count(), FILES + 1);
            retried(&scene, "delete", || caller.delete(copy));
        }
        let limited = |request| with(of_size(request, 1 << 20, 0), &[("capacity", "daemon"), BLOCKING_COPY]);
        for request in [from_snapshot("pvc-4", &made), from_volume("pvc-4", &volume)] {
            assert_refused(caller.create(limited(request)), Code::Internal, "Disk quota exceeded");
            let stored = |part| fs::read_dir(scene.sandbox.path(part)).unwrap().count();
            assert_eq!([stored("pool/volumes"), stored("pool/incoming")], [1, 0]);
        }
        retried(&scene, "delete", || delete_snapshot(&caller, &made));
        caller.unpublish(&volume, POD).unwrap();
        retried(&scene, "unstage", || caller.unstage(&volume));
        caller.delete(&volume).unwrap();
        scene.assert_nothing_left();
    }
}

/// A clone takes no room in the pool, but it counts for the volume.
#[test]
fn a_volume_with_a_limit_takes_no_copy_of_more_bytes_than_it_may_hold() {
    let scene = scene_on(FileSystem::Xfs);
    let caller = scene.caller();
    let of = |request, bytes, capacity| with(of_size(request, bytes, 0), &[("capacity", capacity)]);
    let volume = caller.create(of(create_request("pvc-1"), 1 << 20, "none")).unwrap().volume_id;
    fs::write(data(&scene, &volume).join("file"), vec![7; 4 << 20]).unwrap();
    let made = snapshot(&caller, "snap-1", &volume).unwrap().snapshot_id;
    for source in [from_snapshot("pvc-2", &made), from_volume("pvc-2", &volume)] {
        let refused = caller.create(of(source.clone(), 1 << 20, "daemon"));
        assert_refused(refused, Code::Internal, "Disk quota exceeded");
        for (bytes, capacity) in [(4 << 20, "daemon"), (1 << 20, "none")] {
            let copy = caller.create(of(source.clone(), bytes, capacity)).unwrap().volume_id;
            assert_eq!(fs::metadata(data(&scene, &copy).join("file")).unwrap().len(), 4 << 20);
            caller.delete(&copy).unwrap();
        }
    }
    delete_snapshot(&caller, &made).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// Its daemon counts nothing.
#[test]
fn a_snapshot_of_a_volume_without_a_limit_needs_room_for_its_size() {
    let scene = scene_on(FileSystem::Xfs);
    let caller = scene.caller();
    let request = with(of_size(create_request("pvc-1"), 6 * GI, 0), &[("capacity", "none")]);
    let volume = caller.create(request).unwrap().volume_id;
    caller.stage(&volume).unwrap();
    let words = "exceeds what is left of the pool";
    assert_refused(snapshot(&caller, "snap-1", &volume), Code::ResourceExhausted, words);
    caller.unstage(&volume).unwrap();
    caller.delete(&volume).unwrap();
    scene.assert_nothing_left();
}
