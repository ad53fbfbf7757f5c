//! Files of /proc. It reads those that describe processes, and writes those that change what a
//! process may do: kernel settings and `oom_score_adj`.
//!
//! A file mounted over /proc would accept the value and change nothing (CVE-2025-52881), or change
//! something else.
//!
//! Invariant: a file to write is opened below a descriptor of proc's own root, on the same mount,
//! and is verified to be proc's before it is written.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use rustix::fs::{Mode, OFlags, PROC_SUPER_MAGIC, ResolveFlags};

use crate::rootfs::{KernelFs, open_kernel_fs, verify_magic};
use crate::{Error, Result};

/// Reads a file about a process or thread (`stat`, `status`). Its name may contain any bytes
/// (PR_SET_NAME); invalid UTF-8 is replaced.
pub fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned())
}

/// The system call that a thread is in, from /proc/PID/task/TID/syscall: its number, -1 outside of one (a page
/// fault), and its first argument if that can be a descriptor. `None` for a thread that runs.
pub(crate) fn system_call(text: &str) -> Option<(i64, Option<u32>)> {
    let mut fields = text.split_whitespace();
    let number = fields.next()?.parse().ok()?;
    let first = fields.next().and_then(|word| u32::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    Some((number, first))
}

/// Writes `value` to `name`, which is relative to /proc (`sys/net/ipv4/ip_forward`).
pub fn write(name: &Path, value: &str) -> Result<()> {
    write_below(Path::new("/"), name, value)
}

/// `root` is the directory that contains `proc`.
fn write_below(root: &Path, name: &Path, value: &str) -> Result<()> {
    const OP: &str = "write to /proc";
    let problem = |e: rustix::io::Errno| Error::at(OP, name, e);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty()).map_err(problem)?;
    let proc_dir = open_kernel_fs(root, Path::new("proc"), KernelFs::Proc)?;
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(&proc_dir, name, flags, Mode::empty(), how).map_err(problem)?;
    verify_magic(OP, &file, name, PROC_SUPER_MAGIC)?;
    File::from(file).write_all(value.as_bytes()).map_err(|e| Error::at(OP, name, e))
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn a_setting_is_written() {
        write(Path::new("self/oom_score_adj"), "500").unwrap();
        assert_eq!(std::fs::read_to_string("/proc/self/oom_score_adj").unwrap(), "500\n");
    }

    #[test]
    fn names_that_lead_out_of_proc_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "old").unwrap();
        for name in [format!("sys/../..{}", victim.display()), victim.display().to_string()] {
            assert_eq!(write(Path::new(&name), "new").unwrap_err().errno(), Errno::EXDEV, "{name}");
        }
        let through_root = format!("self/root{}", victim.display());
        assert_eq!(write(Path::new(&through_root), "new").unwrap_err().errno(), Errno::ELOOP);
        assert_eq!(std::fs::read(&victim).unwrap(), b"old");
    }

    #[test]
    fn what_lies_over_proc_is_not_written() {
        crate::process::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
            .expect("this test mounts: run it as root");
        crate::mount::make_private(Path::new("/")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let proc_dir = dir.path().join("proc");
        std::fs::create_dir_all(proc_dir.join("sys")).unwrap();
        std::fs::write(proc_dir.join("sys/setting"), "old").unwrap();
        let error = write_below(dir.path(), Path::new("sys/setting"), "new").unwrap_err();
        assert_eq!(error.op, "verify file system");
        // A file over a setting of the true proc.
        let fake = dir.path().join("fake");
        std::fs::write(&fake, "old").unwrap();
        crate::mount::bind(&fake, Path::new("/proc/sys/kernel/hostname")).unwrap();
        let error = write(Path::new("sys/kernel/hostname"), "new").unwrap_err();
        assert_eq!(error.errno(), Errno::EXDEV);
        assert_eq!(std::fs::read(&fake).unwrap(), b"old");
        crate::mount::unmount(Path::new("/proc/sys/kernel/hostname"), crate::mount::UnmountMode::Detach)
            .unwrap();
    }
}
