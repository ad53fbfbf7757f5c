//! Counts of volumes' faults and pauses since the driver started.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) daemon_deaths: Counter,
    /// Connections that another daemon continued.
    pub(crate) takeovers: Counter,
    /// Daemons that were replaced by ones of the configured program.
    pub(crate) upgrades: Counter,
    /// Replaced daemons whose successor did not serve.
    pub(crate) failed_upgrades: Counter,
    pub(crate) hung_daemons: Counter,
    pub(crate) disk_stalls: Counter,
    pauses: Counter,
    pause_seconds: Counter<f64>,
    /// Copies add the bytes that they read.
    pub(crate) copied_bytes: Counter,
}

impl Counts {
    /// A snapshot or clone held a volume's writers back for this long.
    pub(crate) fn paused(&self, span: Duration) {
        self.pauses.inc();
        self.pause_seconds.inc_by(span.as_secs_f64());
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("daemon_deaths", "Daemons that ended unexpectedly", &self.daemon_deaths),
            ("takeovers", "Connections of dead daemons that another daemon continued", &self.takeovers),
            ("upgrades", "Daemons that `hawser-csi upgrade` has replaced", &self.upgrades),
            (
                "failed_upgrades",
                "Daemons that `hawser-csi upgrade` has ended and whose successor did not serve",
                &self.failed_upgrades,
            ),
            ("hung_daemons", "Daemons that answered no request and were killed", &self.hung_daemons),
            ("disk_stalls", "Stalls of the pool's disk that a daemon's users waited for", &self.disk_stalls),
            ("pauses", "Snapshots and clones that held a volume's writers back", &self.pauses),
            (
                "copied_bytes",
                "Bytes that snapshots, restores and clones copied; none where blocks are shared",
                &self.copied_bytes,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
        let help = "Seconds for which snapshots and clones held a volume's writers back";
        registry.register("pause_seconds", help, self.pause_seconds.clone());
    }
}
