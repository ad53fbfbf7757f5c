//! A process and all that it starts, in a PID namespace of their own: SIGKILL to the first ends all,
//! and the first is not gone before they are. So no process stays in the kernel unnoticed.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ::tests::eventually;
use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::STANDARD_PATH;

/// After SIGKILL.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const START_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct Jail {
    /// Files to be seen in place of others.
    files: Vec<(PathBuf, PathBuf)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Exited,
    /// Killed, and no process is left.
    TimedOut,
    /// Killed, and processes are left.
    Stuck,
}

/// When the process is killed.
pub(super) struct Alarm {
    timeout: Duration,
    due: Instant,
}

impl Alarm {
    pub(super) fn restart(&mut self) {
        self.due = Instant::now() + self.timeout;
    }
}

impl Jail {
    pub(super) fn with(files: Vec<(PathBuf, PathBuf)>) -> Self {
        Self { files }
    }

    /// Runs `command`, with what it prints piece by piece, until it ends or the alarm is due.
    pub(super) fn run(
        &self,
        command: &Command,
        timeout: Duration,
        mut print: impl FnMut(&str, &mut Alarm),
    ) -> Result<End> {
        let mut child = self.start(command)?;
        let first = first_process(&mut child)?;
        let pieces = pieces(&mut child)?;
        let mut stdin = child.stdin.take().context("a pipe")?;
        stdin.write_all(b"\n").context("start the command")?;
        let mut alarm = Alarm { timeout, due: Instant::now() + timeout };
        let end = loop {
            match pieces.recv_timeout(alarm.due.saturating_duration_since(Instant::now())) {
                Ok(piece) => print(&piece, &mut alarm),
                Err(RecvTimeoutError::Disconnected) => break End::Exited,
                Err(RecvTimeoutError::Timeout) => break End::TimedOut,
            }
        };
        // A process that closed its output may run on.
        if end == End::TimedOut || !is_gone(&first, alarm.due.saturating_duration_since(Instant::now()))? {
            let _ended_meanwhile = linux::process::signal_pidfd(&first, Signal::SIGKILL as i32)?;
            if !is_gone(&first, END_TIMEOUT)? {
                return Ok(End::Stuck);
            }
            child.wait().context("wait for unshare")?;
            return Ok(End::TimedOut);
        }
        child.wait().context("wait for unshare")?;
        Ok(End::Exited)
    }

    fn start(&self, command: &Command) -> Result<Child> {
        let mut unshare = Command::new("unshare");
        unshare.env_clear().env("PATH", STANDARD_PATH);
        // Mounts of the driver are seen, those of tests stay here.
        unshare.args([
            "--mount",
            "--propagation",
            "slave",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]);
        // It waits until its pidfd is open. The output is one: tests report in both.
        let bind = "mount -n --bind \"$1\" \"$2\" && shift 2 && ";
        let script = format!("read -r _ && {}exec \"$@\" 2>&1 </dev/null", bind.repeat(self.files.len()));
        unshare.args(["sh", "-c", &script, "sh"]);
        for (shown, place) in &self.files {
            unshare.arg(shown).arg(place);
        }
        unshare.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            if let Some(value) = value {
                unshare.env(name, value);
            }
        }
        if let Some(dir) = command.get_current_dir() {
            unshare.current_dir(dir);
        }
        unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("start unshare")
    }
}

/// The first process of the namespace, which is unshare's child.
fn first_process(unshare: &mut Child) -> Result<OwnedFd> {
    let children = format!("/proc/{0}/task/{0}/children", unshare.id());
    eventually("unshare has a child", START_TIMEOUT, || {
        let pids = std::fs::read_to_string(&children).with_context(|| children.clone())?;
        let pid = pids.split_whitespace().next().context("not yet")?.parse().context("a pid")?;
        linux::process::open_pidfd(pid)?.context("it has ended")
    })
}

/// What the process prints, by a thread of its own.
fn pieces(child: &mut Child) -> Result<Receiver<String>> {
    let mut stdout = child.stdout.take().context("a pipe")?;
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = stdout.read(&mut buffer) {
            if sender.send(String::from_utf8_lossy(&buffer[..count]).into_owned()).is_err() {
                break;
            }
        }
    });
    Ok(receiver)
}

/// Whether it ends within `timeout`. A pidfd is readable once its process has ended.
fn is_gone(process: &OwnedFd, timeout: Duration) -> Result<bool> {
    let timeout = PollTimeout::try_from(timeout).context("a time that poll(2) takes")?;
    let mut fds = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, timeout).context("poll")?;
    ensure!(ready <= 1, "{ready} descriptors of one");
    Ok(ready == 1)
}
