//! `test --runtime containerd`: the tests of whole nodes, whose kubelet speaks CRI to Debian's containerd.
//!
//! Which tests these are, and why others are not among them, is in `tests/src/over_containerd.rs`.

use std::process::{Command, Stdio};

use ::tests::node_runtime::VARIABLE;
use ::tests::over_containerd::{OTHER_SUITES, SUITES, Unmet, runnable};
use anyhow::{Context, Result, ensure};
use xtask::build::{cargo, products, require_root, run as run_command, words};
use xtask::foreign::debian_program;
use xtask::libtest::{Counts, Transcript, listed_tests};
use xtask::progress::{part, say};

/// What all suites together did.
#[derive(Debug, Default)]
struct Outcome {
    transcript: Transcript,
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
    Ok(listed_tests(&String::from_utf8_lossy(&output.stdout)))
}

fn run_suite(suite: &str, command: &mut Command, outcome: &mut Outcome) -> Result<()> {
    let before = outcome.transcript.failures();
    let status = outcome.transcript.run(command)?;
    ensure!(status.success() || outcome.transcript.failures() > before, "{suite}: {status}");
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
        self.transcript.say_failures();
        let Counts { passed, failed, ignored } = self.transcript.counts();
        say(&format!("over containerd: {passed} passed, {failed} failed, {} cannot hold", self.unmet.len()));
        ensure!(self.transcript.failures() == 0, "tests failed over containerd");
        ensure!(ignored == 0, "{ignored} tests were ignored; a test runs or does not exist");
        ensure!(passed > 0, "no test ran");
        Ok(())
    }
}
