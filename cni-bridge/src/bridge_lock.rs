//! One ADD at a time changes a bridge and its ports.
//!
//! Invariant: the lock file exists only while somebody holds it or waits for
//! it. Whoever gets the lock of a file that has been removed meanwhile starts
//! over, so two never hold it at once.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use linux::Error;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Writable by root only: nobody else can hold up an ADD.
const DIR: &str = "/run";

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct BridgeLock {
    path: PathBuf,
    _lock: Flock<File>,
}

impl BridgeLock {
    /// Waits until the bridge called `bridge` (a valid interface name) is ours.
    pub(crate) fn take(bridge: &str) -> Result<Self, Error> {
        let path = Path::new(DIR).join(format!("hawser-bridge-{bridge}.lock"));
        loop {
            let lock = lock(&path)?;
            if is_at(&lock, &path)? {
                return Ok(Self { path, _lock: lock });
            }
        }
    }
}

impl Drop for BridgeLock {
    fn drop(&mut self) {
        // A file that stays is the next holder's.
        drop(std::fs::remove_file(&self.path));
    }
}

fn lock(path: &Path) -> Result<Flock<File>, Error> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::at("open lock", path, e))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusive) {
            Ok(lock) => return Ok(lock),
            Err((back, Errno::EINTR)) => file = back,
            Err((_, errno)) => return Err(Error::at("lock", path, errno)),
        }
    }
}

fn is_at(file: &File, path: &Path) -> Result<bool, Error> {
    let locked = file.metadata().map_err(|e| Error::at("stat lock", path, e))?;
    let named = std::fs::metadata(path);
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (locked.dev(), locked.ino())))
}
