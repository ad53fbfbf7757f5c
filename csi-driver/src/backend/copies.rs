//! Copies of volumes: how far one has come, and what it holds.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use crate::model::capacity::{BYTES_PER_INODE, inode_limit};

/// How far a copy has come, seen from other threads, and their way to end it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) done_bytes: AtomicU64,
    pub(crate) total_bytes: AtomicU64,
    pub(crate) stop: AtomicBool,
    /// Where it ends with an error.
    pub(crate) most: OnceLock<Most>,
    /// Counts what all copies together have done.
    pub(crate) all_bytes: Arc<AtomicU64>,
}

/// The most that a copy may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Most {
    count: Count,
    names: u64,
}

impl Most {
    /// What a volume of that size may hold, and some more: its daemon may count less
    /// than a copy takes. Every name takes 12 bytes of a directory at least (ext4).
    fn of(capacity_bytes: u64) -> Self {
        let bytes = capacity_bytes.saturating_add(capacity_bytes / 8).saturating_add(1 << 20);
        let inodes = inode_limit(capacity_bytes, BYTES_PER_INODE);
        let inodes = inodes.saturating_add(inodes / 8);
        Self { count: Count { bytes, inodes }, names: bytes / 12 }
    }
}

impl Progress {
    /// Bounds the copy of a volume of `capacity_bytes` that is, or was, served: a daemon that
    /// was taken over may add to it for ever.
    pub(crate) fn bound(&self, capacity_bytes: u64) {
        let _first_counts = self.most.set(Most::of(capacity_bytes));
    }

    /// `EDQUOT` where what is copied, of `inodes` with `names` and `attribute_bytes`, is too
    /// much; `ECANCELED` where it is to end. Extents that are shared take nothing.
    pub(super) fn check(&self, inodes: u64, names: u64, attribute_bytes: u64) -> Result<(), Errno> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Errno::CANCELED);
        }
        let bytes = self.done_bytes.load(Ordering::Relaxed).saturating_add(attribute_bytes);
        let is_more =
            |most: &Most| bytes > most.count.bytes || inodes > most.count.inodes || names > most.names;
        if self.most.get().is_some_and(is_more) { Err(Errno::DQUOT) } else { Ok(()) }
    }
}

/// What a tree holds, as the volume's daemon accounts for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}
