//! One run of a program under ptrace: how many programs it starts, itself
//! included, and the largest resident set of any of them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Observed {
    pub(super) programs: usize,
    /// KiB; `VmHWM` of a process as it ends.
    pub(super) peak_rss: u64,
}

/// `command`'s program, arguments and environment; `stdin` is what it reads.
/// An exit code other than 0 is an error.
pub(super) fn observe(command: &Command, stdin: &[u8]) -> Result<Observed> {
    let mut child = start_waiting(command)?;
    let root = Pid::from_raw(i32::try_from(child.id()).context("a process id")?);
    let options = Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACEEXIT
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(root, options).context("trace the program")?;
    let mut pipe = child.stdin.take().context("the program's stdin")?;
    pipe.write_all(b"\n").context("let the program start")?;
    pipe.write_all(stdin).context("write the program's stdin")?;
    drop(pipe);
    follow(root)
}

/// A shell that becomes the program once it has read a line: it can be traced
/// before that. (dash reads a line byte by byte, so the rest is the program's.)
fn start_waiting(command: &Command) -> Result<Child> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "read _go && exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
    shell.env_clear();
    for (name, value) in command.get_envs() {
        shell.env(name, value.unwrap_or_default());
    }
    shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    shell.spawn().context("start /bin/sh")
}

fn follow(root: Pid) -> Result<Observed> {
    let mut programs = 0;
    let mut peaks: BTreeMap<i32, u64> = BTreeMap::new();
    loop {
        // This thread's children and tracees only: others have theirs.
        let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        let status = match waitpid(Pid::from_raw(-1), Some(flags)) {
            Err(Errno::EINTR) => continue,
            status => status.context("wait for the program")?,
        };
        match status {
            WaitStatus::Exited(pid, code) if pid == root => {
                ensure!(code == 0, "the program ended with {code}");
                let peak_rss = peaks.values().copied().max().unwrap_or(0);
                return Ok(Observed { programs, peak_rss });
            }
            WaitStatus::Signaled(pid, signal, _) if pid == root => bail!("the program was killed: {signal}"),
            WaitStatus::PtraceEvent(pid, signal, event) => {
                if event == libc::PTRACE_EVENT_EXEC {
                    // The shell's own start may be seen or not; the program's comes last of this process.
                    programs = if pid == root { 1 } else { programs + 1 };
                }
                if event == libc::PTRACE_EVENT_EXIT {
                    peaks.insert(pid.as_raw(), resident_peak(pid)?);
                }
                // A group stop comes as an event with its signal; nothing here stops groups.
                resume(
                    pid,
                    (event == libc::PTRACE_EVENT_STOP).then_some(signal).filter(|s| *s != Signal::SIGTRAP),
                )?;
            }
            WaitStatus::Stopped(pid, signal) => resume(pid, Some(signal))?,
            _ => {}
        }
    }
}

fn resume(pid: Pid, signal: Option<Signal>) -> Result<()> {
    match ptrace::cont(pid, signal) {
        // Killed meanwhile; its end is reported.
        Err(Errno::ESRCH) => Ok(()),
        done => done.context("resume the program"),
    }
}

fn resident_peak(pid: Pid) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).context(path)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    // Threads share their process's; what has no memory left has no line.
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")).map_or(Ok(0), |kib| kib.trim().parse());
    kib.context("VmHWM")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_started_program_counts_and_the_largest_resident_set_is_kept() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "/bin/true; /bin/true"]).env("PATH", "/bin");
        let observed = observe(&command, b"").unwrap();
        assert_eq!(observed.programs, 3);
        assert!((200..20_000).contains(&observed.peak_rss), "{observed:?}");
    }

    #[test]
    fn a_failure_is_an_error() {
        let mut command = Command::new("/bin/false");
        command.env("PATH", "/bin");
        assert!(observe(&command, b"").unwrap_err().to_string().contains("ended with 1"));
    }
}
