//! What a volume may hold, and how it knows what it holds.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use proto::control::{SetCapacity, Usage, reply, request};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::fixture::{Setup, Stage, Volume, errno, here, with_prompt_keeper};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

/// Its use is known: before, all of it looks free.
fn volume_of(capacity_bytes: u64) -> Volume {
    let volume = Volume::with(Setup { capacity_bytes, ..Setup::default() });
    volume.usage();
    volume
}

/// What du(1) finds in the backing directory: every inode once.
fn du(volume: &Volume) -> u64 {
    let output = std::process::Command::new("du").args(["-s", "-B1"]).arg(&volume.backing).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn free(volume: &Volume) -> u64 {
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    statistics.f_bavail * statistics.f_frsize
}

/// Writes until nothing fits. Returns how many bytes did.
fn fill(file: &mut File) -> u64 {
    let data = vec![0xa5; 256 << 10];
    let mut written = 0;
    loop {
        match file.write(&data) {
            Ok(more) => written += more as u64,
            Err(e) if e.kind() == ErrorKind::StorageFull => return written,
            Err(e) => panic!("{e}"),
        }
    }
}

fn full_file(path: &Path) -> (File, u64) {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    let length = fill(&mut file);
    (file, length)
}

fn grow(volume: &Volume, capacity_bytes: u64, inode_limit: u64) -> reply::Kind {
    volume.control().ask(request::Kind::SetCapacity(SetCapacity { capacity_bytes, inode_limit }))
}

#[test]
fn a_write_past_the_capacity_is_enospc_and_what_fits_is_kept() {
    let volume = volume_of(4 * MIB);
    let before = volume.usage().used_bytes;
    let (file, length) = full_file(&volume.path("f"));
    assert_eq!(length, 4 * MIB - before, "to the last block");
    assert_eq!(file.metadata().unwrap().len(), length);
    file.sync_all().unwrap();
    assert_eq!(volume.usage().used_bytes, 4 * MIB);
    assert_eq!((free(&volume), du(&volume)), (0, 4 * MIB));
    assert!(fs::read(volume.path("f")).unwrap().iter().all(|byte| *byte == 0xa5));
    assert_eq!(errno(fs::create_dir_all(volume.path("d/d"))), libc::ENOSPC);
}

#[test]
fn a_write_larger_than_what_is_left_is_a_short_one() {
    let volume = volume_of(MIB);
    let left = free(&volume);
    let mut file = File::create(volume.path("f")).unwrap();
    assert_eq!(file.write(&vec![1; usize::try_from(2 * MIB).unwrap()]).unwrap() as u64, left);
    assert_eq!(errno(file.write(b"x")), libc::ENOSPC);
}

#[test]
fn overwriting_in_a_full_volume_works() {
    let volume = volume_of(2 * MIB);
    let (file, length) = full_file(&volume.path("f"));
    let again = vec![7; usize::try_from(length).unwrap()];
    file.write_all_at(&again, 0).unwrap();
    file.write_all_at(b"unaligned", 4090).unwrap();
    assert_eq!(errno(file.write_at(b"x", length)), libc::ENOSPC);
    // Replacing a file by rename takes a name and gives one back.
    fs::rename(volume.path("f"), volume.path("g")).unwrap();
    // What was reserved with fallocate is the file's, though it reads as a hole.
    fs::remove_file(volume.path("g")).unwrap();
    drop(file);
    let file = File::create(volume.path("reserved")).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, length).unwrap();
    assert_eq!(free(&volume), 0);
    file.write_all_at(&again, 0).unwrap();
}

/// The daemon cannot tell the two apart: it may make no ioctl(2), so no FIEMAP.
#[test]
fn what_is_reserved_in_a_file_with_a_hole_is_taken_for_one_in_a_full_volume() {
    let volume = volume_of(4 * MIB);
    let file = File::create(volume.path("f")).unwrap();
    file.set_len(2 * MIB).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, MIB).unwrap();
    let (other, length) = full_file(&volume.path("other"));
    assert_eq!(errno(file.write_at(b"x", 0)), libc::ENOSPC);
    // Nothing was taken for the reserved space in the end.
    other.set_len(length - BLOCK).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    assert_eq!(free(&volume), BLOCK);
    // Without the hole the rest can be written.
    file.set_len(MIB).unwrap();
    let (_third, _) = full_file(&volume.path("third"));
    assert_eq!(free(&volume), 0);
    file.write_all_at(&vec![1; usize::try_from(MIB).unwrap()], 0).unwrap();
}

#[test]
fn a_hole_is_free_and_filling_it_is_not() {
    let volume = volume_of(2 * MIB);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("f")).unwrap();
    let before = free(&volume);
    file.set_len(1 << 40).unwrap();
    assert_eq!(free(&volume), before);
    file.write_all_at(b"x", 1 << 30).unwrap();
    assert_eq!(free(&volume), before - BLOCK);
    let left = usize::try_from(free(&volume)).unwrap();
    file.write_all_at(&vec![1; left], 512 * MIB).unwrap();
    assert_eq!(errno(file.write_at(b"x", 0)), libc::ENOSPC);
    rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 512 * MIB, MIB)
        .unwrap();
    assert_eq!(free(&volume), MIB);
    file.write_all_at(b"x", 0).unwrap();
}

#[test]
fn removing_makes_room_at_once_or_when_closed() {
    let volume = volume_of(2 * MIB);
    for _ in 0..20 {
        let (_, length) = full_file(&volume.path("f"));
        fs::remove_file(volume.path("f")).unwrap();
        fs::write(volume.path("next"), vec![1; usize::try_from(length).unwrap()]).unwrap();
        File::create(volume.path("next")).unwrap();
        assert_eq!(full_file(&volume.path("next")).1, length, "truncation makes room too");
        fs::remove_file(volume.path("next")).unwrap();
    }
    // Replaced by rename: gone as well.
    for _ in 0..5 {
        let (open, length) = full_file(&volume.path("old"));
        fs::write(volume.path("new"), "").unwrap();
        fs::rename(volume.path("new"), volume.path("old")).unwrap();
        let mut new = OpenOptions::new().write(true).open(volume.path("old")).unwrap();
        assert_eq!(errno(new.write(b"x")), libc::ENOSPC);
        drop(open);
        assert_eq!(fill(&mut new), length);
    }
}

#[test]
fn an_unlinked_open_file_is_still_charged() {
    let volume = volume_of(2 * MIB);
    let before = volume.usage();
    let (file, length) = full_file(&volume.path("f"));
    fs::remove_file(volume.path("f")).unwrap();
    // Open or not: whoever holds the inode can open it again.
    let held = rustix::fs::open(
        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)),
        rustix::fs::OFlags::PATH,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    drop(file);
    assert_eq!(errno(fs::write(volume.path("g"), "x")), libc::ENOSPC);
    assert_eq!(volume.usage().used_bytes, 2 * MIB);
    drop(held);
    wait_for(&volume, |usage| usage.used_bytes == before.used_bytes);
    assert_eq!(full_file(&volume.path("g")).1, length);
    assert_eq!(volume.usage().used_inodes, before.used_inodes + 1);
}

#[test]
fn parallel_writers_to_one_file_are_charged_once() {
    let volume = volume_of(64 * MIB);
    let file = File::create(volume.path("f")).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..8_u64 {
            let file = &file;
            scope.spawn(move || {
                for round in 0..64_u64 {
                    file.write_all_at(&[1; 6000], (round * 8 + writer % 4) * 3000).unwrap();
                }
            });
        }
    });
    file.sync_all().unwrap();
    assert_eq!(volume.usage().used_bytes, du(&volume));
}

#[test]
fn parallel_writers_of_many_files_stop_at_the_capacity_together() {
    let volume = volume_of(8 * MIB);
    let sum: u64 = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..6)
            .map(|n| {
                let path = volume.path(&format!("f{n}"));
                scope.spawn(move || full_file(&path).1)
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).sum()
    });
    assert!(sum > 7 * MIB, "{sum}");
    assert!(du(&volume) <= 8 * MIB, "{}", du(&volume));
    assert_eq!(volume.usage().used_bytes, du(&volume));
}

#[test]
fn hard_links_are_charged_once() {
    let volume = volume_of(16 * MIB);
    fs::write(volume.path("a"), vec![1; 100_000]).unwrap();
    let before = volume.usage();
    fs::hard_link(volume.path("a"), volume.path("b")).unwrap();
    fs::remove_file(volume.path("a")).unwrap();
    assert_eq!(volume.usage(), before);
    fs::remove_file(volume.path("b")).unwrap();
    let after = wait_for(&volume, |usage| usage.used_inodes < before.used_inodes);
    assert_eq!(after.used_bytes, du(&volume));
}

/// FORGET comes a moment after the removal that causes it.
fn wait_for(volume: &Volume, wanted: impl Fn(&Usage) -> bool) -> Usage {
    let deadline = std::time::Instant::now() + here(Duration::from_secs(60));
    loop {
        let usage = volume.usage();
        if wanted(&usage) {
            return usage;
        }
        assert!(std::time::Instant::now() < deadline, "{usage:?}");
        std::thread::yield_now();
    }
}

#[test]
fn preallocation_beyond_the_end_is_refused() {
    let volume = volume_of(2 * MIB);
    let file = File::create(volume.path("f")).unwrap();
    file.set_len(10).unwrap();
    let keep = FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&file, keep, 0, MIB), Err(Errno::OPNOTSUPP));
    rustix::fs::fallocate(&file, keep, 0, 10).unwrap();
}

#[test]
fn copy_file_range_and_fallocate_meet_the_limit() {
    let volume = volume_of(2 * MIB);
    let file = File::create(volume.path("f")).unwrap();
    assert_eq!(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 2 * MIB), Err(Errno::NOSPC));
    assert_eq!(file.metadata().unwrap().len(), 0, "all or nothing");
    fs::write(volume.path("from"), vec![1; 1_500_000]).unwrap();
    let from = File::open(volume.path("from")).unwrap();
    let mut copied = 0;
    let refused = loop {
        match rustix::fs::copy_file_range(from.as_fd(), None, file.as_fd(), None, 2_000_000) {
            Ok(0) => panic!("{copied} bytes fit"),
            Ok(more) => copied += more,
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, Errno::NOSPC);
    assert_eq!((free(&volume), du(&volume)), (0, 2 * MIB));
    assert_eq!(file.metadata().unwrap().len(), copied as u64);
}

#[test]
fn the_inode_limit_is_enforced_and_shown() {
    let volume = Volume::with(Setup { inode_limit: 5, ..Setup::default() });
    fs::write(volume.path("f"), "").unwrap();
    fs::create_dir(volume.path("d")).unwrap();
    std::os::unix::fs::symlink("f", volume.path("l")).unwrap();
    volume.shell(crate::fixture::ROOT, "mkfifo p");
    assert_eq!(errno(File::create(volume.path("g"))), libc::ENOSPC);
    assert_eq!(errno(fs::create_dir(volume.path("g"))), libc::ENOSPC);
    fs::hard_link(volume.path("f"), volume.path("a second name is no inode")).unwrap();
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    assert_eq!((statistics.f_files, statistics.f_ffree), (5, 0));
    fs::remove_dir(volume.path("d")).unwrap();
    File::create(volume.path("g")).unwrap();
}

#[test]
fn a_killed_daemon_counts_again_and_agrees_with_du() {
    let setup = Setup { capacity_bytes: 64 * MIB, ..Setup::default() };
    let mut volume = Volume::with(setup);
    for n in 0..50_usize {
        fs::create_dir_all(volume.path(&format!("d{}/e", n % 7))).unwrap();
        fs::write(volume.path(&format!("d{}/f{n}", n % 7)), vec![1; n * 1000]).unwrap();
    }
    fs::hard_link(volume.path("d1/f1"), volume.path("again")).unwrap();
    fs::remove_file(volume.path("d2/f2")).unwrap();
    rustix::fs::sync();
    let before = wait_for(&volume, |usage| usage.used_bytes == du(&volume));
    volume.kill();
    assert_eq!(fs::metadata(volume.usage_file()).unwrap().len(), 0);
    volume.serve_again(setup);
    assert_eq!(volume.usage(), before);
}

#[test]
fn a_clean_end_is_trusted() {
    let setup = Setup { capacity_bytes: 64 * MIB, ..Setup::default() };
    let mut volume = Volume::with(setup);
    fs::write(volume.path("f"), vec![1; 100_000]).unwrap();
    fs::write(volume.path("gone"), vec![1; 100_000]).unwrap();
    fs::remove_file(volume.path("gone")).unwrap();
    let used = wait_for(&volume, |usage| usage.used_inodes == 2);
    volume.unmount();
    // Nobody looks: a file that came behind the daemons' back is not seen.
    fs::write(volume.backing.join("behind"), vec![1; 500_000]).unwrap();
    volume.serve_again(setup);
    assert_eq!(volume.usage(), used);
}

#[test]
fn a_file_removed_at_the_very_end_is_not_kept_in_the_use() {
    let setup = Setup { capacity_bytes: 64 * MIB, ..Setup::default() };
    let mut volume = Volume::with(setup);
    let used = volume.usage();
    for n in 0..50 {
        fs::write(volume.path(&format!("f{n}")), vec![1; 10_000]).unwrap();
    }
    for n in 0..50 {
        fs::remove_file(volume.path(&format!("f{n}"))).unwrap();
    }
    volume.unmount();
    volume.serve_again(setup);
    assert_eq!(volume.usage(), used);
}

#[test]
fn a_torn_usage_file_is_counted_again() {
    let setup = Setup { capacity_bytes: 64 * MIB, ..Setup::default() };
    let mut volume = Volume::with(setup);
    fs::write(volume.path("f"), vec![1; 100_000]).unwrap();
    volume.unmount();
    let kept = fs::read(volume.usage_file()).unwrap();
    assert_eq!(kept.len(), 64);
    fs::write(volume.backing.join("behind"), vec![1; 500_000]).unwrap();
    rustix::fs::sync();
    for torn in [&kept[..63], &[&kept[..20], &[kept[20] ^ 1], &kept[21..]].concat()] {
        fs::write(volume.usage_file(), torn).unwrap();
        volume.serve_again(setup);
        assert_eq!(volume.usage().used_bytes, du(&volume));
        volume.unmount();
    }
}

#[test]
fn the_capacity_grows_while_files_are_open() {
    let volume = volume_of(MIB);
    let (mut file, length) = full_file(&volume.path("f"));
    assert_eq!(grow(&volume, 3 * MIB, 0), reply::Kind::Done(proto::control::Done {}));
    assert_eq!(free(&volume), 2 * MIB);
    assert_eq!(fill(&mut file), 2 * MIB);
    assert_eq!(file.metadata().unwrap().len(), length + 2 * MIB);
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    assert_eq!(statistics.f_blocks * statistics.f_frsize, 3 * MIB);
}

#[test]
fn a_shrink_is_refused() {
    let volume = Volume::with(Setup { capacity_bytes: MIB, inode_limit: 10, ..Setup::default() });
    for (capacity, inodes, field) in [(MIB - 1, 10, "capacity_bytes: 1048575"), (MIB, 9, "inode_limit: 9")] {
        match grow(&volume, capacity, inodes) {
            reply::Kind::Refused(refused) => assert!(refused.reason.starts_with(field), "{refused:?}"),
            other => panic!("{other:?}"),
        }
    }
    let usage = volume.usage();
    assert_eq!((usage.capacity_bytes, usage.inode_limit), (MIB, 10));
    assert_eq!(grow(&volume, MIB, 10), reply::Kind::Done(proto::control::Done {}), "the same is no change");
}

/// A bit of everything that takes or gives back space.
const ALL_SORTS: &str = "
    mkdir -p a/b/c; head -c 300000 /dev/urandom > a/f; cp a/f a/b/g; truncate -s 10000 a/f
    ln a/b/g a/b/c/h; ln -s $(head -c 200 /dev/zero | tr '\\0' x) link; mkfifo p
    truncate -s 50M sparse; printf x | dd of=sparse bs=1 seek=20000000 conv=notrunc 2>/dev/null
    for n in $(seq 300); do echo $n > a/b/a-name-of-some-length-so-that-the-directory-grows-$n; done
    rm a/b/a-name*1*; mv a/b z; rm a/f; cp -r z y; rm -r z; fallocate -l 1M y/g; fallocate -p -o 8192 -l 65536 y/g
    chmod 600 y/g; dd if=/dev/zero of=y/g bs=4096 count=3 seek=5 conv=notrunc 2>/dev/null
";

#[test]
fn whatever_is_done_the_use_is_what_du_finds() {
    let volume = volume_of(64 * MIB);
    volume.shell(crate::fixture::ROOT, ALL_SORTS);
    let inodes = volume.shell(crate::fixture::ROOT, "find . -printf '%i\\n' | sort -u | wc -l");
    let used = wait_for(&volume, |usage| usage.used_inodes.to_string() == inodes);
    assert_eq!(used.used_bytes, du(&volume));
}

/// xfs allocates ahead, btrfs copies on write and knows no number of inodes.
fn the_limit_holds_on(kind: &str) {
    let setup = Setup { capacity_bytes: 64 * MIB, inode_limit: 2000, ..Setup::default() };
    let mut volume = Volume::on(Stage::on_file_system(kind), setup);
    volume.usage();
    volume.shell(crate::fixture::ROOT, ALL_SORTS);
    let left = free(&volume);
    let (file, length) = full_file(&volume.path("rest"));
    assert_eq!(length, left);
    assert_eq!(errno(fs::write(volume.path("more"), "x")), libc::ENOSPC);
    let again = vec![7; usize::try_from(length).unwrap()];
    file.write_all_at(&again, 0).unwrap();
    file.sync_all().unwrap();
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    let usage = volume.usage();
    assert_eq!((statistics.f_bavail, statistics.f_files), (0, 2000));
    assert_eq!(statistics.f_ffree, 2000 - usage.used_inodes);
    drop(file);
    volume.kill();
    // What xfs has allocated ahead is taken back later, and not charged.
    let ahead = if kind == "xfs" { MIB } else { 0 };
    assert!(du(&volume) <= 64 * MIB + ahead, "{kind}: {}", du(&volume));
    volume.serve_again(setup);
    assert_eq!(volume.usage(), usage, "{kind}: counted again");
    fs::remove_file(volume.path("rest")).unwrap();
    assert_eq!(full_file(&volume.path("again")).1, length);
}

#[test]
fn the_limit_holds_on_xfs() {
    the_limit_holds_on("xfs");
}

#[test]
fn the_limit_holds_on_btrfs() {
    the_limit_holds_on("btrfs");
}

#[test]
fn what_xfs_has_allocated_ahead_is_no_content_without_admission() {
    type Grow = fn(&File) -> std::io::Result<()>;
    let ways: [(&str, Grow); 3] = [
        ("truncate", |file| file.set_len(40 * MIB)),
        ("write", |file| file.write_all_at(&[1], 40 * MIB)),
        ("fallocate", |file| {
            let allocated = rustix::fs::fallocate(file, FallocateFlags::empty(), 40 * MIB, BLOCK);
            allocated.map_err(Into::into)
        }),
    ];
    for (way, grow) in ways {
        let setup = Setup { capacity_bytes: 64 * MIB, ..Setup::default() };
        let volume = Volume::on(Stage::on_file_system("xfs"), setup);
        volume.usage();
        let mut file = File::create(volume.path("f")).unwrap();
        (0..24).for_each(|_| file.write_all(&vec![1; 1 << 20]).unwrap());
        let allocated = fs::metadata(volume.backing.join("f")).unwrap().blocks() * 512;
        assert!(allocated > 28 * MIB, "{allocated}");
        fs::write(volume.path("spare"), vec![1; 64 << 10]).unwrap();
        let (_rest, _length) = full_file(&volume.path("rest"));
        let full = volume.usage().used_bytes;
        fs::remove_file(volume.path("spare")).unwrap();
        grow(&file).unwrap();
        let used = volume.usage().used_bytes;
        assert!(used <= full, "{way}: {full}, then {used}");
    }
}

const LIMITED: Setup =
    Setup { capacity_bytes: 32 * MIB, inode_limit: 8192, limited_by_kernel: true, ..Setup::PLAIN };

/// What fits into a new file, and the errno of the first write that does not.
fn until_refused(path: &Path) -> (u64, Option<i32>) {
    let mut file = File::create(path).unwrap();
    let piece = [7; 64 << 10];
    let mut written = 0;
    loop {
        match file.write(&piece) {
            Ok(more) => written += more as u64,
            Err(e) => return (written, e.raw_os_error()),
        }
        assert!(written <= 64 * MIB, "the quota is not enforced");
    }
}

fn referenced(volume: &Volume) -> u64 {
    tests::subvolume::group(&volume.backing).unwrap().0
}

#[test]
fn at_a_quota_of_the_file_system_a_write_by_the_daemon_is_enospc() {
    let volume = Volume::on(Stage::with_quota_group(32 * MIB), LIMITED);
    let (written, refusal) = until_refused(&volume.path("f"));
    assert_eq!(refusal, Some(libc::ENOSPC));
    assert!(written > 24 * MIB && written <= 32 * MIB, "{written}");
    assert!(referenced(&volume) <= 32 * MIB);
    fs::remove_file(volume.path("f")).unwrap();
    // Free once the kernel has forgotten the inode, which is after the answer.
    tests::eventually("what was removed is free", here(Duration::from_secs(60)), || {
        fs::write(volume.path("g"), vec![7; 24 << 20])?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn at_a_quota_of_the_file_system_a_write_past_the_daemon_is_edquot() {
    let setup = Setup { passthrough: true, successors: 1, ..LIMITED };
    let stage = || Stage::with_quota_group(32 * MIB);
    with_prompt_keeper(stage, setup, |volume| {
        let (written, refusal) = until_refused(&volume.path("f"));
        assert_eq!(refusal, Some(libc::EDQUOT));
        assert!(written > 24 * MIB && written <= 32 * MIB, "{written}");
        assert!(referenced(volume) <= 32 * MIB);
    });
}

/// As the driver writes it.
fn kernels_count(bytes: u64) -> [u8; 64] {
    let mut record = [0; 64];
    record[..8].copy_from_slice(b"HAWSKRN1");
    record[8] = 1;
    record[16..24].copy_from_slice(&bytes.to_le_bytes());
    let sum = record[..56]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    record[56..].copy_from_slice(&sum.to_le_bytes());
    record
}

#[test]
fn statfs_shows_the_use_that_the_kernel_counts_and_the_limit() {
    let stage = Stage::with_quota_group(32 * MIB);
    fs::write(&stage.usage, kernels_count(3 * MIB)).unwrap();
    let usage = stage.usage.clone();
    let mut volume = Volume::on(stage, LIMITED);
    let shown = |volume: &Volume| {
        let statistics = rustix::fs::statvfs(&volume.path).unwrap();
        (statistics.f_blocks * statistics.f_frsize, free(volume))
    };
    assert_eq!(shown(&volume), (32 * MIB, 29 * MIB));
    fs::write(&usage, kernels_count(5 * MIB)).unwrap();
    assert_eq!(shown(&volume), (32 * MIB, 27 * MIB));
    // Half a record is not the driver's last word.
    fs::write(&usage, &kernels_count(7 * MIB)[..32]).unwrap();
    assert_eq!(shown(&volume), (32 * MIB, 27 * MIB));
    fs::write(&usage, kernels_count(7 * MIB)).unwrap();
    assert!(matches!(grow(&volume, 16 * MIB, 8192), reply::Kind::Refused(_)), "a volume never shrinks");
    assert_eq!(grow(&volume, 64 * MIB, 16384), reply::Kind::Done(proto::control::Done {}));
    assert_eq!(shown(&volume), (64 * MIB, 57 * MIB));
    let now = volume.usage_now();
    assert_eq!((now.used_bytes, now.capacity_bytes, now.inode_limit), (7 * MIB, 64 * MIB, 0));
    volume.kill();
    volume.serve_again(Setup { capacity_bytes: 64 * MIB, ..LIMITED });
    assert_eq!(shown(&volume), (64 * MIB, 57 * MIB));
}

/// As on ext4 and XFS with a project, whose limit and use are in statfs(2) of the volume's directory.
#[test]
fn without_a_count_by_the_driver_statfs_is_that_of_the_directory() {
    let volume = Volume::on(Stage::on_file_system("ext4"), LIMITED);
    let of = |path: &Path| {
        let found = rustix::fs::statvfs(path).unwrap();
        (found.f_blocks * found.f_frsize, found.f_bfree * found.f_frsize, found.f_files, found.f_ffree)
    };
    assert_eq!(of(&volume.path), of(&volume.backing));
}

#[test]
fn extended_attributes_of_a_file_have_a_limit_of_their_own() {
    use rustix::fs::{XattrFlags, setxattr};
    // xfs itself would take them all.
    let volume = Volume::on(Stage::on_file_system("xfs"), Setup::default());
    let path = volume.path("f");
    fs::write(&path, "").unwrap();
    let set = |name: &str, length: usize| setxattr(&path, name, &vec![1; length], XattrFlags::empty());
    set("user.one", 2000).unwrap();
    set("user.two", 2000).unwrap();
    assert_eq!(set("user.three", 200), Err(Errno::NOSPC));
    set("user.two", 1000).unwrap();
    set("user.three", 200).unwrap();
    assert_eq!(set("user.one", 4000), Err(Errno::NOSPC));
}

/// The next of a sequence that is the same in every run (Knuth's MMIX constants).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// One thing a program may do, on names that it shares with others. Whether
/// it succeeds depends on them.
fn do_something(volume: &Volume, random: &mut u64) {
    let path = |n: u64| volume.path(&format!("d{}/f{}", n % 3, n % 7));
    let (what, one, other) = (next(random) % 9, path(next(random)), path(next(random)));
    let (at, length) = (next(random) % 200_000, usize::try_from(next(random) % 50_000).unwrap());
    let done = match what {
        0 | 1 => File::create(&one).and_then(|file| file.write_all_at(&vec![1; length], at)),
        2 => {
            OpenOptions::new().write(true).open(&one).and_then(|file| file.write_all_at(&vec![2; length], at))
        }
        3 => OpenOptions::new().write(true).open(&one).and_then(|file| file.set_len(at)),
        4 => fs::remove_file(&one),
        5 => fs::rename(&one, &other),
        6 => fs::hard_link(&one, &other),
        7 => fs::copy(&one, &other).map(drop),
        _ => File::open(&one).and_then(|file| fs::remove_file(&one).and_then(|()| file.sync_all())),
    };
    drop(done);
}

#[test]
fn users_of_everything_at_once_leave_the_use_that_du_finds() {
    let volume = volume_of(2 * MIB);
    for n in 0..3 {
        fs::create_dir(volume.path(&format!("d{n}"))).unwrap();
    }
    std::thread::scope(|scope| {
        for seed in 1..=6_u64 {
            let volume = &volume;
            scope.spawn(move || {
                let mut random = seed;
                for _ in 0..400 {
                    do_something(volume, &mut random);
                }
            });
        }
    });
    // ext4 takes the block that maps a file of many pieces when it writes them.
    volume.shell(crate::fixture::ROOT, "find . -type f -exec sync {} +");
    let inodes = volume.shell(crate::fixture::ROOT, "find . -printf '%i\\n' | sort -u | wc -l");
    let used = wait_for(&volume, |usage| usage.used_inodes.to_string() == inodes);
    assert_eq!(used.used_bytes, du(&volume));
    assert!(used.used_bytes <= 2 * MIB, "{used:?}");
}
