//! What befell volumes since the driver started.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Page;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    daemon_deaths: AtomicU64,
    pauses: AtomicU64,
    paused_us: AtomicU64,
    copied_bytes: Arc<AtomicU64>,
}

impl Counts {
    /// A daemon ended that nobody had told to.
    pub(crate) fn daemon_died(&self) {
        self.daemon_deaths.fetch_add(1, Ordering::Relaxed);
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
