//! Finds the holder of a file's flock(2) lock in /proc/locks (`1: FLOCK  ADVISORY  WRITE 4711
//! 00:1a:567 0 EOF`, the device in hexadecimal). It lists holders in the reader's pid namespace and
//! below, by the process that took the lock. That process may have ended and left the lock to a
//! child.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Error, Result, mount, mountinfo};

const LOCKS: &str = "/proc/locks";

/// There may be several: Btrfs gives files of several subvolumes the same number.
pub(super) fn of(file: &File) -> Result<Vec<i32>> {
    let number = number_of(file)?;
    let locks = std::fs::read_to_string(LOCKS).map_err(|e| Error::at("read", Path::new(LOCKS), e))?;
    let holders = locks.lines().filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, "FLOCK", _, "WRITE", pid, file, ..] if file == number => pid.parse().ok(),
        _ => None,
    });
    Ok(holders.collect())
}

/// The file's id in /proc/locks. Its device is the mount's; on Btrfs, stat(2) returns another one.
/// A namespace's file is on no mount that mountinfo lists.
pub(super) fn number_of(file: &File) -> Result<String> {
    let found = file.metadata().map_err(|e| Error::new("look at", "a lock", e))?;
    let (major, minor) = match mountinfo::of_id(mount::id_of(file)?)? {
        Some(mount) => (mount.major, mount.minor),
        None => (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev())),
    };
    Ok(format!("{major:02x}:{minor:02x}:{}", found.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{Mode, OFlags, openat};

    use super::*;
    use crate::lock::FileLock;
    use crate::rootfs::new_fs;

    /// The first file of a new tmpfs: those of all of them have one number.
    fn first_file() -> (OwnedFd, File) {
        assert!(nix::unistd::geteuid().is_root(), "this test makes file systems: run it as root");
        let root = new_fs("tmpfs", &[]).unwrap();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = openat(&root, "lock", flags, Mode::RUSR).unwrap().into();
        (root, file)
    }

    #[test]
    fn a_lock_of_a_file_of_the_same_number_elsewhere_is_no_lock_of_this_one() {
        let ((_one, here), (_other, elsewhere)) = (first_file(), first_file());
        assert_eq!(here.metadata().unwrap().ino(), elsewhere.metadata().unwrap().ino());
        let lock = FileLock::try_of(elsewhere).unwrap().unwrap();
        assert_eq!(of(&here).unwrap(), [] as [i32; 0]);
        assert_eq!(of(lock.file()).unwrap(), [std::process::id().cast_signed()]);
    }

    #[test]
    fn who_shares_a_lock_does_not_hold_it_alone() {
        let (_root, file) = first_file();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockShared).unwrap();
        assert_eq!(of(&file).unwrap(), [] as [i32; 0]);
    }
}
