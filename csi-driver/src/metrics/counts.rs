//! What befell volumes since the driver started.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Page;

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
    /// A daemon ended that nobody had told to.
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

    /// A snapshot or clone held a volume's writers back for so long.
    pub(crate) fn paused(&self, span: Duration) {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        self.paused_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Where snapshots, restores and clones add what they read for a copy.
    pub(crate) fn copied_bytes(&self) -> Arc<AtomicU64> {
        self.copied_bytes.clone()
    }

    pub(super) fn show(&self, page: &mut Page) {
        let load = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let name = "hawser_csi_daemon_deaths_total";
        page.metric(name, "counter", "Daemons that ended and were not told to.");
        page.sample(name, "", load(&self.daemon_deaths));
        let name = "hawser_csi_hung_daemons_total";
        page.metric(name, "counter", "Daemons that answered no request and were killed.");
        page.sample(name, "", load(&self.hung_daemons));
        let name = "hawser_csi_disk_stalls_total";
        page.metric(name, "counter", "Stalls of the pool's disk that a daemon's users waited for.");
        page.sample(name, "", load(&self.disk_stalls));
        let name = "hawser_csi_pauses_total";
        page.metric(name, "counter", "Snapshots and clones that held a volume's writers back.");
        page.sample(name, "", load(&self.pauses));
        let name = "hawser_csi_pause_seconds_total";
        page.metric(name, "counter", "Seconds in which they held them back.");
        page.sample(name, "", Duration::from_micros(load(&self.paused_us)).as_secs_f64());
        let name = "hawser_csi_copied_bytes_total";
        page.metric(
            name,
            "counter",
            "Bytes that snapshots, restores and clones copied; none where blocks are shared.",
        );
        page.sample(name, "", load(&self.copied_bytes));
    }
}
