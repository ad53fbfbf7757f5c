//! What the driver counts, in the Prometheus text format, on a unix socket of
//! its run directory. The names are those of docs/METRICS.md.

mod calls;
mod counts;
mod readers;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

pub(crate) use calls::{Calls, CountCalls};
pub(crate) use counts::Counts;
pub(crate) use readers::serve;

use crate::driver::Driver;
use crate::error::chain;
use crate::journal::{SnapshotPhase, VolumeRecord};
use crate::mounts;

/// `hawser-csi snapshots` reads it too.
pub(crate) const COPY_BYTES: &str = "hawser_csi_copy_bytes";

/// Writes one metric after the other, each with its HELP and TYPE lines.
#[derive(Debug, Default)]
struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    /// `labels` as they stand between the braces; none of ours needs escaping.
    fn sample(&mut self, name: &str, labels: &str, value: impl fmt::Display) {
        match labels {
            "" => self.line(format_args!("{name} {value}")),
            labels => self.line(format_args!("{name}{{{labels}}} {value}")),
        }
    }

    fn line(&mut self, text: fmt::Arguments<'_>) {
        writeln!(self.0, "{text}").expect("a String takes any text");
    }
}

impl Driver {
    /// Everything, as of now. May block for as long as the pool does.
    fn metrics(&self) -> String {
        let mut page = Page::default();
        self.calls.show(&mut page);
        self.counts.show(&mut page);
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
        match self.room() {
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
