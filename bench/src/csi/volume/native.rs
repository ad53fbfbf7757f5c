//! Volumes and other FUSE file systems beside native directories of the same file system, in turn.

use std::path::{Path, PathBuf};

use anyhow::Result;
use tests::loop_device::FileSystem;
use xtask::foreign::find_program;
use xtask::progress::{complain, step};

use super::Table;
use super::operations::{self, Operation};
use super::place::{Place, Sample, Served, Where};
use crate::statistics::{median, spread};

/// What is measured, and what it is to reach: its speed to that of the native directory.
struct Subject {
    title: &'static str,
    place: Place,
    bar: fn(&Operation) -> Option<f64>,
    /// What it cannot do is no error.
    is_peer: bool,
}

/// Where a subject cannot do something, why.
type Measured = Result<Vec<[Sample; 2]>>;

pub(super) fn table(
    runs: usize,
    is_wanted: impl Fn(&Operation) -> bool,
    passthrough_hp: Option<&Path>,
) -> Result<String> {
    let subjects = subjects(passthrough_hp)?;
    let measured = rows(&subjects, runs, is_wanted);
    for subject in subjects {
        subject.place.end()?;
    }
    measured
}

fn subjects(passthrough_hp: Option<&Path>) -> Result<Vec<Subject>> {
    let ours = |title, kind, parameters, bar| {
        let place = Place::new(kind, Served::Ours { parameters, has_successors: true })?;
        anyhow::Ok(Subject { title, place, bar, is_peer: false })
    };
    let peer = |title, program: &Path, options| {
        let served = Served::Peer { program: program.to_owned(), options };
        let place = Place::new(FileSystem::Ext4, served)?;
        anyhow::Ok(Subject { title, place, bar: |_| None, is_peer: true })
    };
    let mut subjects = vec![
        ours(
            "ext4, capacity daemon, dataPath daemon",
            FileSystem::Ext4,
            &[("dataPath", "daemon"), ("capacity", "daemon")],
            |operation| operation.by_daemon,
        )?,
        ours(
            "ext4, capacity daemon, dataPath daemon, writebackCache",
            FileSystem::Ext4,
            &[("dataPath", "daemon"), ("capacity", "daemon"), ("writebackCache", "true")],
            |operation| operation.writing_back,
        )?,
        ours(
            "ext4, capacity none, dataPath passthrough",
            FileSystem::Ext4,
            &[("dataPath", "passthrough"), ("capacity", "none")],
            |operation| operation.passing,
        )?,
        ours(
            "btrfs, capacity kernel, dataPath passthrough",
            FileSystem::Btrfs,
            &[("dataPath", "passthrough"), ("capacity", "kernel")],
            |operation| operation.passing,
        )?,
    ];
    let bindfs = find_program("bindfs").unwrap_or_else(|| PathBuf::from("bindfs"));
    subjects.push(peer("ext4, bindfs", &bindfs, &["-f"])?);
    if let Some(program) = passthrough_hp {
        subjects.push(peer("ext4, passthrough_hp", program, &["--foreground"])?);
        let options = &["--foreground", "--nopassthrough"];
        subjects.push(peer("ext4, passthrough_hp --nopassthrough", program, options)?);
    }
    Ok(subjects)
}

fn rows(subjects: &[Subject], runs: usize, is_wanted: impl Fn(&Operation) -> bool) -> Result<String> {
    let mut table = Table::begin([
        "what",
        "file system, capacity, data path",
        "native us",
        "mounted us",
        "to native, by speed",
        "spread",
        "daemon's cores",
        "bar",
    ]);
    for operation in operations::beside_native().filter(|operation| is_wanted(operation)) {
        let measured = step(operation.title, || measure(subjects, operation, runs))?;
        for (subject, measured) in subjects.iter().zip(measured) {
            table.add(&row(subject, operation, &measured));
        }
    }
    Ok(table.end())
}

fn measure(subjects: &[Subject], operation: &Operation, runs: usize) -> Result<Vec<Measured>> {
    let mut measured: Vec<Measured> = subjects.iter().map(|_| Ok(Vec::new())).collect();
    // The first run fills caches.
    for run in 0..=operation.runs(runs) {
        for (subject, measured) in subjects.iter().zip(&mut measured) {
            let Ok(samples) = measured else { continue };
            match subject.pair(operation, run) {
                Ok(pair) if run > 0 => samples.push(pair),
                Ok(_) => {}
                Err(error) if subject.is_peer => {
                    complain(&format!("{}: {}: {error:#}", operation.title, subject.title));
                    *measured = Err(error);
                }
                Err(error) => return Err(error.context(subject.title)),
            }
        }
    }
    Ok(measured)
}

impl Subject {
    fn pair(&self, operation: &Operation, run: usize) -> Result<[Sample; 2]> {
        let time = |at| self.place.time(operation, at, run);
        // In turn, so that neither is always the second one.
        if run.is_multiple_of(2) {
            let native = time(Where::Native)?;
            Ok([native, time(Where::Mounted)?])
        } else {
            let mounted = time(Where::Mounted)?;
            Ok([time(Where::Native)?, mounted])
        }
    }
}

fn row(subject: &Subject, operation: &Operation, measured: &Measured) -> String {
    let Ok(samples) = measured else {
        return format!("| {} | {} | it fails | | | | | |", operation.title, subject.title);
    };
    let middle = |of: fn(&[Sample; 2]) -> f64| median(&mut samples.iter().map(of).collect::<Vec<_>>());
    let mut ratios: Vec<f64> =
        samples.iter().map(|[native, mounted]| native.took_us / mounted.took_us).collect();
    let (low, high) = spread(&mut ratios);
    let ratio = median(&mut ratios);
    let bar = (subject.bar)(operation)
        .map_or_else(String::new, |bar| format!(">= {bar}: {}", if ratio >= bar { "met" } else { "MISSED" }));
    format!(
        "| {} | {} | {:.1} | {:.1} | {ratio:.3} | {low:.2}..{high:.2} | {:.2} | {bar} |",
        operation.title,
        subject.title,
        middle(|[native, _]| native.took_us),
        middle(|[_, mounted]| mounted.took_us),
        middle(|[_, mounted]| mounted.cores),
    )
}
