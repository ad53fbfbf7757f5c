//! Directories that only root may use.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// Creates and removes a file in `dir`, to find a read-only or missing file system.
pub(crate) fn probe_dir(dir: &Path) -> linux::Result<()> {
    let path = dir.join(format!(".probe.{}.tmp", std::process::id()));
    let written = std::fs::write(&path, b"probe");
    let removed = match std::fs::remove_file(&path) {
        Err(e) if written.is_err() && e.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    written.and(removed).map_err(|e| linux::Error::at("write", &path, e))
}

/// Creates `dir`, mode 0700, in an existing directory.
pub(crate) fn private_dir(dir: &Path) -> linux::Result<()> {
    DirBuilder::new().mode(0o700).create(dir).map_err(|e| linux::Error::at("create", dir, e))
}

/// Creates `dir` and its parents, each with mode 0700.
pub(crate) fn private_dir_all(dir: &Path) -> linux::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| linux::Error::at("create", dir, e))
}
