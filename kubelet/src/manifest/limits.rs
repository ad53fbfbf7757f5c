//! How much of a manifest the kubelet reads. Anybody who may write a manifest
//! is untrusted: one file must not stop the others, nor the kubelet's end.
//!
//! Invariant: no step of reading a manifest takes more than linear time in the
//! bytes, nodes and documents that these limits let through.

use std::time::{Duration, Instant};

/// A whole file: kubelet's own `maxConfigLength`.
pub const FILE_BYTES: usize = 10 << 20;
/// One document. The API server accepts 3 MiB a request.
pub(super) const DOCUMENT_BYTES: usize = 3 << 20;
/// Sequences and mappings inside one another. The deepest field of a pod is at 13.
pub(super) const DEPTH: usize = 64;
/// Values of one document, counted after every alias is replaced by what it stands for.
pub(super) const NODES: usize = 50_000;
/// Documents of one file.
pub(super) const DOCUMENTS: usize = 1_000;
/// All work on one file.
pub const TIME: Duration = Duration::from_secs(2);

/// When the work on a file has to be over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn start() -> Self {
        Self(Instant::now() + TIME)
    }

    pub(super) fn has_passed(self) -> bool {
        Instant::now() >= self.0
    }
}
