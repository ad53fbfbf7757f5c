//! How a snapshot is cut.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SnapshotMode {
    /// Shared extents, copied on the first write (FICLONE).
    Reflink,
    /// A full copy while writers wait.
    BlockingCopy,
}

impl SnapshotMode {
    /// The value in a StorageClass or VolumeSnapshotClass.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Reflink => "reflink",
            Self::BlockingCopy => "blocking-copy",
        }
    }
}
