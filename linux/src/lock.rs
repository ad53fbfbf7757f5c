//! Whole-file locks (flock(2)): one holder per file, released by the kernel
//! when the holder dies.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{FlockOperation, flock};

use crate::{Error, Result, process};

mod holder;
mod transient;

pub use transient::TransientLock;

/// Held until dropped. (nix's guard panics when the release fails; closing the
/// file releases the lock all the same.)
#[derive(Debug)]
pub struct FileLock {
    file: File,
}

impl FileLock {
    /// Waits for the lock; creates a missing file with `mode`.
    pub fn exclusive(path: &Path, mode: u32) -> Result<Self> {
        Self::of(open(path, mode)?).map_err(|e| Error::at("lock", path, e))
    }

    /// `None` if another process (or another open of the file) holds it.
    pub fn try_exclusive(path: &Path, mode: u32) -> Result<Option<Self>> {
        Self::try_of(open(path, mode)?).map_err(|e| Error::at("lock", path, e))
    }

    /// [`Self::try_exclusive`], but a holder that was killed counts as gone. Such a process never
    /// runs its program again, but its threads may still wait in the kernel for a file system that
    /// does not answer, and keep the lock.
    ///
    /// The killed holder keeps the lock of its file, and another file replaces that one: all users
    /// of this lock must take it through this function. The replacement is made together with the
    /// first lock, since the disk may be full later.
    pub fn try_exclusive_after_kill(path: &Path, mode: u32) -> Result<Option<Self>> {
        let next = path.with_extension("next");
        let lock = match Self::try_in_place(path, mode)? {
            None => Self::try_succeed(path, &next, mode)?,
            locked => locked,
        };
        if lock.is_some() {
            let _full_disk_is_no_reason = open(&next, mode);
        }
        Ok(lock)
    }

    /// Also `None` if another file replaced this one while it was opened.
    fn try_in_place(path: &Path, mode: u32) -> Result<Option<Self>> {
        let lock = Self::try_exclusive(path, mode)?;
        let inode = |found: io::Result<Metadata>| found.map(|found| found.ino()).ok();
        Ok(lock.filter(|lock| inode(lock.file.metadata()) == inode(std::fs::metadata(path))))
    }

    /// Replaces `path`, whose holder was killed, by `next`.
    fn try_succeed(path: &Path, next: &Path, mode: u32) -> Result<Option<Self>> {
        // The lock of the directory allows only one successor.
        let dir = path.parent().unwrap_or(Path::new("/"));
        let dir = File::open(dir).map_err(|e| Error::at("open directory of lock", path, e))?;
        let alone = Self::try_of(dir).map_err(|e| Error::at("lock directory of", path, e))?;
        let holders = holder::of(&open(path, mode)?)?;
        if alone.is_none() || holders.is_empty() || !holders.into_iter().all(process::is_killed) {
            return Ok(None);
        }
        let Some(lock) = Self::try_exclusive(next, mode)? else { return Ok(None) };
        std::fs::rename(next, path).map_err(|e| Error::at("take the place of lock", path, e))?;
        Ok(Some(lock))
    }

    /// The lock of an open file; `None` if another open of it holds the lock.
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
        // At once, even if a child that has not yet called exec holds the file too.
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
        // The directory may be one that a pod can write.
        .custom_flags(libc::O_NOFOLLOW)
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
