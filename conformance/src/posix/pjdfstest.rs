//! github.com/pjd/pjdfstest: shell scripts that print a line in TAP for each assertion.

mod comparison;
mod expected;
mod tap;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use xtask::progress::complain;

use self::comparison::Comparison;
use self::tap::Output;
use super::counts::Counts;
use super::exception::Exception;

/// In scripts: what a volume refuses to make, since device nodes give access to the node's hardware.
const DEVICE_NODES: &str = " block char ";

/// What a script prints last from which device nodes were taken, so that it makes fewer assertions than it has planned.
const END: &str = "# the end, without device nodes";

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
        let scripts = self.scripts()?;
        for (name, script) in &scripts {
            let dir = volume.join(name.replace('/', "-"));
            fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
            let ran = Command::new("sh").arg(script).current_dir(&dir).output().context("start sh")?;
            let printed = String::from_utf8_lossy(&ran.stdout);
            match read(&printed) {
                Ok(output) => {
                    let comparison = Comparison::new(name, ground, &output, expected::on(ground));
                    comparison.complaints().iter().for_each(|text| complain(text));
                    counts += comparison.counts();
                }
                Err(error) => {
                    let errors = String::from_utf8_lossy(&ran.stderr);
                    complain(&format!("FAILED {name} ({}): {error:#}\n{printed}{errors}", ran.status));
                    counts.failed += 1;
                }
            }
            fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
        }
        let listed = expected::on(ground).map(|entry| &entry.exception);
        for Exception { name, ground, .. } in listed.filter(|listed| !scripts.contains_key(listed.name)) {
            complain(&format!(
                "{name}: this pjdfstest has no such script. Remove its entry for grounds with {ground:?}"
            ));
            counts.failed += 1;
        }
        Ok(counts)
    }

    /// By their names, such as `chmod/00.t`.
    fn scripts(&self) -> Result<BTreeMap<String, PathBuf>> {
        let mut scripts = BTreeMap::new();
        for dir in entries(&self.tests)?.into_iter().filter(|path| path.is_dir()) {
            for script in entries(&dir)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "t"))
            {
                scripts.insert(script.strip_prefix(&self.tests)?.display().to_string(), script);
            }
        }
        Ok(scripts)
    }
}

/// Assertions are missing only where device nodes were taken from the script, and if it reached its end.
fn read(printed: &str) -> Result<Output> {
    let output = Output::read(printed)?;
    let is_at_its_end = printed.lines().next_back() == Some(END);
    ensure!(output.missing() == 0 || is_at_its_end, "ended {} assertions too early", output.missing());
    Ok(output)
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
            fs::write(&copy, without_device_nodes(&text))?;
        }
    }
    Ok(())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

fn without_device_nodes(script: &str) -> String {
    if script.contains(DEVICE_NODES) {
        format!("{}\necho '{END}'\n", script.replace(DEVICE_NODES, " "))
    } else {
        script.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints an assertion for each type of file.
    const SCRIPT: &str = "n=1\necho 1..4\nfor type in regular block char fifo; do\n\
        echo \"ok $n\"\n[ $n != \"$last\" ] || exit 1\nn=$((n + 1))\ndone";

    fn print(script: &str, last: &str) -> String {
        let mut sh = Command::new("sh");
        let output = sh.args(["-c", script]).env("last", last).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_script_without_device_nodes_makes_fewer_assertions_and_ends() {
        let script = without_device_nodes(SCRIPT);
        assert_eq!(read(&print(&script, "")).unwrap().missing(), 2);
        assert_eq!(read(&print(SCRIPT, "")).unwrap().missing(), 0);
    }

    #[test]
    fn a_script_that_ends_too_early_is_an_error_also_without_device_nodes() {
        for script in [&without_device_nodes(SCRIPT), SCRIPT] {
            let error = read(&print(script, "1")).unwrap_err();
            assert_eq!(error.to_string(), "ended 3 assertions too early");
        }
    }

    #[test]
    fn a_script_that_names_no_device_nodes_is_left_as_it_is() {
        assert_eq!(without_device_nodes("for type in regular fifo; do"), "for type in regular fifo; do");
    }
}
