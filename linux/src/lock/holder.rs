//! Who holds the flock(2) lock of a file, by /proc/locks
//! (`1: FLOCK  ADVISORY  WRITE 4711 00:1a:567 0 EOF`, the device in hexadecimal). It shows
//! holders of the reader's pid namespace and those below, by the process that took the lock,
//! which may have ended since and left it to a child.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Error, Result, mount, mountinfo};

const LOCKS: &str = "/proc/locks";

/// Several where Btrfs gave files of several subvolumes the same number.
pub(super) fn of(file: &File) -> Result<Vec<i32>> {
    let number = number_of(file)?;
    let locks = std::fs::read_to_string(LOCKS).map_err(|e| Error::at("read", Path::new(LOCKS), e))?;
    let holders = locks.lines().filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, "FLOCK", _, "WRITE", pid, file, ..] if file == number => pid.parse().ok(),
        _ => None,
    });
    Ok(holders.collect())
}

/// The file as /proc/locks writes it. Its device is that of the mount: on Btrfs stat(2) tells
/// another one. A namespace's file is on no mount that mountinfo lists.
pub(super) fn number_of(file: &File) -> Result<String> {
    let found = file.metadata().map_err(|e| Error::new("look at", "a lock", e))?;
    let (major, minor) = match mountinfo::of_id(mount::id_of(file)?)? {
        Some(mount) => (mount.major, mount.minor),
        None => (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev())),
    };
    Ok(format!("{major:02x}:{minor:02x}:{}", found.ino()))
}
