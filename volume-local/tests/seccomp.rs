//! The system call filter, from inside: a process that has it. Not a harness
//! test, since the filter is for every thread and for good.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "there is no harness to report")]
#![expect(unsafe_code, reason = "the calls are made bare, as an intruder would")]

use std::io;

/// Linux 6.17: FS_IOC_FSSETXATTR without ioctl(2).
const SYS_FILE_SETATTR: i64 = 469;

/// What an intruder would want, each with arguments that would do something.
const REFUSED: &[(&str, i64, [i64; 3])] = &[
    ("socket", libc::SYS_socket, [libc::AF_UNIX as i64, libc::SOCK_STREAM as i64, 0]),
    ("connect", libc::SYS_connect, [0, 0, 0]),
    ("socketpair", libc::SYS_socketpair, [libc::AF_UNIX as i64, libc::SOCK_STREAM as i64, 0]),
    ("bind", libc::SYS_bind, [0, 0, 0]),
    ("listen", libc::SYS_listen, [0, 1, 0]),
    (
        "getsockopt of another option",
        libc::SYS_getsockopt,
        [0, libc::SOL_SOCKET as i64, libc::SO_SNDBUF as i64],
    ),
    ("setsockopt", libc::SYS_setsockopt, [0, 0, 0]),
    ("execve", libc::SYS_execve, [0, 0, 0]),
    ("execveat", libc::SYS_execveat, [0, 0, 0]),
    ("fork", libc::SYS_fork, [0, 0, 0]),
    ("vfork", libc::SYS_vfork, [0, 0, 0]),
    ("clone of a process", libc::SYS_clone, [libc::SIGCHLD as i64, 0, 0]),
    ("mount", libc::SYS_mount, [0, 0, 0]),
    ("umount2", libc::SYS_umount2, [0, 0, 0]),
    ("open_tree", libc::SYS_open_tree, [0, 0, 0]),
    ("fsopen", libc::SYS_fsopen, [0, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0]),
    ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0]),
    ("kill", libc::SYS_kill, [1, 0, 0]),
    ("tgkill of another", libc::SYS_tgkill, [1, 1, 0]),
    ("setns", libc::SYS_setns, [0, 0, 0]),
    ("unshare", libc::SYS_unshare, [libc::CLONE_NEWUSER as i64, 0, 0]),
    ("setuid", libc::SYS_setuid, [0, 0, 0]),
    ("ioctl", libc::SYS_ioctl, [0, 0x8004_e500, 0]),
    // What takes a directory out of its limit: another project, no limit, or another subvolume.
    ("FS_IOC_FSSETXATTR", libc::SYS_ioctl, [0, 0x401c_5820, 0]),
    ("FS_IOC_SETFLAGS", libc::SYS_ioctl, [0, 0x4008_6602, 0]),
    ("file_setattr", SYS_FILE_SETATTR, [0, 0, 0]),
    ("quotactl", libc::SYS_quotactl, [0, 0, 0]),
    ("quotactl_fd", libc::SYS_quotactl_fd, [0, 0x80_0008 << 8, 0]),
    ("BTRFS_IOC_QGROUP_LIMIT", libc::SYS_ioctl, [0, 0x8030_942b, 0]),
    ("BTRFS_IOC_QUOTA_CTL", libc::SYS_ioctl, [0, 0xc010_9428, 0]),
    ("BTRFS_IOC_SUBVOL_CREATE_V2", libc::SYS_ioctl, [0, 0x5000_9418, 0]),
    ("BTRFS_IOC_SNAP_CREATE_V2", libc::SYS_ioctl, [0, 0x5000_9417, 0]),
    ("BTRFS_IOC_SUBVOL_SETFLAGS", libc::SYS_ioctl, [0, 0x4008_941a, 0]),
    ("bpf", libc::SYS_bpf, [0, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [0, 0, 0]),
    ("chroot", libc::SYS_chroot, [0, 0, 0]),
    ("keyctl", libc::SYS_keyctl, [0, 0, 0]),
];

fn main() {
    // As libtest does: only tests whose name contains the word.
    let word = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    volume_fs::seccomp::install(volume_local::service::SYSTEM_CALLS).unwrap();
    let (mut passed, mut filtered_out) = (0, 0);
    for (name, number, [a, b, c]) in REFUSED {
        if !format!("{name}_is_refused").contains(&word) {
            filtered_out += 1;
            continue;
        }
        // SAFETY: all pointers are null, and the filter refuses before it looks.
        let result = unsafe { libc::syscall(*number, *a, *b, *c, 0, 0, 0) };
        let errno = io::Error::last_os_error().raw_os_error();
        assert_eq!((result, errno), (-1, Some(libc::EPERM)), "{name}");
        println!("test {name}_is_refused ... ok");
        passed += 1;
    }
    if "threads_and_files_still_work".contains(&word) {
        what_serving_takes_still_works();
        println!("test threads_and_files_still_work ... ok");
        passed += 1;
    } else {
        filtered_out += 1;
    }
    println!(
        "\ntest result: ok. {passed} passed; 0 failed; 0 ignored; 0 measured; {filtered_out} filtered out"
    );
}

/// Files, memory and threads.
fn what_serving_takes_still_works() {
    let answer = std::thread::Builder::new()
        .name("event-loop".to_owned())
        .spawn(|| std::fs::read("/proc/self/stat").map(|content| vec![content; 1000].len()))
        .unwrap();
    assert_eq!(answer.join().unwrap().unwrap(), 1000);
}
