//! github.com/kdave/xfstests: its generic quick tests on two volumes, and its program fsx.
//!
//! The suite mounts and unmounts what it tests: programs of ours in front of mount(8) and umount(8)
//! stage and unstage the volumes ([`mounts`]).

mod exceptions;
mod jail;
pub(crate) mod mounts;
mod outcome;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ::tests::csi::scene::Scene;
use anyhow::{Context, Result, bail, ensure};
use xtask::foreign::debian_program;
use xtask::progress::{complain, say};

use self::exceptions::{EXCEPTIONS, OMITTED};
use self::jail::{End, Jail};
use self::mounts::Places;
use self::outcome::{Outcome, Report};
use super::counts::Counts;
use super::exception;

/// The tests that are run.
const GROUP: &str = "generic/quick";
/// For one test. The longest take a minute on an idle machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(600);

const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const FSX_OPERATIONS: &str = "60000";
const FSX_TIMEOUT: Duration = Duration::from_secs(1200);

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
}

impl Suite {
    /// `dir`: the clone, in which the programs were built.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let dir = fs::canonicalize(dir).with_context(|| format!("--xfstests {}", dir.display()))?;
        for file in ["check", "ltp/fsx", "src/af_unix", "tests/generic/group.list"] {
            let path = dir.join(file);
            ensure!(path.is_file(), "--xfstests {}: {} is missing: build it", dir.display(), path.display());
        }
        for (program, package) in PROGRAMS {
            debian_program(program, package)?;
        }
        Ok(Self { dir })
    }

    /// The tests, on `volumes`: one to test, and one that tests mount and unmount.
    pub(super) fn run(&self, scene: &Scene, volumes: [&str; 2], ground: &str) -> Result<Counts> {
        let places = Places::new(scene, volumes)?;
        let results = self.results_of(ground)?;
        let jail = Jail::with(users(&places)?);
        let omitted = places.file("omitted");
        let mut report = Report::default();
        let mut left_out: BTreeSet<String> = OMITTED.iter().map(|(test, _)| (*test).to_owned()).collect();
        loop {
            fs::write(&omitted, left_out.iter().map(|test| format!("{test}\n")).collect::<String>())?;
            let mut check = Command::new(self.dir.join("check"));
            check.args(["-g", GROUP, "-E"]).arg(&omitted).current_dir(&self.dir);
            places.configure(&mut check, &results);
            let mut output = String::new();
            let end = jail.run(&check, TEST_TIMEOUT, |more, alarm| {
                output.push_str(more);
                // The name of each test begins a line.
                if more.contains('\n') || more.starts_with("generic/") {
                    alarm.restart();
                }
            })?;
            let batch = Report::read(&output);
            left_out.extend(batch.tests().map(str::to_owned));
            report.add(batch);
            match end {
                End::Exited if is_complete(&output) => break,
                End::Exited => bail!("check ended early: {}", tail(&output)),
                End::TimedOut => {
                    let test = report.time_out(TEST_TIMEOUT).context("no test began within the time")?;
                    complain(&format!("{test}: not within {TEST_TIMEOUT:?}"));
                    left_out.insert(test);
                }
                End::Stuck => {
                    places.abort(scene)?;
                    let last = report.last().unwrap_or("no test");
                    bail!("processes of {last} did not end after SIGKILL: their connections were aborted");
                }
            }
        }
        places.remove()?;
        judge(&report, ground, &results)
    }

    /// fsx: reads, writes, truncates and maps one file in random order, and compares.
    pub(super) fn run_fsx(&self, volume: &Path) -> Result<Counts> {
        let mut counts = Counts::default();
        let logs = tempfile::tempdir().context("for fsx's logs")?;
        let jail = Jail::default();
        for (seed, direct) in [("1", false), ("2", true)] {
            let file = volume.join(format!("fsx-{seed}"));
            let mut fsx = Command::new(self.dir.join("ltp/fsx"));
            fsx.args(["-q", "-N", FSX_OPERATIONS, "-S", seed]);
            if direct {
                // In whole blocks, without mappings.
                fsx.args(["-Z", "-R", "-W", "-r", "4096", "-w", "4096", "-t", "4096", "-l", "500000"]);
            }
            fsx.arg("-P").arg(logs.path()).arg(&file);
            let mut output = String::new();
            let end = jail.run(&fsx, FSX_TIMEOUT, |more, _alarm| output.push_str(more))?;
            ensure!(end == End::Exited, "fsx: not within {FSX_TIMEOUT:?}");
            if output.contains("operations completed A-OK!") {
                counts.passed += 1;
            } else {
                counts.failed += 1;
                complain(&format!("FAILED fsx {fsx:?}: {output}"));
            }
            fs::remove_file(&file).with_context(|| file.display().to_string())?;
        }
        Ok(counts)
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

/// Whether `check` printed its summary: otherwise tests are missing.
fn is_complete(output: &str) -> bool {
    let is_summary = |line: &str| {
        let is_failed = line.starts_with("Failed ") && line.contains(" of ");
        line.ends_with(" tests") && (is_failed || line.starts_with("Passed all "))
    };
    output.lines().any(is_summary)
}

fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
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
    ensure!(counts.passed > 0, "no test passed: {}", results.display());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_a_summary_is_not_complete() {
        assert!(is_complete("generic/001  4s\nRan: generic/001\nPassed all 1 tests\n"));
        assert!(is_complete("Failures: generic/001\nFailed 1 of 4 tests\n"));
        assert!(!is_complete("generic/001  4s\ngeneric/002 "));
    }
}
