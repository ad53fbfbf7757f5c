//! What a pool holds, as its directories show it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::model::ids::{SnapshotId, VolumeId};

/// Empty for a directory that cannot be listed.
pub(super) fn entries_of(dirs: [&Path; 2]) -> Vec<PathBuf> {
    let entries = dirs.map(std::fs::read_dir).into_iter().flatten().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The volumes and snapshots with data in the pool; empty if it cannot be listed.
pub(super) fn stored(dir: &Path) -> (BTreeSet<VolumeId>, BTreeSet<SnapshotId>) {
    let names = |part| {
        let entries = std::fs::read_dir(dir.join(part)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    };
    let volumes = names("volumes").filter_map(|name| VolumeId::parse(&name));
    (volumes.collect(), names("snapshots").filter_map(|name| SnapshotId::parse(&name)).collect())
}
