//! Volumes with the writeback cache: the kernel answers write(2), and sends what was written later.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

use proto::control::{GetWritten, Quiesce, reply, request, written};
use rustix::fs::copy_file_range;
use rustix::io::Errno;

use crate::files::store_by_mapping;
use crate::fixture::{BOB, ROOT, Setup, Stage, Volume, errno};
use crate::known::until;
use crate::metrics::requests;
use crate::passthrough::read_write;
use crate::pauses::resume;
use crate::takeover;

const SETUP: Setup = Setup { writeback_cache: true, ..takeover::SETUP };

fn close(file: impl Into<OwnedFd>) -> nix::Result<()> {
    nix::unistd::close(file.into())
}

/// What the daemon names as open for writing, from the node after `after` on.
fn written(volume: &Volume, after: u64) -> Vec<written::File> {
    match volume.control().ask(request::Kind::GetWritten(GetWritten { after })) {
        reply::Kind::Written(written) => written.files,
        other => panic!("{other:?}"),
    }
}

/// As the driver does before a pause.
fn write_back(volume: &Volume) {
    let root = File::open(&volume.path).unwrap();
    for file in written(volume, 0) {
        let flags = rustix::fs::OFlags::RDONLY;
        let file = linux::fs_at::open_fuse_node(root.as_fd(), file.node, file.generation, flags).unwrap();
        close(file).unwrap();
    }
}

/// The kernel sends parts of a file at a time, in any order. xfs allocates ahead, which is given back where a
/// part begins behind the file's end.
#[test]
fn parts_that_are_sent_at_the_same_time_are_all_in_the_file() {
    const BYTES: usize = 16 << 20;
    let setup = Setup { capacity_bytes: 256 << 20, ..SETUP };
    for kind in ["xfs", "ext4"] {
        let volume = Volume::on(Stage::on_file_system(kind), setup);
        for round in 1..=10 {
            let content = vec![round; BYTES];
            let mut file = File::create(volume.path("f")).unwrap();
            file.write_all(&content).unwrap();
            file.sync_all().unwrap();
            let sent = fs::read(volume.backing.join("f")).unwrap();
            let wrong = sent.iter().position(|byte| *byte != round);
            assert!(
                sent.len() == BYTES && wrong.is_none(),
                "{kind}, {round}: {} bytes, {wrong:?}",
                sent.len()
            );
        }
    }
}

#[test]
fn many_small_writes_are_few_requests() {
    let volume = Volume::with(SETUP);
    let mut file = File::create(volume.path("f")).unwrap();
    for number in 0..4096_u64 {
        file.write_all(&number.to_le_bytes()).unwrap();
    }
    let expected: Vec<u8> = (0..4096_u64).flat_map(u64::to_le_bytes).collect();
    assert!(fs::read(volume.path("f")).unwrap() == expected);
    file.sync_all().unwrap();
    assert!(fs::read(volume.backing.join("f")).unwrap() == expected);
    let sent = requests(&volume, "write");
    assert!((1..100).contains(&sent), "{sent}");
}

/// The kernel reads the rest of a page, also from a file that is open for writing only.
#[test]
fn parts_of_pages_are_written_by_files_that_cannot_be_read() {
    let volume = Volume::with(SETUP);
    fs::write(volume.backing.join("f"), vec![b'a'; 10_000]).unwrap();
    let only_writes = OpenOptions::new().write(true).open(volume.path("f")).unwrap();
    only_writes.write_all_at(b"bbb", 5000).unwrap();
    let mut appends = OpenOptions::new().append(true).open(volume.path("f")).unwrap();
    appends.write_all(b"ccc").unwrap();
    let created = OpenOptions::new().write(true).create_new(true).open(volume.path("g")).unwrap();
    created.write_all_at(b"ddd", 9000).unwrap();
    created.write_all_at(b"eee", 100).unwrap();
    for file in [only_writes, appends, created] {
        close(file).unwrap();
    }
    let content = fs::read(volume.backing.join("f")).unwrap();
    assert_eq!(content.len(), 10_003);
    assert_eq!((&content[4999..5004], &content[9999..]), (&b"abbba"[..], &b"accc"[..]));
    let content = fs::read(volume.backing.join("g")).unwrap();
    assert_eq!((content.len(), &content[9000..], &content[99..104]), (9003, &b"ddd"[..], &b"\0eee\0"[..]));
    // A file that its owner may write and not read.
    let mode = fs::Permissions::from_mode(0o200);
    fs::set_permissions(volume.path("f"), mode).unwrap();
    std::os::unix::fs::chown(volume.path("f"), Some(BOB.uid), Some(BOB.gid)).unwrap();
    volume.shell(BOB, "printf fff | dd of=f bs=1 seek=5000 conv=notrunc status=none");
    assert_eq!(fs::read(volume.backing.join("f")).unwrap()[4999..5004], *b"afffa");
}

#[test]
fn a_full_volume_is_reported_by_fsync_or_close() {
    let volume = Volume::with(Setup { capacity_bytes: 1 << 20, ..SETUP });
    let mut file = File::create(volume.path("f")).unwrap();
    file.write_all(&vec![1; 2 << 20]).unwrap();
    assert_eq!(errno(file.sync_all()), libc::ENOSPC);
    file.sync_all().expect("reported once");
    drop(file);
    let mut file = File::create(volume.path("g")).unwrap();
    file.write_all(&vec![1; 2 << 20]).unwrap();
    assert_eq!(close(file), Err(nix::errno::Errno::ENOSPC));
    let held = |name: &str| fs::metadata(volume.backing.join(name)).unwrap().blocks() * 512;
    assert!(held("f") + held("g") <= 1 << 20);
}

/// Only the kernel knows where data is that it has not sent.
#[test]
fn data_that_was_not_sent_is_no_hole() {
    let volume = Volume::with(SETUP);
    let mut file = read_write().open(volume.path("f")).unwrap();
    file.write_all_at(&[1; 4096], 1 << 20).unwrap();
    let data = |from| rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(from));
    let hole = |from| rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(from));
    assert_eq!(data(1 << 20), Ok(1 << 20));
    assert_eq!(hole(1 << 20), Ok((1 << 20) + 4096));
    assert_eq!(data(2 << 20), Err(Errno::NXIO));
    file.write_all_at(b"more", 2 << 20).unwrap();
    let copy = read_write().open(volume.path("copy")).unwrap();
    let copied = copy_file_range(&file, Some(&mut 0), &copy, None, 4 << 20).unwrap();
    assert_eq!(copied, (2 << 20) + 4);
    let mut end = Vec::new();
    file.seek(SeekFrom::Start(2 << 20)).unwrap();
    file.read_to_end(&mut end).unwrap();
    assert_eq!(end, b"more");
    assert_eq!(fs::read(volume.path("copy")).unwrap()[2 << 20..], *b"more");
}

#[test]
fn times_are_those_of_the_writes() {
    let volume = Volume::with(SETUP);
    let file = read_write().open(volume.path("f")).unwrap();
    // Within one tick of the clock, the kernel does not see that the times change.
    std::thread::park_timeout(std::time::Duration::from_millis(50));
    file.write_all_at(b"x", 0).unwrap();
    let seen = file.metadata().unwrap();
    std::thread::park_timeout(std::time::Duration::from_millis(50));
    file.sync_all().unwrap();
    let times = |seen: &fs::Metadata| (seen.mtime(), seen.mtime_nsec());
    assert_eq!(times(&file.metadata().unwrap()), times(&seen));
    close(file).unwrap();
    assert_eq!(times(&fs::metadata(volume.backing.join("f")).unwrap()), times(&seen));
    let long_ago = SystemTime::UNIX_EPOCH;
    let file = read_write().open(volume.path("f")).unwrap();
    file.write_all_at(b"y", 0).unwrap();
    file.set_modified(long_ago).unwrap();
    close(file).unwrap();
    assert_eq!(fs::metadata(volume.backing.join("f")).unwrap().modified().unwrap(), long_ago);
}

#[test]
fn a_write_by_another_user_clears_suid() {
    let volume = Volume::with(SETUP);
    fs::write(volume.path("f"), "x").unwrap();
    fs::set_permissions(volume.path("f"), fs::Permissions::from_mode(0o4777)).unwrap();
    volume.shell(BOB, "printf y > f");
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&volume.path("f")), 0o777);
    assert_eq!(mode(&volume.backing.join("f")), 0o777);
}

#[test]
fn what_was_not_sent_outlives_the_daemon() {
    let mut volume = Volume::with(Setup { successors: 5, ..SETUP });
    let file = read_write().open(volume.path("f")).unwrap();
    let mut log = OpenOptions::new().append(true).create(true).open(volume.path("log")).unwrap();
    let removed = read_write().open(volume.path("removed")).unwrap();
    fs::remove_file(volume.path("removed")).unwrap();
    for round in 0..5_u64 {
        file.write_all_at(&vec![u8::try_from(round).unwrap() + 1; 1 << 20], round << 20).unwrap();
        log.write_all(format!("line {round}\n").as_bytes()).unwrap();
        removed.write_all_at(&round.to_le_bytes(), round * 8).unwrap();
        volume.kill();
        volume.take_over(SETUP);
    }
    file.sync_all().unwrap();
    log.sync_all().unwrap();
    removed.sync_all().unwrap();
    let content = fs::read(volume.backing.join("f")).unwrap();
    assert_eq!(content.len(), 5 << 20);
    assert!(content.chunks(1 << 20).zip(1..).all(|(chunk, number)| chunk.iter().all(|byte| *byte == number)));
    let lines: String = (0..5).map(|round| format!("line {round}\n")).collect();
    assert_eq!(fs::read_to_string(volume.backing.join("log")).unwrap(), lines);
    let mut numbers = [0; 40];
    removed.read_exact_at(&mut numbers, 0).unwrap();
    assert!(numbers.chunks(8).zip(0_u64..).all(|(bytes, number)| *bytes == number.to_le_bytes()));
}

/// The driver makes the kernel send it so before a pause.
#[test]
fn closing_any_descriptor_sends_what_the_kernel_keeps() {
    let volume = Volume::with(SETUP);
    let file = read_write().open(volume.path("f")).unwrap();
    let reader = File::open(volume.path("f")).unwrap();
    file.write_all_at(&vec![7; 8 << 20], 0).unwrap();
    let removed = read_write().open(volume.path("removed")).unwrap();
    fs::remove_file(volume.path("removed")).unwrap();
    removed.write_all_at(b"x", 0).unwrap();
    let files = written(&volume, 0);
    let nodes = |files: &[written::File]| files.iter().map(|file| file.node).collect::<Vec<_>>();
    let mut expected = [&file, &removed].map(|file| file.metadata().unwrap().ino());
    expected.sort_unstable();
    assert_eq!(nodes(&files), expected);
    assert_eq!(nodes(&written(&volume, expected[0])), expected[1..]);
    assert_eq!(nodes(&written(&volume, expected[1])), [0; 0]);
    write_back(&volume);
    assert!(fs::read(volume.backing.join("f")).unwrap() == vec![7; 8 << 20]);
    // A mapping keeps its file open.
    store_by_mapping(&volume.path("f"), 5000);
    drop((file, reader, removed));
    until("the files are closed", || written(&volume, 0).is_empty());
    // A node that the kernel has forgotten, and one that never was.
    let root = File::open(&volume.path).unwrap();
    for node in [expected[1], u64::MAX] {
        let opened = linux::fs_at::open_fuse_node(root.as_fd(), node, 7, rustix::fs::OFlags::RDONLY);
        assert_eq!(opened.map(IntoRawFd::into_raw_fd), Err(Errno::STALE));
    }
}

/// The kernel's own file systems stay exact beside it.
#[test]
fn direct_reads_and_writes_are_ordered_with_cached_ones() {
    let volume = Volume::on(Stage::on_file_system("ext4"), SETUP);
    let cached = read_write().open(volume.path("f")).unwrap();
    let direct = read_write().custom_flags(libc::O_DIRECT).open(volume.path("f")).unwrap();
    cached.write_all_at(&[1; 8192], 0).unwrap();
    let mut seen = [0; 8192];
    direct.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(seen, [1; 8192]);
    direct.write_all_at(&[2; 4096], 4096).unwrap();
    cached.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen[..4096] == [1; 4096] && seen[4096..] == [2; 4096]);
}

/// What the kernel sends meanwhile takes all of its background requests.
#[test]
fn reads_go_on_in_a_pause_while_the_kernel_writes_back() {
    const FILES: usize = 40;
    let volume = Volume::with(SETUP);
    fs::write(volume.backing.join("other"), vec![5; 1 << 20]).unwrap();
    let files: Vec<File> = (0..FILES).map(|n| File::create(volume.path(&format!("{n}"))).unwrap()).collect();
    let control = volume.control();
    let quiesce = request::Kind::Quiesce(Quiesce { lease_ms: 30_000, passing_may_write: false });
    assert!(matches!(control.ask(quiesce), reply::Kind::Quiesced(_)));
    for file in &files {
        file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    }
    let syncing: Vec<_> = files.into_iter().map(|file| std::thread::spawn(move || file.sync_all())).collect();
    while volume.waiting() < 16 {
        std::thread::yield_now();
    }
    assert!(fs::read(volume.path("other")).unwrap() == vec![5; 1 << 20]);
    assert!(syncing.iter().any(|thread| !thread.is_finished()), "the pause holds them back");
    assert!(resume(&control).held);
    for thread in syncing {
        thread.join().unwrap().unwrap();
    }
    assert!(fs::read(volume.backing.join("0")).unwrap() == vec![7; 1 << 20]);
}

/// tar(1) takes a file without blocks for one hole.
#[test]
fn a_file_that_was_not_sent_is_archived_whole() {
    let volume = Volume::with(SETUP);
    let file = read_write().open(volume.path("f")).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    assert!(file.metadata().unwrap().blocks() > 0);
    volume.shell(ROOT, "tar -c --sparse -f /proc/self/fd/1 f | tar -x -O > copy");
    assert!(fs::read(volume.path("copy")).unwrap() == vec![7; 1 << 20]);
}
