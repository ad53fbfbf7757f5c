//! Random changes of names and attributes. Each is also made in a directory of the node's own file
//! system, which no kill reaches: that one knows the right answer, and what must be there after.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags, chmodat, linkat,
    lremovexattr, lsetxattr, mkdirat, mknodat, openat, renameat_with, rmdir, symlinkat, unlink, utimensat,
};
use rustix::io::Errno;
use tests::random::Random;

use crate::run::Run;

const THREADS: u64 = 2;
/// Few, so that most names are met again.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const DEEPEST: usize = 3;
/// Operations between comparisons of the whole trees.
const COMPARED_AFTER: u64 = 60;
const ATTRIBUTES: [&str; 2] = ["user.one", "user.two"];

#[derive(Debug, Clone)]
enum Operation {
    Mkdir(PathBuf),
    Fifo(PathBuf),
    Create(PathBuf, Vec<u8>),
    Append(PathBuf, Vec<u8>),
    Symlink(PathBuf),
    Link(PathBuf, PathBuf),
    Rename(PathBuf, PathBuf, RenameFlags),
    Unlink(PathBuf),
    Rmdir(PathBuf),
    SetAttribute(PathBuf, &'static str, Vec<u8>, XattrFlags),
    RemoveAttribute(PathBuf, &'static str),
    Chmod(PathBuf, u32),
    Times(PathBuf, i64),
}

pub(crate) fn run(run: &Run) -> Result<()> {
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads = (0..THREADS).map(|number| scope.spawn(move || churn(run, number)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a panic"))).collect()
    });
    results.into_iter().collect()
}

fn churn(run: &Run, number: u64) -> Result<()> {
    let mut random = Random::new(run.seed.wrapping_add(number));
    let volume = run.dir.join(format!("names-{number}"));
    let right = run.report.join(format!("names-{number}"));
    fs::create_dir(&right).context("make the directory of right answers")?;
    run.step(|| fs::create_dir(&volume))?.context("mkdir")?;
    let mut made = 0_u64;
    while run.goes_on() {
        let operation = draw(&mut random);
        let answer = run.step(|| operation.make(&volume))?;
        let wanted = operation.make(&right);
        ensure!(
            operation.is_right(answer, wanted),
            "operation {made}: {operation:?}: {answer:?}, and not {wanted:?}"
        );
        made += 1;
        if made.is_multiple_of(COMPARED_AFTER) {
            compare(&volume, &right).with_context(|| format!("after operation {made}: {operation:?}"))?;
        }
    }
    compare(&volume, &right).context("at the end")?;
    run.step(|| fs::remove_dir_all(&volume))?.context("remove the tree")
}

fn draw(random: &mut Random) -> Operation {
    let one = path(random);
    match random.below(17) {
        0..=2 => Operation::Mkdir(one),
        3 => Operation::Fifo(one),
        4..=5 => {
            let length = random.index(9000);
            Operation::Create(one, random.bytes(length))
        }
        6 => Operation::Append(one, random.bytes(100)),
        7 => Operation::Symlink(one),
        8 => Operation::Link(one, path(random)),
        9..=11 => {
            let flags = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE];
            Operation::Rename(one, path(random), *random.pick(&flags))
        }
        12 => Operation::Unlink(one),
        13 => Operation::Rmdir(one),
        14 => {
            let flags = [XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE];
            let length = random.index(60);
            let value = random.bytes(length);
            Operation::SetAttribute(one, ATTRIBUTES[random.index(2)], value, *random.pick(&flags))
        }
        15 => Operation::RemoveAttribute(one, ATTRIBUTES[random.index(2)]),
        _ if random.below(2) == 0 => Operation::Chmod(one, *random.pick(&[0o600, 0o655])),
        _ => Operation::Times(one, i64::try_from(random.below(1 << 31)).unwrap_or(0)),
    }
}

fn path(random: &mut Random) -> PathBuf {
    let depth = 1 + random.index(DEEPEST);
    (0..depth).map(|_| *random.pick(&NAMES)).collect()
}

impl Operation {
    /// Whether it may be answered so where another file system gives the answer `wanted`.
    fn is_right(&self, answer: Result<(), Errno>, wanted: Result<(), Errno>) -> bool {
        // rename(2) to a directory that is not empty: POSIX allows both, and XFS chooses the first.
        let is_of_xfs = answer == Err(Errno::EXIST) && wanted == Err(Errno::NOTEMPTY);
        answer == wanted || (is_of_xfs && matches!(self, Self::Rename(..)))
    }

    /// Makes it below `root`.
    fn make(&self, root: &Path) -> Result<(), Errno> {
        let at = |path: &Path| root.join(path);
        match self {
            Self::Mkdir(path) => mkdirat(CWD, at(path), Mode::from_bits_truncate(0o755)),
            Self::Fifo(path) => mknodat(CWD, at(path), FileType::Fifo, Mode::from_bits_truncate(0o644), 0),
            Self::Create(path, content) => {
                write(&at(path), OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY, content)
            }
            // Without a reader, a FIFO answers at once.
            Self::Append(path, content) => write(
                &at(path),
                OFlags::APPEND | OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW,
                content,
            ),
            Self::Symlink(path) => symlinkat("where", CWD, at(path)),
            Self::Link(from, to) => linkat(CWD, at(from), CWD, at(to), AtFlags::empty()),
            Self::Rename(from, to, flags) => renameat_with(CWD, at(from), CWD, at(to), *flags),
            Self::Unlink(path) => unlink(at(path)),
            Self::Rmdir(path) => rmdir(at(path)),
            Self::SetAttribute(path, name, value, flags) => lsetxattr(at(path), *name, value, *flags),
            Self::RemoveAttribute(path, name) => lremovexattr(at(path), *name),
            Self::Chmod(path, mode) => {
                chmodat(CWD, at(path), Mode::from_bits_truncate(*mode), AtFlags::empty())
            }
            Self::Times(path, seconds) => {
                let time = Timespec { tv_sec: *seconds, tv_nsec: 0 };
                let times = Timestamps { last_access: time, last_modification: time };
                utimensat(CWD, at(path), &times, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
    }
}

fn write(path: &Path, flags: OFlags, content: &[u8]) -> Result<(), Errno> {
    let file = openat(CWD, path, flags | OFlags::CLOEXEC, Mode::from_bits_truncate(0o644))?;
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    File::from(file).write_all(content).map_err(errno)
}

/// What users see of one entry.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    links: u64,
    /// Of files and symbolic links.
    length: Option<u64>,
    content: Option<Vec<u8>>,
    attributes: BTreeMap<&'static str, Vec<u8>>,
    /// The other names of its inode.
    names: Vec<PathBuf>,
}

fn compare(volume: &Path, right: &Path) -> Result<()> {
    let (found, mut wanted) = (look(volume)?, look(right)?);
    // On Btrfs a directory has one link, however many directories it contains.
    if volume.symlink_metadata().context("stat the tree's root")?.nlink() == 1 {
        wanted.values_mut().filter(|seen| seen.length.is_none()).for_each(|seen| seen.links = 1);
    }
    for (path, wanted) in &wanted {
        let found = found.get(path).with_context(|| format!("{} is missing", path.display()))?;
        ensure!(found == wanted, "{}: {found:?}, and not {wanted:?}", path.display());
    }
    let more = found.keys().find(|path| !wanted.contains_key(*path));
    ensure!(more.is_none(), "{more:?} should not be there");
    Ok(())
}

fn look(root: &Path) -> Result<BTreeMap<PathBuf, Seen>> {
    let (mut all, mut names) = (BTreeMap::new(), BTreeMap::<u64, Vec<PathBuf>>::new());
    collect(root, root, &mut all, &mut names)?;
    for (inode, seen) in all.values_mut() {
        seen.names.clone_from(&names[inode]);
        seen.names.sort();
    }
    Ok(all.into_iter().map(|(path, (_, seen))| (path, seen)).collect())
}

fn collect(
    root: &Path,
    dir: &Path,
    all: &mut BTreeMap<PathBuf, (u64, Seen)>,
    names: &mut BTreeMap<u64, Vec<PathBuf>>,
) -> Result<()> {
    for entry in fs::read_dir(dir).context("open a directory")? {
        let path = entry.context("read a directory")?.path();
        let metadata = path.symlink_metadata().with_context(|| format!("stat {}", path.display()))?;
        let content = if metadata.is_file() {
            Some(fs::read(&path).with_context(|| format!("read {}", path.display()))?)
        } else {
            None
        };
        let mut attributes = BTreeMap::new();
        for name in ATTRIBUTES {
            let mut value = vec![0; 256];
            match rustix::fs::lgetxattr(&path, name, &mut value) {
                Ok(length) => {
                    value.truncate(length);
                    attributes.insert(name, value);
                }
                Err(Errno::NODATA | Errno::PERM) => {}
                Err(errno) => anyhow::bail!("attribute {name} of {}: {errno}", path.display()),
            }
        }
        let name = path.strip_prefix(root).context("a path in the tree")?.to_path_buf();
        names.entry(metadata.ino()).or_default().push(name.clone());
        let length = (!metadata.is_dir()).then_some(metadata.len());
        let (mode, links) = (metadata.mode(), metadata.nlink());
        let seen = Seen { mode, links, length, content, attributes, names: Vec::new() };
        let earlier = all.insert(name, (metadata.ino(), seen));
        ensure!(earlier.is_none(), "{} is listed twice", path.display());
        if metadata.is_dir() {
            collect(root, &path, all, names)?;
        }
    }
    Ok(())
}
