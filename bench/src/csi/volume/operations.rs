//! What `bench volume` does in a directory.

mod mapped;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::fs::{Advice, XattrFlags, fadvise, removexattr, setxattr};

use super::pgbench::Script;

/// Of a stream.
const STREAM_BYTES: usize = 64 << 20;
const BLOCK_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;
/// Over the file, in one run.
const PASSES: usize = 3;
/// Of one run.
const SYNCS: u64 = 50;
const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits().cast_signed();

/// One kind of work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) title: &'static str,
    pub(super) work: Work,
    /// Whether a run takes seconds, so that a few are enough.
    is_long: bool,
    /// The speed that volumes are to reach, of a native directory's: by the daemon's path, and where the
    /// kernel passes data through.
    pub(super) by_daemon: Option<f64>,
    pub(super) passing: Option<f64>,
    /// On Btrfs, where it is not the same.
    pub(super) passing_on_btrfs: Option<f64>,
    /// By the daemon's path with the writeback cache.
    pub(super) writing_back: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    Steps(Steps),
    /// On the content of one file of 64 MiB, which all runs share. It is timed once.
    Content(Step),
    Transactions(Script),
}

/// A step is timed as the mean of all. Its preparation is not timed, nor are the first rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    steps: usize,
    prepare: Step,
    work: Step,
    untimed_rounds: usize,
}

impl Operation {
    const fn bars(self, by_daemon: f64, passing: f64) -> Self {
        Self { by_daemon: bar(by_daemon), passing: bar(passing), ..self }
    }

    const fn on_btrfs(self, to_reach: f64) -> Self {
        Self { passing_on_btrfs: bar(to_reach), ..self }
    }

    /// Before what is timed, the same steps are done so often.
    const fn after_rounds(self, untimed_rounds: usize) -> Self {
        match self.work {
            Work::Steps(steps) => Self { work: Work::Steps(Steps { untimed_rounds, ..steps }), ..self },
            Work::Content(_) | Work::Transactions(_) => self,
        }
    }

    const fn writing_back(self, to_reach: f64) -> Self {
        Self { writing_back: bar(to_reach), ..self }
    }

    /// Whether the content of files counts most. The others are on names.
    pub(super) fn is_data(&self) -> bool {
        self.passing.is_some()
    }

    /// Whether all that counts is the memory that the kernel keeps the content in.
    pub(super) fn is_of_cached_content(&self) -> bool {
        self.title.contains("read") && self.needs_no_daemon() && !self.title.contains("direct")
    }

    /// Whether the kernel asks the daemon nothing on the way, where data passes through.
    pub(super) fn needs_no_daemon(&self) -> bool {
        matches!(self.work, Work::Content(_)) && !self.title.contains("fsync")
    }

    pub(super) fn runs(&self, wanted: usize) -> usize {
        if self.is_long { wanted.min(LONG_RUNS) } else { wanted }
    }
}

/// 0: none.
const fn bar(bar: f64) -> Option<f64> {
    if bar > 0.0 { Some(bar) } else { None }
}

/// Of an operation whose run takes seconds.
const LONG_RUNS: usize = 5;

/// Measured beside native directories. Databases are last: their servers run from then on.
pub(super) fn beside_native() -> impl Iterator<Item = &'static Operation> {
    DATA.iter().chain(&NAMES).chain(&TREES).chain(&TRANSACTIONS)
}

/// Measured with and without a record.
pub(super) fn beside_unrecorded() -> impl Iterator<Item = &'static Operation> {
    RECORDED.iter().chain(&STREAMS)
}

/// Those that a daemon records before their effect.
pub(super) const RECORDED: [Operation; 12] = [
    metadata("create+write", nothing, |path| fs::write(path, [7; 4096])),
    metadata("open+append+close", file, |path| {
        OpenOptions::new().append(true).open(path)?.write_all(&[7; 100])
    }),
    metadata("truncate", file, |path| OpenOptions::new().write(true).open(path)?.set_len(100)),
    metadata("mkdir", nothing, |path| fs::create_dir(path)),
    metadata("rmdir", |path| fs::create_dir(path), |path| fs::remove_dir(path)),
    metadata("symlink", nothing, |path| symlink("target", path)),
    metadata("link", file, |path| fs::hard_link(path, other(path))),
    metadata("rename", file, |path| fs::rename(path, other(path))),
    metadata("unlink", file, |path| fs::remove_file(path)),
    metadata("setxattr", file, |path| Ok(setxattr(path, "user.key", b"value", XattrFlags::empty())?)),
    metadata(
        "removexattr",
        |path| {
            file(path)?;
            Ok(setxattr(path, "user.key", b"value", XattrFlags::empty())?)
        },
        |path| Ok(removexattr(path, "user.key")?),
    ),
    metadata("stat of an absent name", nothing, absent),
];

const DATA: [Operation; 14] = [
    content("seq write 1 MiB, buffered", |path| write_all(path, BLOCK_BYTES, Order::Sequential))
        .bars(0.25, 0.95),
    content("seq write 4 KiB, buffered", |path| write_all(path, PAGE, Order::Sequential)).bars(0.0, 0.95),
    content("rand write 4 KiB, buffered", |path| write_all(path, PAGE, Order::Random))
        .bars(0.25, 0.95)
        .writing_back(0.85),
    content("seq read 1 MiB, cached", |path| read_all(path, BLOCK_BYTES, Order::Sequential)).bars(0.75, 0.95),
    content("rand read 4 KiB, cached", |path| read_all(path, PAGE, Order::Random))
        .bars(0.0, 0.95)
        .writing_back(0.9),
    content("seq write, mapped", |path| mapped::write(path, STREAM_BYTES)).bars(0.0, 0.95),
    content("seq read, mapped", |path| mapped::read(path, STREAM_BYTES)).bars(0.0, 0.95),
    content("rand write, mapped", |path| mapped::write_pages(path, STREAM_BYTES)).bars(0.0, 0.95),
    content("rand read, mapped", |path| mapped::read_pages(path, STREAM_BYTES)).bars(0.0, 0.95),
    content("seq write 1 MiB, direct", |path| direct(path, BLOCK_BYTES, Order::Sequential, true))
        .bars(0.0, 0.95),
    content("seq read 1 MiB, direct", |path| direct(path, BLOCK_BYTES, Order::Sequential, false))
        .bars(0.0, 0.95),
    content("rand write 4 KiB, direct", |path| direct(path, PAGE, Order::Random, true)).bars(0.0, 0.95),
    content("rand read 4 KiB, direct", |path| direct(path, PAGE, Order::Random, false)).bars(0.0, 0.95),
    content("write 4 KiB + fsync", |path| {
        let file = OpenOptions::new().write(true).open(path)?;
        (0..SYNCS).try_for_each(|at| {
            file.write_all_at(&[8; PAGE], at * PAGE as u64)?;
            file.sync_all()
        })
    })
    .bars(0.0, 0.8)
    .on_btrfs(0.9),
];

const NAMES: [Operation; 6] = [
    metadata(
        "stat, cached",
        |path| file(path).and_then(|()| fs::metadata(path).map(drop)),
        |path| (0..10).try_for_each(|_| fs::metadata(path).map(drop)),
    )
    .bars(0.8, 0.0),
    metadata("create+write 4 KiB", nothing, file).bars(0.22, 0.0),
    metadata("open+read+close 4 KiB, cached", file, |path| fs::read(path).map(drop))
        .after_rounds(2)
        .bars(0.11, 0.0),
    metadata("rename", file, |path| fs::rename(path, other(path))).bars(0.24, 0.0),
    metadata("unlink", file, |path| fs::remove_file(path)).bars(0.24, 0.0),
    metadata("stat of an absent name", nothing, absent),
];

const TREES: [Operation; 5] = [
    tree(
        "stat of 1,000 files, a second after they were made",
        |path| {
            make_tree(path)?;
            stat_tree(path)?;
            std::thread::park_timeout(Duration::from_millis(1200));
            Ok(())
        },
        |path| (0..10).try_for_each(|_| stat_tree(path)),
    )
    .bars(0.8, 0.0),
    tree(
        "tar x, 1,000 files",
        |path| {
            make_tree(&other(path))?;
            run(Command::new("tar")
                .arg("cf")
                .arg(path.with_extension("tar"))
                .arg("-C")
                .arg(other(path))
                .arg("."))?;
            fs::create_dir(path)
        },
        |path| run(Command::new("tar").arg("xf").arg(path.with_extension("tar")).arg("-C").arg(path)),
    )
    .bars(0.26, 0.0),
    tree(
        "5 times git status, warm",
        |path| {
            make_tree(path)?;
            git(path, &["init", "-q"])?;
            // Of files that are as old as the index, git(1) reads the content each time.
            std::thread::park_timeout(Duration::from_millis(1200));
            git(path, &["add", "."])?;
            git(path, &["status", "--porcelain"])
        },
        |path| (0..5).try_for_each(|_| git(path, &["status", "--porcelain"])),
    )
    .bars(0.65, 0.0),
    tree("grep -r", |path| make_tree(path).and_then(|()| grep(path)), grep).bars(0.2, 0.0),
    tree("rm -rf", make_tree, |path| run(Command::new("rm").arg("-rf").arg(path))).bars(0.28, 0.0),
];

/// On a database of its own.
const TRANSACTIONS: [Operation; 2] = [
    transactions("pgbench -S (read-only), 2 clients", Script::SelectOnly).bars(0.0, 0.95),
    transactions("pgbench TPC-B (read-write), 2 clients", Script::TpcB).bars(0.0, 0.9),
];

pub(super) const STREAMS: [Operation; 3] = [
    stream("seq write, buffered, 64 MiB", nothing, |path| {
        let mut file = File::create(path)?;
        let block = vec![7; BLOCK_BYTES];
        (0..STREAM_BYTES / BLOCK_BYTES).try_for_each(|_| file.write_all(&block))
    }),
    stream("seq write and fsync, 64 MiB", nothing, |path| write_stream(path).map(drop)),
    stream("seq read, 64 MiB that are not cached in the volume", uncached_stream, |path| {
        let mut file = File::open(path)?;
        let mut block = vec![0; BLOCK_BYTES];
        while file.read(&mut block)? > 0 {}
        Ok(())
    }),
];

pub(super) type Step = fn(&Path) -> std::io::Result<()>;

const fn operation(title: &'static str, work: Work) -> Operation {
    Operation {
        title,
        work,
        is_long: false,
        by_daemon: None,
        passing: None,
        passing_on_btrfs: None,
        writing_back: None,
    }
}

const fn metadata(title: &'static str, prepare: Step, work: Step) -> Operation {
    operation(title, Work::Steps(Steps { steps: 300, prepare, work, untimed_rounds: 0 }))
}

const fn content(title: &'static str, work: Step) -> Operation {
    operation(title, Work::Content(work))
}

const fn stream(title: &'static str, prepare: Step, work: Step) -> Operation {
    operation(title, Work::Steps(Steps { steps: 1, prepare, work, untimed_rounds: 0 }))
}

/// Of a tree of files.
const fn tree(title: &'static str, prepare: Step, work: Step) -> Operation {
    Operation { is_long: true, ..stream(title, prepare, work) }
}

const fn transactions(title: &'static str, script: Script) -> Operation {
    Operation { is_long: true, ..operation(title, Work::Transactions(script)) }
}

fn nothing(_path: &Path) -> std::io::Result<()> {
    Ok(())
}

fn file(path: &Path) -> std::io::Result<()> {
    fs::write(path, [7; 4096])
}

fn other(path: &Path) -> PathBuf {
    path.with_extension("other")
}

fn write_stream(path: &Path) -> std::io::Result<File> {
    let mut file = File::create(path)?;
    let block = vec![7; BLOCK_BYTES];
    (0..STREAM_BYTES / BLOCK_BYTES).try_for_each(|_| file.write_all(&block))?;
    file.sync_all()?;
    Ok(file)
}

fn uncached_stream(path: &Path) -> std::io::Result<()> {
    let file = write_stream(path)?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

fn absent(path: &Path) -> std::io::Result<()> {
    match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(std::io::Error::other("it is there")),
    }
}

/// Makes the file of 64 MiB if it is not there. Its pages are cached, and none of them is dirty.
fn cached(path: &Path) -> std::io::Result<()> {
    match File::open(path) {
        Ok(file) => file.sync_all()?,
        Err(_) => drop(write_stream(path)?),
    }
    let (file, mut block) = (File::open(path)?, vec![0; BLOCK_BYTES]);
    Order::Sequential.offsets(BLOCK_BYTES).try_for_each(|at| file.read_exact_at(&mut block, at))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Sequential,
    Random,
}

impl Order {
    /// Offsets of blocks of a stream: all, or a quarter of them.
    fn offsets(self, block: usize) -> impl Iterator<Item = u64> {
        let blocks = (STREAM_BYTES / block) as u64;
        let (count, factor) = match self {
            Self::Sequential => (blocks, 1),
            // Odd, so that each block is met once in a cycle of a power of two.
            Self::Random => (blocks / 4, 0x9e37_79b1),
        };
        (0..count).map(move |number| number * factor % blocks * block as u64)
    }
}

fn write_all(path: &Path, block: usize, order: Order) -> std::io::Result<()> {
    let (file, data) = (OpenOptions::new().write(true).open(path)?, vec![9; block]);
    in_passes(|| order.offsets(block).try_for_each(|at| file.write_all_at(&data, at)))
}

fn read_all(path: &Path, block: usize, order: Order) -> std::io::Result<()> {
    let (file, mut data) = (File::open(path)?, vec![0; block]);
    in_passes(|| order.offsets(block).try_for_each(|at| file.read_exact_at(&mut data, at)))
}

/// So often that the open does not count.
fn in_passes(mut pass: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
    (0..PASSES).try_for_each(|_| pass())
}

/// With O_DIRECT; of a random order, a part.
fn direct(path: &Path, block: usize, order: Order, writes: bool) -> std::io::Result<()> {
    const MOST: usize = 1024;
    let mut options = OpenOptions::new();
    let file = options.read(true).write(writes).custom_flags(DIRECT).open(path)?;
    let mut space = vec![0; block + PAGE];
    let aligned = space.as_ptr().align_offset(PAGE);
    let data = &mut space[aligned..aligned + block];
    order.offsets(block).take(MOST).try_for_each(|at| match writes {
        true => file.write_all_at(data, at),
        false => file.read_exact_at(data, at),
    })
}

/// A thousand files of 1 to 16 KiB in fifty directories.
fn make_tree(path: &Path) -> std::io::Result<()> {
    fs::create_dir(path)?;
    for number in 0..50 {
        let dir = path.join(format!("d{number}"));
        fs::create_dir(&dir)?;
        for file in 0..20 {
            let line = format!("line of file {file} in directory {number}\n");
            fs::write(dir.join(format!("f{file}")), line.repeat(30 + 20 * file))?;
        }
    }
    Ok(())
}

fn stat_tree(path: &Path) -> std::io::Result<()> {
    for number in 0..50 {
        let dir = path.join(format!("d{number}"));
        for file in 0..20 {
            fs::metadata(dir.join(format!("f{file}")))?;
        }
    }
    Ok(())
}

fn git(path: &Path, words: &[&str]) -> std::io::Result<()> {
    run(Command::new("git").arg("-C").arg(path).args(["-c", "safe.directory=*"]).args(words))
}

fn grep(path: &Path) -> std::io::Result<()> {
    run(Command::new("grep").args(["-r", "file 7 in directory 7"]).arg(path))
}

fn run(command: &mut Command) -> std::io::Result<()> {
    let output = command.output()?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(std::io::Error::other(format!("{command:?}: {}: {said}", output.status)))
        }
    }
}

/// Microseconds of one step, and how many processors the server used meanwhile, by what `processor` returns.
/// `dir` is new, and is removed afterwards.
pub(super) fn time(dir: &Path, steps: &Steps, processor: impl Fn() -> f64) -> Result<(f64, f64)> {
    let failed = || dir.display().to_string();
    fs::create_dir(dir).with_context(failed)?;
    let timed = time_within(dir, steps, processor)?;
    fs::remove_dir_all(dir).with_context(failed)?;
    Ok(timed)
}

/// The same of work on one file, which stays in `dir` for later runs.
pub(super) fn time_content(dir: &Path, work: Step, processor: impl Fn() -> f64) -> Result<(f64, f64)> {
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    time_within(dir, &Steps { steps: 1, prepare: cached, work, untimed_rounds: 0 }, processor)
}

/// Of the one file that [`time_content`] has left in `dir`.
pub(super) fn pages_in_order(dir: &Path) -> Result<f64> {
    let file = fs::read_dir(dir)?.next().context("no file was measured")??;
    mapped::pages_in_order(&file.path(), STREAM_BYTES).with_context(|| dir.display().to_string())
}

fn time_within(dir: &Path, steps: &Steps, processor: impl Fn() -> f64) -> Result<(f64, f64)> {
    let Steps { steps, prepare, work, untimed_rounds } = *steps;
    let failed = || dir.display().to_string();
    // From within, since the paths to the directories differ in length. The thread shares its working
    // directory with no other: it has a mount namespace of its own (unshare(2)).
    std::env::set_current_dir(dir).with_context(failed)?;
    let paths: Vec<PathBuf> = (0..steps).map(|number| PathBuf::from(format!("f{number}"))).collect();
    paths.iter().try_for_each(|path| prepare(path)).with_context(failed)?;
    let round = || paths.iter().try_for_each(|path| work(path)).with_context(failed);
    (0..untimed_rounds).try_for_each(|_| round())?;
    let (before, begun) = (processor(), Instant::now());
    round()?;
    let took = begun.elapsed().as_secs_f64();
    let cores = (processor() - before) / took;
    std::env::set_current_dir("/").context("/")?;
    Ok((took * 1e6 / steps as f64, cores))
}
