//! The daemon is killed at a chosen moment of a request: after its effect, before its answer, or right
//! after the answer. The application gets one right answer, the effect is made once, and the use of the
//! volume is that of its files.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::c_long;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::fs::{CWD, FallocateFlags, FileType, Mode, RenameFlags, XattrFlags};

use crate::fixture::{Setup, Volume, here};

/// When the daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// The system call that makes the effect has returned.
    AfterEffect,
    /// The daemon has charged the effect, and is about to answer.
    BeforeAnswer,
    /// The kernel has the answer.
    AfterAnswer,
}

const MOMENTS: [Moment; 3] = [Moment::AfterEffect, Moment::BeforeAnswer, Moment::AfterAnswer];

/// `op` of struct ptrace_syscall_info (linux/ptrace.h).
const SYSCALL_ENTRY: u8 = 1;

/// With limits, so that charges are compared.
pub(crate) const SETUP: Setup =
    Setup { capacity_bytes: 64 << 20, inode_limit: 1000, confine: true, successors: 1, ..Setup::PLAIN };

/// The threads of a daemon, which stop at each system call.
///
/// Only the thread that has made it may use it, and may have no child that ends meanwhile.
pub(crate) struct Tracer {
    daemon: Pid,
}

impl Tracer {
    pub(crate) fn of(pid: u32) -> Self {
        let daemon = Pid::from_raw(pid.cast_signed());
        let options =
            Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL;
        let mut seized = BTreeSet::new();
        // It may still be starting threads; those of a seized one are seized from their start.
        loop {
            let threads: BTreeSet<Pid> = fs::read_dir(format!("/proc/{daemon}/task"))
                .unwrap()
                .map(|thread| Pid::from_raw(thread.unwrap().file_name().to_str().unwrap().parse().unwrap()))
                .collect();
            if threads.is_subset(&seized) {
                return Self { daemon };
            }
            for thread in threads.difference(&seized.clone()) {
                match ptrace::seize(*thread, options) {
                    Ok(()) => resume(ptrace::interrupt(*thread)),
                    // Seized from its start, or ended.
                    Err(Errno::EPERM | Errno::ESRCH) => {}
                    Err(errno) => panic!("{errno}"),
                }
                seized.insert(*thread);
            }
        }
    }

    /// Kills the daemon at this moment of the next request that succeeds with this system call.
    fn kill_at(&self, moment: Moment, effect: c_long) {
        let mut has_effect = BTreeSet::new();
        loop {
            // No child of another test's thread.
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)).unwrap() {
                WaitStatus::PtraceSyscall(thread) => {
                    let registers = ptrace::getregs(thread).unwrap();
                    let (call, result) = (registers.orig_rax.cast_signed(), registers.rax.cast_signed());
                    let enters = ptrace::syscall_info(thread).unwrap().op == SYSCALL_ENTRY;
                    let answers = call == libc::SYS_writev && has_effect.contains(&thread);
                    let is_now = match moment {
                        Moment::AfterEffect => !enters && call == effect && result >= 0,
                        Moment::BeforeAnswer => enters && answers,
                        Moment::AfterAnswer => !enters && answers,
                    };
                    if is_now {
                        return self.kill();
                    }
                    if !enters && call == effect && result >= 0 {
                        has_effect.insert(thread);
                    }
                    ptrace::syscall(thread, None).unwrap();
                }
                WaitStatus::PtraceEvent(thread, ..) => ptrace::syscall(thread, None).unwrap(),
                WaitStatus::Stopped(thread, signal) => ptrace::syscall(thread, signal).unwrap(),
                WaitStatus::Exited(thread, _) if thread != self.daemon => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Kills the daemon after it has made so many system calls. False if it ends before.
    pub(crate) fn kill_after(&self, calls: usize) -> bool {
        let mut made = 0;
        loop {
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)).unwrap() {
                WaitStatus::PtraceSyscall(thread) => {
                    let enters = ptrace::syscall_info(thread).is_ok_and(|info| info.op == SYSCALL_ENTRY);
                    made += usize::from(!enters);
                    if made >= calls {
                        self.kill();
                        return true;
                    }
                    resume(ptrace::syscall(thread, None));
                }
                WaitStatus::PtraceEvent(thread, ..) => resume(ptrace::syscall(thread, None)),
                WaitStatus::Stopped(thread, signal) => resume(ptrace::syscall(thread, signal)),
                WaitStatus::Signaled(thread, ..) | WaitStatus::Exited(thread, _) if thread == self.daemon => {
                    return false;
                }
                _ => {}
            }
        }
    }

    fn kill(&self) {
        kill(self.daemon, Signal::SIGKILL).unwrap();
        // The first thread is the last one whose end is reported.
        loop {
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)).unwrap() {
                WaitStatus::Signaled(thread, ..) | WaitStatus::Exited(thread, _) if thread == self.daemon => {
                    return;
                }
                _ => {}
            }
        }
    }
}

/// The thread may have ended meanwhile, or been killed.
fn resume(resumed: nix::Result<()>) {
    assert!(matches!(resumed, Ok(()) | Err(Errno::ESRCH)), "{resumed:?}");
}

/// What an application does while the daemon is killed at this moment, and another one continues.
fn cut<T: Send>(volume: &mut Volume, moment: Moment, effect: c_long, act: impl FnOnce() -> T + Send) -> T {
    volume.add_successor(SETUP);
    std::thread::scope(|scope| {
        let tracer = Tracer::of(volume.pid());
        let acting = scope.spawn(act);
        tracer.kill_at(moment, effect);
        volume.forget_daemon();
        volume.take_over(SETUP);
        acting.join().unwrap()
    })
}

/// Bytes and inodes of the tree. ext4 has allocated nothing ahead.
fn found(directory: &Path, seen: &mut BTreeSet<u64>) -> (u64, u64) {
    let own = fs::symlink_metadata(directory).unwrap();
    let mut sum = (0, 0);
    if seen.insert(own.ino()) {
        sum = (own.blocks() * 512, 1);
    }
    if own.is_dir() {
        for entry in fs::read_dir(directory).unwrap() {
            let (bytes, inodes) = found(&entry.unwrap().path(), seen);
            sum = (sum.0 + bytes, sum.1 + inodes);
        }
    }
    sum
}

/// The use is that of the files, once the kernel has forgotten those that are gone.
fn assert_use(volume: &Volume, what: &str) {
    let begun = Instant::now();
    loop {
        let usage = volume.usage();
        let (used, is) =
            ((usage.used_bytes, usage.used_inodes), found(&volume.backing, &mut BTreeSet::new()));
        if used == is {
            return;
        }
        assert!(begun.elapsed() < here(Duration::from_secs(60)), "{what}: charged {used:?}, found {is:?}");
        std::thread::yield_now();
    }
}

fn served() -> Volume {
    let volume = Volume::with(SETUP);
    assert_use(&volume, "before");
    volume
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

#[test]
fn data_that_is_written_when_the_daemon_is_killed_is_written_once() {
    let mut volume = served();
    let mut expected = Vec::<u8>::new();
    for moment in MOMENTS {
        let path = volume.path("log");
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        // An append, a part of a block further; one with a hole before it; one over data.
        let line = format!("{moment:?} {}", "x".repeat(5000));
        let written =
            cut(&mut volume, moment, libc::SYS_pwrite64, || io::Write::write(&mut log, line.as_bytes()));
        assert_eq!(written.unwrap(), line.len(), "{moment:?}");
        expected.extend(line.as_bytes());
        assert_eq!(fs::read(&path).unwrap(), expected, "{moment:?}");
        assert_use(&volume, &format!("append, {moment:?}"));

        let (sparse, at) = (open(&volume.path("sparse")), (moment as u64 + 1) << 20);
        cut(&mut volume, moment, libc::SYS_pwrite64, || sparse.write_all_at(&[7; 9000], at)).unwrap();
        assert_eq!(sparse.metadata().unwrap().len(), at + 9000);
        assert_use(&volume, &format!("write, {moment:?}"));

        let to = open(&volume.path("copy"));
        let from = File::open(&path).unwrap();
        let length = expected.len();
        let copied = cut(&mut volume, moment, libc::SYS_copy_file_range, || {
            rustix::fs::copy_file_range(&from, Some(&mut 0), &to, Some(&mut 0), length)
        });
        assert_eq!(copied, Ok(length), "{moment:?}");
        assert_eq!(fs::read(volume.path("copy")).unwrap(), expected);
        assert_use(&volume, &format!("copy_file_range, {moment:?}"));
    }
}

#[test]
fn a_truncation_or_an_allocation_that_is_made_when_the_daemon_is_killed_is_right() {
    let mut volume = served();
    for moment in MOMENTS {
        let path = volume.path(&format!("f-{moment:?}"));
        let file = open(&path);
        let mut expected = vec![5; 40_000];
        file.write_all_at(&expected, 0).unwrap();
        let (truncate, allocate) = (libc::SYS_ftruncate, libc::SYS_fallocate);
        for size in [20_000, 30_000] {
            cut(&mut volume, moment, truncate, || file.set_len(size)).unwrap();
            expected.resize(usize::try_from(size).unwrap(), 0);
            assert_eq!(fs::read(&path).unwrap(), expected, "{moment:?}, {size}");
            assert_use(&volume, &format!("truncate to {size}, {moment:?}"));
        }
        let modes = [
            (FallocateFlags::empty(), 28_000, 30_000),
            (FallocateFlags::KEEP_SIZE, 0, 50_000),
            (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 3_000, 20_000),
            (FallocateFlags::ZERO_RANGE, 10_000, 60_000),
        ];
        for (mode, start, length) in modes {
            cut(&mut volume, moment, allocate, || rustix::fs::fallocate(&file, mode, start, length)).unwrap();
            let (start, end) = (usize::try_from(start).unwrap(), usize::try_from(start + length).unwrap());
            if !mode.contains(FallocateFlags::KEEP_SIZE) {
                expected.resize(expected.len().max(end), 0);
            }
            if mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE) {
                let end = end.min(expected.len());
                expected[start..end].fill(0);
            }
            assert_eq!(fs::read(&path).unwrap(), expected, "{moment:?}, {mode:?}");
            assert_use(&volume, &format!("fallocate with {mode:?}, {moment:?}"));
        }
    }
}

#[test]
fn a_file_that_is_made_when_the_daemon_is_killed_is_made_and_charged_once() {
    let mut volume = served();
    for moment in MOMENTS {
        let at = |name: &str| volume.path.join(format!("{name}-{moment:?}"));
        let (directory, file, fifo, link, other) = (at("d"), at("f"), at("p"), at("l"), at("h"));
        cut(&mut volume, moment, libc::SYS_mkdirat, || fs::create_dir(&directory)).unwrap();
        assert_use(&volume, &format!("mkdir, {moment:?}"));
        let created = cut(&mut volume, moment, libc::SYS_openat, || File::create_new(&file)).unwrap();
        created.write_all_at(b"content", 0).unwrap();
        drop(created);
        assert_use(&volume, &format!("create, {moment:?}"));
        cut(&mut volume, moment, libc::SYS_mknodat, || {
            rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0)
        })
        .unwrap();
        assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());
        assert_use(&volume, &format!("mknod, {moment:?}"));
        let target = "t".repeat(200);
        cut(&mut volume, moment, libc::SYS_symlinkat, || std::os::unix::fs::symlink(&target, &link)).unwrap();
        assert_use(&volume, &format!("symlink, {moment:?}"));
        cut(&mut volume, moment, libc::SYS_linkat, || fs::hard_link(&file, &other)).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().nlink(), 2);
        assert_use(&volume, &format!("link, {moment:?}"));
    }
}

#[test]
fn a_name_that_is_lost_when_the_daemon_is_killed_is_lost_and_freed_once() {
    let mut volume = served();
    for moment in MOMENTS {
        // After the answer, the killed daemon may have read the FORGET of what is gone: its successor asks
        // the kernel some seconds later.
        let check = |volume: &Volume, what: &str| {
            if moment != Moment::AfterAnswer {
                assert_use(volume, &format!("{what}, {moment:?}"));
            }
        };
        let at = |name: &str| volume.path.join(format!("{name}-{moment:?}"));
        let (one, two, three, directory, last) = (at("one"), at("two"), at("three"), at("d"), at("last"));
        for name in [&one, &two] {
            fs::write(name, vec![1; 50_000]).unwrap();
        }
        fs::hard_link(&one, &three).unwrap();
        fs::create_dir(&directory).unwrap();
        let exchange = RenameFlags::EXCHANGE;
        cut(&mut volume, moment, libc::SYS_renameat2, || {
            rustix::fs::renameat_with(CWD, &one, CWD, &two, exchange)
        })
        .unwrap();
        check(&volume, "exchange");
        // `two` and `three` are one file: it keeps a name.
        cut(&mut volume, moment, libc::SYS_unlinkat, || fs::remove_file(&three)).unwrap();
        check(&volume, "unlink of one of two names");
        cut(&mut volume, moment, libc::SYS_renameat2, || fs::rename(&two, &three)).unwrap();
        check(&volume, "rename");
        cut(&mut volume, moment, libc::SYS_renameat2, || fs::rename(&three, &one)).unwrap();
        check(&volume, "rename over a file");
        let held = open(&one);
        cut(&mut volume, moment, libc::SYS_unlinkat, || fs::remove_file(&one)).unwrap();
        held.write_all_at(&[2; 9000], 100_000).unwrap();
        drop(held);
        check(&volume, "unlink of an open file");
        cut(&mut volume, moment, libc::SYS_unlinkat, || fs::remove_dir(&directory)).unwrap();
        check(&volume, "rmdir");
        fs::write(&last, vec![1; 50_000]).unwrap();
        cut(&mut volume, moment, libc::SYS_unlinkat, || fs::remove_file(&last)).unwrap();
        check(&volume, "unlink");
    }
    assert_eq!(fs::read_dir(&volume.path).unwrap().count(), 0);
    assert_use(&volume, "everything is removed");
}

#[test]
fn an_attribute_that_is_changed_when_the_daemon_is_killed_is_charged_once() {
    let mut volume = served();
    for moment in MOMENTS {
        let path = volume.path(&format!("f-{moment:?}"));
        fs::write(&path, "content").unwrap();
        let set = || rustix::fs::setxattr(&path, "user.a", &[1; 2000], XattrFlags::CREATE);
        cut(&mut volume, moment, libc::SYS_fsetxattr, set).unwrap();
        assert_use(&volume, &format!("setxattr, {moment:?}"));
        let remove = || rustix::fs::removexattr(&path, "user.a");
        cut(&mut volume, moment, libc::SYS_fremovexattr, remove).unwrap();
        assert_use(&volume, &format!("removexattr, {moment:?}"));
    }
}
