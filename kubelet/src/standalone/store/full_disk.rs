//! How an object is marked for deletion on a full disk.
//!
//! A new version of a file needs space; a new name for the file does not. So a
//! deletion that cannot be written renames the object's file to
//! `<file>.deleted`, and the next start reads the object as deleted. Where even
//! that fails, the mark stands in memory alone until the kubelet ends.
//!
//! Invariant: of `<file>` and `<file>.deleted`, the first one is newer: it was
//! written after there was space again.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

const SUFFIX: &str = ".deleted";

/// Whether a write failed because the file system, or the quota, is used up.
pub(super) fn is_cause(error: &linux::Error) -> bool {
    matches!(error.errno(), Errno::ENOSPC | Errno::EDQUOT)
}

/// Marks the object in `file` as deleted, without writing a byte.
pub(super) fn bury(file: &Path) -> linux::Result<()> {
    let grave = grave_of(file);
    std::fs::rename(file, &grave).map_err(|e| linux::Error::at("rename to", &grave, e))
}

/// The name that [`bury`] gives to `file`.
pub(super) fn grave_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

pub(super) fn is_grave(file: &Path) -> bool {
    file.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes())
}

/// The name that the object's file had before [`bury`].
pub(super) fn unburied(file: &Path) -> PathBuf {
    if is_grave(file) { file.with_extension("") } else { file.to_owned() }
}
