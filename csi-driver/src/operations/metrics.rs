//! The driver's metrics in the Prometheus text format, on a unix socket in its run directory.
//! docs/METRICS.md lists the names.

mod readers;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Registry;
pub(crate) use readers::serve;

use crate::engine::driver::Driver;
use crate::error::chain;
use crate::kernel::mounts;
use crate::model::calls::Calls;
use crate::model::records::{SnapshotPhase, VolumeRecord};

/// All metrics of the driver. Encoding them may block as long as the pool does.
fn registry(driver: &Arc<Driver>, calls: &Calls) -> Registry {
    let mut registry = Registry::with_prefix("hawser_csi");
    calls.register(&mut registry);
    driver.counts.register(&mut registry);
    registry.register_collector(Box::new(driver.clone()));
    registry
}

/// What the driver's other state shows, read for each page.
impl Collector for Driver {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let volumes = self.volumes_by_state().into_iter().map(|(state, count)| ([("state", state)], count));
        encode_gauge(encoder, "volumes", "Volumes of this driver by state.", volumes)?;
        let policies = self.journal.list().into_iter().map(|(id, record)| {
            let labels = [
                ("volume_id", id.to_string()),
                ("data_path", record.data_path().to_string()),
                ("capacity", record.policies().capacity.to_string()),
            ];
            (labels, 1)
        });
        let help = "Which way the data of each volume takes, and what keeps it within its capacity.";
        encode_gauge(encoder, "volume_policies", help, policies)?;
        let snapshots =
            self.snapshots_by_state().into_iter().map(|(state, count)| ([("state", state)], count));
        encode_gauge(encoder, "snapshots", "Snapshots of this driver by state.", snapshots)?;
        let copies = self.jobs.list().into_iter().flat_map(|(id, (done_bytes, total_bytes))| {
            let labels = |kind: &str| [("id", id.clone()), ("kind", kind.to_owned())];
            [(labels("done"), done_bytes), (labels("total"), total_bytes)]
        });
        let help = "Bytes of each copy that is under way: done, and in all.";
        encode_gauge(encoder, "copy_bytes", help, copies)?;
        let pool = self.pool_bytes().into_iter().map(|(kind, bytes)| ([("kind", kind)], bytes));
        let help = "Bytes of the pool: its capacity, what may be claimed, what is.";
        encode_gauge(encoder, "pool_bytes", help, pool)?;
        let aborted = ConstCounter::new(mounts::aborted_connections());
        let help = "FUSE connections that were aborted.";
        aborted.encode(encoder.encode_descriptor("aborted_connections", help, None, aborted.metric_type())?)
    }
}

/// A sample for each set of labels.
fn encode_gauge<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    samples.into_iter().try_for_each(|(labels, value)| metric.encode_family(&labels)?.encode_gauge(&value))
}

impl Driver {
    fn pool_bytes(&self) -> BTreeMap<&'static str, u64> {
        let mut bytes = BTreeMap::from([("committed", self.journal.committed_bytes())]);
        match self.backend.room() {
            Ok(room) => bytes.extend([("capacity", room.pool_bytes), ("promised", room.promised_bytes)]),
            Err(error) => tracing::debug!(error = chain(&error), "the pool's capacity is not known"),
        }
        bytes
    }

    fn volumes_by_state(&self) -> BTreeMap<&'static str, u64> {
        let states = ["deleting", "unstaged", "half_staged", "dead", "staged", "published", "parked"];
        let mut counts: BTreeMap<_, _> = states.into_iter().map(|state| (state, 0)).collect();
        let readable = self.journal.list();
        let unreadable = self.journal.ids().len().saturating_sub(readable.len());
        counts.insert("unreadable", unreadable as u64);
        for (_, record) in &readable {
            *counts.entry(state_of(record)).or_default() += 1;
        }
        counts
    }

    fn snapshots_by_state(&self) -> BTreeMap<&'static str, u64> {
        let states = ["begun", "copying", "ready", "failed", "deleting"];
        let mut counts: BTreeMap<_, _> = states.into_iter().map(|state| (state, 0)).collect();
        let readable = self.journal.snapshots().list();
        let unreadable = self.journal.snapshots().ids().len().saturating_sub(readable.len());
        counts.insert("unreadable", unreadable as u64);
        for (_, record) in &readable {
            let state = match record.phase {
                _ if record.deleting => "deleting",
                SnapshotPhase::Begun => "begun",
                SnapshotPhase::Copying => "copying",
                SnapshotPhase::Ready => "ready",
                SnapshotPhase::Lost | SnapshotPhase::Failed { .. } => "failed",
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::encoding::prometheus_text;
    use tonic::Code;

    use super::*;

    #[test]
    fn calls_are_counted_by_method_code_and_time() {
        let calls = Calls::default();
        calls.count("NodeStageVolume", Code::Ok, Duration::from_millis(2));
        calls.count("NodeStageVolume", Code::DeadlineExceeded, Duration::from_secs(200));
        let mut registry = Registry::with_prefix("hawser_csi");
        calls.register(&mut registry);
        let mut page = String::new();
        prometheus_text::encode(&mut page, &registry).unwrap();
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
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
    }
}
