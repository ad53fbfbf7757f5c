//! Whole-file locks (flock(2)): one holder per file, released by the kernel
//! when the holder dies.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{FlockOperation, flock};

use crate::{Error, Result};

mod transient;

pub use transient::TransientLock;

/// Held until dropped. (nix's guard panics when the release fails; closing the
/// file releases the lock all the same.)
#[derive(Debug)]
pub struct FileLock {
    file: File,
}

impl FileLock {
    /// Waits for the lock; creates the file with `mode` when it is missing.
    pub fn exclusive(path: &Path, mode: u32) -> Result<Self> {
        Self::of(open(path, mode)?).map_err(|e| Error::at("lock", path, e))
    }

    /// `None` when another process (or another open of the file) holds it.
    pub fn try_exclusive(path: &Path, mode: u32) -> Result<Option<Self>> {
        Self::try_of(open(path, mode)?).map_err(|e| Error::at("lock", path, e))
    }

    /// The lock of an open file; `None` when another open of it holds the lock.
    pub fn try_of(file: File) -> io::Result<Option<Self>> {
        match lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { file })),
            Err(e) if e.raw_os_error() == Some(Errno::EWOULDBLOCK as i32) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Waits for the lock of an open file.
    pub fn of(file: File) -> io::Result<Self> {
        lock(&file, FlockOperation::LockExclusive)?;
        Ok(Self { file })
    }

    /// The locked file.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // Now, even if a child that has not yet called exec holds the file, too.
        let _closing_releases_it = lock(&self.file, FlockOperation::Unlock);
    }
}

fn open(path: &Path, mode: u32) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(mode)
        .open(path)
        .map_err(|e| Error::at("open lock", path, e))
}

fn lock(file: &File, how: FlockOperation) -> io::Result<()> {
    loop {
        match flock(file, how) {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
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
