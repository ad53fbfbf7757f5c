//! Processes of a container launcher: clone3(2) into new namespaces, pidfds,
//! reaping, and every privilege that is given up before execve(2).
//!
//! Invariant: [`clone_child`] refuses to run in a process with threads, so its child need not be
//! async-signal-safe.

#![expect(unsafe_code, reason = "clone3, prctl, seccomp and close_range have no safe wrapper")]

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sched::CloneFlags;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus};
use nix::unistd::{Gid, Pid, Uid};

use crate::{Error, Result, procfs};

/// include/uapi/linux/sched.h; in `libc` it is an `int`, which is too small for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// A child that is not reaped yet. Its `pidfd` becomes readable when it ends.
#[derive(Debug)]
pub struct Child {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    /// The exit code as in a shell: the code, or 128 + signal.
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// fork(2) into new namespaces (`namespaces`, only `CLONE_NEW*` flags) and into the cgroup v2
/// directory `group` (CLONE_INTO_CGROUP, Linux 5.7): joining it later would wait for an RCU grace
/// period of about 15 ms. The child runs `child` and exits with the code that it returns, without
/// running destructors of the parent's values. `EBUSY` if this process has threads: another thread
/// could hold a lock that the child needs.
pub fn clone_child(
    namespaces: CloneFlags,
    group: Option<BorrowedFd<'_>>,
    child: impl FnOnce() -> i32,
) -> Result<Child> {
    const OP: &str = "clone3";
    let threads = std::fs::read_dir("/proc/self/task").map_err(|e| Error::new(OP, "count threads", e))?;
    if threads.count() != 1 {
        return Err(Error::new(OP, "process with several threads", Errno::EBUSY));
    }
    let mut pidfd: RawFd = -1;
    let mut flags =
        u64::from(namespaces.bits().cast_unsigned()) | u64::from(libc::CLONE_PIDFD.cast_unsigned());
    if group.is_some() {
        flags |= CLONE_INTO_CGROUP;
    }
    let args = libc::clone_args {
        flags,
        pidfd: std::ptr::from_mut(&mut pidfd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: u64::from(libc::SIGCHLD.cast_unsigned()),
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: group.map_or(0, |fd| u64::from(fd.as_raw_fd().cast_unsigned())),
    };
    // SAFETY: without CLONE_VM the child gets a copy of this address space and
    // goes on with the same stack, as after fork(2); `args` and `pidfd` live
    // across the call. No other thread exists (checked above), so no lock of
    // the allocator or of std can be held by a thread that is not in the child.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(Error::new(OP, format!("{namespaces:?}"), Errno::last())),
        0 => {
            let code = child();
            // SAFETY: _exit(2) ends this process at once and does not return.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Child {
            pid: i32::try_from(pid).expect("a pid is an int"),
            // SAFETY: CLONE_PIDFD made the kernel install this descriptor for us alone.
            pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        }),
    }
}

/// fork(2) to a child of this process's parent (CLONE_PARENT), in the namespaces that this process has for its
/// children. `announce` gets the pid as this process sees it. Only then the child goes on: it reads a byte of
/// `gate`, a new pipe, and it ends if this process ends before. Only for a child of [`clone_child`], which has
/// no threads.
pub fn clone_sibling<E: From<Error>>(
    (announced, done): (OwnedFd, OwnedFd),
    announce: impl FnOnce(i32) -> std::result::Result<(), E>,
    child: impl FnOnce() -> i32,
) -> std::result::Result<(), E> {
    let failed =
        |op: &'static str, e: rustix::io::Errno| Error::new(op, "", Errno::from_raw(e.raw_os_error()));
    // Not clone3(2): the filter of this process may have forbidden it, since no filter sees its flags.
    let flags = libc::c_long::from(libc::CLONE_PARENT | libc::SIGCHLD);
    let none: libc::c_long = 0;
    // SAFETY: as in `clone_child`; a child of it has one thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
    match pid {
        -1 => Err(Error::new("clone", "a sibling", Errno::last()).into()),
        0 => {
            // This process's copies.
            drop(done);
            let read = rustix::io::retry_on_intr(|| rustix::io::read(&announced, &mut [0_u8; 1][..]));
            drop(announced);
            let code = if read == Ok(1) { child() } else { 127 };
            // SAFETY: _exit(2) ends this process at once and does not return.
            unsafe { libc::_exit(code) }
        }
        pid => {
            announce(i32::try_from(pid).expect("a pid is an int"))?;
            let written = rustix::io::retry_on_intr(|| rustix::io::write(&done, &[0]));
            written.map(drop).map_err(|e| failed("write", e).into())
        }
    }
}

/// Whether `pid` is a child of this process that was not reaped yet.
pub fn is_child(pid: i32) -> Result<bool> {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match nix::sys::wait::waitid(nix::sys::wait::Id::Pid(Pid::from_raw(pid)), flags) {
        Ok(_) => Ok(true),
        Err(Errno::ECHILD) => Ok(false),
        Err(e) => Err(Error::new("waitid", pid, e)),
    }
}

/// Sends SIGKILL to `leader`, a child that is not reaped yet, and to its process group if it leads one.
pub fn kill_with_group(leader: &Child) -> Result<()> {
    // 0 and 1 have other meanings (kill(2)).
    if leader.pid <= 1 {
        return Err(Error::new("kill process group", leader.pid, Errno::EINVAL));
    }
    let killed = match nix::sys::signal::killpg(Pid::from_raw(leader.pid), Signal::SIGKILL) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(e) => Err(Error::new("kill process group", leader.pid, e)),
    };
    signal_pidfd(&leader.pidfd, libc::SIGKILL)?;
    killed
}

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

/// A pidfd of a process that is not our child; `None` if no process has this pid.
pub fn open_pidfd(pid: i32) -> Result<Option<OwnedFd>> {
    let Some(rustix_pid) = rustix::process::Pid::from_raw(pid) else { return Ok(None) };
    match rustix::process::pidfd_open(rustix_pid, rustix::process::PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
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
        Some(Self {
            is_asleep: state == "D",
            is_killed: has_sigkill("SigPnd")? || has_sigkill("ShdPnd")?,
            is_exiting: matches!(state, "Z" | "X") || (!has_memory && !is_kernel_thread),
            context_switches: number("voluntary_ctxt_switches")? + number("nonvoluntary_ctxt_switches")?,
        })
    }
}

/// Whether a process was killed and still has threads that wait in the kernel: each has SIGKILL
/// pending, is exiting, or is a zombie. False for a process
/// that is gone.
pub fn is_killed(pid: i32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut states = tasks.flatten().filter_map(|task| is_killed_or_ends(&task.path())).peekable();
    states.peek().is_some() && states.all(|ends| ends)
}

/// [`is_killed`] for one thread; `None` if it is gone.
fn is_killed_or_ends(task: &Path) -> Option<bool> {
    let status = ThreadStatus::parse(&procfs::read(&task.join("status")).ok()?)?;
    Some(status.is_exiting || status.is_killed)
}

/// Reaps the next child that has ended, if any.
pub fn reap() -> Result<Option<(i32, Exit)>> {
    loop {
        match nix::sys::wait::waitpid(None::<Pid>, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => return Ok(Some((pid.as_raw(), Exit::Code(code)))),
            Ok(WaitStatus::Signaled(pid, signal, _)) => {
                return Ok(Some((pid.as_raw(), Exit::Signal(signal as i32))));
            }
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(None),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(Error::new("waitpid", "any child", e)),
        }
    }
}

/// Makes orphans among this process's descendants its children.
pub fn become_subreaper() -> Result<()> {
    prctl("PR_SET_CHILD_SUBREAPER", libc::PR_SET_CHILD_SUBREAPER, 1)
}

/// Starts a new session, so that signals to a terminal's or the caller's process group do not reach
/// us.
pub fn new_session() -> Result<()> {
    match nix::unistd::setsid() {
        Ok(_) => Ok(()),
        // Already a group leader, for example if started with setsid(1).
        Err(Errno::EPERM) => Ok(()),
        Err(e) => Err(Error::new("setsid", "", e)),
    }
}

/// Blocks `signals` and returns a non-blocking descriptor that is readable when one is pending.
pub fn signal_descriptor(signals: &[Signal]) -> Result<nix::sys::signalfd::SignalFd> {
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    let set: SigSet = signals.iter().copied().collect();
    set.thread_block().map_err(|e| Error::new("block signals", format!("{signals:?}"), e))?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(|e| Error::new("signalfd", format!("{signals:?}"), e))
}

/// A signal that this thread waits for. It may be one that has no effect otherwise, as for the first process of a pid
/// namespace. The signal is blocked until the drop, which must be on the same thread.
#[derive(Debug)]
pub struct SignalWait {
    signal: Signal,
    pending: nix::sys::signalfd::SignalFd,
}

impl SignalWait {
    pub fn block(signal: Signal) -> Result<Self> {
        Ok(Self { signal, pending: signal_descriptor(&[signal])? })
    }

    /// Blocks until the signal is pending, which is then taken (`true`), or until `fd` is readable or closed (`false`).
    /// If both are so, the result is `false`, and the signal has its usual effect after the drop.
    pub fn precedes(&self, fd: impl AsFd) -> Result<bool> {
        let mut waited = [fd.as_fd(), self.pending.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let polled = loop {
            match nix::poll::poll(&mut waited, PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                polled => break polled,
            }
        };
        polled.map_err(|e| Error::new("poll", format!("for {}", self.signal), e))?;
        if waited[0].any().unwrap_or(true) {
            return Ok(false);
        }
        let taken = self.pending.read_signal().map_err(|e| Error::new("read", "signalfd", e))?;
        Ok(taken.is_some())
    }
}

impl Drop for SignalWait {
    fn drop(&mut self) {
        let blocked: SigSet = [self.signal].into_iter().collect();
        // It fails only for an invalid argument.
        let _unblocked = blocked.thread_unblock();
    }
}

/// Unblocks every signal and resets it to its default, as programs expect: Rust's runtime ignores
/// SIGPIPE, and ignored signals survive execve(2).
pub fn reset_signals() -> Result<()> {
    for signal in Signal::iterator() {
        if matches!(signal, Signal::SIGKILL | Signal::SIGSTOP) {
            continue;
        }
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: SIG_DFL runs no code of ours.
        unsafe { nix::sys::signal::sigaction(signal, &default) }
            .map_err(|e| Error::new("reset signal", signal, e))?;
    }
    nix::sys::signal::sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)
        .map_err(|e| Error::new("unblock signals", "", e))
}

/// setns(2): `namespace` is an open nsfs file or `/proc/PID/ns/X`.
pub fn enter_namespace(namespace: impl AsFd, kind: CloneFlags) -> Result<()> {
    nix::sched::setns(namespace, kind).map_err(|e| Error::new("setns", format!("{kind:?}"), e))
}

/// unshare(2) of this process, which must be single-threaded.
pub fn unshare(kinds: CloneFlags) -> Result<()> {
    nix::sched::unshare(kinds).map_err(|e| Error::new("unshare", format!("{kinds:?}"), e))
}

pub fn set_hostname(name: &str) -> Result<()> {
    nix::unistd::sethostname(name).map_err(|e| Error::new("sethostname", name, e))
}

/// Capability sets as bit masks, bit N = capability number N.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    pub bounding: u64,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub ambient: u64,
}

impl Capabilities {
    /// All five sets without the capabilities in `mask`.
    #[must_use]
    pub fn without(self, mask: u64) -> Self {
        Self {
            bounding: self.bounding & !mask,
            effective: self.effective & !mask,
            permitted: self.permitted & !mask,
            inheritable: self.inheritable & !mask,
            ambient: self.ambient & !mask,
        }
    }
}

/// The capabilities that this thread may ever have (PR_CAPBSET_READ).
pub fn bounding_set() -> u64 {
    let mut set = 0;
    for number in 0..64_u64 {
        // SAFETY: PR_CAPBSET_READ takes plain numbers.
        match unsafe { libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) } {
            1 => set |= 1 << number,
            0 => {}
            _ => break, // past the kernel's last capability
        }
    }
    set
}

/// First half: shrinks the bounding set. Needs CAP_SETPCAP, so it must come before the change of
/// user.
pub fn limit_bounding_set(keep: u64) -> Result<()> {
    let unwanted = bounding_set() & !keep;
    (0..64_u64)
        .filter(|number| unwanted & (1 << number) != 0)
        .try_for_each(|number| prctl("PR_CAPBSET_DROP", libc::PR_CAPBSET_DROP, number))
}

/// Changes to `uid`:`gid` with exactly `groups`, and keeps the permitted capabilities until
/// [`set_capabilities`]. `EINVAL` for 4294967295, which setresuid(2) reads as "unchanged".
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> Result<()> {
    if uid == u32::MAX || gid == u32::MAX {
        return Err(Error::new("become user", format!("{uid}:{gid}"), Errno::EINVAL));
    }
    prctl("PR_SET_KEEPCAPS", libc::PR_SET_KEEPCAPS, 1)?;
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    nix::unistd::setgroups(&groups).map_err(|e| Error::new("setgroups", format!("{groups:?}"), e))?;
    let gid = Gid::from_raw(gid);
    nix::unistd::setresgid(gid, gid, gid).map_err(|e| Error::new("setresgid", gid, e))?;
    let uid = Uid::from_raw(uid);
    nix::unistd::setresuid(uid, uid, uid).map_err(|e| Error::new("setresuid", uid, e))?;
    prctl("PR_SET_KEEPCAPS", libc::PR_SET_KEEPCAPS, 0)
}

/// Second half: sets the other sets exactly.
pub fn set_capabilities(wanted: Capabilities) -> Result<()> {
    use rustix::thread::{CapabilitySet, CapabilitySets};
    prctl_ambient(libc::PR_CAP_AMBIENT_CLEAR_ALL, 0)?;
    let sets = CapabilitySets {
        effective: CapabilitySet::from_bits_retain(wanted.effective),
        permitted: CapabilitySet::from_bits_retain(wanted.permitted),
        inheritable: CapabilitySet::from_bits_retain(wanted.inheritable),
    };
    rustix::thread::set_capabilities(None, sets)
        .map_err(|e| Error::new("capset", format!("{wanted:x?}"), e))?;
    (0..64)
        .filter(|n| wanted.ambient & (1 << n) != 0)
        .try_for_each(|n| prctl_ambient(libc::PR_CAP_AMBIENT_RAISE, n))
}

/// Keeps other processes of the same user from tracing it and from opening its /proc/PID.
pub fn set_undumpable() -> Result<()> {
    prctl("PR_SET_DUMPABLE", libc::PR_SET_DUMPABLE, 0)
}

/// One classic BPF instruction for seccomp(2) (struct sock_filter).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct BpfInstruction {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

/// Adds a permanent filter on this thread's system calls. Needs no_new_privs or CAP_SYS_ADMIN.
pub fn install_seccomp(program: &[BpfInstruction]) -> Result<()> {
    #[repr(C)]
    struct SockFprog {
        length: u16,
        filter: *const BpfInstruction,
    }
    let length =
        u16::try_from(program.len()).map_err(|_| Error::new("seccomp", "filter length", Errno::E2BIG))?;
    let prog = SockFprog { length, filter: program.as_ptr() };
    // SAFETY: `prog` is laid out as struct sock_fprog and points to `length`
    // instructions that live across the call; the kernel verifies and copies them.
    let done = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const prog) };
    if done < 0 {
        // Not as an Errno, which lacks the kernel's own ENOTSUPP (524).
        let refused = std::io::Error::last_os_error();
        return Err(Error::new("seccomp", format!("{length} instructions"), refused));
    }
    Ok(())
}

/// `resource` is the kernel's number (RLIMIT_NOFILE = 7). If raising is not allowed, the hard limit
/// is clamped to the current one. Returns the limits that were set.
pub fn set_rlimit(resource: u32, soft: u64, hard: u64) -> Result<(u64, u64)> {
    let set = |soft, hard| {
        let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
        // SAFETY: `limit` lives across the call; no old value is asked for.
        Errno::result(unsafe { libc::prlimit64(0, resource as _, &raw const limit, std::ptr::null_mut()) })
    };
    match set(soft, hard) {
        Ok(_) => Ok((soft, hard)),
        Err(Errno::EPERM) => {
            let mut now = libc::rlimit64 { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: `now` is valid for the kernel to fill; nothing is set.
            Errno::result(unsafe { libc::prlimit64(0, resource as _, std::ptr::null(), &raw mut now) })
                .map_err(|e| Error::new("read rlimit", resource, e))?;
            let (soft, hard) = (soft.min(now.rlim_max), hard.min(now.rlim_max));
            set(soft, hard).map(|_| (soft, hard)).map_err(|e| Error::new("set rlimit", resource, e))
        }
        Err(e) => Err(Error::new("set rlimit", resource, e)),
    }
}

/// The soft limit of open descriptors (RLIMIT_NOFILE).
pub fn descriptor_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Makes these descriptors the process's stdin, stdout and stderr.
pub fn set_stdio(stdin: impl AsFd, stdout: impl AsFd, stderr: impl AsFd) -> Result<()> {
    for (fd, number) in [(stdin.as_fd(), 0), (stdout.as_fd(), 1), (stderr.as_fd(), 2)] {
        // SAFETY: dup2(2) to a standard descriptor replaces it atomically; std
        // holds no OwnedFd for 0, 1 or 2. Sources above 2 are not overwritten.
        Errno::result(unsafe { libc::dup2(fd.as_raw_fd(), number) })
            .map_err(|e| Error::new("dup2", number, e))?;
    }
    Ok(())
}

/// Closes every descriptor above 2 but `kept`. Only for a child of [`clone_child`] that is about to call
/// execve(2) for an untrusted program: what its parent's values own stays open there, and this process uses
/// none of it any more. Close-on-exec is too late: the kernel looks a script's interpreter up before
/// (begin_new_exec of fs/exec.c), and a path of /proc/self/fd leads to what a descriptor is open for.
pub fn close_all_but(kept: &[BorrowedFd<'_>]) -> Result<()> {
    let mut kept: Vec<u32> = kept.iter().map(|fd| fd.as_raw_fd().cast_unsigned()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().chain([u32::MAX]) {
        let last = if end == u32::MAX { end } else { end.saturating_sub(1) };
        if first <= last {
            // SAFETY: the child ends by execve(2) or _exit(2), so no value of its parent is used or dropped
            // in it.
            Errno::result(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) })
                .map_err(|e| Error::new("close_range", format!("{first} to {last}"), e))?;
        }
        first = first.max(end.saturating_add(1));
    }
    Ok(())
}

/// execve(2); returns only on failure, with the reason.
pub fn exec(path: &Path, args: &[CString], env: &[CString]) -> Error {
    use std::os::unix::ffi::OsStrExt;
    let Ok(c_path) = CString::new(path.as_os_str().as_bytes()) else {
        return Error::at("exec", path, Errno::EINVAL);
    };
    let args: Vec<&CStr> = args.iter().map(CString::as_c_str).collect();
    let env: Vec<&CStr> = env.iter().map(CString::as_c_str).collect();
    match nix::unistd::execve(&c_path, &args, &env) {
        Ok(never) => match never {},
        Err(e) => Error::at("exec", path, e),
    }
}

fn prctl(name: &'static str, option: i32, value: u64) -> Result<()> {
    // SAFETY: the options used in this file take one plain number.
    Errno::result(unsafe { libc::prctl(option, value, 0, 0, 0) })
        .map(drop)
        .map_err(|e| Error::new("prctl", format!("{name} {value}"), e))
}

fn prctl_ambient(operation: i32, capability: u64) -> Result<()> {
    // SAFETY: PR_CAP_AMBIENT takes two plain numbers.
    Errno::result(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, operation, capability, 0, 0) })
        .map(drop)
        .map_err(|e| Error::new("prctl", format!("PR_CAP_AMBIENT {operation} {capability}"), e))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn only_own_processes_that_were_not_reaped_are_children() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(is_child(pid).unwrap());
        child.wait().unwrap();
        assert!(!is_child(pid).unwrap());
        assert!(!is_child(1).unwrap());
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
        assert!(is_killed(pid));
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
    fn clone_is_refused_in_a_process_with_threads() {
        // The test harness runs this body on a thread of its own.
        let err = clone_child(CloneFlags::empty(), None, || 0).unwrap_err();
        assert_eq!(err.errno(), Errno::EBUSY);
    }

    #[test]
    fn a_process_has_a_start_time_and_a_missing_one_has_none() {
        assert!(start_time(std::process::id().cast_signed()).unwrap().unwrap() > 0);
        assert_eq!(start_time(i32::MAX).unwrap(), None);
        assert!(open_pidfd(i32::MAX).unwrap().is_none());
    }

    #[test]
    fn exit_codes_read_as_in_a_shell() {
        assert_eq!(Exit::Code(3).shell_code(), 3);
        assert_eq!(Exit::Signal(9).shell_code(), 137);
    }
}
