//! Starting and reaping processes: clone3(2) into new namespaces, what a process takes and gives up
//! between clone and execve(2) (session, user, capabilities, limits, descriptors), and reaping.
//!
//! `watch` examines, signals and awaits processes by pid and pidfd. `signals` is about the signals
//! that this process gets.
//!
//! Invariant: [`clone_child`] refuses to run in a process with threads, so its child need not be
//! async-signal-safe.

#![expect(unsafe_code, reason = "clone3, prctl, seccomp and close_range have no safe wrapper")]

mod signals;
mod watch;

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sched::CloneFlags;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus};
use nix::unistd::{Gid, Pid, Uid};

use crate::{Error, Result};
pub use signals::{SignalWait, reset_signals, signal_descriptor};
pub use watch::{
    ThreadStatus, is_killed, only_notifies_fuse, open_pidfd, signal_pidfd, start_time, wait_for_end,
};

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
    fn clone_is_refused_in_a_process_with_threads() {
        // The test harness runs this body on a thread of its own.
        let err = clone_child(CloneFlags::empty(), None, || 0).unwrap_err();
        assert_eq!(err.errno(), Errno::EBUSY);
    }

    #[test]
    fn exit_codes_read_as_in_a_shell() {
        assert_eq!(Exit::Code(3).shell_code(), 3);
        assert_eq!(Exit::Signal(9).shell_code(), 137);
    }
}
