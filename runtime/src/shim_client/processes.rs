//! The shims of a sandbox, found in /proc: no record has the pid of a shim whose runtime was killed
//! just after it had started it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use linux::{process, procfs};

use crate::error::{Error, Result};
use crate::reexec::SHIM_NAME;

/// Pidfds of the shims of the sandbox in `dir`, found by their command lines. Command lines of pods'
/// processes are not read: they may be in memory whose pages never arrive.
pub(crate) fn shims_of(dir: &Path) -> Result<Vec<OwnedFd>> {
    let proc = Path::new("/proc");
    let mut shims = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(|e| Error::io("read directory", proc, e))? {
        let entry = entry.map_err(|e| Error::io("read directory", proc, e))?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if !is_shim(pid, dir)? {
            continue;
        }
        // Again after the pidfd was opened: so it belongs to the shim, and not to a process that got its
        // pid.
        if let Some(pidfd) = process::open_pidfd(pid)?
            && is_shim(pid, dir)?
        {
            shims.push(pidfd);
        }
    }
    Ok(shims)
}

fn is_shim(pid: i32, dir: &Path) -> Result<bool> {
    if !is_in_own_pid_namespace(pid)? {
        return Ok(false);
    }
    let path = format!("/proc/{pid}/cmdline");
    let line = of_process(&path, std::fs::read(&path))?;
    let wanted = [SHIM_NAME.as_bytes(), dir.as_os_str().as_encoded_bytes()];
    Ok(line.split(|byte| *byte == 0).take(2).eq(wanted))
}

/// Not in a nested one, as processes of containers are (`NSpid` in proc_pid_status(5)).
fn is_in_own_pid_namespace(pid: i32) -> Result<bool> {
    let path = format!("/proc/{pid}/status");
    let status = of_process(&path, procfs::read(Path::new(&path)))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    Ok(numbers.is_some_and(|numbers| numbers.split_whitespace().count() == 1))
}

/// Empty if the process has ended.
fn of_process<T: Default>(path: &str, read: io::Result<T>) -> Result<T> {
    match read {
        // ESRCH: it ended between the open and the read.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(T::default()),
        read => read.map_err(|e| Error::io("read", Path::new(path), e)),
    }
}
