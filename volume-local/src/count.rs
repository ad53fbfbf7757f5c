//! Counts what a tree holds, if the last daemon's count is missing: the daemon was killed, or the
//! machine crashed.
//!
//! The tree does not change meanwhile, so `..` leads back up, and two descriptors are enough for
//! any depth.

use std::collections::HashSet;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Statx, StatxFlags};
use rustix::io::Errno;
use volume_fs::figures::Counted;

use crate::attributes::Origin;
use crate::charge::{Charged, charge};
use crate::errno::Result;
use crate::nodes::stat;
use crate::quota::Use;

const BUFFER_BYTES: usize = 32 * 1024;
const REPORT_EACH: u64 = 1000;

/// Counts everything below `root`, and `root` itself. A file with several names counts once, plus
/// its further names if these take inodes. Other file systems are not part of the volume.
/// `attribute_blocks` returns the most blocks that the attributes of a file (an O_PATH descriptor)
/// take. `report` gets what was found so far, after each [`REPORT_EACH`] files.
pub(crate) fn count(
    root: impl AsFd,
    origin: Origin,
    names_take_inodes: bool,
    attribute_blocks: impl Fn(BorrowedFd<'_>) -> Result<u8>,
    report: impl Fn(Counted),
) -> Result<Use> {
    let (found, linked) = (Use::default(), HashSet::new());
    let mut walk = Walk { origin, names_take_inodes, attribute_blocks, report, found, linked };
    let seen = stat(&root)?;
    walk.take(&seen, charge(&seen, 0));
    let mut here = open_directory(&root, c".")?;
    // The directories still to be visited, level by level.
    let mut levels = vec![walk.directory(&here)?];
    while let Some(level) = levels.last_mut() {
        match level.pop() {
            Some(name) => {
                here = match open_directory(&here, &name) {
                    // Its type changed: another process works behind the mount.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                    opened => opened?,
                };
                levels.push(walk.directory(&here)?);
            }
            None => {
                levels.pop();
                if !levels.is_empty() {
                    here = open_directory(&here, c"..")?;
                }
            }
        }
    }
    Ok(walk.found)
}

struct Walk<B, R> {
    origin: Origin,
    names_take_inodes: bool,
    attribute_blocks: B,
    report: R,
    found: Use,
    /// Files with several names that were counted.
    linked: HashSet<u64>,
}

impl<B: Fn(BorrowedFd<'_>) -> Result<u8>, R: Fn(Counted)> Walk<B, R> {
    /// Counts the contents of `directory`. Returns its subdirectories.
    fn directory(&mut self, directory: &OwnedFd) -> Result<Vec<CString>> {
        let mut below = Vec::new();
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut entries = RawDir::new(directory, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let wanted = StatxFlags::BASIC_STATS;
            let seen = match rustix::fs::statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, wanted) {
                Err(Errno::NOENT) => continue,
                seen => seen?,
            };
            let charged = self.charged(directory, name, &seen)?;
            if self.take(&seen, charged)
                && FileType::from_raw_mode(seen.stx_mode.into()) == FileType::Directory
            {
                below.push(name.to_owned());
            }
        }
        Ok(below)
    }

    /// Reads attributes only if they may have blocks that are not charged yet.
    fn charged(&self, directory: &OwnedFd, name: &std::ffi::CStr, seen: &Statx) -> Result<Charged> {
        let plain = charge(seen, 0);
        if plain.bytes == seen.stx_blocks.saturating_mul(512) {
            return Ok(plain);
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(directory, name, flags, Mode::empty());
        let blocks = match file.and_then(|file| (self.attribute_blocks)(file.as_fd())) {
            // Removed behind the mount.
            Err(Errno::NOENT) => return Ok(plain),
            blocks => blocks?,
        };
        Ok(charge(seen, blocks))
    }

    /// Whether the file belongs to this volume.
    fn take(&mut self, seen: &Statx, charged: Charged) -> bool {
        let Ok(id) = self.origin.node_id(seen) else { return false };
        let several =
            seen.stx_nlink > 1 && FileType::from_raw_mode(seen.stx_mode.into()) != FileType::Directory;
        if !several || self.linked.insert(seen.stx_ino) {
            self.found.counted.bytes += charged.bytes;
            self.found.counted.inodes += 1;
            if self.found.counted.inodes.is_multiple_of(REPORT_EACH) {
                (self.report)(self.found.counted);
            }
            if !charged.lasting {
                self.found.unsettled.push((id, charged.bytes));
            }
        } else if self.names_take_inodes {
            self.found.counted.inodes += 1;
        }
        true
    }
}

fn open_directory(parent: impl AsFd, name: &std::ffi::CStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOATIME;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn counted(path: &std::path::Path) -> Counted {
        found(path).counted
    }

    fn found(path: &std::path::Path) -> Use {
        let root = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let report = |_so_far| ();
        count(&root, Origin::of_root(&stat(&root).unwrap()), false, |_file| Ok(0), report).unwrap()
    }

    #[test]
    fn files_of_every_kind_are_counted_and_one_of_two_names_once() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| dir.path().join(name);
        let empty = counted(dir.path());
        assert_eq!(empty.inodes, 1, "the root");
        fs::create_dir(at("d")).unwrap();
        fs::write(at("d/f"), vec![1; 10_000]).unwrap();
        fs::hard_link(at("d/f"), at("again")).unwrap();
        symlink("d", at("link")).unwrap();
        fs::File::create(at("sparse")).unwrap().set_len(1 << 30).unwrap();
        let whole = counted(dir.path());
        assert_eq!(whole.inodes - empty.inodes, 4);
        let directory = fs::metadata(at("d")).unwrap().blocks() * 512;
        assert_eq!(whole.bytes - empty.bytes, directory + 12_288);
        let sparse = fs::metadata(at("sparse")).unwrap().ino();
        assert_eq!(
            found(dir.path()).unsettled,
            [(sparse, 0)],
            "what has holes may be charged otherwise later"
        );
    }

    #[test]
    fn a_tree_deeper_than_descriptors_and_paths_allow_is_counted() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let name = "d".repeat(250);
        let mut here = rustix::fs::open(dir.path(), OFlags::PATH, Mode::empty()).unwrap();
        for _ in 0..2000 {
            rustix::fs::mkdirat(&here, &*name, Mode::RWXU).unwrap();
            here = rustix::fs::openat(&here, &*name, OFlags::PATH, Mode::empty()).unwrap();
        }
        assert_eq!(counted(dir.path()).inodes, 2001);
    }
}
