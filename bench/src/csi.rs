//! `bench csi`: the driver's calls, each on a connection of its own as kubelet's
//! are; two hundred volumes at once; memory.
//!
//! A figure is the time from before the connection to the answer. The pool is a
//! directory of the machine's /tmp, on its disk.

mod client;
mod crash;
mod snapshots;
pub(super) mod takeover;
pub(super) mod volume;
mod walk;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ::tests::lone_driver::{self, TRACE};
use ::tests::{Daemon, Node, NodeOptions, Sandbox};
use anyhow::{Context, Result, anyhow, ensure};
use xtask::build::{products, require_root};
use xtask::foreign::debian_program;
use xtask::progress::{part, step};
use xtask::timeline;

use self::client::{Client, Volume};
use super::rows::{Bar, Row, milliseconds, resident};
use super::scene;

const VOLUMES: usize = 200;
const AT_ONCE: usize = 20;
const TIMEOUT: Duration = Duration::from_secs(30);

/// How often each call is made at the least: fewer say nothing about a median.
const RUNS_MIN: usize = 20;

/// `only`: of the parts whose name contains it.
pub(super) fn run(runs: usize, only: Option<&str>) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    let parts: [(&str, scene::Scene); 7] = [
        ("calls", calls),
        ("many", many),
        ("manifest launcher", manifest_launcher),
        ("snapshots on xfs", snapshots::on_xfs),
        ("snapshots on btrfs, file by file", snapshots::on_btrfs),
        ("snapshots on btrfs, of a subvolume", snapshots::of_a_subvolume),
        ("a million files", crash::scene),
    ];
    let parts = scene::named(&parts, only)?;
    part("build the static binaries", products)?;
    debian_program("mkfs.xfs", "xfsprogs")?;
    debian_program("mkfs.btrfs", "btrfs-progs")?;
    scene::run(&parts, runs)
}

/// A driver with daemons as child processes, over the sandbox's directory `pool`.
fn start(sandbox: &Sandbox) -> Result<(Daemon, Client)> {
    sandbox.make_dir("pool")?;
    let driver = lone_driver::start(
        sandbox,
        &["--node-id", "bench", "--pool-capacity", "100Gi", "--keeper-binary", "none", "--warm-daemons", "0"],
    )?;
    Ok((driver, client(sandbox)))
}

fn client(sandbox: &Sandbox) -> Client {
    let kubelet_dir = sandbox.path("k");
    Client::new(lone_driver::csi_socket(&kubelet_dir), kubelet_dir)
}

/// One volume's whole life, again and again.
fn calls(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let (mut driver, client) = start(sandbox)?;
    let mut times = Times::default();
    step(&format!("{runs} volumes, one after the other"), || {
        for run in 0..=runs {
            // The first one fills caches.
            times.counts = run > 0;
            life(&client, &format!("calls-{run}"), &mut times)?;
        }
        Ok(())
    })?;
    driver.stop(TIMEOUT)?;
    let bars =
        BTreeMap::from([(CREATE, Bar::AtMost(3.0)), (STAGE, Bar::AtMost(12.0)), (PUBLISH, Bar::AtMost(3.0))]);
    let mut rows: Vec<Row> = times.rows(|title| bars.get(title).copied());
    rows.extend(spans(&sandbox.path(TRACE))?);
    Ok(rows)
}

const CREATE: &str = "CreateVolume";
const STAGE: &str = "NodeStageVolume until the first stat through the mount, child process";
const PUBLISH: &str = "NodePublishVolume of a staged volume";

/// Milliseconds by what took them, in the order of their first appearance.
#[derive(Debug, Default)]
struct Times {
    counts: bool,
    samples: Vec<(&'static str, Vec<f64>)>,
}

impl Times {
    fn time<T>(&mut self, title: &'static str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let done = call()?;
        let took = milliseconds(started.elapsed());
        if self.counts {
            match self.samples.iter_mut().find(|(known, _)| *known == title) {
                Some((_, samples)) => samples.push(took),
                None => self.samples.push((title, vec![took])),
            }
        }
        Ok(done)
    }

    fn rows(self, bar: impl Fn(&str) -> Option<Bar>) -> Vec<Row> {
        let rows =
            self.samples.into_iter().map(|(title, samples)| Row::new(title, "ms", samples, bar(title)));
        rows.collect()
    }
}

fn life(client: &Client, name: &str, times: &mut Times) -> Result<()> {
    let volume = times.time(CREATE, || client.create(name))?;
    Client::make_directories(&volume)?;
    times.time(STAGE, || {
        client.stage(&volume)?;
        fs::metadata(&volume.globalmount).context("stat the volume").map(drop)
    })?;
    times.time(PUBLISH, || client.publish(&volume))?;
    times.time("NodeUnpublishVolume", || client.unpublish(&volume))?;
    times.time("NodeUnstageVolume, the daemon's end included", || client.unstage(&volume))?;
    times.time("DeleteVolume", || client.delete(&volume))
}

/// Where the time goes, by the driver's own spans.
fn spans(trace_file: &Path) -> Result<Vec<Row>> {
    let mut lengths: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for span in timeline::read(trace_file)? {
        let took = milliseconds(Duration::from_nanos(span.end_ns.saturating_sub(span.start_ns)));
        lengths.entry(span.name).or_default().push(took);
    }
    let rows =
        lengths.into_iter().map(|(name, samples)| Row::new(format!("span {name}"), "ms", samples, None));
    Ok(rows.collect())
}

/// From nothing to published, and back.
fn many(sandbox: &Sandbox, _runs: usize) -> Result<Vec<Row>> {
    let (mut driver, client) = start(sandbox)?;
    let names: Vec<String> = (0..VOLUMES).map(|number| format!("many-{number}")).collect();
    let (volumes, up) = step(&format!("{VOLUMES} volumes from claim to published"), || {
        all_at_once(&names, |name| {
            let volume = client.create(name)?;
            Client::make_directories(&volume)?;
            client.stage(&volume)?;
            client.publish(&volume)?;
            Ok(volume)
        })
    })?;
    let memory = step("memory", || {
        let mut daemons = Vec::new();
        for process in sandbox.tag().processes()?.iter().filter(|process| process.name == "hawser-volume") {
            daemons.push(resident(process.pid)?);
        }
        ensure!(daemons.len() == VOLUMES, "{} daemons", daemons.len());
        let (resident_mib, shares_mib) = daemons.into_iter().unzip();
        let (driver_mib, _) = resident(driver.pid().as_raw())?;
        let title = format!("the driver's resident memory with {VOLUMES} volumes");
        Ok(vec![
            Row::new(title, "MiB", vec![driver_mib], Some(Bar::AtMost(30.0))),
            Row::new("an idle daemon's resident memory", "MiB", resident_mib, Some(Bar::AtMost(6.0))),
            Row::new("its share of it (Pss)", "MiB", shares_mib, None),
        ])
    })?;
    let (_, down) = step("and away again", || {
        all_at_once(&volumes, |volume: &Volume| {
            client.unpublish(volume)?;
            client.unstage(volume)?;
            client.delete(volume)
        })
    })?;
    driver.stop(TIMEOUT)?;
    let rate = |took: Duration| vec![VOLUMES as f64 / took.as_secs_f64()];
    let mut rows = vec![
        Row::new(
            format!("{VOLUMES} volumes, {AT_ONCE} at a time, from claim to published"),
            "a second",
            rate(up),
            Some(Bar::AtLeast(30.0)),
        ),
        Row::new(
            format!("{VOLUMES} volumes, {AT_ONCE} at a time, unpublished to deleted"),
            "a second",
            rate(down),
            None,
        ),
    ];
    rows.extend(memory);
    Ok(rows)
}

/// `AT_ONCE` clients, until the last has ended; what each call made, and how long all took.
fn all_at_once<W: Sync, T: Send>(
    work: &[W],
    call: impl Fn(&W) -> Result<T> + Sync,
) -> Result<(Vec<T>, Duration)> {
    let queue = Mutex::new(work.iter());
    let worker = || -> Result<Vec<T>> {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().map_err(|_| anyhow!("another client panicked"))?.next();
            let Some(item) = next else { return Ok(done) };
            done.push(call(item)?);
        }
    };
    let started = Instant::now();
    let done: Result<Vec<Vec<T>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|worker| worker.join().map_err(|_| anyhow!("a client panicked"))?).collect()
    });
    let took = started.elapsed();
    Ok((done?.into_iter().flatten().collect(), took))
}

/// A real kubelet runs the mount pod; the calls are ours.
fn manifest_launcher(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let node = step("start hawser-csi and hawser-kubelet", || Node::start(sandbox, NodeOptions::default()))?;
    let client = client(sandbox);
    let mut samples = Vec::new();
    step(&format!("{runs} volumes by mount pods"), || {
        for run in 0..=runs {
            let volume = client.create(&format!("manifest-{run}"))?;
            Client::make_directories(&volume)?;
            let started = Instant::now();
            client.stage(&volume)?;
            fs::metadata(&volume.globalmount).context("stat the volume")?;
            let took = milliseconds(started.elapsed());
            if run > 0 {
                samples.push(took);
            }
            client.unstage(&volume)?;
            client.delete(&volume)?;
        }
        Ok(())
    })?;
    node.stop()?;
    let title = "NodeStageVolume until the first stat through the mount, mount pod";
    Ok(vec![Row::new(title, "ms", samples, None)])
}
