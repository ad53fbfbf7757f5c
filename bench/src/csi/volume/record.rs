//! What the record of each request costs: a volume that another daemon can continue, and one that none
//! can, in turn.
//!
//! The daemon of the first records each request before its effect, so that its successor can answer
//! it. The other records nothing: the ratio of the two is what the record costs.

use anyhow::Result;
use tests::loop_device::FileSystem;
use xtask::progress::step;

use super::Table;
use super::operations::{Operation, RECORDED, STREAMS};
use super::place::{Place, Served, Where};
use crate::statistics::{median, spread};

/// Of the volume with a record to the one without: no user is to notice the record.
const BAR: f64 = 0.95;

pub(super) fn table(runs: usize, is_wanted: impl Fn(&Operation) -> bool) -> Result<String> {
    let volume =
        |has_successors| Place::new(FileSystem::Ext4, Served::Ours { parameters: &[], has_successors });
    let volumes = [volume(true)?, volume(false)?];
    let measured = rows(&volumes, runs, is_wanted);
    for volume in volumes {
        volume.end()?;
    }
    measured
}

fn rows(volumes: &[Place; 2], runs: usize, is_wanted: impl Fn(&Operation) -> bool) -> Result<String> {
    let mut table = Table::begin([
        "ext4, capacity by the daemon",
        "native us",
        "no record us",
        "record us",
        "record to none, by speed",
        "spread",
        "record to native",
        "bar",
    ]);
    for (operations, bar) in [(&RECORDED[..], Some(BAR)), (&STREAMS[..], None)] {
        for operation in operations.iter().filter(|operation| is_wanted(operation)) {
            let measured = step(operation.title, || measure(volumes, operation, runs))?;
            table.add(&measured.row(operation, bar));
        }
    }
    Ok(table.end())
}

/// Microseconds of an operation, run by run.
#[derive(Debug, Default)]
struct Measured {
    native: Vec<f64>,
    unrecorded: Vec<f64>,
    recorded: Vec<f64>,
}

fn measure([recorded, unrecorded]: &[Place; 2], operation: &Operation, runs: usize) -> Result<Measured> {
    let mut measured = Measured::default();
    for run in 0..=runs {
        let native = unrecorded.time(operation, Where::Native, run)?;
        // In turn, so that neither is always the second one.
        let (with, without) = if run % 2 == 0 {
            let with = recorded.time(operation, Where::Mounted, run)?;
            (with, unrecorded.time(operation, Where::Mounted, run)?)
        } else {
            let without = unrecorded.time(operation, Where::Mounted, run)?;
            (recorded.time(operation, Where::Mounted, run)?, without)
        };
        // The first one fills caches.
        if run > 0 {
            measured.native.push(native.took_us);
            measured.unrecorded.push(without.took_us);
            measured.recorded.push(with.took_us);
        }
    }
    Ok(measured)
}

impl Measured {
    fn row(&self, operation: &Operation, bar: Option<f64>) -> String {
        let speed =
            |of: &[f64], to: &[f64]| -> Vec<f64> { of.iter().zip(to).map(|(of, to)| to / of).collect() };
        let mut ratios = speed(&self.recorded, &self.unrecorded);
        let (low, high) = spread(&mut ratios);
        let ratio = median(&mut ratios);
        let to_native = median(&mut speed(&self.recorded, &self.native));
        let middle = |samples: &[f64]| median(&mut samples.to_vec());
        let bar = bar.map_or_else(String::new, |bar| {
            format!(">= {bar}: {}", if ratio >= bar { "met" } else { "MISSED" })
        });
        format!(
            "| {} | {:.1} | {:.1} | {:.1} | {ratio:.3} | {low:.2}..{high:.2} | {to_native:.2} | {bar} |",
            operation.title,
            middle(&self.native),
            middle(&self.unrecorded),
            middle(&self.recorded),
        )
    }
}
