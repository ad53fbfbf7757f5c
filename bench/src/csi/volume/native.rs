//! Volumes and other FUSE file systems beside native directories of the same file system, in turn.

use std::path::{Path, PathBuf};

use ::tests::loop_device::FileSystem;
use anyhow::{Context, Result};
use xtask::foreign::find_program;
use xtask::progress::{complain, say, step};

use super::Table;
use super::operations::{self, Operation, Work};
use super::place::{Place, Sample, Served, Where};
use crate::memory_fs;
use crate::statistics::{median, spread};

/// Of operations on names by passthrough: the speed to reach, of that by the daemon's path on the same file
/// system.
const NAMES_BY_PASSTHROUGH: f64 = 0.8;
/// Processors that the daemon may use while data passes through.
const MOST_CORES: f64 = 0.02;

/// What is measured.
struct Subject {
    title: &'static str,
    place: Place,
    file_system: FileSystem,
    kind: Kind,
    /// The speed to reach, of the native directory's.
    bar: fn(&Operation) -> Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Daemon,
    /// By the daemon's path, and only operations on names: for comparison.
    Names,
    WritingBack,
    Passing,
    /// What it cannot do is no error.
    Peer,
    /// It touches no disk: for comparison.
    InMemory,
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
    let ours = |title, kind, file_system, parameters, bar| {
        let place = Place::new(file_system, Served::Ours { parameters, has_successors: true })?;
        anyhow::Ok(Subject { title, place, file_system, kind, bar })
    };
    let other = |title, kind, program: &Path, options| {
        let served = Served::Peer { program: program.to_owned(), options };
        let file_system = FileSystem::Ext4;
        let place = Place::new(file_system, served)?;
        anyhow::Ok(Subject { title, place, file_system, kind, bar: |_| None })
    };
    let peer = |title, program: &Path, options| other(title, Kind::Peer, program, options);
    let mut subjects = vec![
        ours(
            "ext4, capacity daemon, dataPath daemon",
            Kind::Daemon,
            FileSystem::Ext4,
            &[("dataPath", "daemon"), ("capacity", "daemon")],
            |operation| operation.by_daemon,
        )?,
        ours(
            "ext4, capacity daemon, dataPath daemon, writebackCache",
            Kind::WritingBack,
            FileSystem::Ext4,
            &[("dataPath", "daemon"), ("capacity", "daemon"), ("writebackCache", "true")],
            |operation| operation.writing_back,
        )?,
        ours(
            "ext4, capacity none, dataPath passthrough",
            Kind::Passing,
            FileSystem::Ext4,
            &[("dataPath", "passthrough"), ("capacity", "none")],
            |operation| operation.passing,
        )?,
        ours(
            "btrfs, capacity kernel, dataPath passthrough",
            Kind::Passing,
            FileSystem::Btrfs,
            &[("dataPath", "passthrough"), ("capacity", "kernel")],
            |operation| operation.passing_on_btrfs.or(operation.passing),
        )?,
        ours(
            "btrfs, capacity kernel, dataPath daemon",
            Kind::Names,
            FileSystem::Btrfs,
            &[("dataPath", "daemon"), ("capacity", "kernel")],
            |_| None,
        )?,
    ];
    let bindfs = find_program("bindfs").unwrap_or_else(|| PathBuf::from("bindfs"));
    subjects.push(peer("ext4, bindfs", &bindfs, &["-f"])?);
    if let Some(program) = passthrough_hp {
        subjects.push(peer("ext4, passthrough_hp", program, &["--foreground"])?);
        let options = &["--foreground", "--nopassthrough"];
        subjects.push(peer("ext4, passthrough_hp --nopassthrough", program, options)?);
    }
    let own = std::env::current_exe().context("this program")?;
    subjects.push(other("a FUSE file system in memory", Kind::InMemory, &own, &[memory_fs::MODE])?);
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
        let subjects: Vec<&Subject> = subjects.iter().filter(|subject| subject.does(operation)).collect();
        let measured = step(operation.title, || measure(&subjects, operation, runs))?;
        let reached: Vec<Option<Reached>> =
            measured.iter().map(|measured| measured.as_deref().ok().map(Reached::of)).collect();
        let all: Vec<_> = subjects.into_iter().zip(reached).collect();
        for (subject, reached) in &all {
            table.add(&row(subject, operation, reached.as_ref(), &all));
        }
        if operation.is_of_cached_content() {
            all.iter().for_each(|(subject, _)| show_pages(subject));
        }
    }
    Ok(table.end())
}

/// How fast memory is read depends on the order in which the kernel happened to take its pages.
fn show_pages(subject: &Subject) {
    let share = |at| {
        subject.place.pages_in_order(at).map_or_else(|e| format!("{e:#}"), |share| format!("{share:.2}"))
    };
    let (native, mounted) = (share(Where::Native), share(Where::Mounted));
    say(&format!("pages behind their predecessors in memory: native {native}, {} {mounted}", subject.title));
}

fn measure(subjects: &[&Subject], operation: &Operation, runs: usize) -> Result<Vec<Measured>> {
    let mut measured: Vec<Measured> = subjects.iter().map(|_| Ok(Vec::new())).collect();
    // The first run fills caches.
    for run in 0..=operation.runs(runs) {
        for (subject, measured) in subjects.iter().zip(&mut measured) {
            let Ok(samples) = measured else { continue };
            match subject.pair(operation, run) {
                Ok(pair) if run > 0 => samples.push(pair),
                Ok(_) => {}
                Err(error) if subject.kind == Kind::Peer => {
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
    fn does(&self, operation: &Operation) -> bool {
        match self.kind {
            Kind::Names => !operation.is_data(),
            Kind::InMemory => !matches!(operation.work, Work::Transactions(_)),
            Kind::Daemon | Kind::WritingBack | Kind::Passing | Kind::Peer => true,
        }
    }

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

/// Medians.
struct Reached {
    native_us: f64,
    mounted_us: f64,
    cores: f64,
    /// The mounted directory's speed, of the native one's.
    ratio: f64,
    /// First and last quartile of the ratio.
    low: f64,
    high: f64,
}

impl Reached {
    fn of(samples: &[[Sample; 2]]) -> Self {
        let middle = |of: fn(&[Sample; 2]) -> f64| median(&mut samples.iter().map(of).collect::<Vec<_>>());
        let mut ratios: Vec<f64> =
            samples.iter().map(|[native, mounted]| native.took_us / mounted.took_us).collect();
        let (low, high) = spread(&mut ratios);
        Self {
            native_us: middle(|[native, _]| native.took_us),
            mounted_us: middle(|[_, mounted]| mounted.took_us),
            cores: middle(|[_, mounted]| mounted.cores),
            ratio: median(&mut ratios),
            low,
            high,
        }
    }
}

fn row(
    subject: &Subject,
    operation: &Operation,
    reached: Option<&Reached>,
    all: &[(&Subject, Option<Reached>)],
) -> String {
    let Some(reached) = reached else {
        return format!("| {} | {} | it fails | | | | | |", operation.title, subject.title);
    };
    let Reached { native_us, mounted_us, cores, ratio, low, high } = reached;
    format!(
        "| {} | {} | {native_us:.1} | {mounted_us:.1} | {ratio:.3} | {low:.2}..{high:.2} | {cores:.2} | {} |",
        operation.title,
        subject.title,
        bars(subject, operation, reached, all).join("; "),
    )
}

/// What the subject is to reach in this operation, and whether it does.
fn bars(
    subject: &Subject,
    operation: &Operation,
    reached: &Reached,
    all: &[(&Subject, Option<Reached>)],
) -> Vec<String> {
    let mut bars: Vec<String> = (subject.bar)(operation)
        .map(|bar| format!(">= {bar}: {}", verdict(reached.ratio >= bar)))
        .into_iter()
        .collect();
    if subject.kind == Kind::Passing && operation.needs_no_daemon() {
        bars.push(format!("< {MOST_CORES} cores: {}", verdict(reached.cores < MOST_CORES)));
    }
    if operation.is_data() {
        return bars;
    }
    let of = |kinds: &'static [Kind]| {
        let others = all
            .iter()
            .filter(|(other, _)| other.file_system == subject.file_system && kinds.contains(&other.kind));
        others.filter_map(|(other, reached)| Some((other.title, reached.as_ref()?)))
    };
    match subject.kind {
        Kind::Passing => bars.extend(of(&[Kind::Daemon, Kind::Names]).map(|(_, daemon)| {
            let share = reached.ratio / daemon.ratio;
            let verdict = verdict(share >= NAMES_BY_PASSTHROUGH);
            format!("{share:.2} of the daemon's path, >= {NAMES_BY_PASSTHROUGH}: {verdict}")
        })),
        // Also a peer that passes data through: on names, that does not matter.
        Kind::Daemon => bars.extend(beside_best_peer(reached, of(&[Kind::Peer]))),
        Kind::Names | Kind::WritingBack | Kind::Peer | Kind::InMemory => {}
    }
    bars
}

/// Our median beside the fastest peer's first quartile: spreads that overlap would hide that ours is slower.
fn beside_best_peer<'a>(
    reached: &Reached,
    peers: impl Iterator<Item = (&'a str, &'a Reached)>,
) -> Option<String> {
    let (title, best) = peers.max_by(|(_, a), (_, b)| a.ratio.total_cmp(&b.ratio))?;
    let Reached { ratio, low, .. } = best;
    let verdict = verdict(reached.ratio >= *low);
    Some(format!(">= {low:.3}, the first quartile of the best peer ({title}: {ratio:.3}): {verdict}"))
}

fn verdict(holds: bool) -> &'static str {
    if holds { "met" } else { "MISSED" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First quartile, median and last quartile of the ratio.
    fn reached([low, ratio, high]: [f64; 3]) -> Reached {
        Reached { native_us: 1.0, mounted_us: 1.0 / ratio, cores: 0.0, ratio, low, high }
    }

    #[test]
    fn the_median_is_compared_with_the_first_quartile_of_the_fastest_peer() {
        let peers = [("slow", reached([0.1, 0.2, 0.3])), ("fast", reached([0.36, 0.38, 0.41]))];
        let beside = |ours| {
            let peers = peers.iter().map(|(title, reached)| (*title, reached));
            beside_best_peer(&reached(ours), peers).unwrap()
        };
        let text = beside([0.3, 0.37, 0.4]);
        assert_eq!(text, ">= 0.360, the first quartile of the best peer (fast: 0.380): met");
        let text = beside([0.3, 0.35, 0.4]);
        assert!(text.ends_with(": MISSED"), "the spreads overlap: {text}");
        assert_eq!(beside_best_peer(&reached([0.3, 0.35, 0.4]), [].into_iter()), None);
    }
}
