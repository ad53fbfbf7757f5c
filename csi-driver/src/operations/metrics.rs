//! The driver's metrics in the Prometheus text format, on a unix socket in its run directory.
//! docs/METRICS.md lists the names.

mod readers;

use std::collections::BTreeMap;

use crate::model::calls::{BOUNDS, Calls};
use crate::model::counts::Counted;
use crate::operations::page::Page;
pub(crate) use readers::serve;

use crate::engine::driver::Driver;
use crate::error::chain;
use crate::kernel::mounts;
use crate::model::records::{SnapshotPhase, VolumeRecord};

const COPY_BYTES: &str = "hawser_csi_copy_bytes";

impl Driver {
    /// All metrics, as of now. May block as long as the pool does.
    fn metrics(&self, calls: &Calls) -> String {
        let mut page = Page::default();
        show_calls(calls, &mut page);
        show_counts(self.counts.now(), &mut page);
        let name = "hawser_csi_volumes";
        page.metric(name, "gauge", "Volumes of this driver by state.");
        for (state, count) in self.volumes_by_state() {
            page.sample(name, &format!("state=\"{state}\""), count);
        }
        let name = "hawser_csi_snapshots";
        page.metric(name, "gauge", "Snapshots of this driver by state.");
        for (state, count) in self.snapshots_by_state() {
            page.sample(name, &format!("state=\"{state}\""), count);
        }
        page.metric(COPY_BYTES, "gauge", "Bytes of each copy that is under way: done, and in all.");
        for (id, (done_bytes, total_bytes)) in self.jobs.list() {
            page.sample(COPY_BYTES, &format!("id=\"{id}\",kind=\"done\""), done_bytes);
            page.sample(COPY_BYTES, &format!("id=\"{id}\",kind=\"total\""), total_bytes);
        }
        self.show_pool(&mut page);
        let name = "hawser_csi_aborted_connections_total";
        page.metric(name, "counter", "FUSE connections that were aborted.");
        page.sample(name, "", mounts::aborted_connections());
        page.0
    }

    fn show_pool(&self, page: &mut Page) {
        let name = "hawser_csi_pool_bytes";
        page.metric(name, "gauge", "Bytes of the pool: its capacity, what may be claimed, what is.");
        match self.backend.room() {
            Ok(room) => {
                page.sample(name, "kind=\"capacity\"", room.pool_bytes);
                page.sample(name, "kind=\"promised\"", room.promised_bytes);
            }
            Err(error) => tracing::debug!(error = chain(&error), "the pool's capacity is not known"),
        }
        page.sample(name, "kind=\"committed\"", self.journal.committed_bytes());
    }

    fn volumes_by_state(&self) -> BTreeMap<&'static str, usize> {
        let states = ["deleting", "unstaged", "half_staged", "dead", "staged", "published", "parked"];
        let mut counts: BTreeMap<_, _> = states.into_iter().map(|state| (state, 0)).collect();
        let readable = self.journal.list();
        counts.insert("unreadable", self.journal.ids().len().saturating_sub(readable.len()));
        for (_, record) in &readable {
            *counts.entry(state_of(record)).or_default() += 1;
        }
        counts
    }

    fn snapshots_by_state(&self) -> BTreeMap<&'static str, usize> {
        let states = ["begun", "copying", "ready", "failed", "deleting"];
        let mut counts: BTreeMap<_, _> = states.into_iter().map(|state| (state, 0)).collect();
        let readable = self.journal.snapshots().list();
        let unreadable = self.journal.snapshots().ids().len().saturating_sub(readable.len());
        counts.insert("unreadable", unreadable);
        for (_, record) in &readable {
            let state = match record.phase {
                _ if record.deleting => "deleting",
                SnapshotPhase::Begun => "begun",
                SnapshotPhase::Copying => "copying",
                SnapshotPhase::Ready => "ready",
                SnapshotPhase::Failed { .. } => "failed",
            };
            *counts.entry(state).or_default() += 1;
        }
        counts
    }
}

fn state_of(record: &VolumeRecord) -> &'static str {
    let Some(stage) = record.stage.as_ref().filter(|_| !record.deleting) else {
        return match record.parked {
            _ if record.deleting => "deleting",
            Some(_) => "parked",
            None => "unstaged",
        };
    };
    match stage.serving {
        None => "half_staged",
        Some(serving) if !serving.daemon.is_alive().unwrap_or(true) => "dead",
        Some(_) if record.targets.is_empty() => "staged",
        Some(_) => "published",
    }
}

fn show_counts(counts: Counted, page: &mut Page) {
    let name = "hawser_csi_daemon_deaths_total";
    page.metric(name, "counter", "Daemons that ended unexpectedly.");
    page.sample(name, "", counts.daemon_deaths);
    let name = "hawser_csi_hung_daemons_total";
    page.metric(name, "counter", "Daemons that answered no request and were killed.");
    page.sample(name, "", counts.hung_daemons);
    let name = "hawser_csi_disk_stalls_total";
    page.metric(name, "counter", "Stalls of the pool's disk that a daemon's users waited for.");
    page.sample(name, "", counts.disk_stalls);
    let name = "hawser_csi_pauses_total";
    page.metric(name, "counter", "Snapshots and clones that held a volume's writers back.");
    page.sample(name, "", counts.pauses);
    let name = "hawser_csi_pause_seconds_total";
    page.metric(name, "counter", "Seconds in which they held them back.");
    page.sample(name, "", counts.paused.as_secs_f64());
    let name = "hawser_csi_copied_bytes_total";
    page.metric(
        name,
        "counter",
        "Bytes that snapshots, restores and clones copied; none where blocks are shared.",
    );
    page.sample(name, "", counts.copied_bytes);
}

fn show_calls(calls: &Calls, page: &mut Page) {
    let methods = calls.by_method();
    let name = "hawser_csi_calls_total";
    page.metric(name, "counter", "CSI calls answered, by gRPC code.");
    for (method, calls) in &methods {
        for (code, count) in &calls.codes {
            page.sample(name, &format!("method=\"{method}\",code=\"{code}\""), count);
        }
    }
    let name = "hawser_csi_call_seconds";
    page.metric(name, "histogram", "Seconds from a CSI call to its answer.");
    for (method, calls) in &methods {
        let mut kept = 0;
        for (bound, count) in BOUNDS.iter().zip(&calls.took) {
            kept += count;
            page.sample(&format!("{name}_bucket"), &format!("method=\"{method}\",le=\"{bound}\""), kept);
        }
        let all: u64 = calls.took.iter().sum();
        let label = format!("method=\"{method}\"");
        page.sample(&format!("{name}_bucket"), &format!("{label},le=\"+Inf\""), all);
        page.sample(&format!("{name}_sum"), &label, calls.seconds);
        page.sample(&format!("{name}_count"), &label, all);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic::Code;

    use super::*;

    #[test]
    fn calls_are_counted_by_method_code_and_time() {
        let calls = Calls::default();
        calls.count("NodeStageVolume", Code::Ok, Duration::from_millis(2));
        calls.count("NodeStageVolume", Code::DeadlineExceeded, Duration::from_secs(200));
        let mut page = Page::default();
        show_calls(&calls, &mut page);
        for line in [
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"DEADLINE_EXCEEDED\"} 1",
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"OK\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"0.001\"} 0",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"0.002\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"100\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"+Inf\"} 2",
            "hawser_csi_call_seconds_sum{method=\"NodeStageVolume\"} 200.002",
            "hawser_csi_call_seconds_count{method=\"NodeStageVolume\"} 2",
        ] {
            assert!(page.0.lines().any(|l| l == line), "{line}\n{}", page.0);
        }
    }
}
