//! Mounts at or below a path, read from the mount table without accessing any file system.

use std::path::{Path, PathBuf};

use linux::mountinfo;

use super::error::Error;

/// Fails if anything is mounted at or below `path`.
pub(super) fn check_nothing_mounted(path: &Path) -> Result<(), Error> {
    let below = mounts_below(path)?;
    match below.into_iter().next() {
        Some(path) => Err(Error::StillMounted { path }),
        None => Ok(()),
    }
}

/// The mount points at or below `path`.
pub(super) fn mounts_below(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let mounts = mountinfo::below(path).map_err(Error::Kernel)?;
    Ok(mounts.into_iter().map(|mount| mount.mount_point).collect())
}
