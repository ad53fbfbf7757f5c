//! An application: a process of its own, which reports its steps to files outside of the volume.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tests::Sandbox;

/// For its last checks, after it was asked to end.
const END_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(crate) struct App {
    pub(crate) name: String,
    pub(crate) report: PathBuf,
    child: Child,
}

/// What the test asserts about an application's end.
pub(crate) enum Ended {
    Well,
    /// With its output.
    Badly(String),
}

impl App {
    /// Starts application `name` in a directory of its own or in that of others.
    pub(crate) fn start(sandbox: &Sandbox, number: usize, name: &str, dir: &Path, seed: u64) -> Self {
        let report = sandbox.make_dir(&format!("apps/{number}")).unwrap();
        // Beside the test: cargo built both.
        let program = env!("CARGO_BIN_EXE_workload");
        let output = File::create(report.join("messages")).unwrap();
        let mut command = sandbox.command(Path::new(program));
        command.arg(name).arg(dir).arg(&report).arg(seed.to_string());
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        Self { name: name.to_owned(), report, child: command.spawn().unwrap() }
    }

    /// What it has done so far.
    pub(crate) fn steps(&self) -> u64 {
        fs::metadata(self.report.join("progress")).map_or(0, |file| file.len())
    }

    /// Its slow steps so far, in their order.
    pub(crate) fn pauses(&self) -> Vec<Duration> {
        let text = fs::read_to_string(self.report.join("pauses")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).map(Duration::from_micros).collect()
    }

    pub(crate) fn messages(&self) -> String {
        fs::read_to_string(self.report.join("messages")).unwrap_or_default()
    }

    /// None of them ends before it is asked to.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Asks it for its end, and waits for it.
    pub(crate) fn end(&mut self) -> Ended {
        fs::write(self.report.join("stop"), "").unwrap();
        let begun = Instant::now();
        loop {
            match self.ended() {
                Some(status) if status.success() => return Ended::Well,
                Some(status) => return Ended::Badly(format!("{}: {status}\n{}", self.name, self.messages())),
                None if begun.elapsed() > END_TIMEOUT => {
                    return Ended::Badly(format!("{}: it does not end\n{}", self.name, self.messages()));
                }
                None => std::thread::park_timeout(Duration::from_millis(2)),
            }
        }
    }
}
