//! The job of the process that unpacks one layer.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::limits::{ImageLimits, Used};
use super::source::Blob;

/// Passed as the first argument, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) blob: Blob,
    /// Whether the blob's digest was checked, and nothing else can change the file. It is computed
    /// again while it is unpacked.
    pub(crate) is_checked: bool,
    pub(crate) digest: String,
    pub(crate) diff_id: String,
    /// An empty directory, or the layer's own if it is unpacked already.
    pub(crate) target: PathBuf,
    /// If it is unpacked already, only the two digests are checked.
    pub(crate) is_unpacked: bool,
    pub(crate) limits: ImageLimits,
    /// What the image's lower layers have used of its limits.
    pub(crate) used: Used,
}
