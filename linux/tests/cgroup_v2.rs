//! Groups in the kernel's cgroup v2 tree: also on hybrid machines, where the tree
//! has the controller hugetlb and no other. Needs root.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::ffi::{CString, c_void};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use linux::cgroup::{Cgroup, Hierarchies, Limits, remove_dirs, v2};
use linux::mountinfo;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use rustix::fs::{Mode, OFlags};

const DEADLINE: Duration = Duration::from_secs(10);

fn root() -> PathBuf {
    let mounts = mountinfo::read().unwrap();
    let found = mounts.into_iter().find(|m| m.fs_type == "cgroup2" && m.root == Path::new("/"));
    found.expect("this test needs a cgroup2 mount").mount_point
}

/// Of this test alone, absolute within the tree.
fn path(name: &str) -> PathBuf {
    PathBuf::from(format!("/hawser-{name}-{}", std::process::id()))
}

fn under(path: &Path) -> PathBuf {
    root().join(path.strip_prefix("/").unwrap())
}

/// A process in the group `path`.
fn sleeper(path: &Path) -> Child {
    let child = Command::new("sleep").arg("100").spawn().unwrap();
    std::fs::write(under(path).join("cgroup.procs"), child.id().to_string()).unwrap();
    child
}

#[test]
fn a_file_of_v2_is_written_where_v2_has_its_controller_and_left_out_elsewhere() {
    let hierarchies = Hierarchies::detect().unwrap();
    assert!(hierarchies.has_in_v2("hugetlb"), "this test needs the v2 controller hugetlb: {hierarchies:?}");
    let parent = path("unified");
    let file = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let unified = vec![
        file("hugetlb.2MB.max", "4194304"),
        file("hugetlb.2MB.no-such-limit", "1"),
        file("no-such-controller.max", "1"),
    ];
    let made = hierarchies.ensure_parent(&parent).unwrap();
    let limits = Limits { unified, ..Limits::default() };
    let (group, unmet) = hierarchies.create(&parent.join("c"), &limits).unwrap();
    let written = std::fs::read_to_string(under(&parent).join("c/hugetlb.2MB.max"));
    group.remove().unwrap();
    // Where v2 restricts no devices, the limit's group above was made for it alone.
    let left = remove_dirs(&[vec![under(&parent)], made].concat());
    assert_eq!(written.unwrap(), "4194304\n");
    assert_eq!(unmet, ["hugetlb.2MB.no-such-limit: this kernel's cgroups have no such limit"]);
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn a_file_of_the_group_itself_is_no_limit() {
    let hierarchies = Hierarchies::detect().unwrap();
    let parent = path("refused");
    let made = hierarchies.ensure_parent(&parent).unwrap();
    let unified = vec![("hugetlb./../../cgroup.procs".to_owned(), "0".to_owned())];
    let refused = hierarchies.create(&parent.join("c"), &Limits { unified, ..Limits::default() });
    let left = remove_dirs(&[vec![under(&parent)], made].concat());
    assert_eq!(refused.unwrap_err().errno(), Errno::EINVAL);
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn a_parent_with_processes_of_its_own_is_named_with_them() {
    let busy = path("busy");
    let made = v2::ensure_dirs(&root(), &busy, &["hugetlb"]).unwrap();
    let mut sleeper = sleeper(&busy);
    let refused = v2::ensure_dirs(&root(), &busy.join("pods"), &["hugetlb"]);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let left = remove_dirs(&made);
    let (error, made_below) = refused.unwrap_err();
    assert_eq!((error.errno(), made_below), (Errno::EBUSY, Vec::new()));
    let words = format!("the group has processes of its own (pids {})", sleeper.id());
    assert!(error.to_string().contains(&words), "{error}");
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn controllers_that_are_handed_down_already_are_no_reason_to_fail() {
    let parent = path("again");
    let made = v2::ensure_dirs(&root(), &parent.join("a"), &["hugetlb"]).unwrap();
    assert_eq!(v2::ensure_dirs(&root(), &parent.join("a"), &["hugetlb"]).unwrap(), Vec::<PathBuf>::new());
    let enabled = std::fs::read_to_string(under(&parent).join("cgroup.subtree_control"));
    let (error, _) = v2::ensure_dirs(&root(), &parent.join("a/b"), &["no-such-controller"]).unwrap_err();
    let left = remove_dirs(&made);
    assert_eq!(enabled.unwrap().trim(), "hugetlb");
    assert_eq!(error.errno(), Errno::EINVAL, "{error}");
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn a_group_ends_with_the_groups_below_it() {
    let nested = path("nested");
    let inner = nested.join("made/by/itself");
    v2::ensure_dirs(&root(), &inner, &[]).unwrap();
    let mut sleeper = sleeper(&inner);
    let group = Cgroup::find(&Hierarchies::detect().unwrap(), &nested);
    assert_eq!(group.remove().unwrap_err().errno(), Errno::EBUSY);
    assert_eq!(group.pids().unwrap(), [sleeper.id().cast_signed()]);
    group.end(DEADLINE).unwrap();
    assert!(!sleeper.wait().unwrap().success(), "it was killed");
    assert!(!under(&nested).exists());
}

/// A process in the group `path` whose first thread has ended, and whose second one waits.
#[expect(unsafe_code, reason = "no safe call ends a process's first thread alone")]
fn without_its_first_thread(path: &Path) -> i32 {
    extern "C" fn wait(_: *mut c_void) -> *mut c_void {
        loop {
            // SAFETY: it only waits.
            unsafe { libc::pause() };
        }
    }
    let procs = CString::new(under(path).join("cgroup.procs").into_os_string().into_vec()).unwrap();
    // SAFETY: the child calls only functions that may be called after fork(2), and pthread_create(3), which glibc
    // allows there.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let mut thread = 0;
        // SAFETY: as above. The pointers are valid, and `wait` needs no argument.
        unsafe {
            let file = libc::open(procs.as_ptr(), libc::O_WRONLY);
            // Otherwise the whole process ends.
            if libc::write(file, c"0".as_ptr().cast(), 1) == 1
                && libc::pthread_create(&raw mut thread, std::ptr::null(), wait, std::ptr::null_mut()) == 0
            {
                libc::syscall(libc::SYS_exit, 0);
            }
            libc::_exit(1);
        }
    }
    assert!(pid > 0, "fork");
    pid
}

/// Whether the first thread of `pid` ends within [`DEADLINE`].
fn first_thread_ends(pid: i32) -> bool {
    let begun = Instant::now();
    while !std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z ")) {
        if begun.elapsed() >= DEADLINE {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// The kernel's own way to kill all processes of a group passes over it.
#[test]
fn a_process_whose_first_thread_has_ended_ends_with_its_group() {
    let own = path("leaderless");
    v2::ensure_dirs(&root(), &own, &[]).unwrap();
    let group = Cgroup::find(&Hierarchies::detect().unwrap(), &own);
    let pid = without_its_first_thread(&own);
    let is_leaderless = first_thread_ends(pid);
    let pids = group.pids();
    let ended = group.end(DEADLINE);
    // Also after a failure, which leaves it.
    let _ended_or_not = kill(Pid::from_raw(pid), Signal::SIGKILL);
    waitpid(Pid::from_raw(pid), None).unwrap();
    remove_dirs(&[under(&own)]);
    assert!(is_leaderless, "the first thread has not ended");
    assert_eq!(pids.unwrap(), [pid]);
    ended.unwrap();
}

/// 5,000 bytes of names below `dir`; the deepest group.
fn nest(dir: &Path) -> OwnedFd {
    let open = |at: BorrowedFd<'_>, name: &Path| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(at, name, flags, Mode::empty()).unwrap()
    };
    let mut group = open(rustix::fs::CWD, dir);
    let name = "n".repeat(250);
    for _ in 0..20 {
        rustix::fs::mkdirat(&group, &name, Mode::from(0o755)).unwrap();
        group = open(group.as_fd(), Path::new(&name));
    }
    group
}

fn write_in(group: &OwnedFd, file: &str, value: &str) -> rustix::io::Result<()> {
    let file = rustix::fs::openat(group, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value.as_bytes()).map(drop)
}

/// Root in a pod may mount hierarchies in a user namespace, and nest groups beyond PATH_MAX there.
#[test]
fn a_group_ends_whose_processes_are_deeper_than_any_path_in_every_hierarchy_and_frozen() {
    let path = path("deep");
    let hierarchies = Hierarchies::detect().unwrap();
    let (group, _unmet) = hierarchies.create_everywhere(&path, &Limits::default()).unwrap();
    let mounts = mountinfo::read().unwrap();
    let dirs: Vec<PathBuf> = mounts
        .into_iter()
        .filter(|m| m.root == Path::new("/") && matches!(m.fs_type.as_str(), "cgroup" | "cgroup2"))
        .map(|m| m.mount_point.join(path.strip_prefix("/").unwrap()))
        .collect();
    let mut sleeper = Command::new("sleep").arg("100").spawn().unwrap();
    let pid = sleeper.id().to_string();
    // A group of v1's cpuset takes no process until it has processors.
    let is_empty_cpuset = |dir: &Path| dir.join("tasks").exists() && dir.join("cpuset.mems").exists();
    for dir in dirs.iter().filter(|dir| !is_empty_cpuset(dir)) {
        let deepest = nest(dir);
        write_in(&deepest, "cgroup.procs", &pid).unwrap();
        // Where this hierarchy has a freezer.
        let _frozen = write_in(&deepest, "freezer.state", "FROZEN");
    }
    assert_eq!(group.pids().unwrap(), [sleeper.id().cast_signed()]);
    group.end(DEADLINE).unwrap();
    assert!(!sleeper.wait().unwrap().success(), "it was killed");
    let left: Vec<_> = dirs.iter().filter(|dir| dir.exists()).collect();
    assert_eq!(left, Vec::<&PathBuf>::new());
}
