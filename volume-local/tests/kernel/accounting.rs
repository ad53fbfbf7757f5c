//! The use that the daemon keeps up to date against the one that it counts
//! when it starts anew.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::mount::MsFlags;
use rustix::fs::{CWD, FallocateFlags, RenameFlags, XattrFlags};

use crate::fixture::{ROOT, Setup, Stage, Volume};
use crate::metrics::knows_nothing;

const SETUP: Setup = Setup { capacity_bytes: 24 << 20, ..Setup::PLAIN };

/// One of several users of the same few names.
struct User {
    root: PathBuf,
    random: u64,
    held: Vec<File>,
}

impl User {
    /// Up to `end`, the same in every run (Knuth's MMIX constants).
    fn up_to(&mut self, end: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % end
    }

    fn path(&mut self) -> PathBuf {
        let (directory, name) = (self.up_to(5), self.up_to(13));
        self.root.join(format!("d{directory}/f{name}"))
    }

    fn content(&mut self, most: u64) -> Vec<u8> {
        vec![0x5a; usize::try_from(self.up_to(most)).unwrap()]
    }

    fn one_held(&mut self) -> Option<File> {
        let most = u64::try_from(self.held.len()).unwrap();
        let which = if most == 0 { 0 } else { self.up_to(most) };
        self.held.get(usize::try_from(which).unwrap()).map(|file| file.try_clone().unwrap())
    }

    /// Something that may succeed or not: that depends on the others.
    fn do_something(&mut self) -> io::Result<()> {
        let (one, other) = (self.path(), self.path());
        match self.up_to(19) {
            0..=3 => {
                let truncate = self.up_to(3) == 0;
                let file =
                    OpenOptions::new().read(true).write(true).create(true).truncate(truncate).open(&one)?;
                let (content, at) = (self.content(300_000), self.up_to(3_000_000));
                self.held.push(file.try_clone()?);
                file.write_all_at(&content, at)
            }
            4 => fs::remove_file(&one),
            5 => fs::rename(&one, &other),
            6 => fs::hard_link(&one, &other),
            7 => Ok(rustix::fs::renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE)?),
            8 => std::os::unix::fs::symlink("z".repeat(1 + self.content(4000).len()), &one),
            9 => fs::create_dir(&one),
            10 => fs::remove_dir(&one),
            11 => {
                let size = self.up_to(4_000_000);
                OpenOptions::new().write(true).open(&one)?.set_len(size)
            }
            12 | 13 => self.allocate(),
            14 => {
                let (Some(from), Some(to)) = (self.one_held(), self.one_held()) else { return Ok(()) };
                let (mut from_at, mut to_at) = (self.up_to(100_000), self.up_to(100_000));
                let length = self.content(400_000).len();
                rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), length)?;
                Ok(())
            }
            15 => {
                let size = self.up_to(2_000_000);
                self.one_held().map_or(Ok(()), |file| file.set_len(size))
            }
            16 => self.one_held().map_or(Ok(()), |file| file.sync_all()),
            17 => {
                let value = self.content(2000);
                Ok(rustix::fs::lsetxattr(&one, "user.a", &value, XattrFlags::empty())?)
            }
            _ => Ok(rustix::fs::lremovexattr(&one, "user.a")?),
        }
    }

    fn allocate(&mut self) -> io::Result<()> {
        let Some(file) = self.one_held() else { return Ok(()) };
        let modes = [
            FallocateFlags::empty(),
            FallocateFlags::KEEP_SIZE,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            FallocateFlags::ZERO_RANGE,
        ];
        let mode = modes[usize::try_from(self.up_to(4)).unwrap()];
        let (offset, length) = (self.up_to(3_000_000), 1 + self.up_to(500_000));
        Ok(rustix::fs::fallocate(file, mode, offset, length)?)
    }

    fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
    }

    fn step(&mut self) {
        drop(self.do_something());
        if self.held.len() > 20 {
            let oldest = usize::try_from(self.up_to(20)).unwrap();
            drop(self.held.swap_remove(oldest));
        }
    }
}

fn everybody_does_everything(volume: &Volume, round: u64) {
    std::thread::scope(|scope| {
        for user in 1..=5 {
            scope.spawn(move || {
                let mut user =
                    User { root: volume.path.clone(), random: round * 100 + user, held: Vec::new() };
                user.work(600);
            });
        }
    });
}

/// Everything is written back, and the kernel forgets it all.
fn rest(volume: &Volume) {
    rustix::fs::syncfs(File::open(&volume.backing).unwrap()).unwrap();
    forget_all(volume);
}

/// As [`rest`]; the file system has given back what it allocated ahead, and each file is
/// charged anew. Short of memory, the kernel forgets files and drops their backing inodes
/// at any time, and both change what a file takes after it was charged (docs/SEMANTICS.md).
fn rest_and_charge_anew(volume: &Volume, kind: &str) {
    rustix::fs::syncfs(File::open(&volume.backing).unwrap()).unwrap();
    if kind == "xfs" {
        let mut spaceman = Command::new("xfs_spaceman");
        let freed = spaceman.args(["-c", "prealloc -s"]).arg(&volume.backing).status().unwrap();
        assert!(freed.success(), "xfs_spaceman: {freed}");
    }
    charge_anew(&volume.path(""));
    rest(volume);
}

fn charge_anew(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            charge_anew(&entry.path());
        }
        if kind.is_dir() || kind.is_file() {
            File::open(entry.path()).unwrap().sync_all().unwrap();
        }
    }
}

/// A remount drops the names that the kernel has cached and that are not in use. A child
/// which another test starts has this test's files open until it executes its program.
fn forget_all(volume: &Volume) {
    volume.remount(MsFlags::empty()).unwrap();
    while !knows_nothing(volume) {
        std::thread::yield_now();
        volume.remount(MsFlags::empty()).unwrap();
    }
}

fn a_fresh_count_agrees_on(kind: &str) {
    let mut volume = Volume::on(Stage::on_file_system(kind), SETUP);
    let before = volume.usage();
    for directory in 0..5 {
        fs::create_dir(volume.path(&format!("d{directory}"))).unwrap();
    }
    for round in 0..3 {
        everybody_does_everything(&volume, round);
        rest_and_charge_anew(&volume, kind);
        let kept = volume.usage();
        // Every second time the daemon has only what the last one has kept.
        if round % 2 == 1 {
            volume.unmount();
            volume.serve_again(SETUP);
            assert_eq!(volume.usage(), kept, "{kind}, round {round}: kept");
        }
        volume.kill();
        volume.serve_again(SETUP);
        assert_eq!(kept, volume.usage(), "{kind}, round {round}: kept and counted");
    }
    volume.shell(ROOT, "rm -r d*");
    rest(&volume);
    assert_eq!(volume.usage(), before, "{kind}: all of it is given back");
}

#[test]
fn a_fresh_count_agrees_with_the_use_after_everything_at_once_on_ext4() {
    a_fresh_count_agrees_on("ext4");
}

#[test]
fn a_fresh_count_agrees_with_the_use_after_everything_at_once_on_xfs() {
    a_fresh_count_agrees_on("xfs");
}

/// Stops the users, also when the test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Daemons are killed at any moment, and none of their successors counts.
fn the_use_is_right_after_kills_on(kind: &str) {
    const KILLS: u64 = 25;
    let setup = Setup { confine: true, successors: 1, ..SETUP };
    let mut volume = Volume::on(Stage::on_file_system(kind), setup);
    for directory in 0..5 {
        fs::create_dir(volume.path(&format!("d{directory}"))).unwrap();
    }
    volume.usage();
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stopping = Stopping(&stop);
        for user in 1..=4 {
            let (stop, steps, root) = (&stop, &steps, volume.path.clone());
            scope.spawn(move || {
                let mut user = User { root, random: user * 7919, held: Vec::new() };
                while !stop.load(Ordering::Relaxed) {
                    user.step();
                    steps.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for kill in 0..KILLS {
            let (before, begun) = (steps.load(Ordering::Relaxed), Instant::now());
            while steps.load(Ordering::Relaxed) < before + 5 + kill * 7 % 40 {
                assert!(begun.elapsed() < Duration::from_secs(60), "{kind}: no progress after kill {kill}");
                std::thread::yield_now();
            }
            volume.add_successor(setup);
            volume.kill();
            volume.take_over(setup);
            assert!(!volume.usage_now().counting, "{kind}: kill {kill}");
        }
        drop(stopping);
    });
    rest_and_charge_anew(&volume, kind);
    let kept = volume.usage();
    let seen = rustix::fs::statvfs(&volume.path).unwrap();
    assert_eq!((seen.f_blocks - seen.f_bfree) * seen.f_frsize, kept.used_bytes, "{kind}: statfs");
    volume.unmount();
    // The next daemon has nothing but the tree.
    File::create(volume.usage_file()).unwrap();
    volume.serve_again(setup);
    assert_eq!(volume.usage(), kept, "{kind}: counted, kept");
}

#[test]
fn a_fresh_count_agrees_with_the_use_after_kills_under_load_on_ext4() {
    the_use_is_right_after_kills_on("ext4");
}

#[test]
fn a_fresh_count_agrees_with_the_use_after_kills_under_load_on_xfs() {
    the_use_is_right_after_kills_on("xfs");
}

#[test]
fn a_fresh_count_agrees_with_the_use_after_kills_under_load_on_btrfs() {
    the_use_is_right_after_kills_on("btrfs");
}

/// Files of many pieces: ext4 takes a block that says where they are when it
/// writes them back, xfs gives back what it has allocated ahead between them.
fn write_pieces(volume: &Volume) {
    for n in 0..20 {
        let file = File::create(volume.path(&format!("f{n}"))).unwrap();
        for piece in 0..30 {
            file.write_all_at(&[0x5a; 4096], piece * (128 << 10)).unwrap();
        }
    }
}

fn files_forgotten_before_they_are_written_back_on(kind: &str) {
    // xfs allocates up to thirty times what is written.
    let setup = Setup { capacity_bytes: 256 << 20, ..SETUP };
    let mut volume = Volume::on(Stage::on_file_system(kind), setup);
    let empty = volume.usage();
    for clean_end in [false, true] {
        write_pieces(&volume);
        forget_all(&volume);
        rustix::fs::syncfs(File::open(&volume.backing).unwrap()).unwrap();
        if clean_end {
            volume.unmount();
            volume.serve_again(setup);
        }
        volume.shell(ROOT, "rm f*");
        rest(&volume);
        assert_eq!(volume.usage(), empty, "{kind}, the daemon before had a clean end: {clean_end}");
    }
}

#[test]
fn a_file_forgotten_before_it_is_written_back_is_freed_for_what_it_was_charged_on_ext4() {
    files_forgotten_before_they_are_written_back_on("ext4");
}

#[test]
fn a_file_forgotten_before_it_is_written_back_is_freed_for_what_it_was_charged_on_xfs() {
    files_forgotten_before_they_are_written_back_on("xfs");
}

/// They are in no file's blocks there.
#[test]
fn on_btrfs_each_further_name_of_a_file_takes_an_inode() {
    let setup = Setup { inode_limit: 20, ..SETUP };
    let mut volume = Volume::on(Stage::on_file_system("btrfs"), setup);
    let before = volume.usage().used_inodes;
    fs::write(volume.path("first"), "").unwrap();
    let refused =
        (0..100).find_map(|n| fs::hard_link(volume.path("first"), volume.path(&n.to_string())).err());
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(volume.usage().used_inodes, 20);
    fs::remove_file(volume.path("3")).unwrap();
    assert_eq!(volume.usage().used_inodes, 19);
    // One name in the place of another file's, which has others.
    fs::write(volume.path("other"), "").unwrap();
    fs::rename(volume.path("other"), volume.path("4")).unwrap();
    assert_eq!(volume.usage().used_inodes, 19);
    volume.kill();
    volume.serve_again(setup);
    assert_eq!(volume.usage().used_inodes, 19, "counted anew");
    volume.shell(ROOT, "rm -r *");
    rest(&volume);
    assert_eq!(volume.usage().used_inodes, before);
}

#[test]
fn a_block_of_attributes_is_charged_where_a_count_finds_it() {
    let mut volume = Volume::on(Stage::on_file_system("ext4"), SETUP);
    let before = volume.usage();
    fs::create_dir(volume.path("d")).unwrap();
    fs::write(volume.path("empty"), "").unwrap();
    File::create(volume.path("sparse")).unwrap().set_len(1 << 20).unwrap();
    let plain = volume.usage();
    for name in ["d", "empty", "sparse"] {
        rustix::fs::setxattr(volume.path(name), "user.a", &[1; 2000], XattrFlags::empty()).unwrap();
    }
    let attributed = volume.usage();
    assert_eq!(attributed.used_bytes - plain.used_bytes, 3 * 4096);
    volume.kill();
    volume.serve_again(SETUP);
    assert_eq!(volume.usage(), attributed, "counted");
    for name in ["d", "empty", "sparse"] {
        rustix::fs::removexattr(volume.path(name), "user.a").unwrap();
    }
    assert_eq!(volume.usage(), plain);
    volume.shell(ROOT, "rm -r d empty sparse");
    rest(&volume);
    assert_eq!(volume.usage(), before);
}

/// What the backing files take.
fn du(volume: &Volume) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let own = fs::metadata(&volume.backing).unwrap().blocks();
    let below = fs::read_dir(&volume.backing).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    512 * (own + below.map(|file| file.blocks()).sum::<u64>())
}

fn attribute(volume: &Volume, name: &str, length: usize) -> rustix::io::Result<()> {
    rustix::fs::setxattr(volume.path(name), "user.a", &vec![1; length], XattrFlags::empty())
}

fn serve_by_the_next(volume: &mut Volume, clean_end: bool) {
    if clean_end {
        drop(volume.unmount());
    } else {
        volume.kill();
    }
    volume.serve_again(SETUP);
}

fn attributes_of_small_files_are_charged_on(kind: &str, at_least: u64) {
    const FILES: u64 = 200;
    let stage = Stage::on_file_system(kind);
    // mkfs makes it in the root of ext4.
    drop(fs::remove_dir(stage.backing.join("lost+found")));
    let mut volume = Volume::on(stage, SETUP);
    let before = volume.usage();
    let name = |n: u64| format!("f{n}");
    for n in 0..FILES {
        fs::write(volume.path(&name(n)), "1").unwrap();
    }
    rest(&volume);
    let plain = volume.usage().used_bytes;
    for n in 0..FILES {
        attribute(&volume, &name(n), 3900).unwrap();
    }
    rest(&volume);
    let attributed = volume.usage();
    assert_eq!(attributed.used_bytes, du(&volume), "{kind}: charged, found");
    assert!(attributed.used_bytes - plain >= FILES * at_least, "{kind}: {} {plain}", attributed.used_bytes);
    for clean_end in [false, true] {
        serve_by_the_next(&mut volume, clean_end);
        assert_eq!(volume.usage(), attributed, "{kind}: the next daemon, after a clean end: {clean_end}");
    }
    // Overwritten, known anew, or neither: each is charged once.
    for n in 0..FILES / 2 {
        fs::write(volume.path(&name(n)), "2").unwrap();
    }
    rest(&volume);
    assert_eq!(volume.usage(), attributed, "{kind}: overwritten");
    for n in 0..FILES {
        rustix::fs::removexattr(volume.path(&name(n)), "user.a").unwrap();
    }
    rest(&volume);
    assert_eq!(volume.usage().used_bytes, du(&volume), "{kind}: removed attributes");
    assert!(volume.usage().used_bytes <= plain + (64 << 10), "{kind}: given back");
    for n in 0..FILES {
        attribute(&volume, &name(n), 3900).unwrap();
    }
    volume.shell(ROOT, "rm f*");
    rest(&volume);
    assert_eq!(volume.usage().used_inodes, before.used_inodes);
    assert_eq!(volume.usage().used_bytes, du(&volume), "{kind}: removed files");
}

#[test]
fn attribute_blocks_of_small_files_are_charged_and_given_back_on_ext4() {
    attributes_of_small_files_are_charged_on("ext4", 4096);
}

#[test]
fn attribute_blocks_of_small_files_are_charged_and_given_back_on_xfs() {
    attributes_of_small_files_are_charged_on("xfs", 8192);
}

/// The next daemon knows what a file takes, but not how much of that are attributes.
fn a_file_with_attributes_does_not_grow_in_a_full_volume_on(kind: &str) {
    const FILES: u64 = 50;
    let mut volume = Volume::on(Stage::on_file_system(kind), SETUP);
    let name = |n: u64| format!("f{n}");
    for n in 0..FILES {
        fs::write(volume.path(&name(n)), [1; 4096]).unwrap();
        attribute(&volume, &name(n), 3900).unwrap();
    }
    for clean_end in [false, true] {
        serve_by_the_next(&mut volume, clean_end);
        volume.usage();
        let full = fs::write(volume.path("fill"), vec![1; 32 << 20]).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        let full = volume.usage();
        for n in 0..FILES {
            let file = OpenOptions::new().write(true).open(volume.path(&name(n))).unwrap();
            let refused = file.write_at(&[2; 4096], 4096).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC), "{kind}, {n}");
            file.write_all_at(&[2; 4096], 0).unwrap();
        }
        assert_eq!(volume.usage(), full, "{kind}, after a clean end: {clean_end}");
        fs::remove_file(volume.path("fill")).unwrap();
    }
}

#[test]
fn a_file_with_attributes_does_not_grow_in_a_full_volume() {
    a_file_with_attributes_does_not_grow_in_a_full_volume_on("ext4");
    a_file_with_attributes_does_not_grow_in_a_full_volume_on("xfs");
}

fn an_attribute_beyond_the_capacity_leaves_nothing_on(kind: &str) {
    let volume = Volume::on(Stage::on_file_system(kind), SETUP);
    for name in ["plain", "attributed"] {
        fs::write(volume.path(name), "1").unwrap();
    }
    attribute(&volume, "attributed", 3900).unwrap();
    let full = fs::write(volume.path("fill"), vec![1; 32 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let before = volume.usage();
    assert_eq!(attribute(&volume, "plain", 2000), Err(rustix::io::Errno::NOSPC));
    assert_eq!(volume.usage(), before);
    let mut names = [0; 100];
    let length = rustix::fs::listxattr(volume.backing.join("plain"), &mut names[..]).unwrap();
    assert!(!names[..length].starts_with(b"user.a"), "nothing is left");
    // What takes nothing works in a full volume.
    attribute(&volume, "attributed", 3900).unwrap();
    attribute(&volume, "plain", 20).unwrap();
    rustix::fs::removexattr(volume.path("attributed"), "user.a").unwrap();
    attribute(&volume, "plain", 2000).unwrap();
}

#[test]
fn an_attribute_that_does_not_fit_the_capacity_is_enospc_and_leaves_nothing() {
    an_attribute_beyond_the_capacity_leaves_nothing_on("ext4");
    an_attribute_beyond_the_capacity_leaves_nothing_on("xfs");
}

#[test]
fn overwriting_what_a_snapshot_shares_on_xfs_takes_no_more_than_is_written() {
    const FILES: u64 = 20;
    const PIECES: u64 = 30;
    const PIECE: u64 = 4096;
    // Confined: with no more than six capabilities xfs is told how to copy.
    let setup = Setup { capacity_bytes: 256 << 20, confine: true, ..SETUP };
    let volume = Volume::on(Stage::on_file_system("xfs"), setup);
    let snapshot = volume.backing.join("snapshot");
    fs::create_dir(&snapshot).unwrap();
    fs::create_dir(volume.path("d")).unwrap();
    let overwrite = |byte: u8| {
        for n in 0..FILES {
            let path = volume.path(&format!("d/f{n}"));
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
            for piece in 0..PIECES {
                file.write_all_at(&vec![byte; 4096], piece * (128 << 10)).unwrap();
            }
        }
    };
    overwrite(1);
    rest_and_charge_anew(&volume, "xfs");
    let written = volume.usage().used_bytes;
    for round in 2..5 {
        for n in 0..FILES {
            let from = File::open(volume.backing.join(format!("d/f{n}"))).unwrap();
            let to = File::create(snapshot.join(format!("f{n}"))).unwrap();
            rustix::fs::ioctl_ficlone(to, from).unwrap();
        }
        overwrite(round);
        let most = written + FILES * PIECES * PIECE;
        let used = volume.usage().used_bytes;
        assert!(used <= most, "round {round}: {used}, {most} would be every piece twice");
    }
    rest_and_charge_anew(&volume, "xfs");
    assert_eq!(volume.usage().used_bytes, written, "what was copied is written back");
}

#[test]
fn the_count_after_a_kill_shows_the_files_that_it_has_found() {
    const FILES: u64 = 100_000;
    let mut volume = Volume::new();
    fs::create_dir(volume.path("d")).unwrap();
    volume.kill();
    for number in 0..FILES {
        File::create(volume.backing.join(format!("d/{number}"))).unwrap();
    }
    volume.serve_again(Setup::default());
    let all = FILES + 2;
    // On a busy machine the count may be over before this test looks.
    let is_shown = |volume: &mut Volume| {
        volume.kill();
        volume.serve_again(Setup::default());
        let mut found = Vec::new();
        let counted = loop {
            let now = volume.usage_now();
            if !now.counting {
                break now.used_inodes;
            }
            found.push(now.used_inodes);
        };
        assert_eq!(counted, all);
        assert!(found.is_sorted(), "{found:?}");
        found.iter().any(|files| (1..FILES).contains(files))
    };
    assert!((0..20).any(|_| is_shown(&mut volume)));

    // A daemon that ends before it has counted all of them: on a busy machine, not the first one.
    let ends_early = |volume: &mut Volume| {
        volume.kill();
        volume.serve_again(Setup::default());
        while volume.usage_now().used_inodes == 0 {}
        let is_early = volume.usage_now().counting;
        volume.unmount();
        let is_kept = fs::metadata(volume.usage_file()).unwrap().len() > 0;
        volume.serve_again(Setup::default());
        assert_eq!(volume.usage().used_inodes, all);
        is_early && !is_kept
    };
    assert!((0..20).any(|_| ends_early(&mut volume)));
}
