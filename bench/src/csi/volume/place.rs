//! A mounted directory over a file system of its own, on a thread in a sandbox of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use ::tests::loop_device::{FileSystem, LoopMount};
use ::tests::{Daemon, Network, Sandbox, binaries, eventually, lone_driver};
use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::signal::Signal;

use super::super::client::Client;
use super::super::takeover::{end, keeper_of};
use super::super::{TIMEOUT, client};
use super::operations::{self, Operation, Work};
use super::pgbench::Database;

/// Sparse. Larger than what all runs write.
const POOL_BYTES: u64 = 8 << 30;
const VOLUME_BYTES: i64 = 4 << 30;

/// What serves the mounted directory.
#[derive(Debug, Clone)]
pub(super) enum Served {
    /// A driver with one volume of this class; its daemon can be continued only with `has_successors`.
    Ours { parameters: &'static [(&'static str, &'static str)], has_successors: bool },
    /// A program that mounts its first path on its second one, and stays in the foreground.
    Peer { program: PathBuf, options: &'static [&'static str] },
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Where {
    /// A directory of the same file system.
    Native,
    Mounted,
}

/// Time and the daemon's share of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Of one step.
    pub(super) took_us: f64,
    /// Processors that the serving process used meanwhile.
    pub(super) cores: f64,
}

/// Sends its answer itself.
type Job = Box<dyn FnOnce(&mut Places) + Send>;

pub(super) struct Place {
    jobs: Sender<Job>,
    thread: JoinHandle<Result<()>>,
}

/// What the thread of a place has.
struct Places {
    native: Site,
    mounted: Site,
    /// The serving process.
    server: i32,
}

impl Places {
    fn site(&mut self, at: Where) -> &mut Site {
        match at {
            Where::Native => &mut self.native,
            Where::Mounted => &mut self.mounted,
        }
    }
}

/// A directory that is measured.
struct Site {
    dir: PathBuf,
    /// For what a database has outside of `dir`.
    outside: PathBuf,
    /// From its first use on; or why there is none.
    database: Option<Result<Database, String>>,
}

impl Site {
    fn new(sandbox: &Sandbox, name: &str, dir: PathBuf) -> Result<Self> {
        Ok(Self { dir, outside: sandbox.make_dir(name)?, database: None })
    }

    fn content(&self) -> PathBuf {
        self.dir.join("content")
    }

    fn database(&mut self) -> Result<&Database> {
        let Self { dir, outside, database } = self;
        let start = || Database::start(dir, outside).map_err(|error| format!("{error:#}"));
        database.get_or_insert_with(start).as_ref().map_err(|error| anyhow!("{error}"))
    }

    fn end(self) -> Result<()> {
        self.database.and_then(Result::ok).map_or(Ok(()), Database::stop)
    }
}

impl Place {
    pub(super) fn new(kind: FileSystem, served: Served) -> Result<Self> {
        let (jobs, received) = mpsc::channel();
        let (ready, is_ready) = mpsc::channel();
        let thread = thread::spawn(move || serve(kind, &served, &ready, &received));
        if is_ready.recv().is_err() {
            return Err(match thread.join() {
                Ok(Err(error)) => error,
                _ => anyhow!("the thread of a driver panicked"),
            });
        }
        Ok(Self { jobs, thread })
    }

    /// One run of the operation.
    pub(super) fn time(&self, operation: &Operation, at: Where, run: usize) -> Result<Sample> {
        let Operation { title, work, .. } = *operation;
        self.ask(move |places| {
            let server = places.server;
            let processor = || processor_seconds(server);
            let site = places.site(at);
            let (took_us, cores) = match work {
                Work::Steps(steps) => {
                    let name = title.replace(|c: char| !c.is_alphanumeric(), "-");
                    let dir = site.dir.join(format!("{name}-{run}"));
                    operations::time(&dir, &steps, processor)?
                }
                Work::Content(work) => operations::time_content(&site.content(), work, processor)?,
                Work::Transactions(script) => site.database()?.time(script, processor)?,
            };
            Ok(Sample { took_us, cores })
        })
    }

    /// Of the pages of the file of [`Work::Content`], the share that lies behind its predecessor in memory.
    pub(super) fn pages_in_order(&self, at: Where) -> Result<f64> {
        self.ask(move |places| operations::pages_in_order(&places.site(at).content()))
    }

    fn ask<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Places) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = mpsc::channel();
        // Who asked waits for it.
        let job: Job = Box::new(move |places| drop(answer.send(job(places))));
        self.jobs.send(job).map_err(|_| anyhow!("a driver's thread ended"))?;
        answered.recv().context("a driver's thread ended")?
    }

    pub(super) fn end(self) -> Result<()> {
        drop(self.jobs);
        self.thread.join().map_err(|_| anyhow!("a driver's thread panicked"))?
    }
}

type Jobs = Receiver<Job>;

fn serve(kind: FileSystem, served: &Served, ready: &Sender<()>, jobs: &Jobs) -> Result<()> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let pool = LoopMount::new(&sandbox, "pool", kind, POOL_BYTES)?;
    match served {
        Served::Ours { parameters, has_successors } => {
            if parameters.contains(&("capacity", "kernel")) && kind == FileSystem::Btrfs {
                // Of the whole file system: what the native directory holds is counted too.
                run(Command::new("btrfs").args(["quota", "enable"]).arg(sandbox.path("pool")))?;
            }
            serve_volume(&sandbox, parameters, *has_successors, ready, jobs)?;
        }
        Served::Peer { program, options } => serve_peer(&sandbox, program, options, ready, jobs)?,
    }
    drop(pool);
    Ok(())
}

fn serve_volume(
    sandbox: &Sandbox,
    parameters: &[(&str, &str)],
    has_successors: bool,
    ready: &Sender<()>,
    jobs: &Jobs,
) -> Result<()> {
    let keeper = match has_successors {
        true => binaries::find("hawser-keeper")?,
        false => PathBuf::from("none"),
    };
    let keeper = keeper.display().to_string();
    let mut driver = lone_driver::start(
        sandbox,
        &["--node-id", "bench", "--pool-capacity", "7Gi", "--keeper-binary", &keeper, "--warm-daemons", "0"],
    )?;
    let client = client(sandbox);
    let volume = client.create_with("volume", VOLUME_BYTES, parameters)?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    // Users of their own have no way to the staging directory.
    client.publish(&volume)?;
    let daemons = sandbox.tag().processes()?.into_iter().filter(|process| process.name == "hawser-volume");
    let [daemon] = daemons.map(|process| process.pid).collect::<Vec<_>>()[..] else {
        return Err(anyhow!("not one daemon serves"));
    };
    answer_jobs(sandbox, &volume.target, daemon, ready, jobs)?;
    eventually("the volume is unpublished", TIMEOUT, || client.unpublish(&volume))?;
    eventually("the volume is unstaged", TIMEOUT, || client.unstage(&volume))?;
    client.delete(&volume)?;
    driver.stop(TIMEOUT)?;
    if has_successors {
        end(keeper_of(sandbox)?, Signal::SIGTERM)?;
    }
    Ok(())
}

fn serve_peer(
    sandbox: &Sandbox,
    program: &Path,
    options: &[&str],
    ready: &Sender<()>,
    jobs: &Jobs,
) -> Result<()> {
    let source = sandbox.path("pool").join("source");
    let mounted = sandbox.make_dir("peer")?;
    fs::create_dir(&source).with_context(|| source.display().to_string())?;
    let mut command = sandbox.command(program);
    command.args(options).arg(&source).arg(&mounted);
    let mut server = Daemon::start("peer", command, &sandbox.path("peer.log"))?;
    eventually("the peer has mounted", TIMEOUT, || {
        ensure!(rustix::fs::statfs(&mounted)?.f_type == 0x6573_5546, "not FUSE yet: {}", server.output());
        Ok(())
    })?;
    let pid = server.pid().as_raw();
    answer_jobs(sandbox, &mounted, pid, ready, jobs)?;
    linux::mount::unmount(&mounted, linux::mount::UnmountMode::Detach)?;
    server.stop(TIMEOUT).map(drop)
}

fn answer_jobs(
    sandbox: &Sandbox,
    mounted: &Path,
    server: i32,
    ready: &Sender<()>,
    jobs: &Jobs,
) -> Result<()> {
    let native = sandbox.path("pool").join("native");
    fs::create_dir(&native).with_context(|| native.display().to_string())?;
    let native = Site::new(sandbox, "native-database", native)?;
    let mounted = Site::new(sandbox, "mounted-database", mounted.to_owned())?;
    let mut places = Places { native, mounted, server };
    ready.send(()).context("no thread measures")?;
    for job in jobs {
        job(&mut places);
    }
    places.native.end()?;
    places.mounted.end()
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Of all threads of a process, from schedstat (Documentation/scheduler/sched-stats.rst).
fn processor_seconds(pid: i32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let nanoseconds = tasks.filter_map(|task| {
        let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}
