//! What the kernel keeps of the daemon's answers: it asks rarely, and shows what is in the backing
//! directory.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::mount::MsFlags;
use rustix::fs::{CWD, FallocateFlags, FileType, Mode, RenameFlags, XattrFlags};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use tests::random::Random;

use crate::fixture::{self, Setup, Stage, Volume, errno, here};
use crate::known::until;

const SEED: &str = "HAWSER_TRUST_SEED";
const STEPS: usize = 3000;
const KINDS: usize = 24;
const DIRECTORIES: [&str; 3] = ["", "d", "e"];
const NAMES: [&str; 4] = ["a", "b", "c", "s"];
const LONGEST: u64 = 30_000;

/// Everything of stat(2) that a program may rely on, but the number of blocks: the backing file system
/// changes that later, when it writes back.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    inode: u64,
    mode: u32,
    links: u64,
    owner: (u32, u32),
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Seen {
    fn of(path: &Path) -> io::Result<Self> {
        let stat = fs::symlink_metadata(path)?;
        Ok(Self {
            inode: stat.ino(),
            mode: stat.mode(),
            links: stat.nlink(),
            owner: (stat.uid(), stat.gid()),
            bytes: stat.size(),
            modified: (stat.mtime(), stat.mtime_nsec()),
            changed: (stat.ctime(), stat.ctime_nsec()),
        })
    }
}

/// All names that a step may use, below `root`; the root has another inode number there.
fn all(root: &Path) -> BTreeMap<String, Result<Seen, i32>> {
    let names = DIRECTORIES.iter().flat_map(|directory| NAMES.iter().map(move |name| below(directory, name)));
    let names = names.chain(DIRECTORIES[1..].iter().map(|name| (*name).to_owned()));
    let seen = names.map(|name| {
        let seen = Seen::of(&root.join(&name)).map_err(|error| error.raw_os_error().unwrap());
        (name, seen)
    });
    let own = Seen { inode: 1, ..Seen::of(root).unwrap() };
    seen.chain([(String::new(), Ok(own))]).collect()
}

/// Of all files and directories: their bytes or names.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for directory in DIRECTORIES {
        let mut names: Vec<String> = match fs::read_dir(root.join(directory)) {
            Ok(entries) => entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect(),
            Err(_) => continue,
        };
        names.sort();
        for name in &names {
            let name = below(directory, name);
            if fs::symlink_metadata(root.join(&name)).unwrap().is_file() {
                found.insert(name.clone(), fs::read(root.join(&name)).unwrap());
            }
        }
        found.insert(directory.to_owned(), names.join("/").into_bytes());
    }
    found
}

fn below(directory: &str, name: &str) -> String {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

struct Steps {
    root: PathBuf,
    random: Random,
}

impl Steps {
    fn path(&mut self) -> PathBuf {
        let (directory, name) = (*self.random.pick(&DIRECTORIES), *self.random.pick(&NAMES));
        self.root.join(below(directory, name))
    }

    fn directory(&mut self) -> PathBuf {
        let name = *self.random.pick(&DIRECTORIES);
        self.root.join(name)
    }

    fn any(&mut self) -> PathBuf {
        if self.random.below(4) == 0 { self.directory() } else { self.path() }
    }

    /// Many steps fail, since a name is missing or is there.
    fn step(&mut self) -> (&'static str, io::Result<()>) {
        let (path, other, any) = (self.path(), self.path(), self.any());
        let (at, length) = (self.random.below(LONGEST), 1 + self.random.below(9000));
        let bytes = self.random.bytes(usize::try_from(length).unwrap());
        let writable = || OpenOptions::new().read(true).write(true).open(&path);
        // Files that cannot be read are written too.
        let reads = self.random.below(2) == 0;
        let to_write = || OpenOptions::new().read(reads).write(true).open(&path);
        match self.random.below(24) {
            0 => ("create", File::create(&path).map(drop)),
            1 => ("create new", File::create_new(&path).map(drop)),
            2 => ("write", to_write().and_then(|file| file.write_all_at(&bytes, at))),
            3 => {
                ("append", OpenOptions::new().append(true).open(&path).and_then(|mut f| f.write_all(&bytes)))
            }
            4 => ("truncate", to_write().and_then(|file| file.set_len(at))),
            5 => ("read", File::open(&path).and_then(|mut file| file.read_to_end(&mut Vec::new())).map(drop)),
            6 => ("chmod", fs::set_permissions(&any, fs::Permissions::from_mode(self.mode()))),
            7 => ("chown", std::os::unix::fs::lchown(&any, Some(self.id()), Some(self.id()))),
            8 => ("times", File::open(&any).and_then(|file| file.set_times(some_times(at)))),
            9 => ("setxattr", set(&any, c"user.key", &bytes[..30.min(bytes.len())])),
            10 => ("removexattr", rustix::fs::removexattr(&any, c"user.key").map_err(Into::into)),
            11 => ("setfacl", set(&any, c"system.posix_acl_access", &self.acl())),
            12 => ("setfacl -d", set(&self.directory(), c"system.posix_acl_default", &self.acl())),
            13 | 14 => ("mkdir", fs::create_dir(self.root.join(*self.random.pick(&DIRECTORIES[1..])))),
            15 => ("rmdir", self.remove_directory()),
            16 => ("unlink", fs::remove_file(&path)),
            17 => ("rename", fs::rename(&path, &other)),
            18 => {
                let (one, other) = if at % 2 == 0 { (any, self.any()) } else { (path, other) };
                let renamed = rustix::fs::renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE);
                ("exchange", renamed.map_err(Into::into))
            }
            19 => ("link", fs::hard_link(&path, &other)),
            20 => ("symlink", std::os::unix::fs::symlink("to", &path)),
            21 => {
                let modes = [FallocateFlags::empty(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE];
                let mode = *self.random.pick(&modes);
                let done = writable().map(|file| rustix::fs::fallocate(file, mode, at, length));
                ("fallocate", done.and_then(|done| done.map_err(Into::into)))
            }
            22 => ("copy", copy(&path, &other, at)),
            _ => {
                if self.random.below(2) == 0 {
                    let made = rustix::fs::mknodat(CWD, &path, FileType::Socket, Mode::RUSR, 0);
                    return ("mknod", made.map_err(Into::into));
                }
                ("map", writable().and_then(|file| store(&file, bytes[0])))
            }
        }
    }

    /// With what is in it. An exchange may have put a file there, or a directory into it, and nothing else
    /// would give the name back to a directory.
    fn remove_directory(&mut self) -> io::Result<()> {
        let directory = self.root.join(*self.random.pick(&DIRECTORIES[1..]));
        match fs::remove_file(&directory) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir_all(directory),
            Err(error) => Err(error),
            Ok(()) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn mode(&mut self) -> u32 {
        u32::try_from(self.random.below(0o10000)).unwrap()
    }

    fn id(&mut self) -> u32 {
        u32::try_from(1000 + self.random.below(3)).unwrap()
    }

    /// Of the owner, a user, the group, the mask and others (linux/posix_acl_xattr.h).
    fn acl(&mut self) -> Vec<u8> {
        let entries = [(0x01, u32::MAX), (0x02, 1000), (0x04, u32::MAX), (0x10, u32::MAX), (0x20, u32::MAX)];
        let mut value = 2_u32.to_le_bytes().to_vec();
        for (tag, id) in entries {
            let permissions = u16::try_from(self.random.below(8)).unwrap();
            value.extend(u16::to_le_bytes(tag));
            value.extend(permissions.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }
}

fn some_times(number: u64) -> FileTimes {
    let time = SystemTime::UNIX_EPOCH + Duration::new(number, 5);
    FileTimes::new().set_modified(time).set_accessed(time)
}

fn set(path: &Path, name: &std::ffi::CStr, value: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::setxattr(path, name, value, XattrFlags::empty())?)
}

fn copy(from: &Path, to: &Path, at: u64) -> io::Result<()> {
    let (from, to) = (File::open(from)?, OpenOptions::new().write(true).open(to)?);
    let (mut from_offset, mut to_offset) = (0, at);
    let copied = rustix::fs::copy_file_range(&from, Some(&mut from_offset), &to, Some(&mut to_offset), 5000);
    Ok(copied.map(drop)?)
}

/// Through a shared mapping, which the kernel writes back when it ends.
#[expect(unsafe_code, reason = "there is no safe mmap")]
fn store(file: &File, byte: u8) -> io::Result<()> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    if file.metadata()?.size() == 0 {
        return Ok(());
    }
    // SAFETY: the page has at least one byte of the file; nothing else uses the mapping.
    unsafe {
        let page =
            mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?;
        page.cast::<u8>().write_volatile(byte);
        munmap(page, 4096)?;
    }
    Ok(())
}

fn every_step_is_seen_on(kind: &str, seed: u64) {
    let setup = Setup { confine: true, ..Setup::default() };
    let volume = Volume::on(Stage::on_file_system(kind), setup);
    let mut steps = Steps { root: volume.path.clone(), random: Random::new(seed) };
    let mut succeeded = BTreeMap::<&str, usize>::new();
    for number in 0.. {
        if number >= STEPS && succeeded.len() == KINDS {
            break;
        }
        assert!(number < 20 * STEPS, "each step succeeds sometimes: {succeeded:?}");
        let (step, result) = steps.step();
        if result.is_ok() {
            *succeeded.entry(step).or_default() += 1;
        }
        let (seen, backing) = (all(&volume.path), all(&volume.backing));
        for (name, backing) in backing {
            assert_eq!(seen[&name], backing, "{name:?} after step {number}, {step}: {result:?}");
        }
        let (read, backing) = (contents(&volume.path), contents(&volume.backing));
        for (name, backing) in backing {
            assert!(read[&name] == backing, "content of {name:?} after step {number}, {step}: {result:?}");
        }
    }
}

#[test]
fn every_change_is_seen_by_the_next_stat_on_ext4() {
    let seed = Random::seed(SEED);
    eprintln!("{SEED}={seed}");
    every_step_is_seen_on("ext4", seed);
}

#[test]
fn every_change_is_seen_by_the_next_stat_on_xfs() {
    let seed = Random::seed(SEED);
    eprintln!("{SEED}={seed}");
    every_step_is_seen_on("xfs", seed);
}

#[test]
fn every_change_is_seen_by_the_next_stat_on_btrfs() {
    let seed = Random::seed(SEED);
    eprintln!("{SEED}={seed}");
    every_step_is_seen_on("btrfs", seed);
}

/// One process changes directories while others look at them: an answer that is taken in late is
/// corrected.
#[test]
fn attributes_are_right_after_changes_and_looks_at_the_same_time() {
    const ROUNDS: usize = 1500;
    let volume = Volume::new();
    let directory = |root: &Path, number: usize| root.join(format!("d{number}"));
    for number in 0..ROUNDS {
        fs::create_dir(directory(&volume.path, number)).unwrap();
    }
    let current = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while current.load(Ordering::Relaxed) < ROUNDS {
                    let number = current.load(Ordering::Relaxed).min(ROUNDS - 1);
                    fs::metadata(directory(&volume.path, number)).unwrap();
                }
            });
        }
        for number in 0..ROUNDS {
            current.store(number, Ordering::Relaxed);
            let path = directory(&volume.path, number);
            fs::create_dir(path.join("a")).unwrap();
            fs::create_dir(path.join("b")).unwrap();
        }
        current.store(ROUNDS, Ordering::Relaxed);
    });
    let wrong = || {
        let seen = |root: &Path, number| Seen::of(&directory(root, number)).unwrap();
        (0..ROUNDS).filter(|number| seen(&volume.path, *number) != seen(&volume.backing, *number)).count()
    };
    eprintln!("{} directories are outdated at first", wrong());
    until("all attributes are right", || wrong() == 0);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// ext4 gives several changes the same mtime: each names another time of the clock's tick.
#[test]
fn a_listing_after_each_change_is_that_of_the_directory() {
    let volume = Volume::new();
    let (path, other) = (volume.path("d"), volume.path("e"));
    fs::create_dir(&path).unwrap();
    fs::create_dir(&other).unwrap();
    let mut same_time = 0;
    for number in 0..2000 {
        let name = format!("f{}", number % 7);
        let before = Seen::of(&path).unwrap().modified;
        match number % 4 {
            0 => drop(File::create(path.join(&name)).unwrap()),
            1 => fs::create_dir(path.join(format!("d{number}"))).unwrap(),
            2 => fs::rename(path.join(format!("d{}", number - 1)), other.join("moved")).unwrap(),
            _ => {
                fs::rename(other.join("moved"), path.join("moved")).unwrap();
                fs::remove_dir(path.join("moved")).unwrap();
            }
        }
        same_time += usize::from(Seen::of(&path).unwrap().modified == before);
        assert_eq!(names(&path), names(&volume.backing.join("d")), "after change {number}");
    }
    eprintln!("{same_time} changes did not change the time");
}

#[test]
fn a_listing_is_right_after_changes_and_listings_at_the_same_time() {
    const ROUNDS: usize = 300;
    let volume = Volume::new();
    let path = volume.path("d");
    fs::create_dir(&path).unwrap();
    (0..400).for_each(|number| drop(File::create(path.join(format!("{number}"))).unwrap()));
    let (done, lacking) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut wrong = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while done.load(Ordering::Relaxed) == 0 {
                    let found = names(&path);
                    let lost = (0..400).filter(|number| !found.contains(&number.to_string())).count();
                    lacking.fetch_add(lost, Ordering::Relaxed);
                }
            });
        }
        for number in 0..ROUNDS {
            File::create(path.join(format!("new{number}"))).unwrap();
            if number % 2 == 0 {
                fs::remove_file(path.join(format!("new{number}"))).unwrap();
            }
            if names(&path) != names(&volume.backing.join("d")) {
                wrong.push(number);
            }
        }
        done.store(1, Ordering::Relaxed);
    });
    assert_eq!(lacking.into_inner(), 0, "names that a listing lacked");
    assert_eq!(wrong, [0; 0], "rounds after which a listing was outdated");
}

/// Its pages stay in the kernel, and the daemon gets no FLUSH; close(2) nevertheless reports it.
#[test]
fn a_close_reports_that_what_was_stored_in_a_mapping_does_not_fit() {
    let volume = Volume::with(Setup { capacity_bytes: 64 << 10, confine: true, ..Setup::default() });
    for is_first in [true, false] {
        let file = File::options().read(true).write(true).create_new(true).open(volume.path("f")).unwrap();
        fs::write(volume.path("full"), vec![1; 40 << 10]).unwrap();
        file.set_len(64 << 10).unwrap();
        store_everywhere(&file, 64 << 10);
        assert_eq!(nix::unistd::close(file), Err(nix::errno::Errno::ENOSPC), "first: {is_first}");
        fs::remove_file(volume.path("f")).unwrap();
    }
}

#[expect(unsafe_code, reason = "there is no safe mmap")]
fn store_everywhere(file: &File, length: usize) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    // SAFETY: the file has `length` bytes; nothing else uses the mapping.
    unsafe {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        let start = mmap(std::ptr::null_mut(), length, flags, MapFlags::SHARED, file, 0).unwrap();
        (0..length).for_each(|at| start.cast::<u8>().add(at).write_volatile(7));
        munmap(start, length).unwrap();
    }
}

#[test]
fn what_other_programs_change_in_the_pool_is_seen_after_a_second() {
    // A busy machine may be late in all attempts but one.
    const ATTEMPTS: usize = 5;
    let volume = Volume::with(Setup { changed_from_outside: true, ..Setup::default() });
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= here(Duration::from_secs(3))) {
        assert!(took.len() < ATTEMPTS, "{took:?}");
        took.push(a_change_is_seen_after(&volume));
    }
}

/// The longest time until something that is changed in the pool is seen in the volume.
fn a_change_is_seen_after(volume: &Volume) -> Duration {
    fs::write(volume.path("f"), "old").unwrap();
    assert_eq!(errno(fs::metadata(volume.path("new"))), libc::ENOENT);
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "old");
    fs::write(volume.backing.join("new"), "new").unwrap();
    fs::write(volume.backing.join("f"), "longer").unwrap();
    assert_eq!(fs::read_to_string(volume.path("new")).unwrap(), "new", "a missing name is not remembered");
    let changed = Instant::now();
    until("the new size is seen", || fs::metadata(volume.path("f")).unwrap().len() == 6);
    let size_after = changed.elapsed();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "longer");
    fs::remove_file(volume.backing.join("f")).unwrap();
    let removed = Instant::now();
    until("the removal is seen", || fs::metadata(volume.path("f")).is_err());
    fs::remove_file(volume.path("new")).unwrap();
    size_after.max(removed.elapsed())
}

/// The kernel unmounts what is mounted on a name that it looks up again, after any error but ENOMEM.
#[test]
fn a_daemon_without_free_descriptors_unmounts_nothing() {
    let volume = Volume::with(Setup { changed_from_outside: true, ..Setup::default() });
    fs::create_dir(volume.path("d")).unwrap();
    nix::mount::mount(Some("tmpfs"), &volume.path("d"), Some("tmpfs"), MsFlags::empty(), None::<&str>)
        .unwrap();
    fs::write(volume.path("d/f"), "mounted").unwrap();
    let daemon = Pid::from_raw(i32::try_from(volume.pid()).unwrap());
    let limited =
        |current| prlimit(daemon, Resource::Nofile, Rlimit { current, ..getrlimit(Resource::Nofile) });
    let before = limited(Some(3)).unwrap();
    let begun = Instant::now();
    // Its name is valid for a second.
    let refused = loop {
        match fs::read(volume.path("d/f")) {
            Ok(_) => {
                assert!(begun.elapsed() < here(Duration::from_secs(20)), "the name is never looked up again");
            }
            Err(error) => break error,
        }
        std::thread::yield_now();
    };
    prlimit(daemon, Resource::Nofile, before).unwrap();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOMEM));
    assert_eq!(fs::read(volume.path("d/f")).unwrap(), b"mounted");
    fixture::unmount(&volume.path("d"));
}
