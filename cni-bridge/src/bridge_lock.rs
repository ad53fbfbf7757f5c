//! One ADD at a time changes a bridge and its ports.
//!
//! Invariant: the lock file exists only while somebody holds it or waits for
//! it. Whoever gets the lock of a file that has been removed meanwhile starts
//! over, so two never hold it at once.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use linux::Error;
use linux::lock::FileLock;

/// Writable by root only: nobody else can hold up an ADD.
const DIR: &str = "/run";

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct BridgeLock {
    path: PathBuf,
    lock: FileLock,
}

impl BridgeLock {
    /// Waits until the bridge called `bridge` (a valid interface name) is ours.
    pub(crate) fn take(bridge: &str) -> Result<Self, Error> {
        let path = Path::new(DIR).join(format!("hawser-bridge-{bridge}.lock"));
        loop {
            let lock = FileLock::exclusive(&path, 0o600)?;
            if is_at(lock.file(), &path)? {
                return Ok(Self { path, lock });
            }
        }
    }
}

impl Drop for BridgeLock {
    fn drop(&mut self) {
        // A file that stays is the next holder's, and so is one that replaced ours.
        if is_at(self.lock.file(), &self.path).unwrap_or(false) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

fn is_at(file: &File, path: &Path) -> Result<bool, Error> {
    let locked = file.metadata().map_err(|e| Error::at("stat lock", path, e))?;
    let named = std::fs::metadata(path);
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (locked.dev(), locked.ino())))
}
