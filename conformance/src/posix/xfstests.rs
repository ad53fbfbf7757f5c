//! github.com/kdave/xfstests: its generic quick tests on two volumes, and its program fsx.
//!
//! The suite mounts and unmounts what it tests: programs of ours in front of mount(8) and umount(8)
//! stage and unstage the volumes ([`mounts`]).

mod exceptions;
mod group;
mod jail;
pub(crate) mod mounts;
mod outcome;
mod worker;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ::tests::csi::scene::Scene;
use anyhow::{Context, Result, ensure};
use xtask::foreign::debian_program;
use xtask::progress::{complain, say};

use self::exceptions::{EXCEPTIONS, OMITTED};
use self::jail::{End, Jail};
use self::mounts::Places;
use self::outcome::{Outcome, Report};
use self::worker::Worker;
use super::counts::Counts;
use super::exception;
use super::progress::Progress;
use super::queue::spread;

/// Those of the directory `tests/generic` that are run.
const GROUP: &str = "quick";
const FILLING: &str = "enospc";
/// How many tests one process of `check` runs: its start takes as long as a short test.
const BATCH: usize = 10;

const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Seeds, and whether with O_DIRECT.
pub(super) const FSX_RUNS: [(&str, bool); 2] = [("1", false), ("2", true)];
const FSX_OPERATIONS: &str = "60000";
/// It takes two minutes on an idle machine.
const FSX_TIMEOUT: Duration = Duration::from_secs(500);

/// What tests start, with the packages. A test without its program does not run.
const PROGRAMS: [(&str, &str); 7] = [
    ("xfs_io", "xfsprogs"),
    ("setfattr", "attr"),
    ("setfacl", "acl"),
    ("bc", "bc"),
    ("perl", "perl"),
    ("unshare", "util-linux"),
    ("su", "util-linux"),
];

#[derive(Debug)]
pub(super) struct Suite {
    dir: PathBuf,
    /// Those to run at the same time, as `generic/001`.
    tests: Vec<String>,
    /// Those that take all space that there is. Nothing limits some volumes, so others would find none.
    filling: Vec<String>,
}

impl Suite {
    /// `dir`: the clone, in which the programs were built. `only`: tests whose name contains this.
    pub(super) fn open(dir: &Path, only: Option<&str>) -> Result<Self> {
        let dir = fs::canonicalize(dir).with_context(|| format!("--xfstests {}", dir.display()))?;
        for file in ["check", "ltp/fsx", "src/af_unix", "tests/generic/group.list"] {
            let path = dir.join(file);
            ensure!(path.is_file(), "--xfstests {}: {} is missing: build it", dir.display(), path.display());
        }
        for (program, package) in PROGRAMS {
            debian_program(program, package)?;
        }
        let mut tests = group::members(&dir, GROUP)?;
        tests.retain(|test| OMITTED.iter().all(|(omitted, _)| omitted != test));
        tests.retain(|test| only.is_none_or(|word| test.contains(word)));
        let fills = group::members(&dir, FILLING)?;
        let (filling, tests) = tests.into_iter().partition(|test| fills.contains(test));
        Ok(Self { dir, tests, filling })
    }

    /// How many tests.
    pub(super) fn len(&self) -> usize {
        self.tests.len() + self.filling.len()
    }

    /// The tests, a part of them on each pair of `volumes`: one to test, and one that tests mount and unmount.
    pub(super) fn run(
        &self,
        scene: &Scene,
        volumes: &[[String; 2]],
        ground: &str,
        progress: &Progress,
    ) -> Result<Counts> {
        let results = self.results_of(ground)?;
        let mut workers = Vec::new();
        for (number, pair) in (1..).zip(volumes) {
            let places = Places::new(scene, &format!("suite-{number}"), pair)?;
            let jail = Jail::with(users(&places)?);
            workers.push(Worker { dir: &self.dir, places, jail, results: results.join(number.to_string()) });
        }
        let run = |worker: &mut &mut Worker<'_>, batch: &[String]| {
            let report = worker.run(batch)?;
            progress.add(batch.len());
            Ok(report)
        };
        let mut reports = spread(&mut workers, self.tests.chunks(BATCH), run)?;
        reports.extend(spread(workers.first_mut(), self.filling.chunks(BATCH), run)?);
        for worker in workers {
            worker.places.remove()?;
        }
        judge(&Report::merge(reports), ground, &results)
    }

    /// fsx: reads, writes, truncates and maps one file in random order, and compares.
    pub(super) fn run_fsx(&self, volume: &Path, progress: &Progress) -> Result<Counts> {
        let logs = tempfile::tempdir().context("for fsx's logs")?;
        let results = spread(FSX_RUNS.map(drop), FSX_RUNS, |(), (seed, direct)| {
            let file = volume.join(format!("fsx-{seed}"));
            let mut fsx = Command::new(self.dir.join("ltp/fsx"));
            fsx.args(["-q", "-N", FSX_OPERATIONS, "-S", seed]);
            if direct {
                // In whole blocks, without mappings.
                fsx.args(["-Z", "-R", "-W", "-r", "4096", "-w", "4096", "-t", "4096", "-l", "500000"]);
            }
            fsx.arg("-P").arg(logs.path()).arg(&file);
            let mut output = String::new();
            let end = Jail::default().run(&fsx, FSX_TIMEOUT, |more, _alarm| output.push_str(more))?;
            ensure!(end == End::Exited, "fsx: not within {FSX_TIMEOUT:?}");
            let is_good = output.contains("operations completed A-OK!");
            if !is_good {
                complain(&format!("FAILED fsx {fsx:?}: {output}"));
            }
            fs::remove_file(&file).with_context(|| file.display().to_string())?;
            progress.add(1);
            Ok(is_good)
        })?;
        let passed = results.iter().filter(|is_good| **is_good).count();
        Ok(Counts { passed, failed: results.len() - passed, ..Counts::default() })
    }

    /// Where the suite leaves what tests printed; emptied.
    fn results_of(&self, ground: &str) -> Result<PathBuf> {
        let name: String = ground.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let dir = self.dir.join("results").join(format!("hawser-{name}"));
        match fs::remove_dir_all(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).with_context(|| dir.display().to_string());
            }
            _ => {}
        }
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(dir)
    }
}

/// Compares with the expected exceptions.
fn judge(report: &Report, ground: &str, results: &Path) -> Result<Counts> {
    let mut counts = Counts::default();
    for (test, outcome) in report.outcomes() {
        let exception = exception::find(EXCEPTIONS, test, ground);
        match (outcome, exception) {
            (Outcome::Passed, None) => counts.passed += 1,
            (Outcome::NotRun, _) => counts.not_run += 1,
            (Outcome::Failed(_), Some(_)) => counts.excepted += 1,
            (Outcome::Failed(text), None) => {
                counts.failed += 1;
                complain(&format!("FAILED {test}: {text}"));
            }
            (Outcome::Passed, Some(exception)) => {
                counts.failed += 1;
                complain(&format!("{test} passes, and is expected to fail: {}", exception.reason));
            }
        }
    }
    say(&format!("what the tests printed is in {}", results.display()));
    Ok(counts)
}

/// Files with the machine's users and groups and those that tests want, and where they are to be seen.
fn users(places: &Places) -> Result<Vec<(PathBuf, PathBuf)>> {
    let names = ["fsgqa", "fsgqa2", "123456-fsgqa"];
    let mut files = Vec::new();
    for name in ["passwd", "group"] {
        let original = Path::new("/etc").join(name);
        let mut text = fs::read_to_string(&original).with_context(|| original.display().to_string())?;
        for (id, user) in (61_000..).zip(names) {
            text.push_str(&match name {
                "passwd" => format!("{user}:*:{id}:{id}::/:/bin/bash\n"),
                _ => format!("{user}:*:{id}:\n"),
            });
        }
        let copy = places.file(name);
        fs::write(&copy, text).with_context(|| copy.display().to_string())?;
        files.push((copy, original));
    }
    Ok(files)
}
