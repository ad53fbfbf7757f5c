//! Volumes and other FUSE file systems beside native directories of the same file system, in turn.

use std::path::{Path, PathBuf};

use anyhow::Result;
use tests::loop_device::FileSystem;
use xtask::foreign::find_program;
use xtask::progress::step;

use super::operations::{DATA, NAMES, Operation, TREES};
use super::place::{Place, Sample, Served, Where};
use crate::statistics::{median, spread};

/// What is measured, and what it is to reach: its speed to that of the native directory.
struct Subject {
    title: &'static str,
    place: Place,
    bar: fn(&Operation) -> Option<f64>,
}

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
        anyhow::Ok(Subject { title, place, bar })
    };
    let peer = |title, program: &Path, options| {
        let served = Served::Peer { program: program.to_owned(), options };
        anyhow::Ok(Subject { title, place: Place::new(FileSystem::Ext4, served)?, bar: |_| None })
    };
    let mut subjects = vec![
        ours(
            "ext4, capacity daemon, dataPath daemon",
            FileSystem::Ext4,
            &[("dataPath", "daemon"), ("capacity", "daemon")],
            |operation| operation.by_daemon,
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
    let mut table = format!(
        "\n| what | file system, capacity, data path | native us | mounted us | to native, by speed | spread | daemon's cores | bar |\n{}\n",
        "|---".repeat(8) + "|"
    );
    for operation in DATA.iter().chain(&NAMES).chain(&TREES).filter(|operation| is_wanted(operation)) {
        table += &step(operation.title, || measure(subjects, operation, runs))?;
    }
    Ok(table)
}

fn measure(subjects: &[Subject], operation: &Operation, runs: usize) -> Result<String> {
    let mut measured: Vec<Vec<[Sample; 2]>> = subjects.iter().map(|_| Vec::new()).collect();
    // The first run fills caches.
    for run in 0..=operation.runs(runs) {
        for (subject, samples) in subjects.iter().zip(&mut measured) {
            let time = |at| subject.place.time(operation, at, run);
            // In turn, so that neither is always the second one.
            let pair = if run % 2 == 0 {
                let native = time(Where::Native)?;
                [native, time(Where::Mounted)?]
            } else {
                let mounted = time(Where::Mounted)?;
                [time(Where::Native)?, mounted]
            };
            if run > 0 {
                samples.push(pair);
            }
        }
    }
    let rows = subjects.iter().zip(&measured).map(|(subject, samples)| row(subject, operation, samples));
    Ok(rows.collect())
}

fn row(subject: &Subject, operation: &Operation, samples: &[[Sample; 2]]) -> String {
    let middle = |of: fn(&[Sample; 2]) -> f64| median(&mut samples.iter().map(of).collect::<Vec<_>>());
    let mut ratios: Vec<f64> =
        samples.iter().map(|[native, mounted]| native.took_us / mounted.took_us).collect();
    let (low, high) = spread(&mut ratios);
    let ratio = median(&mut ratios);
    let bar = (subject.bar)(operation)
        .map_or_else(String::new, |bar| format!(">= {bar}: {}", if ratio >= bar { "met" } else { "MISSED" }));
    format!(
        "| {} | {} | {:.1} | {:.1} | {ratio:.3} | {low:.2}..{high:.2} | {:.2} | {bar} |\n",
        operation.title,
        subject.title,
        middle(|[native, _]| native.took_us),
        middle(|[_, mounted]| mounted.took_us),
        middle(|[_, mounted]| mounted.cores),
    )
}
