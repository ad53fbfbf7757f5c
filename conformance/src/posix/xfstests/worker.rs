//! A pair of volumes, and the processes of `check` that run tests on it, one after the other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::progress::complain;

use super::jail::{End, Jail};
use super::mounts::Places;
use super::outcome::Report;

/// For one test. The longest take a minute on an idle machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct Worker<'a> {
    /// The suite's.
    pub(super) dir: &'a Path,
    pub(super) places: Places,
    pub(super) jail: Jail,
    /// Where this worker's tests leave what they print.
    pub(super) results: PathBuf,
}

impl Worker<'_> {
    /// Runs `tests`. A test that takes too long is killed with its `check`, and another one runs the rest.
    pub(super) fn run(&self, tests: &[String]) -> Result<Report> {
        let mut left = tests.to_vec();
        let mut report = Report::default();
        while !left.is_empty() {
            let (end, output) = self.check(&left)?;
            let batch = Report::read(&output);
            left.retain(|test| batch.tests().all(|other| other != test));
            report.add(batch);
            match end {
                End::Exited if is_complete(&output) && left.is_empty() => {}
                End::Exited => bail!("check ended early: {}", tail(&output)),
                End::TimedOut => {
                    let test = report.time_out(TEST_TIMEOUT).context("no test began within the time")?;
                    complain(&format!("{test}: not within {TEST_TIMEOUT:?}"));
                }
                End::Stuck => {
                    self.places.abort()?;
                    let last = report.last().unwrap_or("no test");
                    bail!("processes of {last} did not end after SIGKILL: their connections were aborted");
                }
            }
        }
        Ok(report)
    }

    /// One process, and what it printed.
    fn check(&self, tests: &[String]) -> Result<(End, String)> {
        let mut check = Command::new(self.dir.join("check"));
        check.args(tests).current_dir(self.dir);
        self.places.configure(&mut check, &self.results);
        let mut output = String::new();
        let end = self.jail.run(&check, TEST_TIMEOUT, |more, alarm| {
            output.push_str(more);
            // The name of each test begins a line.
            if more.contains('\n') || more.starts_with("generic/") {
                alarm.restart();
            }
        })?;
        Ok((end, output))
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
