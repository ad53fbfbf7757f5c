//! `test`: everything that must pass, with one sum at the end.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::build::{cargo, products, require_root, words};
use crate::conformance::foreign::debian_program;
use crate::progress::{part, say};

/// Programs that the tests start, and their Debian packages: mkfs makes the pools
/// of csi-driver's tests; ip, nft, iptables and conntrack witness what the plugins
/// made; busybox is the attacker of `tests/tests/hostile`.
const PROGRAMS: [(&str, &str); 8] = [
    ("mkfs.btrfs", "btrfs-progs"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("conntrack", "conntrack"),
    ("busybox", "busybox-static"),
];

/// What libtest counted, over all test binaries.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) ignored: usize,
}

pub(crate) fn run(filter: Option<&str>) -> Result<()> {
    require_root("test")?;
    part("programs of the tests", || {
        for (program, package) in PROGRAMS {
            debian_program(program, package)?;
        }
        Ok(())
    })?;
    let bin_dir = part("build the static binaries", products)?;
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    let passed = part("tests", || {
        let mut command = cargo();
        command.args(["test", "--workspace", "--no-fail-fast"]).args(filter);
        command.env("HAWSER_BIN_DIR", &bin_dir).stdout(Stdio::piped());
        let mut child = command.spawn().context("start cargo test")?;
        let stdout = child.stdout.take().context("cargo test has a piped stdout")?;
        for line in BufReader::new(stdout).lines() {
            let line = line.context("read the output of cargo test")?;
            counts.add(&line);
            failures.extend(failed_test(&line).map(str::to_owned));
            say(&line);
        }
        let status = child.wait().context("wait for cargo test")?;
        ensure!(status.success(), "{}: {status}", words(&command));
        Ok(())
    });
    for name in &failures {
        say(&format!("failed: {name}"));
    }
    // A test binary that dies counts nothing; the error of cargo below tells.
    say(&format!("{} passed, {} failed", counts.passed, counts.failed));
    passed?;
    ensure!(counts.ignored == 0, "{} tests were ignored; a test runs or does not exist", counts.ignored);
    ensure!(counts.passed > 0, "no test ran");
    Ok(())
}

impl Counts {
    /// Adds a line such as `test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; ...`.
    pub(crate) fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for part in counts.split("; ") {
            match part.split_once(' ').map(|(number, word)| (number.parse::<usize>(), word)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                Some((Ok(number), "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// The name in `test a::b ... FAILED`.
pub(crate) fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_over_test_binaries() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.03s",
            "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 30.61s",
        ] {
            counts.add(line);
        }
        assert_eq!(counts, Counts { passed: 7, failed: 1, ignored: 2 });
    }

    #[test]
    fn a_failed_test_is_named() {
        assert_eq!(failed_test("test tests::a_b ... FAILED"), Some("tests::a_b"));
        assert_eq!(failed_test("test tests::a_b ... ok"), None);
    }
}
