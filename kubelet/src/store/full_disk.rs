//! Marks an object for deletion on a full disk.
//!
//! Writing a new version of a file needs space; renaming it does not. So a deletion that cannot be
//! written renames the object's file to `<file>.deleted`, which the next start reads as a deleted
//! object. If that fails too, the mark is in memory only.
//!
//! Invariant: if both `<file>` and `<file>.deleted` exist, `<file>` is newer: it was written after
//! space was freed.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

const SUFFIX: &str = ".deleted";

/// Whether a write failed because the file system or the quota is full.
pub(super) fn is_cause(error: &linux::Error) -> bool {
    matches!(error.errno(), Errno::ENOSPC | Errno::EDQUOT)
}

/// Marks the object in `file` as deleted by renaming the file.
pub(super) fn mark_deleted(file: &Path) -> linux::Result<()> {
    let path = deleted_path(file);
    std::fs::rename(file, &path).map_err(|e| linux::Error::at("rename to", &path, e))
}

/// The new name of `file` after [`mark_deleted`].
pub(super) fn deleted_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

pub(super) fn is_deleted_path(file: &Path) -> bool {
    file.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes())
}

/// The object's file name before [`mark_deleted`].
pub(super) fn original_path(file: &Path) -> PathBuf {
    if is_deleted_path(file) { file.with_extension("") } else { file.to_owned() }
}
