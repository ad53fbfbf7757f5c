//! A manifest file's content, and a fingerprint of its version.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::manifest::{Manifest, Parsed};

/// Distinguishes versions of a file without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fingerprint {
    identity: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// A file's content at one time.
#[derive(Debug, Clone)]
pub(super) struct SeenFile {
    pub(super) fingerprint: Fingerprint,
    pub(super) manifests: Arc<Vec<Manifest>>,
    /// Each with its position. If there are any, `manifests` is incomplete.
    pub(super) mistakes: Vec<String>,
    /// This version was not read before.
    pub(super) is_new: bool,
}

impl SeenFile {
    pub(super) fn new(fingerprint: Fingerprint, parsed: Parsed) -> Self {
        let mistakes = parsed.errors.iter().map(ToString::to_string).collect();
        Self { fingerprint, manifests: Arc::new(parsed.manifests), mistakes, is_new: true }
    }

    pub(super) fn broken(fingerprint: Fingerprint, path: &Path, reason: &str) -> Self {
        let mistakes = vec![format!("{}: {reason}", path.display())];
        Self { fingerprint, manifests: Arc::default(), mistakes, is_new: true }
    }
}

impl Fingerprint {
    pub(super) fn of(file: &Metadata) -> Self {
        Self {
            identity: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    /// For a file that cannot be opened.
    pub(super) fn none() -> Self {
        Self { identity: (0, 0), size: 0, modified: (0, 0), changed: (0, 0) }
    }
}
