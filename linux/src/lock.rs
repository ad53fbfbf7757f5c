//! Whole-file locks (flock(2)): one holder per file, released by the kernel
//! when the holder dies.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::{Error, Result};

/// Held until dropped.
#[derive(Debug)]
pub struct FileLock {
    _flock: Flock<File>,
}

impl FileLock {
    /// Waits for the lock; creates the file with `mode` when it is missing.
    pub fn exclusive(path: &Path, mode: u32) -> Result<Self> {
        lock(path, mode, FlockArg::LockExclusive)
    }

    /// `None` when another process (or another open of the file) holds it.
    pub fn try_exclusive(path: &Path, mode: u32) -> Result<Option<Self>> {
        match lock(path, mode, FlockArg::LockExclusiveNonblock) {
            Ok(held) => Ok(Some(held)),
            Err(e) if e.errno() == Errno::EWOULDBLOCK => Ok(None),
            Err(e) => Err(e),
        }
    }
}

fn lock(path: &Path, mode: u32, how: FlockArg) -> Result<FileLock> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(mode)
        .open(path)
        .map_err(|e| Error::at("open lock", path, e))?;
    loop {
        match Flock::lock(file, how) {
            Ok(flock) => return Ok(FileLock { _flock: flock }),
            Err((back, Errno::EINTR)) => file = back,
            Err((_, errno)) => return Err(Error::at("lock", path, errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_lock_is_refused_and_a_dropped_one_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = FileLock::exclusive(&path, 0o600).unwrap();
        assert!(FileLock::try_exclusive(&path, 0o600).unwrap().is_none());
        drop(held);
        assert!(FileLock::try_exclusive(&path, 0o600).unwrap().is_some());
    }
}
