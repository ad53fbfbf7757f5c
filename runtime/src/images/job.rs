//! One layer to unpack, as the process that does it is told.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::limits::{ImageLimits, Used};
use super::source::Blob;

/// That process's first argument, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) blob: Blob,
    pub(crate) digest: String,
    pub(crate) diff_id: String,
    /// An empty directory; of a layer that is unpacked already, its own.
    pub(crate) target: PathBuf,
    /// Whether it is unpacked already: then only both digests are checked.
    pub(crate) is_unpacked: bool,
    pub(crate) limits: ImageLimits,
    /// What the image's layers below have taken.
    pub(crate) used: Used,
}
