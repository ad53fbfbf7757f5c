//! `RuntimeDefault`: allows the system calls that programs in containers need, and answers all
//! others with EPERM. The list follows Docker and containerd.
//!
//! Invariant: this is the OCI form. `launcher::seccomp` compiles it, and an external OCI runtime
//! gets the same.

use serde_json::{Value, json};

/// Allowed with any arguments. Names that an architecture does not have are ignored there.
const ALLOWED: &str = "
accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown clock_adjtime
clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod
fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents
getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
getrandom getresgid getresuid getrlimit get_robust_list getrusage getsid getsockname getsockopt get_thread_area
gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel
ioctl io_destroy io_getevents io_pgetevents ioprio_get ioprio_set io_setup io_submit kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr llistxattr
lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir
mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
mq_timedsend mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at
nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6 pwrite64 pwritev
pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_getaffinity sched_getattr sched_getparam
sched_get_priority_max sched_get_priority_min sched_getscheduler sched_rr_get_interval sched_setaffinity
sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop
sendfile sendmmsg sendmsg sendto setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid
setresgid setresuid setreuid setrlimit set_robust_list setsid setsockopt set_thread_area set_tid_address setuid
setxattr shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socketpair splice stat statfs statx
symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete
timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate
umask uname unlink unlinkat utime utimensat utimes vfork vmsplice wait4 waitid write writev arch_prctl
modify_ldt file_getattr getxattrat listxattrat mseal process_vm_readv process_vm_writev ptrace removexattrat
setxattrat uretprobe";

/// Allowed for a process with the capability.
const BY_CAPABILITY: &[(&str, &str)] = &[
    (
        "CAP_SYS_ADMIN",
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr move_mount \
         open_tree open_tree_attr perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount2 unshare",
    ),
    ("CAP_BPF", "bpf"),
    ("CAP_PERFMON", "perf_event_open"),
    ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    ("CAP_SYS_BOOT", "reboot"),
    ("CAP_SYS_CHROOT", "chroot"),
    ("CAP_SYS_MODULE", "delete_module init_module finit_module"),
    ("CAP_SYS_PACCT", "acct"),
    ("CAP_SYS_PTRACE", "kcmp pidfd_getfd process_madvise"),
    ("CAP_SYS_RAWIO", "iopl ioperm"),
    ("CAP_SYS_TIME", "settimeofday stime clock_settime"),
    ("CAP_SYS_TTY_CONFIG", "vhangup"),
    ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("CAP_SYSLOG", "syslog"),
];

/// CLONE_NEW*: only with CAP_SYS_ADMIN.
const NAMESPACE_FLAGS: u64 = 0x7e02_0000;
/// Sockets between virtual machines and their host are outside the pod's network. The families
/// above it are listed one by one: "not AF_VSOCK" would let it pass with any of the upper 32 bits
/// set, which the kernel ignores.
const AF_VSOCK: u64 = 40;
const FAMILIES_ABOVE_VSOCK: std::ops::RangeInclusive<u64> = 41..=45;
const ENOSYS: u32 = 38;
/// PER_LINUX, UNAME26, PER_LINUX32, both, and the query.
const PERSONALITIES: [u64; 5] = [0, 0x0002_0000, 8, 0x0002_0008, 0xffff_ffff];

/// The profile for a process whose capabilities are `capabilities` (`CAP_X`).
pub(crate) fn runtime_default(capabilities: &[String]) -> Value {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let allow = |names: Vec<String>| json!({"names": names, "action": "SCMP_ACT_ALLOW"});
    let mut syscalls = vec![allow(words(ALLOWED))];
    for (capability, names) in BY_CAPABILITY {
        if capabilities.iter().any(|c| c == capability) {
            syscalls.push(allow(words(names)));
        }
    }
    let family = |value: u64, op: &str| {
        json!({
            "names": ["socket"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": value, "op": op}],
        })
    };
    syscalls.push(family(AF_VSOCK, "SCMP_CMP_LT"));
    syscalls.extend(FAMILIES_ABOVE_VSOCK.map(|value| family(value, "SCMP_CMP_EQ")));
    for value in PERSONALITIES {
        syscalls.push(json!({
            "names": ["personality"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": value, "op": "SCMP_CMP_EQ"}],
        }));
    }
    if !capabilities.iter().any(|c| c == "CAP_SYS_ADMIN") {
        syscalls.push(json!({
            "names": ["clone"], "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
        }));
        // Its flags are behind a pointer that a filter cannot read. After ENOSYS, libc uses clone.
        syscalls.push(json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": architectures(),
        "syscalls": syscalls,
    })
}

fn architectures() -> Value {
    match std::env::consts::ARCH {
        "x86_64" => json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]),
        "aarch64" => json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]),
        _ => json!([]),
    }
}
