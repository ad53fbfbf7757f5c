//! Copies of volumes: their progress, their limits, and what they hold.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use rustix::io::Errno;

use crate::model::capacity::{BYTES_PER_INODE, inode_limit};
use crate::model::policies::{Allowance, CapacityPolicy};

/// The progress of a copy, readable from other threads, and the flag that cancels it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) done_bytes: AtomicU64,
    pub(crate) total_bytes: AtomicU64,
    pub(crate) stop: AtomicBool,
    /// The limits at which the copy fails.
    pub(crate) most: OnceLock<Most>,
    /// The total of all copies, for the metrics.
    pub(crate) all_bytes: Counter,
}

/// The most that a copy may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Most {
    count: Count,
    names: u64,
    /// What the copy shares with its source counts too.
    with_shared: bool,
}

impl Most {
    /// The limits of a volume. One that nothing limits may hold any amount. The kernel limits the inodes of
    /// others by itself, except on Btrfs, where a volume may have more.
    fn of_volume(allowed: Allowance) -> Option<Self> {
        let most = Self::of(allowed.capacity_bytes);
        match allowed.policies.capacity {
            CapacityPolicy::None => None,
            CapacityPolicy::Kernel => Some(Self { count: Count { inodes: u64::MAX, ..most.count }, ..most }),
            CapacityPolicy::Daemon => Some(most),
        }
    }

    /// The limits of a volume of that size, with a margin: its daemon may count less than a copy
    /// takes. Every name takes at least 12 bytes of a directory (ext4).
    fn of(capacity_bytes: u64) -> Self {
        let bytes = capacity_bytes.saturating_add(capacity_bytes / 8).saturating_add(1 << 20);
        let inodes = inode_limit(capacity_bytes, BYTES_PER_INODE);
        let inodes = inodes.saturating_add(inodes / 8);
        Self { count: Count { bytes, inodes }, names: bytes / 12, with_shared: false }
    }
}

impl Progress {
    /// Limits a copy into a new volume to what that volume may hold. Without an effect if nothing limits it, or
    /// after an earlier limit. What a tree `from_unlimited` shares with the copy counts too: no limit has kept
    /// its volume from holding any amount.
    pub(crate) fn bound_new(&self, new: Allowance, from_unlimited: bool) {
        if let Some(most) = Most::of_volume(new) {
            let _first_counts = self.most.set(Most { with_shared: from_unlimited, ..most });
        }
    }

    /// Limits the copy of a volume with this allowance that is or was served: a compromised daemon
    /// could otherwise add to it without end. Without an effect after an earlier limit.
    pub(crate) fn bound(&self, of: Allowance) {
        if let Some(most) = Most::of_volume(of) {
            let _first_counts = self.most.set(most);
        }
    }

    /// `EDQUOT` if the copy, which holds `count` with these names and `attribute_bytes`, exceeds its limits;
    /// `ECANCELED` if it is cancelled. Shared extents take no space, but may count for a new volume.
    pub(super) fn check(&self, count: Count, names: u64, attribute_bytes: u64) -> Result<(), Errno> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Errno::CANCELED);
        }
        let copied = self.done_bytes.load(Ordering::Relaxed).saturating_add(attribute_bytes);
        let is_more = |most: &Most| {
            let bytes = if most.with_shared { copied.max(count.bytes) } else { copied };
            bytes > most.count.bytes || count.inodes > most.count.inodes || names > most.names
        };
        if self.most.get().is_some_and(is_more) { Err(Errno::DQUOT) } else { Ok(()) }
    }
}

/// What a tree holds, counted as the volume's daemon counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}
