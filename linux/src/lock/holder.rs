//! Who holds the flock(2) lock of a file, by /proc/locks
//! (`1: FLOCK  ADVISORY  WRITE 4711 00:1a:567 0 EOF`). It shows holders of the reader's pid
//! namespace and those below, by the process that took the lock, which may have ended since
//! and left it to a child.

use std::path::Path;

use crate::{Error, Result};

const LOCKS: &str = "/proc/locks";

/// By the inode's number alone: on Btrfs and overlayfs the device that stat(2) tells is not
/// the one that stands here.
pub(super) fn of_inode(inode: u64) -> Result<Option<i32>> {
    find(|file| file.rsplit_once(':').is_some_and(|(_, number)| number.parse() == Ok(inode)))
}

/// `file`: device and inode, as /proc/locks writes them.
pub(super) fn of_file(file: &str) -> Result<Option<i32>> {
    find(|found| found == file)
}

fn find(is_wanted: impl Fn(&str) -> bool) -> Result<Option<i32>> {
    let locks = std::fs::read_to_string(LOCKS).map_err(|e| Error::at("read", Path::new(LOCKS), e))?;
    Ok(locks.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, "FLOCK", _, _, pid, file, ..] if is_wanted(file) => pid.parse().ok(),
        _ => None,
    }))
}
