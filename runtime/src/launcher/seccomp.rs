//! From the OCI form of a seccomp profile to BPF.
//!
//! seccompiler's filters have one action for a match and one for everything else. So a profile
//! becomes a stack of filters: the allow-list, and one more for each other action. The kernel
//! applies the strictest result; of equally strict ones, that of the filter installed last.
//!
//! Programs of other architectures (32-bit ones) are killed by every filter.

use std::collections::BTreeMap;

use super::error::{LaunchError, Result};
use linux::process::BpfInstruction;
use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompOperator, LinuxSyscall,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// __X32_SYSCALL_BIT of asm/unistd.h: the architecture is the same, and the numbers are not.
const FIRST_OF_X32: i64 = 0x4000_0000;

/// The BPF programs, in the order to install them.
pub(crate) fn compile(profile: &LinuxSeccomp) -> Result<Vec<Vec<BpfInstruction>>> {
    let default = action(profile.default_action(), profile.default_errno_ret())?;
    let by_action = rules(profile, &default)?;
    let newest = by_action.iter().filter_map(|(_, rules)| rules.keys().next_back()).max().copied();
    let mut programs = by_action
        .into_iter()
        .map(|(matched, rules)| {
            let rest = if matched == SeccompAction::Allow { default.clone() } else { SeccompAction::Allow };
            program(rules, rest, matched)
        })
        .collect::<Result<Vec<_>>>()?;
    if let (SeccompAction::Errno(_), Some(newest)) = (&default, newest) {
        programs.push(unknown_calls(newest)?);
    } else if cfg!(target_arch = "x86_64") {
        // As x32, whose calls no rule names, a program could make any call.
        programs.push(unknown_calls(FIRST_OF_X32 - 1)?);
    }
    Ok(programs)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The rules of the filter for each action but the default.
fn rules(profile: &LinuxSeccomp, default: &SeccompAction) -> Result<Vec<(SeccompAction, Rules)>> {
    let mut by_action: Vec<(SeccompAction, Rules)> = Vec::new();
    let mut answered_elsewhere = Vec::new();
    for syscall in profile.syscalls().iter().flatten() {
        let wanted = action(syscall.action(), syscall.errno_ret())?;
        if wanted == *default {
            continue;
        }
        let numbers: Vec<i64> = syscall.names().iter().filter_map(|name| number(name)).collect();
        if wanted != SeccompAction::Allow {
            answered_elsewhere.extend(numbers.iter().map(|number| (*number, syscall)));
        }
        let place = by_action.iter().position(|(known, _)| *known == wanted).unwrap_or_else(|| {
            by_action.push((wanted, BTreeMap::new()));
            by_action.len() - 1
        });
        for number in numbers {
            add_rule(by_action[place].1.entry(number), syscall)?;
        }
    }
    if *default != SeccompAction::Allow {
        // What another filter answers must pass the allow-list, with the same arguments; otherwise the
        // default would be as strict.
        let allow =
            by_action.iter().position(|(known, _)| *known == SeccompAction::Allow).unwrap_or_else(|| {
                by_action.push((SeccompAction::Allow, BTreeMap::new()));
                by_action.len() - 1
            });
        for (number, syscall) in answered_elsewhere {
            add_rule(by_action[allow].1.entry(number), syscall)?;
        }
    }
    Ok(by_action)
}

/// ENOSYS for calls newer than the profile: after ENOSYS, but not after EPERM, C libraries try an
/// older call. runc does the same.
fn unknown_calls(newest: i64) -> Result<Vec<BpfInstruction>> {
    // linux/bpf_common.h and linux/seccomp.h: the number is the first field of seccomp_data.
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_GREATER: u16 = 0x25;
    const RETURN: u16 = 0x06;
    const SECCOMP_RET_ERRNO: u32 = 0x0005_0000;
    const SECCOMP_RET_ALLOW: u32 = 0x7fff_0000;
    let newest = u32::try_from(newest).map_err(|_| LaunchError::SeccompNumber { number: newest })?;
    let instruction = |code, jt, jf, k| BpfInstruction { code, jt, jf, k };
    Ok(vec![
        instruction(LOAD_WORD, 0, 0, 0),
        instruction(JUMP_IF_GREATER, 0, 1, newest),
        instruction(RETURN, 0, 0, SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned()),
        instruction(RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ])
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    rest: SeccompAction,
    matched: SeccompAction,
) -> Result<Vec<BpfInstruction>> {
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, rest, matched, arch)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(program.into_iter().map(|i| BpfInstruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k }).collect())
}

/// An empty list of rules means any arguments; later rules for the same call do not change that.
fn add_rule(
    entry: std::collections::btree_map::Entry<'_, i64, Vec<SeccompRule>>,
    syscall: &LinuxSyscall,
) -> Result<()> {
    use std::collections::btree_map::Entry;
    let args = syscall.args().as_deref().unwrap_or_default();
    match entry {
        Entry::Occupied(mut known) if args.is_empty() => known.get_mut().clear(),
        Entry::Occupied(known) if known.get().is_empty() => {}
        Entry::Occupied(mut known) => known.get_mut().push(rule(args)?),
        Entry::Vacant(new) => {
            new.insert(if args.is_empty() { Vec::new() } else { vec![rule(args)?] });
        }
    }
    Ok(())
}

fn rule(args: &[LinuxSeccompArg]) -> Result<SeccompRule> {
    let conditions = args.iter().map(condition).collect::<Result<_>>()?;
    Ok(SeccompRule::new(conditions)?)
}

fn condition(arg: &LinuxSeccompArg) -> Result<SeccompCondition> {
    let (operator, value) = match arg.op() {
        LinuxSeccompOperator::ScmpCmpEq => (SeccompCmpOp::Eq, arg.value()),
        LinuxSeccompOperator::ScmpCmpNe => (SeccompCmpOp::Ne, arg.value()),
        LinuxSeccompOperator::ScmpCmpLt => (SeccompCmpOp::Lt, arg.value()),
        LinuxSeccompOperator::ScmpCmpLe => (SeccompCmpOp::Le, arg.value()),
        LinuxSeccompOperator::ScmpCmpGe => (SeccompCmpOp::Ge, arg.value()),
        LinuxSeccompOperator::ScmpCmpGt => (SeccompCmpOp::Gt, arg.value()),
        LinuxSeccompOperator::ScmpCmpMaskedEq => {
            (SeccompCmpOp::MaskedEq(arg.value()), arg.value_two().unwrap_or_default())
        }
    };
    let index = u8::try_from(arg.index()).map_err(|_| LaunchError::SeccompArgument { index: arg.index() })?;
    Ok(SeccompCondition::new(index, SeccompCmpArgLen::Qword, operator, value)?)
}

fn action(action: LinuxSeccompAction, errno: Option<u32>) -> Result<SeccompAction> {
    Ok(match action {
        LinuxSeccompAction::ScmpActAllow => SeccompAction::Allow,
        LinuxSeccompAction::ScmpActErrno => SeccompAction::Errno(errno.unwrap_or(1)),
        LinuxSeccompAction::ScmpActKill | LinuxSeccompAction::ScmpActKillThread => SeccompAction::KillThread,
        LinuxSeccompAction::ScmpActKillProcess => SeccompAction::KillProcess,
        LinuxSeccompAction::ScmpActTrap => SeccompAction::Trap,
        LinuxSeccompAction::ScmpActLog => SeccompAction::Log,
        LinuxSeccompAction::ScmpActTrace => SeccompAction::Trace(errno.unwrap_or(0)),
        LinuxSeccompAction::ScmpActNotify => {
            return Err(LaunchError::SeccompNotify);
        }
    })
}

macro_rules! syscalls {
    ($($name:ident)*) => {
        &[$((stringify!($name), libc::$name)),*]
    };
}

/// `None` for a call that this architecture does not have.
fn number(name: &str) -> Option<i64> {
    let find = |table: &[(&str, i64)]| {
        table.iter().find(|(known, _)| known.strip_prefix("SYS_") == Some(name)).map(|(_, number)| *number)
    };
    [COMMON, LEGACY, NEW, NEW_HERE].into_iter().find_map(find)
}

/// Calls with one number on all architectures, as every call since Linux 5.1 (scripts/syscall.tbl),
/// that the crate `libc` lacks.
const NEW: &[(&str, i64)] = &[
    ("SYS_set_mempolicy_home_node", 450),
    ("SYS_cachestat", 451),
    ("SYS_fchmodat2", 452),
    ("SYS_map_shadow_stack", 453),
    ("SYS_futex_wake", 454),
    ("SYS_futex_wait", 455),
    ("SYS_futex_requeue", 456),
    ("SYS_statmount", 457),
    ("SYS_listmount", 458),
    ("SYS_lsm_get_self_attr", 459),
    ("SYS_lsm_set_self_attr", 460),
    ("SYS_lsm_list_modules", 461),
    ("SYS_mseal", 462),
    ("SYS_setxattrat", 463),
    ("SYS_getxattrat", 464),
    ("SYS_listxattrat", 465),
    ("SYS_removexattrat", 466),
    ("SYS_open_tree_attr", 467),
    ("SYS_file_getattr", 468),
    ("SYS_file_setattr", 469),
];
/// Calls of this architecture only.
#[cfg(target_arch = "x86_64")]
const NEW_HERE: &[(&str, i64)] = &[("SYS_io_pgetevents", 333), ("SYS_uretprobe", 335)];
#[cfg(not(target_arch = "x86_64"))]
const NEW_HERE: &[(&str, i64)] = &[("SYS_io_pgetevents", 292)];

const COMMON: &[(&str, i64)] = syscalls! {
    SYS_accept SYS_accept4 SYS_acct SYS_adjtimex SYS_bind SYS_bpf SYS_brk SYS_capget SYS_capset SYS_chdir SYS_chroot
    SYS_clock_adjtime SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_clock_settime SYS_clone SYS_clone3
    SYS_close SYS_close_range SYS_connect SYS_copy_file_range SYS_delete_module SYS_dup SYS_dup3 SYS_epoll_create1
    SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_eventfd2 SYS_execve SYS_execveat SYS_exit SYS_exit_group
    SYS_faccessat SYS_faccessat2 SYS_fadvise64 SYS_fallocate SYS_fanotify_init SYS_fanotify_mark SYS_fchdir
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_fcntl SYS_fdatasync SYS_fgetxattr SYS_finit_module
    SYS_flistxattr SYS_flock SYS_fremovexattr SYS_fsconfig SYS_fsetxattr SYS_fsmount SYS_fsopen SYS_fspick SYS_fstat
    SYS_fstatfs SYS_fsync SYS_ftruncate SYS_futex SYS_futex_waitv SYS_get_mempolicy SYS_get_robust_list SYS_getcpu
    SYS_getcwd SYS_getdents64 SYS_getegid SYS_geteuid SYS_getgid SYS_getgroups SYS_getitimer SYS_getpeername
    SYS_getpgid SYS_getpid SYS_getppid SYS_getpriority SYS_getrandom SYS_getresgid SYS_getresuid SYS_getrlimit
    SYS_getrusage SYS_getsid SYS_getsockname SYS_getsockopt SYS_gettid SYS_gettimeofday SYS_getuid SYS_getxattr
    SYS_init_module SYS_inotify_add_watch SYS_inotify_init1 SYS_inotify_rm_watch SYS_io_cancel SYS_io_destroy
    SYS_io_getevents SYS_io_setup SYS_io_submit SYS_ioctl SYS_ioprio_get SYS_ioprio_set SYS_kcmp
    SYS_kill SYS_landlock_add_rule SYS_landlock_create_ruleset SYS_landlock_restrict_self SYS_lgetxattr SYS_linkat
    SYS_listen SYS_listxattr SYS_llistxattr SYS_lremovexattr SYS_lseek SYS_lsetxattr SYS_madvise
    SYS_mbind SYS_membarrier SYS_memfd_create SYS_memfd_secret SYS_mincore SYS_mkdirat SYS_mknodat SYS_mlock
    SYS_mlock2 SYS_mlockall SYS_mmap SYS_mount SYS_mount_setattr SYS_move_mount SYS_mprotect SYS_mq_getsetattr
    SYS_mq_notify SYS_mq_open SYS_mq_timedreceive SYS_mq_timedsend SYS_mq_unlink SYS_mremap SYS_msgctl SYS_msgget
    SYS_msgrcv SYS_msgsnd SYS_msync SYS_munlock SYS_munlockall SYS_munmap SYS_name_to_handle_at SYS_nanosleep
    SYS_newfstatat SYS_open_by_handle_at SYS_open_tree SYS_openat SYS_openat2 SYS_perf_event_open SYS_personality
    SYS_pidfd_getfd SYS_pidfd_open SYS_pidfd_send_signal SYS_pipe2 SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect
    SYS_ppoll SYS_prctl SYS_pread64 SYS_preadv SYS_preadv2 SYS_prlimit64 SYS_process_madvise SYS_process_mrelease
    SYS_process_vm_readv SYS_process_vm_writev SYS_pselect6 SYS_ptrace SYS_pwrite64 SYS_pwritev SYS_pwritev2
    SYS_quotactl SYS_quotactl_fd SYS_read SYS_readahead SYS_readlinkat SYS_readv SYS_reboot SYS_recvfrom SYS_recvmmsg
    SYS_recvmsg SYS_remap_file_pages SYS_removexattr SYS_renameat SYS_renameat2 SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigpending SYS_rt_sigprocmask SYS_rt_sigqueueinfo SYS_rt_sigreturn SYS_rt_sigsuspend
    SYS_rt_sigtimedwait SYS_rt_tgsigqueueinfo SYS_sched_get_priority_max SYS_sched_get_priority_min
    SYS_sched_getaffinity SYS_sched_getattr SYS_sched_getparam SYS_sched_getscheduler SYS_sched_rr_get_interval
    SYS_sched_setaffinity SYS_sched_setattr SYS_sched_setparam SYS_sched_setscheduler SYS_sched_yield SYS_seccomp
    SYS_semctl SYS_semget SYS_semop SYS_semtimedop SYS_sendfile SYS_sendmmsg SYS_sendmsg SYS_sendto SYS_set_mempolicy
    SYS_set_robust_list SYS_set_tid_address SYS_setdomainname SYS_setfsgid SYS_setfsuid SYS_setgid SYS_setgroups
    SYS_sethostname SYS_setitimer SYS_setns SYS_setpgid SYS_setpriority SYS_setregid SYS_setresgid SYS_setresuid
    SYS_setreuid SYS_setrlimit SYS_setsid SYS_setsockopt SYS_settimeofday SYS_setuid SYS_setxattr SYS_shmat
    SYS_shmctl SYS_shmdt SYS_shmget SYS_shutdown SYS_sigaltstack SYS_signalfd4 SYS_socket SYS_socketpair SYS_splice
    SYS_statfs SYS_statx SYS_symlinkat SYS_sync SYS_sync_file_range SYS_syncfs SYS_sysinfo SYS_syslog SYS_tee
    SYS_tgkill SYS_timer_create SYS_timer_delete SYS_timer_getoverrun SYS_timer_gettime SYS_timer_settime
    SYS_timerfd_create SYS_timerfd_gettime SYS_timerfd_settime SYS_times SYS_tkill SYS_truncate SYS_umask SYS_umount2
    SYS_uname SYS_unlinkat SYS_unshare SYS_utimensat SYS_vhangup SYS_vmsplice SYS_wait4 SYS_waitid SYS_write
    SYS_writev
};

/// Calls that newer architectures never had.
#[cfg(target_arch = "x86_64")]
const LEGACY: &[(&str, i64)] = syscalls! {
    SYS_access SYS_alarm SYS_arch_prctl SYS_chmod SYS_chown SYS_creat SYS_dup2 SYS_epoll_create SYS_epoll_ctl_old
    SYS_epoll_wait SYS_epoll_wait_old SYS_eventfd SYS_fork SYS_futimesat SYS_get_thread_area SYS_getdents
    SYS_getpgrp SYS_inotify_init SYS_ioperm SYS_iopl SYS_lchown SYS_link SYS_lstat SYS_mkdir SYS_mknod
    SYS_modify_ldt SYS_open SYS_pause SYS_pipe SYS_poll SYS_readlink SYS_rename SYS_rmdir SYS_select
    SYS_set_thread_area SYS_signalfd SYS_stat SYS_symlink SYS_time SYS_unlink SYS_utime SYS_utimes SYS_vfork
};
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[(&str, i64)] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(text: &str) -> LinuxSeccomp {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_runtime_default_compiles_into_an_allow_list_the_clone3_answer_and_enosys_for_the_unknown() {
        let value = crate::spec::seccomp::runtime_default(&[]);
        let programs = compile(&serde_json::from_value(value).unwrap()).unwrap();
        assert_eq!(programs.len(), 3);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_name_of_the_runtime_default_has_a_number() {
        let all = crate::spec::capabilities::names((1 << 41) - 1);
        let profile: LinuxSeccomp =
            serde_json::from_value(crate::spec::seccomp::runtime_default(&all)).unwrap();
        let names = profile.syscalls().iter().flatten().flat_map(|s| s.names());
        let unknown: Vec<&String> = names.filter(|name| number(name).is_none()).collect();
        // Of 32-bit programs, and of kernels before 6.8.
        assert_eq!(unknown, ["lookup_dcookie", "stime"]);
    }

    #[test]
    fn a_profile_that_only_forbids_is_one_filter() {
        let programs = compile(&profile(
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir","nosuchcall"],"action":"SCMP_ACT_ERRNO","errnoRet":13}]}"#,
        ))
        .unwrap();
        // And one for calls of x32.
        assert_eq!(programs.len(), if cfg!(target_arch = "x86_64") { 2 } else { 1 });
    }

    /// Of the call that a profile allows for some arguments, and answers for others.
    #[test]
    fn an_answer_for_some_arguments_allows_no_others() {
        let some = |action: &str, value: u64| {
            format!(
                r#"{{"names":["socket"],"action":"{action}","args":[{{"index":0,"value":{value},"op":"SCMP_CMP_EQ"}}]}}"#
            )
        };
        let text = format!(
            r#"{{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{},{}]}}"#,
            some("SCMP_ACT_ALLOW", 1),
            some("SCMP_ACT_LOG", 40)
        );
        let by_action = rules(&profile(&text), &SeccompAction::Errno(1)).unwrap();
        let count = |action: SeccompAction| {
            let rules = by_action.iter().find(|(known, _)| *known == action).map(|(_, rules)| rules);
            rules.unwrap()[&libc::SYS_socket].len()
        };
        assert_eq!((count(SeccompAction::Allow), count(SeccompAction::Log)), (2, 1));
    }

    #[test]
    fn notify_is_refused_by_name() {
        let err = compile(&profile(
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_NOTIFY"}]}"#,
        ))
        .unwrap_err();
        assert_eq!(err.to_string(), "seccomp: SCMP_ACT_NOTIFY is not supported");
    }
}
