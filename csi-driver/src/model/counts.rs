//! Counts of volumes' faults and pauses since the driver started.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    daemon_deaths: AtomicU64,
    hung_daemons: AtomicU64,
    disk_stalls: AtomicU64,
    pauses: AtomicU64,
    paused_us: AtomicU64,
    copied_bytes: Arc<AtomicU64>,
}

impl Counts {
    /// A daemon ended unexpectedly.
    pub(crate) fn daemon_died(&self) {
        self.daemon_deaths.fetch_add(1, Ordering::Relaxed);
    }

    /// A daemon answered no request, and was killed.
    pub(crate) fn daemon_hung(&self) {
        self.hung_daemons.fetch_add(1, Ordering::Relaxed);
    }

    /// A daemon waited for the pool's disk for as long as would make it hung.
    pub(crate) fn disk_stalled(&self) {
        self.disk_stalls.fetch_add(1, Ordering::Relaxed);
    }

    /// A snapshot or clone held a volume's writers back for this long.
    pub(crate) fn paused(&self, span: Duration) {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        self.paused_us.fetch_add(us, Ordering::Relaxed);
    }

    /// The counter to which snapshots, restores and clones add the bytes that they read.
    pub(crate) fn copied_bytes(&self) -> Arc<AtomicU64> {
        self.copied_bytes.clone()
    }

    pub(crate) fn now(&self) -> Counted {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Counted {
            daemon_deaths: load(&self.daemon_deaths),
            hung_daemons: load(&self.hung_daemons),
            disk_stalls: load(&self.disk_stalls),
            pauses: load(&self.pauses),
            paused: Duration::from_micros(load(&self.paused_us)),
            copied_bytes: load(&self.copied_bytes),
        }
    }
}

/// The values of [`Counts`] at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    pub daemon_deaths: u64,
    pub hung_daemons: u64,
    pub disk_stalls: u64,
    pub pauses: u64,
    pub paused: Duration,
    pub copied_bytes: u64,
}
