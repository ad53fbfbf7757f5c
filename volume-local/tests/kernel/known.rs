//! How many inodes the kernel knows, and what becomes of those it should forget.
//!
//! On kernels without FUSE_NOTIFY_PRUNE the daemon asks its driver for mount
//! points first: [`Answering`] plays that part.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::control::{GetStats, MountPoints, Quiesce, Stats, reply, request};
use rustix::process::{Resource, Rlimit};

use crate::fixture::{self, ALICE, BOB, Control, ROOT, Setup, Volume, errno, here};
use crate::pauses::resume;

const TIMEOUT: Duration = Duration::from_secs(200);
const BOUND: u64 = 1000;
/// With what requests take for which older kernels make the pruner wait.
const MOST_KNOWN: u64 = 2 * BOUND + BOUND / 64 + 2;
const FILES: usize = 12_000;
const SETUP: Setup = Setup { confine: true, known_inodes: 1000, ..Setup::PLAIN };

pub(crate) fn stats(control: &Control) -> Stats {
    match control.ask(request::Kind::GetStats(GetStats {})) {
        reply::Kind::Stats(stats) => stats,
        other => panic!("{other:?}"),
    }
}

/// A driver that answers what the daemon wants to know, and keeps the largest number it saw.
struct Answering {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Answering {
    fn start(volume: &Volume) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (control, device, told) = (volume.control(), volume.device(), Arc::clone(&stop));
        // The thread of the test has a mount namespace of its own; a new thread shares it.
        let thread = std::thread::spawn(move || {
            let mut most = 0;
            while !told.load(Ordering::Relaxed) {
                let now = stats(&control);
                most = most.max(now.known_inodes);
                if now.mount_points_wanted > 0 {
                    let tid = rustix::thread::gettid().as_raw_nonzero().get();
                    let table = linux::mountinfo::read_of(tid).unwrap();
                    let paths = linux::mountinfo::mounted_inside(&table, device);
                    let paths = paths.into_iter().map(|path| path.into_os_string().into_encoded_bytes());
                    let list = MountPoints { round: now.mount_points_wanted, paths: paths.collect() };
                    control.ask(request::Kind::MountPoints(list));
                }
                std::thread::yield_now();
            }
            most
        });
        Self { stop, thread }
    }

    fn most(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Behind the mount, so that the kernel does not know them.
fn make_files(volume: &Volume) {
    for directory in 0..12 {
        let path = volume.backing.join(format!("d{directory}"));
        fs::create_dir(&path).unwrap();
        for file in 0..FILES / 12 {
            File::create(path.join(format!("f{file}"))).unwrap();
        }
    }
}

fn walk(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| if entry.metadata().unwrap().is_dir() { walk(&entry.path()) } else { 1 }).sum()
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < here(TIMEOUT), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_walk_over_many_files_never_makes_the_kernel_know_twice_the_bound() {
    let volume = Volume::with(SETUP);
    make_files(&volume);
    let driver = Answering::start(&volume);
    for _ in 0..3 {
        assert_eq!(walk(&volume.path), FILES);
    }
    let control = volume.control();
    until("the bound is kept", || stats(&control).known_inodes <= BOUND);
    let now = stats(&control);
    assert_eq!((now.known_inode_limit, now.refused), (BOUND, 0));
    assert!(now.asked_to_forget >= 10_000, "{now:?}");
    let most = driver.most();
    assert!(most <= MOST_KNOWN, "{most} inodes were known");
}

/// Kernels without FUSE_NOTIFY_PRUNE lock directories to forget names, but no directory is locked for a write.
#[test]
fn while_a_write_waits_for_the_end_of_a_pause_the_kernel_still_forgets() {
    let volume = Volume::with(SETUP);
    make_files(&volume);
    let file = File::create(volume.path("written")).unwrap();
    let driver = Answering::start(&volume);
    let control = volume.control();
    let pause = Quiesce { lease_ms: 60_000, passing_may_write: false };
    assert!(matches!(control.ask(request::Kind::Quiesce(pause)), reply::Kind::Quiesced(_)));
    let writer = std::thread::spawn(move || file.write_all_at(b"content", 0));
    until("the write waits", || volume.waiting() > 0);
    for directory in 0..4 {
        assert_eq!(walk(&volume.path(&format!("d{directory}"))), FILES / 12);
    }
    until("the bound is kept", || stats(&control).known_inodes <= BOUND);
    assert!(!writer.is_finished());
    resume(&control);
    writer.join().unwrap().unwrap();
    assert_eq!(stats(&control).refused, 0);
    driver.most();
}

/// Of the daemon, without its program.
fn memory_kib(volume: &Volume) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", volume.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Below the bound: the kernel forgets when it is short of memory, or here by a remount.
#[test]
fn a_walk_over_many_files_leaves_the_memory_that_was_there_before() {
    const MANY: usize = 40_000;
    let volume = Volume::with(Setup { known_inodes: 0, ..SETUP });
    for number in 0..MANY {
        let directory = volume.backing.join(format!("d{}", number % 40));
        if number < 40 {
            fs::create_dir(&directory).unwrap();
        }
        File::create(directory.join(format!("f{number}"))).unwrap();
    }
    let control = volume.control();
    let mut left = Vec::new();
    for _ in 0..5 {
        assert_eq!(walk(&volume.path), MANY);
        assert!(stats(&control).known_inodes > MANY as u64);
        let known = memory_kib(&volume);
        volume.remount(nix::mount::MsFlags::empty()).unwrap();
        until("all is forgotten", || stats(&control).known_inodes == 1);
        until("most of the memory is given back", || memory_kib(&volume) < known / 2);
        left.push(memory_kib(&volume));
    }
    // What the C library keeps at the ends of its heaps differs from walk to walk.
    let (first, later) = left.split_at(2);
    let (most, least) = (first.iter().max().unwrap(), later.iter().min().unwrap());
    assert!(*least < most + 1024, "{left:?} KiB after each walk");
}

#[test]
fn what_is_mounted_inside_a_volume_survives_the_forgetting() {
    let volume = Volume::with(SETUP);
    fs::create_dir_all(volume.path("pod/directory")).unwrap();
    fs::write(volume.path("pod/file"), "below").unwrap();
    make_files(&volume);
    let outside = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::create_dir(outside.path().join("directory")).unwrap();
    fs::write(outside.path().join("directory/secret"), "s").unwrap();
    fs::write(outside.path().join("file"), "mounted").unwrap();
    for name in ["directory", "file"] {
        linux::mount::bind(&outside.path().join(name), &volume.path("pod").join(name)).unwrap();
    }
    let driver = Answering::start(&volume);
    let control = volume.control();
    // Until most of what was known has been forgotten, several times.
    until("the kernel forgets", || {
        assert_eq!(walk(&volume.path), FILES + 2);
        stats(&control).asked_to_forget >= 2 * FILES as u64
    });
    driver.most();
    assert_eq!(fs::read_to_string(volume.path("pod/file")).unwrap(), "mounted");
    assert_eq!(fs::read_to_string(volume.path("pod/directory/secret")).unwrap(), "s");
    for name in ["directory", "file"] {
        fixture::unmount(&volume.path("pod").join(name));
    }
    assert_eq!(fs::read_to_string(volume.path("pod/file")).unwrap(), "below");
}

/// Files that the kernel cannot forget: an O_PATH descriptor needs no open file of FUSE.
fn hold(volume: &Volume) -> (Vec<File>, std::io::Error) {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let mut held = Vec::new();
    loop {
        let path = format!("d{}/f{}", held.len() % 12, held.len() / 12);
        match OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(volume.path(&path)) {
            Ok(file) => held.push(file),
            Err(error) => return (held, error),
        }
    }
}

#[test]
fn who_holds_twice_the_bound_gets_enfile_in_that_volume_alone() {
    let other = Volume::with(SETUP);
    fs::write(other.path("f"), "x").unwrap();
    let mut volume = Volume::on(other.another_stage(), SETUP);
    make_files(&volume);
    let driver = Answering::start(&volume);
    let (held, refused) = hold(&volume);
    assert_eq!(refused.raw_os_error(), Some(libc::ENFILE));
    assert!(held.len() as u64 >= 2 * BOUND - 20, "{}", held.len());
    assert_eq!(errno(File::create(volume.path("new"))), libc::ENFILE);
    assert_eq!(errno(fs::create_dir(volume.path("new"))), libc::ENFILE);
    assert!(!volume.backing.join("new").exists(), "nothing is left of it");
    // What is known goes on, and so do others.
    fs::write(volume.path("d0/f0"), "x").unwrap();
    for n in 0..100 {
        fs::write(other.path(&format!("f{n}")), "x").unwrap();
    }
    let now = stats(&volume.control());
    assert!(now.refused >= 3 && now.known_inodes <= MOST_KNOWN, "{now:?}");
    drop(held);
    until("room again", || File::create(volume.path("new")).is_ok());
    until("the bound is kept", || stats(&volume.control()).known_inodes <= BOUND);
    assert_eq!(walk(&volume.path), FILES + 1);
    driver.most();
    let (_, log) = volume.unmount();
    assert_eq!(log.lines().filter(|line| line.contains("ENFILE")).count(), 1, "{log}");
}

#[test]
fn removed_files_that_one_user_holds_leave_room_for_others() {
    let setup = Setup { descriptors: 256, known_inodes: 0, ..SETUP };
    let volume = Volume::with(setup);
    // Up to nine descriptors, each of a file that is then removed.
    let script = "n=0; for fd in 3 4 5 6 7 8 9; do \
        eval \"exec $fd>$0$fd\" && rm $0$fd 2>/dev/null || break; n=$((n+1)); done; echo $n; read end";
    let user = |user, name: &str| volume.spawn_shell(user, script, name);
    volume.shell(ROOT, "chmod 777 .");
    let (mut alice, first) = user(ALICE, "a");
    let (mut bob, second) = user(BOB, "b");
    assert_eq!((first.as_str(), second.as_str()), ("4", "4"), "a quarter of 16 each");
    assert_eq!(stats(&volume.control()).removed_inodes, 8);
    for user in [&mut alice, &mut bob] {
        drop(user.stdin.take());
        user.wait().unwrap();
    }
    volume.shell(ALICE, "rm -f a*");
    volume.shell(BOB, "rm -f b*");
    let control = volume.control();
    until("all are gone", || stats(&control).removed_inodes == 0);
}

/// The kernel asks about an open file by its inode alone, and the daemon finds a new one by its name.
#[test]
fn an_open_file_is_found_while_it_is_renamed_or_replaced() {
    let volume = Volume::new();
    let (new, named) = (volume.path("new"), volume.path("named"));
    fs::write(&named, "").unwrap();
    for _ in 0..1000 {
        let replaced = File::open(&named).unwrap();
        let file = File::create_new(&new).unwrap();
        let all = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                all.wait();
                for file in [&file, &replaced, &file] {
                    let asked = rustix::fs::fgetxattr(file, c"user.none", &mut [0; 8]);
                    assert_eq!(asked, Err(rustix::io::Errno::NODATA));
                }
            });
            all.wait();
            fs::rename(&new, &named).unwrap();
            looks.join().unwrap();
        });
    }
}
