//! The directories around mounts. No function here follows a mount or stats a mounted root, so a
//! dead FUSE server cannot make it fail.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::error::Error;
use super::layout;
use super::mounted::check_nothing_mounted;

/// Creates the directory and its parents.
pub(super) fn make_dir(path: &Path, mode: u32) -> Result<(), Error> {
    let make = || DirBuilder::new().recursive(true).mode(mode).create(path);
    match make() {
        // The teardown of another volume may have just removed an empty parent.
        Err(e) if e.kind() == io::ErrorKind::NotFound => make(),
        made => made,
    }
    .map_err(|e| Error::io("create directory", path, e))
}

/// Creates a mount point; leaves an existing one unchanged.
pub(super) fn make_mount_point(path: &Path, mode: u32) -> Result<(), Error> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Error::io("create directory", path, e)),
        _ => Ok(()),
    }
}

/// Removes a pod's volume directory after NodeUnpublishVolume: the target (which the driver should
/// have removed), vol_data.json, and the directory.
pub(super) fn remove_volume_dir(dir: &Path) -> Result<(), Error> {
    remove_mount_point(&layout::target(dir))?;
    layout::remove_vol_data(dir)?;
    remove_dir(dir)
}

/// Removes a stage directory after NodeUnstageVolume, and its empty parents.
pub(super) fn remove_stage_dir(dir: &Path) -> Result<(), Error> {
    remove_mount_point(&layout::globalmount(dir))?;
    layout::remove_vol_data(dir)?;
    remove_dir(dir)?;
    // Remove the parents (plugins/kubernetes.io/csi/<driver>) up to the first that is not empty.
    for parent in dir.ancestors().skip(1).take(3) {
        if std::fs::remove_dir(parent).is_err() {
            break;
        }
    }
    Ok(())
}

/// The directories in `dir`; none if it does not exist.
pub(super) fn subdirectories(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io("list", dir, e)),
    };
    let mut dirs = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Error::io("list", dir, e))?;
        // d_type comes from `dir`, without a stat of the entry.
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            dirs.push(entry.path());
        }
    }
    Ok(dirs)
}

pub(super) fn remove_dir(path: &Path) -> Result<(), Error> {
    match std::fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove directory", path, e)),
        _ => Ok(()),
    }
}

/// Removes an empty directory or file on which nothing is mounted, if there is one.
pub(super) fn remove_mount_point(path: &Path) -> Result<(), Error> {
    check_nothing_mounted(path)?;
    // A driver may publish a file.
    match std::fs::remove_dir(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
            std::fs::remove_file(path).map_err(|e| Error::io("remove", path, e))
        }
        Err(e) => Err(Error::io("remove directory", path, e)),
    }
}
