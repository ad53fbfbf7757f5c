//! github.com/pjd/pjdfstest: shell scripts that print a line in TAP for each assertion.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use xtask::progress::complain;

use super::counts::Counts;
use super::exception::{self, Exception};

/// Scripts of which some assertions may fail.
const EXCEPTIONS: &[Exception] = &[
    Exception { name: "mknod/02.t", ground: "", reason: DEVICE_NODE },
    Exception { name: "mknod/03.t", ground: "", reason: DEVICE_NODE },
    Exception { name: "mknod/11.t", ground: "", reason: DEVICE_NODE },
    Exception { name: "unlink/00.t", ground: "", reason: DEVICE_NODE },
    Exception {
        name: "rename/24.t",
        ground: "btrfs",
        reason: "a directory of Btrfs has a link count of 1, and the test counts directories in it",
    },
    Exception {
        name: "symlink/03.t",
        ground: "xfs",
        reason: "XFS keeps symbolic links of at most 1023 bytes, and the test makes one of 4095",
    },
];
const DEVICE_NODE: &str = "it makes device nodes";

/// In scripts: what a volume refuses to make, since device nodes give access to the node's hardware.
const DEVICE_NODES: &str = " block char ";

#[derive(Debug)]
pub(super) struct Suite {
    /// Scripts that try each type of file, without device nodes.
    tests: PathBuf,
    _copy: TempDir,
}

impl Suite {
    /// `dir`: the clone, in which the program was built.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let dir = fs::canonicalize(dir).with_context(|| format!("--pjdfstest {}", dir.display()))?;
        let program = dir.join("pjdfstest");
        ensure!(
            program.is_file(),
            "--pjdfstest {}: {} is missing: build it",
            dir.display(),
            program.display()
        );
        // Users of all ids start it.
        let copy = tempfile::Builder::new().permissions(Permissions::from_mode(0o755)).tempdir()?;
        fs::copy(&program, copy.path().join("pjdfstest"))?;
        let tests = copy.path().join("tests");
        copy_scripts(&dir.join("tests"), &tests)?;
        Ok(Self { tests, _copy: copy })
    }

    /// All scripts, each in a directory of its own below `volume`, which is one of this ground.
    pub(super) fn run(&self, volume: &Path, ground: &str) -> Result<Counts> {
        let mut counts = Counts::default();
        let of_ground = EXCEPTIONS.iter().filter(|exception| exception.is_of(ground));
        let mut expected: BTreeMap<&str, &Exception> = of_ground.map(|e| (e.name, e)).collect();
        for script in self.scripts()? {
            let name = script.strip_prefix(&self.tests)?.display().to_string();
            let exception = exception::find(EXCEPTIONS, &name, ground);
            let dir = volume.join(name.replace('/', "-"));
            fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
            let output = Command::new("sh").arg(&script).current_dir(&dir).output().context("start sh")?;
            let said = String::from_utf8_lossy(&output.stdout);
            let outcome = Outcome::read(&said).with_context(|| format!("{name}: {said}"))?;
            let text = fs::read_to_string(&script)?;
            // A script that names types of files makes fewer assertions than it has planned.
            let is_shorter = text.contains(" in regular ") || text.contains(" in none regular ");
            ensure!(outcome.missing == 0 || is_shorter, "{name}: {} assertions are missing", outcome.missing);
            counts.passed += outcome.passed;
            match exception {
                Some(exception) if !outcome.failed.is_empty() => {
                    expected.remove(exception.name);
                    counts.excepted += outcome.failed.len();
                }
                _ => counts.failed += outcome.failed.len(),
            }
            if exception.is_none() {
                outcome.failed.iter().for_each(|line| complain(&format!("FAILED {name}: {line}")));
            }
            fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
        }
        for Exception { name, reason, .. } in expected.into_values() {
            complain(&format!("{name} passes, and is expected to fail: {reason}"));
            counts.failed += 1;
        }
        Ok(counts)
    }

    /// In order.
    fn scripts(&self) -> Result<BTreeSet<PathBuf>> {
        let mut scripts = BTreeSet::new();
        for dir in entries(&self.tests)?.into_iter().filter(|path| path.is_dir()) {
            scripts
                .extend(entries(&dir)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "t")));
        }
        Ok(scripts)
    }
}

/// Two levels of directories.
fn copy_scripts(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for path in entries(from)? {
        let copy = to.join(path.file_name().context("an entry has a name")?);
        if path.is_dir() {
            copy_scripts(&path, &copy)?;
        } else {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            fs::write(&copy, text.replace(DEVICE_NODES, " "))?;
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// What a script printed.
#[derive(Debug, Default)]
struct Outcome {
    passed: usize,
    failed: Vec<String>,
    /// Planned and not made: those of device nodes.
    missing: usize,
}

impl Outcome {
    /// TAP: a plan (`1..N`), then `ok` or `not ok` for each of its assertions.
    fn read(said: &str) -> Result<Self> {
        let (mut outcome, mut planned) = (Self::default(), None);
        for line in said.lines() {
            if let Some(count) = line.strip_prefix("1..") {
                let digits: String = count.chars().take_while(char::is_ascii_digit).collect();
                planned = Some(digits.parse::<usize>().with_context(|| line.to_owned())?);
            } else if line.starts_with("ok ") || line.contains("# TODO") {
                outcome.passed += 1;
            } else if line.starts_with("not ok") {
                outcome.failed.push(line.to_owned());
            }
        }
        let made = outcome.passed + outcome.failed.len();
        let planned = planned.context("no plan")?;
        ensure!(made <= planned && (made > 0 || planned == 0), "{made} assertions of {planned}");
        outcome.missing = planned - made;
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_assertion_counts_and_a_script_that_broke_off_is_an_error() {
        let outcome = Outcome::read("1..3\nok 1\nnot ok 2 - tried 'x'\nnot ok 3 # TODO later\n").unwrap();
        assert_eq!((outcome.passed, outcome.failed), (2, vec!["not ok 2 - tried 'x'".to_owned()]));
        assert_eq!(Outcome::read("1..0 # SKIP not here\n").unwrap().passed, 0);
        assert_eq!(Outcome::read("1..2\nok 1\n").unwrap().missing, 1);
        Outcome::read("1..2\n").unwrap_err();
        Outcome::read("no plan\n").unwrap_err();
    }
}
