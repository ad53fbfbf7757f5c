//! A product's process under test: its output in a file, its end by its own
//! handle and by nothing else.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::eventually;

#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    output: PathBuf,
}

impl Daemon {
    /// Starts `command` with stdout and stderr appended to `output`.
    pub fn start(name: &str, mut command: Command, output: &Path) -> Result<Self> {
        let file = File::options().append(true).create(true).open(output);
        let file = file.with_context(|| output.display().to_string())?;
        command.stdin(Stdio::null()).stdout(file.try_clone().context("duplicate the log's fd")?).stderr(file);
        let child = command.spawn().with_context(|| format!("start {:?}", command.get_program()))?;
        Ok(Self { name: name.to_owned(), child, output: output.to_path_buf() })
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Everything it has said so far.
    pub fn output(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("wait for {}", self.name))
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("{signal} to {} ({})", self.name, self.pid()))
    }

    /// kill -9, and it is dead when this returns.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill().with_context(|| format!("kill {}", self.name))?;
        self.child.wait().with_context(|| format!("wait for {}", self.name))
    }

    /// SIGTERM and its end, within `timeout`.
    pub fn stop(&mut self, timeout: Duration) -> Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        self.signal(Signal::SIGTERM)?;
        self.wait(timeout)
    }

    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let (name, child) = (&self.name, &mut self.child);
        eventually(&format!("{name} ends"), timeout, || {
            let status = child.try_wait().context("wait")?;
            ensure!(status.is_some(), "it runs");
            status.context("just seen")
        })
    }
}

/// After SIGSTOP, which a process obeys in its own time: until then it answers.
pub fn wait_until_stopped(pid: i32, timeout: Duration) -> Result<()> {
    eventually(&format!("process {pid} is stopped"), timeout, || {
        for thread in fs::read_dir(format!("/proc/{pid}/task")).context("its threads")? {
            let stat = fs::read_to_string(thread.context("its threads")?.path().join("stat"))?;
            // Behind the name, which may hold anything (proc(5)).
            let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
            ensure!(state == Some('T'), "{stat}");
        }
        Ok(())
    })
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Dead already is as good; the sandbox kills and reports what is left.
        let _dead = self.child.kill();
        let _reaped = self.child.wait();
    }
}
