//! Measures a tree's disk space while other processes may be filling it.
//!
//! A running container may change the tree while root counts it, so this uses [`tree::walk`]. The
//! number of entries and the time are limited. If a limit or a change cuts the count short, it is
//! not [`DiskUsage::is_complete`].

use std::collections::HashSet;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rustix::fs::{CWD, ResolveFlags, Statx};

use crate::tree::{self, Changes, Visitor};
use crate::{Error, Result, btrfs};

/// Size of the units of `stx_blocks`.
const BLOCK_BYTES: u64 = 512;
/// The clock is read once in this many steps.
const STEPS_A_LOOK: u64 = 256;

/// The limits of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    pub entries: u64,
    pub time: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    /// Allocated, not apparent size: holes are free. A file with several names counts once. On
    /// Btrfs, names and subvolumes count too, since no file's blocks include them.
    pub bytes: u64,
    /// Files, directories and all others.
    pub inodes: u64,
    /// Whether everything was counted; otherwise the values are lower bounds.
    pub is_complete: bool,
}

/// Divides time among several counts, so that none uses the time of later ones.
#[derive(Debug)]
pub struct TimeShares {
    deadline: Instant,
    counts: u32,
}

impl TimeShares {
    pub fn new(time: Duration, counts: usize) -> Self {
        Self { deadline: Instant::now() + time, counts: u32::try_from(counts).unwrap_or(u32::MAX) }
    }

    /// The next count's share: the remaining time divided by the remaining counts.
    pub fn next_share(&mut self) -> Duration {
        let share = self.deadline.saturating_duration_since(Instant::now()) / self.counts.max(1);
        self.counts = self.counts.saturating_sub(1);
        share
    }
}

/// The usage of `root` and everything below; zero if there is no such directory.
pub fn measure(root: &Path, bounds: Bounds) -> Result<DiskUsage> {
    let mut count = Count::new(bounds);
    let directory = match tree::open_dir(CWD, root, ResolveFlags::NO_SYMLINKS) {
        Err(rustix::io::Errno::NOENT) => return Ok(count.usage),
        opened => opened.map_err(|e| Error::at("open", root, e))?,
    };
    count.names_take_room = btrfs::is_btrfs(&directory).map_err(|e| Error::at("statfs", root, e))?;
    match tree::walk(directory.as_fd(), Changes::Tolerated, &AtomicBool::new(false), &mut count) {
        Ok(()) => {}
        // Moved or removed during the walk, or a limit was reached.
        Err(e)
            if matches!(
                e.errno(),
                Errno::ESTALE | Errno::ENOENT | Errno::ECANCELED | Errno::ENAMETOOLONG | Errno::E2BIG
            ) =>
        {
            count.usage.is_complete = false;
        }
        Err(e) => return Err(e),
    }
    Ok(count.usage)
}

/// The bytes of one file; zero if it does not exist. A link is not followed.
pub fn of_file(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    match std::fs::symlink_metadata(path) {
        Ok(file) => Ok(file.blocks().saturating_mul(BLOCK_BYTES)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(e) => Err(Error::at("stat", path, e)),
    }
}

/// With the device, since subvolumes reuse inode numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct FileId {
    device_major: u32,
    device_minor: u32,
    inode: u64,
}

/// Files with several names that are remembered: some 30 MiB. A tree with more is counted in part.
const MOST_LINKED: usize = 500_000;

struct Count {
    usage: DiskUsage,
    /// Files with several names.
    linked: HashSet<FileId>,
    /// True on Btrfs.
    names_take_room: bool,
    entries_left: u64,
    /// Entries read, and files and directories counted.
    steps: u64,
    deadline: Instant,
}

impl Count {
    fn new(bounds: Bounds) -> Self {
        Self {
            usage: DiskUsage { bytes: 0, inodes: 0, is_complete: true },
            linked: HashSet::new(),
            names_take_room: false,
            entries_left: bounds.entries,
            steps: 0,
            deadline: Instant::now() + bounds.time,
        }
    }

    /// `ECANCELED` once the time is over.
    fn step(&mut self) -> Result<()> {
        if self.steps.is_multiple_of(STEPS_A_LOOK) && Instant::now() > self.deadline {
            return Err(bound_reached());
        }
        self.steps += 1;
        Ok(())
    }

    fn add_name(&mut self, name: &CStr) {
        if self.names_take_room {
            let bytes = btrfs::bytes_of_name(name.count_bytes());
            self.usage.bytes = self.usage.bytes.saturating_add(bytes);
        }
    }

    /// `ECANCELED` once a limit is reached.
    fn add(&mut self, stat: &Statx) -> Result<()> {
        self.step()?;
        if self.entries_left == 0 {
            return Err(bound_reached());
        }
        self.entries_left -= 1;
        self.usage.bytes = self.usage.bytes.saturating_add(stat.stx_blocks.saturating_mul(BLOCK_BYTES));
        self.usage.inodes += 1;
        Ok(())
    }
}

impl Visitor for Count {
    fn entry(&mut self) -> Result<()> {
        self.step()
    }

    fn file(&mut self, _parent: BorrowedFd<'_>, name: &CStr, stat: &Statx) -> Result<()> {
        self.add_name(name);
        let file = FileId {
            device_major: stat.stx_dev_major,
            device_minor: stat.stx_dev_minor,
            inode: stat.stx_ino,
        };
        if stat.stx_nlink > 1 {
            if self.linked.len() >= MOST_LINKED {
                return Err(bound_reached());
            }
            if !self.linked.insert(file) {
                return Ok(());
            }
        }
        self.add(stat)
    }

    fn enter(&mut self, name: &CStr) -> Result<()> {
        self.add_name(name);
        Ok(())
    }

    fn leave(&mut self, directory: BorrowedFd<'_>) -> Result<()> {
        let stat = tree::stat(directory, c"")?;
        if self.names_take_room && stat.stx_ino == btrfs::INODE_OF_SUBVOLUME {
            self.usage.bytes = self.usage.bytes.saturating_add(btrfs::BYTES_OF_SUBVOLUME);
        }
        self.add(&stat)
    }
}

fn bound_reached() -> Error {
    Error::new("count", "a tree", Errno::ECANCELED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const BOUNDS: Bounds = Bounds { entries: 1_000_000, time: Duration::from_secs(600) };

    #[test]
    fn allocated_blocks_count_once_and_links_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        let before = measure(&root, BOUNDS).unwrap();
        fs::write(root.join("a/b/data"), vec![b'x'; 1 << 20]).unwrap();
        fs::hard_link(root.join("a/b/data"), root.join("again")).unwrap();
        fs::File::create(root.join("hole")).unwrap().set_len(1 << 40).unwrap();
        let big = dir.path().join("outside");
        fs::write(&big, vec![b'x'; 8 << 20]).unwrap();
        symlink(&big, root.join("file-link")).unwrap();
        symlink(dir.path(), root.join("dir-link")).unwrap();
        let after = measure(&root, BOUNDS).unwrap();
        assert!(after.is_complete);
        assert_eq!(after.inodes - before.inodes, 4, "data, hole and two links");
        let grown = after.bytes - before.bytes;
        assert!((1 << 20..2 << 20).contains(&grown), "{grown}");
    }

    #[test]
    fn further_names_of_a_file_take_time_too() {
        let dir = tempfile::tempdir().unwrap();
        let first = dir.path().join("0");
        fs::write(&first, "x").unwrap();
        for n in 1..=2 * STEPS_A_LOOK {
            fs::hard_link(&first, dir.path().join(n.to_string())).unwrap();
        }
        let fd = tree::open_dir(CWD, dir.path(), ResolveFlags::NO_SYMLINKS).unwrap();
        let mut count = Count::new(BOUNDS);
        tree::walk(fd.as_fd(), Changes::Tolerated, &AtomicBool::new(false), &mut count).unwrap();
        assert!(count.steps > 2 * STEPS_A_LOOK, "{} steps", count.steps);
        assert_eq!(count.usage.inodes, 2, "the directory and one file");
    }

    #[test]
    fn no_count_takes_the_time_of_those_after_it() {
        let mut shares = TimeShares::new(Duration::from_secs(300), 3);
        assert!(shares.next_share() <= Duration::from_secs(100));
        assert!(shares.next_share() > Duration::from_secs(140), "the first took less");
        assert!(shares.next_share() > Duration::from_secs(290));
        assert!(shares.next_share() > Duration::from_secs(290), "one more than was said");
    }

    #[test]
    fn what_is_not_there_takes_nothing() {
        let usage = measure(Path::new("/nonexistent/x"), BOUNDS).unwrap();
        assert_eq!(usage, DiskUsage { bytes: 0, inodes: 0, is_complete: true });
    }

    /// Deeper than the limits of descriptors, of path lengths and of the stack.
    #[test]
    fn a_tree_of_any_depth_is_counted_and_a_bound_ends_the_count() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let mut at = tree::open_dir(CWD, &root, ResolveFlags::empty()).unwrap();
        for _ in 0..30_000 {
            rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::from(0o700)).unwrap();
            at = tree::open_dir(&at, c"d", tree::WITHIN).unwrap();
        }
        drop(at);
        let usage = measure(&root, BOUNDS).unwrap();
        assert_eq!((usage.inodes, usage.is_complete), (30_001, true));
        let cut = measure(&root, Bounds { entries: 1000, ..BOUNDS }).unwrap();
        assert_eq!((cut.inodes, cut.is_complete), (1000, false));
        let late = measure(&root, Bounds { time: Duration::ZERO, ..BOUNDS }).unwrap();
        assert_eq!(
            (late.inodes, late.is_complete),
            (0, false),
            "on the way down, before anything is counted"
        );
        tree::remove(&root).unwrap();
    }
}
