//! `bench volume`: operations in a volume that another daemon can continue, in one that none can, and
//! in a directory of the same file system, in turn.
//!
//! The daemon of the first records each request before its effect, so that its successor can answer
//! it. The other records nothing: the ratio of the two is what the record costs.

mod operations;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use ::tests::loop_device::{FileSystem, LoopMount};
use ::tests::{Network, Sandbox, binaries, eventually, lone_driver};
use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::Signal;
use xtask::build::{products, require_root};
use xtask::progress::{part, say, step};

use self::operations::{METADATA, Operation, STREAMS};
use super::client::Client;
use super::takeover::{end, keeper_of};
use super::{RUNS_MIN, TIMEOUT, client};
use crate::statistics::{median, spread};

/// Sparse. Larger than what all runs write.
const POOL_BYTES: u64 = 8 << 30;
const VOLUME_BYTES: i64 = 2 << 30;
/// Of the volume with a record to the one without: no user is to notice the record.
const BAR: f64 = 0.95;

/// `only`: of operations whose title contains it.
pub(crate) fn run(runs: usize, only: Option<&str>) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    let is_wanted = |operation: &Operation| only.is_none_or(|word| operation.title.contains(word));
    ensure!(METADATA.iter().chain(&STREAMS).any(is_wanted), "--only {only:?}: no operation");
    part("build the static binaries", products)?;
    let volumes = [Place::volume(true)?, Place::volume(false)?];
    let measured = table(&volumes, runs, is_wanted);
    for volume in volumes {
        volume.end()?;
    }
    say(&measured?);
    Ok(())
}

fn table(volumes: &[Place; 2], runs: usize, is_wanted: impl Fn(&Operation) -> bool) -> Result<String> {
    let mut table = format!(
        "\n| ext4, capacity by the daemon | native us | no record us | record us | record to none, by speed | spread | record to native | bar |\n{}\n",
        "|---".repeat(8) + "|"
    );
    for (operations, bar) in [(&METADATA[..], Some(BAR)), (&STREAMS[..], None)] {
        for operation in operations.iter().filter(|operation| is_wanted(operation)) {
            let measured = step(operation.title, || measure(volumes, operation, runs))?;
            table += &measured.row(operation, bar);
        }
    }
    Ok(table)
}

/// Microseconds of an operation, run by run.
#[derive(Debug, Default)]
struct Measured {
    native: Vec<f64>,
    unrecorded: Vec<f64>,
    recorded: Vec<f64>,
}

fn measure([recorded, unrecorded]: &[Place; 2], operation: &Operation, runs: usize) -> Result<Measured> {
    let mut measured = Measured::default();
    for run in 0..=runs {
        let native = unrecorded.time(operation, Where::Pool, run)?;
        // In turn, so that neither is always the second one.
        let (with, without) = if run % 2 == 0 {
            let with = recorded.time(operation, Where::Volume, run)?;
            (with, unrecorded.time(operation, Where::Volume, run)?)
        } else {
            let without = unrecorded.time(operation, Where::Volume, run)?;
            (recorded.time(operation, Where::Volume, run)?, without)
        };
        // The first one fills caches.
        if run > 0 {
            measured.native.push(native);
            measured.unrecorded.push(without);
            measured.recorded.push(with);
        }
    }
    Ok(measured)
}

impl Measured {
    fn row(&self, operation: &Operation, bar: Option<f64>) -> String {
        let speed =
            |of: &[f64], to: &[f64]| -> Vec<f64> { of.iter().zip(to).map(|(of, to)| to / of).collect() };
        let mut ratios = speed(&self.recorded, &self.unrecorded);
        let (low, high) = spread(&mut ratios);
        let ratio = median(&mut ratios);
        let to_native = median(&mut speed(&self.recorded, &self.native));
        let middle = |samples: &[f64]| median(&mut samples.to_vec());
        let bar = bar.map_or_else(String::new, |bar| {
            format!(">= {bar}: {}", if ratio >= bar { "met" } else { "MISSED" })
        });
        format!(
            "| {} | {:.1} | {:.1} | {:.1} | {ratio:.3} | {low:.2}..{high:.2} | {to_native:.2} | {bar} |\n",
            operation.title,
            middle(&self.native),
            middle(&self.unrecorded),
            middle(&self.recorded),
        )
    }
}

#[derive(Debug, Clone, Copy)]
enum Where {
    /// A directory beside the volumes.
    Pool,
    Volume,
}

type Job = Box<dyn FnOnce(&Path, &Path) -> Result<f64> + Send>;

/// A driver with one volume over a file system of its own, on a thread that is in their sandbox.
struct Place {
    jobs: Sender<(Job, Sender<Result<f64>>)>,
    thread: JoinHandle<Result<()>>,
}

impl Place {
    fn volume(has_successors: bool) -> Result<Self> {
        let (jobs, received) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let thread = thread::spawn(move || serve(has_successors, &ready, &received));
        if is_ready.recv().is_err() {
            return Err(match thread.join() {
                Ok(Err(error)) => error,
                _ => anyhow!("the thread of a driver panicked"),
            });
        }
        Ok(Self { jobs, thread })
    }

    /// Microseconds of one step of the operation.
    fn time(&self, operation: &Operation, at: Where, run: usize) -> Result<f64> {
        let Operation { title, steps, prepare, work, .. } = *operation;
        let job: Job = Box::new(move |pool, volume| {
            let parent = match at {
                Where::Pool => pool,
                Where::Volume => volume,
            };
            let dir = parent.join(format!("{}-{run}", title.replace(|c: char| !c.is_alphanumeric(), "-")));
            operations::time(&dir, steps, prepare, work)
        });
        let (answer, answered) = mpsc::channel();
        self.jobs.send((job, answer)).map_err(|_| anyhow!("a driver's thread ended"))?;
        answered.recv().context("a driver's thread ended")?
    }

    fn end(self) -> Result<()> {
        drop(self.jobs);
        self.thread.join().map_err(|_| anyhow!("a driver's thread panicked"))?
    }
}

fn serve(
    has_successors: bool,
    ready: &Sender<()>,
    jobs: &Receiver<(Job, Sender<Result<f64>>)>,
) -> Result<()> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let _pool = LoopMount::new(&sandbox, "pool", FileSystem::Ext4, POOL_BYTES)?;
    let keeper = match has_successors {
        true => binaries::find("hawser-keeper")?,
        false => PathBuf::from("none"),
    };
    let keeper = keeper.display().to_string();
    let mut driver = lone_driver::start(
        &sandbox,
        &["--node-id", "bench", "--pool-capacity", "7Gi", "--keeper-binary", &keeper, "--warm-daemons", "0"],
    )?;
    let client = client(&sandbox);
    let volume = client.create_of("volume", VOLUME_BYTES)?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    let native = sandbox.path("pool").join("native");
    fs::create_dir(&native).with_context(|| native.display().to_string())?;
    ready.send(()).context("no thread measures")?;
    for (job, answer) in jobs {
        answer.send(job(&native, &volume.globalmount)).context("no thread measures")?;
    }
    eventually("the volume is unstaged", TIMEOUT, || client.unstage(&volume))?;
    client.delete(&volume)?;
    driver.stop(TIMEOUT)?;
    if has_successors {
        end(keeper_of(&sandbox)?, Signal::SIGTERM)?;
    }
    Ok(())
}
