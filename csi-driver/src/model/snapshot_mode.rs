//! How a snapshot is cut.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SnapshotMode {
    /// Extents are shared, copied on the first write (FICLONE).
    Reflink,
    /// Every byte is copied while writers wait.
    BlockingCopy,
}

impl SnapshotMode {
    /// As a StorageClass or VolumeSnapshotClass writes it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Reflink => "reflink",
            Self::BlockingCopy => "blocking-copy",
        }
    }
}
