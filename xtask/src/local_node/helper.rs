//! Programs that `up` and `down` wait for, but not for ever.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use linux::process;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// For the end of a program after SIGKILL: a system call may hold it up.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// What the program prints, when it gets `input`. If it takes longer than `limit`, it is killed together
/// with the programs that it has started.
pub(super) fn output(command: &mut Command, input: &[u8], limit: Duration) -> Result<Output> {
    let name = command.get_program().display().to_string();
    let (mut stdin, stdout, stderr) = (memory_file()?, memory_file()?, memory_file()?);
    stdin.write_all(input).and_then(|()| stdin.rewind()).context("write the input")?;
    // Files, which are neither full nor kept open, unlike pipes.
    let copy = |file: &File| file.try_clone().context("duplicate a descriptor");
    command.stdin(stdin).stdout(copy(&stdout)?).stderr(copy(&stderr)?).process_group(0);
    let mut child = command.spawn().with_context(|| format!("start {name}"))?;
    let pid = child.id().cast_signed();
    let pidfd = process::open_pidfd(pid)?.with_context(|| format!("{name} is gone"))?;
    if !process::wait_for_end(&pidfd, limit)? {
        // Not reaped yet, so the number is still its own.
        killpg(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("kill {name}"))?;
        if process::wait_for_end(&pidfd, KILL_TIMEOUT)? {
            child.wait().with_context(|| format!("wait for {name}"))?;
        }
        bail!("{name} did not end within {limit:?}: killed");
    }
    let status = child.wait().with_context(|| format!("wait for {name}"))?;
    Ok(Output { status, stdout: content(stdout)?, stderr: content(stderr)? })
}

fn memory_file() -> Result<File> {
    let made: OwnedFd = memfd_create(c"output", MFdFlags::MFD_CLOEXEC).context("make a file in memory")?;
    Ok(made.into())
}

fn content(mut file: File) -> Result<Vec<u8>> {
    file.rewind().context("read the output")?;
    linux::atomic_file::content_of(file).context("read the output")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed_with_its_children() {
        let shell = |script: &str, limit| {
            let mut command = Command::new("/bin/sh");
            output(command.args(["-c", script]), b"input", limit)
        };
        let whole = shell("cat; echo problem >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!(
            (whole.status.code(), &whole.stdout[..], &whole.stderr[..]),
            (Some(3), &b"input"[..], &b"problem\n"[..])
        );
        let late = shell("sleep 1000 & sleep 1000", Duration::from_millis(1)).unwrap_err();
        assert!(late.to_string().contains("did not end within 1ms"), "{late}");
    }
}
