//! github.com/pjd/pjdfstest: shell scripts that print a line in TAP for each assertion.

mod comparison;
mod expected;
mod tap;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
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
use super::progress::Progress;
use super::queue;

/// Scripts that run at the same time: they start many short programs, and sleep until times differ.
const AT_ONCE: usize = 8;

/// In scripts: what a volume refuses to make, since device nodes give access to the node's hardware.
const DEVICE_NODES: &str = " block char ";

/// What a script prints last from which device nodes were taken, so that it makes fewer assertions than it has planned.
const END: &str = "# the end, without device nodes";

#[derive(Debug)]
pub(super) struct Suite {
    /// Those to run, by their names, such as `chmod/00.t`. They try each type of file, without device nodes.
    scripts: BTreeMap<String, PathBuf>,
    /// Of all.
    names: BTreeSet<String>,
    _copy: TempDir,
}

impl Suite {
    /// `dir`: the clone, in which the program was built. `only`: scripts whose name contains this.
    pub(super) fn open(dir: &Path, only: Option<&str>) -> Result<Self> {
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
        let mut scripts = scripts_in(&tests)?;
        let names = scripts.keys().cloned().collect();
        scripts.retain(|name, _| only.is_none_or(|word| name.contains(word)));
        Ok(Self { scripts, names, _copy: copy })
    }

    /// How many scripts.
    pub(super) fn len(&self) -> usize {
        self.scripts.len()
    }

    /// All scripts, each in a directory of its own below `volume`, which is one of this ground.
    pub(super) fn run(&self, volume: &Path, ground: &str, progress: &Progress) -> Result<Counts> {
        let counted = queue::spread([(); AT_ONCE], self.longest_first()?, |(), (name, script)| {
            let counts = run_script(name, script, volume, ground)?;
            progress.add(1);
            Ok(counts)
        })?;
        let mut counts = Counts::default();
        counted.into_iter().for_each(|more| counts += more);
        let listed = expected::on(ground).map(|entry| &entry.exception);
        for Exception { name, ground, .. } in listed.filter(|listed| !self.names.contains(listed.name)) {
            complain(&format!(
                "{name}: this pjdfstest has no such script. Remove its entry for grounds with {ground:?}"
            ));
            counts.failed += 1;
        }
        Ok(counts)
    }

    /// Scripts with many assertions come first, so that none of them is alone at the end.
    fn longest_first(&self) -> Result<Vec<(&String, &PathBuf)>> {
        let mut scripts = Vec::new();
        for (name, path) in &self.scripts {
            let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            scripts.push((Reverse(plan(&text)), (name, path)));
        }
        scripts.sort();
        Ok(scripts.into_iter().map(|(_, script)| script).collect())
    }
}

/// A script's plan: how many assertions it makes.
fn plan(script: &str) -> usize {
    let plans = script.lines().filter_map(|line| line.trim().strip_prefix("echo \"1..")?.strip_suffix('"'));
    plans.filter_map(|plan| plan.parse().ok()).max().unwrap_or_default()
}

fn run_script(name: &str, script: &Path, volume: &Path, ground: &str) -> Result<Counts> {
    let dir = volume.join(name.replace('/', "-"));
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    let ran = Command::new("sh").arg(script).current_dir(&dir).output().context("start sh")?;
    let printed = String::from_utf8_lossy(&ran.stdout);
    let counts = match read(&printed) {
        Ok(output) => {
            let comparison = Comparison::new(name, ground, &output, expected::on(ground));
            comparison.complaints().iter().for_each(|text| complain(text));
            comparison.counts()
        }
        Err(error) => {
            let errors = String::from_utf8_lossy(&ran.stderr);
            complain(&format!("FAILED {name} ({}): {error:#}\n{printed}{errors}", ran.status));
            Counts { failed: 1, ..Counts::default() }
        }
    };
    fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    Ok(counts)
}

fn scripts_in(tests: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut scripts = BTreeMap::new();
    for dir in entries(tests)?.into_iter().filter(|path| path.is_dir()) {
        for script in entries(&dir)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "t")) {
            scripts.insert(script.strip_prefix(tests)?.display().to_string(), script);
        }
    }
    Ok(scripts)
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
    fn a_plan_is_the_largest_that_a_script_may_print() {
        assert_eq!(plan("if a; then\n\techo \"1..7\"\nelse\n\techo \"1..12\"\nfi"), 12);
        assert_eq!(plan("echo 1..7"), 0);
    }

    #[test]
    fn a_script_that_names_no_device_nodes_is_left_as_it_is() {
        assert_eq!(without_device_nodes("for type in regular fifo; do"), "for type in regular fifo; do");
    }
}
