//! Any process, child or not: found by its pid, held by a pidfd, signalled and awaited through that.
//!
//! Invariant: the kernel may give the pid of an ended process to another one. Only a pidfd, or the pid
//! with the start time, identifies a process.

#![expect(unsafe_code, reason = "pidfd_send_signal without a siginfo has no safe wrapper")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::{Error, Result, procfs};

/// Sends `signal` to the process behind `pidfd`; `false` if it has ended already.
pub fn signal_pidfd(pidfd: impl AsFd, signal: i32) -> Result<bool> {
    // SAFETY: the descriptor is open for as long as it is borrowed; a null
    // siginfo asks for what kill(2) sends.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_fd().as_raw_fd(),
            signal,
            std::ptr::null::<u8>(),
            0,
        )
    };
    match Errno::result(sent) {
        Ok(_) => Ok(true),
        Err(Errno::ESRCH) => Ok(false),
        Err(e) => Err(Error::new("send signal", signal, e)),
    }
}

/// A pidfd of a process that is not our child; `None` if no process has this pid. A thread may have it: the
/// kernel numbers threads and processes together.
pub fn open_pidfd(pid: i32) -> Result<Option<OwnedFd>> {
    use rustix::io::Errno;
    let Some(rustix_pid) = rustix::process::Pid::from_raw(pid) else { return Ok(None) };
    match rustix::process::pidfd_open(rustix_pid, rustix::process::PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        // INVAL, or NOENT on newer kernels (seen on 6.18): the number of a thread that is not the first.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
        Err(e) => Err(Error::new("pidfd_open", pid, e)),
    }
}

/// Blocks until the process behind `pidfd` has ended, child or not; `false` if it has not within
/// `timeout`.
pub fn wait_for_end(pidfd: impl AsFd, timeout: Duration) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up: a last call with 0 ms would not wait for the last millisecond.
        let left = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match nix::poll::poll(&mut fds, left) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(Error::new("poll", "pidfd", e)),
        }
    }
}

/// Field 22 of /proc/PID/stat: the start time in clock ticks since boot. With the pid it identifies
/// a process uniquely. `None` if the process is gone. An error if that is unknown: a process that
/// cannot be examined may be alive.
pub fn start_time(pid: i32) -> Result<Option<u64>> {
    let path = format!("/proc/{pid}/stat");
    let stat = match procfs::read(Path::new(&path)) {
        Ok(stat) => stat,
        // ESRCH: it ended between the open and the read.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => return Ok(None),
        Err(e) => return Err(Error::new("read", path, e)),
    };
    parse_start_time(&stat).map(Some).ok_or_else(|| Error::new("understand", path, Errno::EINVAL))
}

/// Field 22 of proc_pid_stat(5). The fields follow the last bracket of the name, which may contain
/// any other characters.
fn parse_start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A thread's state, from proc_pid_status(5). The kernel makes no reader of that file wait, as it
/// does with other files of a process that executes a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadStatus {
    /// In uninterruptible sleep (D).
    pub is_asleep: bool,
    /// SIGKILL is pending for the thread or its process.
    pub is_killed: bool,
    /// It has ended, or has given up its memory and is closing its files.
    pub is_exiting: bool,
    /// It has ended: a zombie, or about to be removed.
    pub has_ended: bool,
    /// How often another thread got the processor after it.
    pub context_switches: u64,
}

impl ThreadStatus {
    /// `None` if a field is missing.
    pub fn parse(status: &str) -> Option<Self> {
        const KTHREADD: &str = "2";
        const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim)
        };
        let number = |name| field(name)?.parse::<u64>().ok();
        let has_sigkill = |name| Some(u64::from_str_radix(field(name)?, 16).ok()? & SIGKILL != 0);
        // Linux 6.11 has the field.
        let is_kernel_thread = match field("Kthread") {
            Some(is_kernel_thread) => is_kernel_thread == "1",
            None => field("PPid")? == KTHREADD,
        };
        let state = field("State")?.get(..1)?;
        let has_memory = field("VmSize").is_some();
        let has_ended = matches!(state, "Z" | "X");
        Some(Self {
            is_asleep: state == "D",
            is_killed: has_sigkill("SigPnd")? || has_sigkill("ShdPnd")?,
            is_exiting: has_ended || (!has_memory && !is_kernel_thread),
            has_ended,
            context_switches: number("voluntary_ctxt_switches")? + number("nonvoluntary_ctxt_switches")?,
        })
    }
}

/// Whether a process was killed and still has threads that wait in the kernel: each has SIGKILL
/// pending, is exiting, or is a zombie. False for a process
/// that is gone.
pub fn is_killed(pid: i32) -> bool {
    all_threads(pid, is_killed_or_ends)
}

/// Whether all that is left of a process are threads that have SIGKILL pending and wait in write(2) or
/// writev(2) to /dev/fuse: a FUSE server that has notified the kernel (FUSE_NOTIFY_INVAL_ENTRY) of something
/// that is locked until another request is answered (fs/fuse/dir.c, `fuse_reverse_inval_entry`). It executes
/// nothing any more, but its pidfd is not readable before another server has answered that request. False if
/// that is unknown, and for a process that is gone.
pub fn only_notifies_fuse(pid: i32) -> bool {
    all_threads(pid, only_notifies)
}

/// Whether there are threads, and `holds` of each; `None` for one that does not count.
fn all_threads(pid: i32, holds: impl Fn(&Path) -> Option<bool>) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut found = tasks.flatten().filter_map(|task| holds(&task.path())).peekable();
    found.peek().is_some() && found.all(|holds| holds)
}

/// [`only_notifies_fuse`] for one thread; `None` if it has ended.
fn only_notifies(task: &Path) -> Option<bool> {
    let status = ThreadStatus::parse(&procfs::read(&task.join("status")).ok()?)?;
    if status.has_ended {
        return None;
    }
    let waits = status.is_asleep && status.is_killed && !status.is_exiting;
    // Read only then: such a thread does not execute a program.
    let call = || procfs::read(&task.join("syscall")).unwrap_or_default();
    Some(waits && is_write_to_fuse(task, &call()))
}

/// `call`, as in /proc/PID/task/TID/syscall.
fn is_write_to_fuse(task: &Path, call: &str) -> bool {
    let Some((libc::SYS_write | libc::SYS_writev, Some(descriptor))) = procfs::system_call(call) else {
        return false;
    };
    // Only the link's text: no other file system is asked.
    let target = std::fs::read_link(task.join("fd").join(descriptor.to_string()));
    target.is_ok_and(|path| path == Path::new("/dev/fuse"))
}

/// [`is_killed`] for one thread; `None` if it is gone.
fn is_killed_or_ends(task: &Path) -> Option<bool> {
    let status = ThreadStatus::parse(&procfs::read(&task.join("status")).ok()?)?;
    Some(status.is_exiting || status.is_killed)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn the_number_of_a_thread_is_no_process() {
        let (send, receive) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            send.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _closed = wait.recv();
        });
        let opened = open_pidfd(receive.recv().unwrap());
        drop(end);
        thread.join().unwrap();
        assert!(opened.unwrap().is_none());
    }

    #[test]
    fn a_process_is_known_though_its_name_is_no_text() {
        let script = r"printf '\377) D 1' >/proc/$$/comm; echo named; read end";
        let mut sh = std::process::Command::new("sh");
        let mut child = sh.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        let pid = child.id().cast_signed();
        assert!(std::fs::read_to_string(format!("/proc/{pid}/comm")).is_err(), "no UTF-8");
        assert!(start_time(pid).unwrap().unwrap() > 0);
        assert!(!is_killed(pid) && !crate::disk_wait::waits_for_disk(pid).unwrap());
        child.kill().unwrap();
        // Not reaped yet: a zombie.
        wait_for_end(open_pidfd(pid).unwrap().unwrap(), Duration::from_secs(10)).unwrap();
        assert!(is_killed(pid) && !only_notifies_fuse(pid));
        child.wait().unwrap();
        assert!(!is_killed(pid));
    }

    #[test]
    fn the_start_time_is_found_after_any_name() {
        let stat = "7 (a) S (b) D 1 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 4711 0";
        assert_eq!(parse_start_time(stat), Some(4711));
        assert_eq!(parse_start_time("7 (a) D 1 7"), None);
    }

    #[test]
    fn a_thread_that_was_killed_or_ends_is_told_from_others() {
        let status = |state: &str, parent: u32, of_memory: &str, pending: u64| {
            let text = format!(
                "Name:\tState:\tx\nState:\t{state} (x)\nPPid:\t{parent}\n{of_memory}SigPnd:\t0000000000000000\n\
                 ShdPnd:\t{pending:016x}\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n"
            );
            let status = ThreadStatus::parse(&text).unwrap();
            assert_eq!(status.context_switches, 42);
            (status.is_asleep, status.is_killed, status.is_exiting)
        };
        let memory = "VmSize:\t    5784 kB\n";
        assert_eq!(status("D", 1, memory, 0x4000), (true, false, false), "another signal");
        assert_eq!(status("D", 1, memory, 0x100), (true, true, false));
        assert_eq!(status("D", 1, "", 0), (true, false, true));
        assert_eq!(status("D", 2, "", 0), (true, false, false), "a kernel thread");
        assert_eq!(status("D", 2, "Kthread:\t0\n", 0), (true, false, true), "pid 2 of a namespace");
        assert_eq!(status("D", 1, "Kthread:\t1\n", 0), (true, false, false), "of a kernel process");
        assert_eq!(status("Z", 1, "", 0), (false, false, true));
        assert!(ThreadStatus::parse("Name:\tx\nState:\tD (x)\n").is_none());
        assert!(!is_killed(std::process::id().cast_signed()), "this one runs");
    }

    #[test]
    fn a_write_to_fuse_is_told_from_other_calls_and_files() {
        let task = Path::new("/proc/thread-self");
        let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let other = std::fs::File::open("/dev/null").unwrap();
        let call = |number: i64, file: &std::fs::File| {
            format!("{number} {:#x} 0x7ffd 0x10 0x0 0x0 0x0 0x7ffd 0x7f00\n", file.as_raw_fd())
        };
        assert!(is_write_to_fuse(task, &call(libc::SYS_write, &device)));
        assert!(is_write_to_fuse(task, &call(libc::SYS_writev, &device)));
        assert!(!is_write_to_fuse(task, &call(libc::SYS_pwrite64, &device)));
        assert!(!is_write_to_fuse(task, &call(libc::SYS_write, &other)));
        for call in ["running\n", "-1 0x7ffd 0x7f00\n", ""] {
            assert!(!is_write_to_fuse(task, call), "{call}");
        }
        let this = std::process::id().cast_signed();
        assert!(!only_notifies_fuse(this) && !only_notifies_fuse(i32::MAX), "this one runs");
    }

    #[test]
    fn a_process_has_a_start_time_and_a_missing_one_has_none() {
        assert!(start_time(std::process::id().cast_signed()).unwrap().unwrap() > 0);
        assert_eq!(start_time(i32::MAX).unwrap(), None);
        assert!(open_pidfd(i32::MAX).unwrap().is_none());
    }
}
