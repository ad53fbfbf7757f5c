//! Where the logs of containers are, and the names of rotated ones.

pub(crate) mod names;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::objects::ObjectMeta;

pub(crate) fn log_directory(log_dir: &Path, pod: &ObjectMeta) -> PathBuf {
    log_dir.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
}

/// Below the pod's log directory.
pub(crate) fn log_path(container: &str, restart_count: u32) -> String {
    format!("{container}/{restart_count}.log")
}

/// Removes a closed log and the logs rotated from it.
pub(crate) fn remove(log: &Path) -> linux::Result<()> {
    let rotated = match names::all(log) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        rotated => rotated.map_err(|e| linux::Error::at("list logs of", log, e))?,
    };
    rotated.iter().map(PathBuf::as_path).chain([log]).try_for_each(linux::atomic_file::discard)
}
