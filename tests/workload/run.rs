//! What an application reports to the suite while it runs, and the programs that it starts.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tests::random::Random;

/// A step that takes longer is reported as a pause.
const SLOW: Duration = Duration::from_millis(5);
/// For one program, with all pauses in it.
pub(crate) const PROGRAM_TIMEOUT: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(2);

/// One application: where it works, and where it reports.
#[derive(Debug)]
pub(crate) struct Run {
    /// Its directory in the volume.
    pub(crate) dir: PathBuf,
    /// A directory outside of the volume.
    pub(crate) report: PathBuf,
    pub(crate) seed: u64,
    /// One byte for each step.
    progress: File,
    /// One line for each slow step: microseconds.
    pauses: File,
}

impl Run {
    pub(crate) fn new(dir: PathBuf, report: PathBuf, seed: u64) -> Result<Self> {
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        let append = |name: &str| {
            let path = report.join(name);
            let file = File::options().append(true).create(true).open(&path);
            file.with_context(|| path.display().to_string())
        };
        let (progress, pauses) = (append("progress")?, append("pauses")?);
        Ok(Self { dir, report, seed, progress, pauses })
    }

    pub(crate) fn random(&self) -> Random {
        Random::new(self.seed)
    }

    /// False as soon as the suite asks for the end.
    pub(crate) fn goes_on(&self) -> bool {
        !self.report.join("stop").exists()
    }

    /// Does one step, and reports it and the time it took.
    pub(crate) fn step<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let begun = Instant::now();
        let answer = work();
        let took = begun.elapsed();
        if took >= SLOW {
            (&self.pauses)
                .write_all(format!("{}\n", took.as_micros()).as_bytes())
                .context("report a pause")?;
        }
        (&self.progress).write_all(b".").context("report a step")?;
        Ok(answer)
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).current_dir(&self.report).env("HOME", &self.report);
        command.env("LC_ALL", "C.UTF-8").env("GIT_CONFIG_NOSYSTEM", "1");
        command
    }

    /// Runs a program to its end, as one step. Returns its output.
    pub(crate) fn program(&self, mut command: Command) -> Result<String> {
        let line = format!("{command:?}");
        let path = self.report.join("output");
        let output = File::create(&path).with_context(|| path.display().to_string())?;
        command.stdout(output.try_clone().context("duplicate a descriptor")?).stderr(output);
        let status = self.step(|| {
            let mut child = command.spawn().with_context(|| missing(&line))?;
            wait(&mut child, PROGRAM_TIMEOUT).with_context(|| line.clone())
        })?;
        let output = fs::read(&path).with_context(|| path.display().to_string())?;
        let output = String::from_utf8_lossy(&output).into_owned();
        let status = status.with_context(|| output.clone())?;
        ensure!(status.success(), "{line}: {status}\n{output}");
        Ok(output)
    }
}

fn missing(line: &str) -> String {
    format!(
        "start {line}: if the program is missing, run `apt-get install fio git sqlite3 postgresql`, or \
         `cargo xtask test`, which installs it"
    )
}

/// Its end, within `limit`; then it is killed.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> Result<ExitStatus> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("wait")? {
            return Ok(status);
        }
        if begun.elapsed() > limit {
            child.kill().context("kill")?;
            bail!("not ended within {limit:?}: killed");
        }
        thread::park_timeout(LOOK);
    }
}

/// Reads a file of the volume, and compares it.
pub(crate) fn expect_content(path: &Path, content: &[u8]) -> Result<()> {
    let found = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    if found == content {
        return Ok(());
    }
    let at = found.iter().zip(content).position(|(found, wanted)| found != wanted);
    let (found, wanted) = (found.len(), content.len());
    bail!("{}: {found} bytes, and {wanted} were written; first difference at {at:?}", path.display())
}
