//! The system calls that the daemon may use once the volume is handed over: those of the FUSE side,
//! listed here (the connection, the driver's listeners, memory, threads of this process), and those
//! of the backend.
//!
//! A refused call returns `EPERM` and does not kill the process: a call that only an unusual path
//! of the C library makes then costs one request an error, and not every user of the volume its
//! mount. Only clone3 returns `ENOSYS`: then the C library uses clone, whose flags a filter can
//! check.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::{Error, Result};

/// The system calls of the FUSE side with any backend, with any arguments.
const ALLOWED: &[c_long] = &[
    // The FUSE connection.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_close,
    // Answers to the driver on its listeners and on accepted connections; no other socket can be
    // opened.
    libc::SYS_sendmsg,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    // The socket to another keeper, from the driver.
    libc::SYS_recvmsg,
    libc::SYS_ppoll,
    // The last capability is dropped after the filter is installed.
    libc::SYS_capset,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    // Threads and time.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Installs the filter for all existing and future threads. Needs no_new_privs.
///
/// `of_backend` are allowed with any arguments, also those that the FUSE side may only use with
/// some. The exceptions are clone, clone3 and tgkill, which stay as narrow with any backend: they
/// reach other processes.
pub fn install(of_backend: &[c_long]) -> Result<()> {
    for program in programs(of_backend)? {
        seccompiler::apply_filter_all_threads(&program).map_err(|source| Error::Seccomp { source })?;
    }
    Ok(())
}

/// The order matters only because the last one must allow its own installation.
fn programs(of_backend: &[c_long]) -> Result<[BpfProgram; 2]> {
    let clone3 = [(libc::SYS_clone3, vec![])].into_iter().collect();
    Ok([
        compile(clone3, SeccompAction::Allow, errno(libc::ENOSYS))?,
        compile(allowed(of_backend)?, errno(libc::EPERM), SeccompAction::Allow)?,
    ])
}

fn allowed(of_backend: &[c_long]) -> Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let mut rules = narrow_unless_the_backend_widens()?;
    rules.extend(ALLOWED.iter().chain(of_backend).map(|call| (*call, vec![])));
    rules.extend(always_narrow()?);
    Ok(rules)
}

/// The FUSE side needs these calls with some arguments only; a backend may need them with others.
fn narrow_unless_the_backend_widens() -> Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let name = rule(0, Width::Dword, SeccompCmpOp::Eq, u64::from(libc::PR_SET_NAME.unsigned_abs()))?;
    let mut fcntl = Vec::new();
    for command in [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_GETFL] {
        fcntl.push(rule(1, Width::Dword, SeccompCmpOp::Eq, u64::from(command.unsigned_abs()))?);
    }
    // Only to the connected peer, never to an address.
    let to_peer = rule(4, Width::Qword, SeccompCmpOp::Eq, 0)?;
    let mut getsockopt = Vec::new();
    // Of the driver: its credentials. Of a socket that it sends: what it is.
    for option in [libc::SO_PEERCRED, libc::SO_DOMAIN, libc::SO_TYPE, libc::SO_ACCEPTCONN] {
        let level = condition(1, Width::Dword, SeccompCmpOp::Eq, u64::from(libc::SOL_SOCKET.unsigned_abs()))?;
        let option = condition(2, Width::Dword, SeccompCmpOp::Eq, u64::from(option.unsigned_abs()))?;
        getsockopt.push(SeccompRule::new(vec![level, option]).map_err(backend)?);
    }
    Ok(BTreeMap::from([
        (libc::SYS_prctl, vec![name]),
        (libc::SYS_fcntl, fcntl),
        (libc::SYS_sendto, vec![to_peer]),
        (libc::SYS_getsockopt, getsockopt),
    ]))
}

fn always_narrow() -> Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    // Only threads of this process, never a process.
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    let clone = rule(0, Width::Qword, SeccompCmpOp::MaskedEq(thread), thread)?;
    // Only abort(3) of this process, no signal to another one.
    let own_pid = u64::from(std::process::id());
    let to_own_thread = rule(0, Width::Dword, SeccompCmpOp::Eq, own_pid)?;
    Ok(BTreeMap::from([
        (libc::SYS_clone, vec![clone]),
        // The filter of clone3 decides.
        (libc::SYS_clone3, vec![]),
        (libc::SYS_tgkill, vec![to_own_thread]),
    ]))
}

fn rule(argument: u8, width: Width, op: SeccompCmpOp, value: u64) -> Result<SeccompRule> {
    SeccompRule::new(vec![condition(argument, width, op, value)?]).map_err(backend)
}

fn condition(argument: u8, width: Width, op: SeccompCmpOp, value: u64) -> Result<SeccompCondition> {
    SeccompCondition::new(argument, width, op, value).map_err(backend)
}

fn compile(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram> {
    TargetArch::try_from(std::env::consts::ARCH)
        .and_then(|arch| SeccompFilter::new(rules, otherwise, matched, arch))
        .and_then(BpfProgram::try_from)
        .map_err(backend)
}

fn errno(errno: i32) -> SeccompAction {
    SeccompAction::Errno(errno.unsigned_abs())
}

fn backend(source: seccompiler::BackendError) -> Error {
    Error::Seccomp { source: seccompiler::Error::Backend(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_widens_the_calls_that_it_lists_except_those_that_reach_other_processes() {
        // No rule means any arguments.
        let any = |of_backend: &[c_long], call: c_long| allowed(of_backend).unwrap()[&call].is_empty();
        for call in [libc::SYS_prctl, libc::SYS_fcntl, libc::SYS_sendto, libc::SYS_getsockopt] {
            assert!(!any(&[], call), "call {call} without a backend");
            assert!(any(&[call], call), "call {call}");
            assert!(!any(&[libc::SYS_openat], call), "call {call} beside another of the backend");
        }
        for call in [libc::SYS_clone, libc::SYS_tgkill] {
            assert!(!any(&[call], call), "call {call}");
        }
        assert!(any(&[libc::SYS_openat], libc::SYS_openat));
    }
}
