//! `test --runtime containerd`: the tests of whole nodes, whose kubelet speaks CRI to Debian's containerd.
//!
//! Which tests these are, and why others are not among them, is in `tests/src/over_containerd.rs`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use ::tests::node_runtime::VARIABLE;
use ::tests::over_containerd::{OTHER_SUITES, SUITES, Unmet, runnable};
use anyhow::{Context, Result, bail, ensure};
use xtask::build::{cargo, products, require_root, run as run_command, words};
use xtask::foreign::debian_program;
use xtask::libtest::{Counts, failed_test};
use xtask::progress::{part, say};

/// What all suites together did.
#[derive(Debug, Default)]
struct Outcome {
    counts: Counts,
    failures: Vec<String>,
    unmet: Vec<Unmet>,
}

pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    require_root("test")?;
    part("programs of the tests", || {
        for (program, package) in super::test::PROGRAMS {
            debian_program(program, package)?;
        }
        Ok(())
    })?;
    let bin_dir = part("build the static binaries", products)?;
    part("build the tests", || run_command(cargo().args(["test", "-p", "tests", "--no-run"])))?;
    let mut outcome = Outcome::default();
    for suite in SUITES {
        let of_suite = |words: &[&str]| {
            let mut command = cargo();
            command.args(["test", "-p", "tests", "--test", suite, "--"]).args(words);
            command.env("HAWSER_BIN_DIR", &bin_dir).env(VARIABLE, "containerd");
            command
        };
        let all = listed(&mut of_suite(&["--list", "--format", "terse"]))?;
        let (mut chosen, mut rows) = runnable(suite, &all)?;
        if let Some(filter) = filter {
            chosen.retain(|test| test.contains(filter));
            rows.retain(|row| row.test.contains(filter));
        }
        outcome.unmet.extend(rows);
        if chosen.is_empty() {
            continue;
        }
        let mut command = of_suite(&["--exact"]);
        command.args(&chosen);
        // A suite that fails is counted; the others still run.
        part(suite, || run_suite(suite, &mut command, &mut outcome))?;
    }
    outcome.report()
}

fn listed(command: &mut Command) -> Result<Vec<String>> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| words(command))?;
    ensure!(output.status.success(), "{}: {}", words(command), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

fn run_suite(suite: &str, command: &mut Command, outcome: &mut Outcome) -> Result<()> {
    let before = outcome.failures.len();
    let mut child = command.stdout(Stdio::piped()).spawn().context("start cargo test")?;
    let stdout = child.stdout.take().context("cargo test has a piped stdout")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("read the output of cargo test")?;
        outcome.counts.add(&line);
        outcome.failures.extend(failed_test(&line).map(|test| format!("{suite}: {test}")));
        say(&line);
    }
    let status = child.wait().context("wait for cargo test")?;
    // A test binary that dies reports no failed test.
    ensure!(status.success() || outcome.failures.len() > before, "{suite}: {status}");
    Ok(())
}

impl Outcome {
    fn report(self) -> Result<()> {
        for Unmet { suite, test, reason } in &self.unmet {
            say(&format!("cannot hold over containerd 1.6: {suite}: {test}: {reason}"));
        }
        for (suite, about) in OTHER_SUITES {
            say(&format!("not run over containerd: {suite}: {about}"));
        }
        for name in &self.failures {
            say(&format!("failed: {name}"));
        }
        let Counts { passed, failed, ignored } = self.counts;
        say(&format!("over containerd: {passed} passed, {failed} failed, {} cannot hold", self.unmet.len()));
        if failed > 0 || !self.failures.is_empty() {
            bail!("{failed} tests failed over containerd");
        }
        ensure!(ignored == 0, "{ignored} tests were ignored; a test runs or does not exist");
        ensure!(passed > 0, "no test ran");
        Ok(())
    }
}
