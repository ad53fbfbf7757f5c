//! Whether a process waits for a disk: a thread is in uninterruptible sleep (state D,
//! proc_pid_stat(5)) in a system call on a file, or in a page fault.
//!
//! Invariant: no function here opens or stats a file of the process, so that the check never waits
//! for the same disk.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Error, Result, procfs};

/// False for a process that is gone. The descriptor in the first argument of the system call shows
/// what a thread in state D waits for. vfork(2), which also sleeps like this, has none.
pub fn waits_for_disk(pid: i32) -> Result<bool> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let tasks = process.join("task");
    let entries = match std::fs::read_dir(&tasks) {
        Ok(entries) => entries,
        Err(e) if is_gone(&e) => return Ok(false),
        Err(e) => return Err(Error::at("list", &tasks, e)),
    };
    for entry in entries {
        // A thread that ends meanwhile waits for nothing.
        let Ok(entry) = entry else { continue };
        let task = entry.path();
        if read(&task.join("stat"))?.is_some_and(|stat| is_uninterruptible(&stat))
            && read(&task.join("syscall"))?.is_some_and(|call| is_on_a_file(&process, &call))
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn read(path: &Path) -> Result<Option<String>> {
    match procfs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(Error::at("read", path, e)),
    }
}

fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// `stat`: the state follows the last bracket of the name, which may contain any other characters.
fn is_uninterruptible(stat: &str) -> bool {
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
}

/// `call`, as in /proc/PID/task/TID/syscall. True in a page fault.
fn is_on_a_file(process: &Path, call: &str) -> bool {
    let fd = match procfs::system_call(call) {
        Some((-1, _)) => return true,
        Some((_, Some(fd))) => fd,
        Some((_, None)) | None => return false,
    };
    // Only the link's text: `socket:[1]`, `anon_inode:...`, or a path.
    let target = std::fs::read_link(process.join("fd").join(fd.to_string()));
    target.is_ok_and(|path| path.is_absolute() && !path.starts_with("/dev"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_sleeps_or_is_gone_waits_for_no_disk() {
        use std::io::{Read, Write};
        use std::process::{Command, Stdio};
        let mut cat = Command::new("cat");
        let mut child = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id().cast_signed();
        // Until it has answered, its program may still be read from the disk.
        child.stdin.as_ref().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert!(!waits_for_disk(pid).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!waits_for_disk(pid).unwrap());
    }

    #[test]
    fn the_state_follows_the_last_bracket_of_the_name() {
        assert!(is_uninterruptible("7 (a) S (b) D 1 7"));
        assert!(!is_uninterruptible("7 (x) D) S 1 7"));
    }

    #[test]
    fn a_system_call_on_a_file_is_told_from_others() {
        let process = PathBuf::from(format!("/proc/{}", std::process::id()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        use std::os::fd::AsRawFd;
        let call = |fd: i32| format!("1 {fd:#x} 0x7ffd 0x10 0x0 0x0 0x0 0x7ffd 0x7f00\n");
        assert!(is_on_a_file(&process, &call(file.as_raw_fd())));
        assert!(!is_on_a_file(&process, &call(reader.as_raw_fd())));
        assert!(is_on_a_file(&process, "-1 0x7ffd 0x7f00\n"));
        assert!(!is_on_a_file(&process, "running\n"));
        assert!(!is_on_a_file(&process, "58 0xffffffffffffff9c 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x7f00\n"));
    }
}
