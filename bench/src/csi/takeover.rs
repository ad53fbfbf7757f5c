//! `bench takeover`: how long users wait when a volume's daemon is killed, with a keeper, and with and
//! without a daemon that waits for a volume; the start of a volume by such a daemon; what the processes
//! take of the memory.
//!
//! A takeover's figure is the time from the kill to the answer of a stat that the kernel has not cached.

use std::fs;
use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use ::tests::node::has_connection;
use ::tests::{Keeper, Launcher, Node, NodeOptions, Sandbox, binaries, eventually, lone_driver};
use anyhow::{Context, Result, anyhow, ensure};
use linux::process::{open_pidfd, signal_pidfd, wait_for_end};
use nix::sys::signal::Signal;
use xtask::build::{products, require_root};
use xtask::progress::{part, step};

use super::client::{Client, Volume};
use super::{RUNS_MIN, TIMEOUT, client};
use crate::rows::{Bar, Row, milliseconds, resident};
use crate::scene;
use crate::statistics::percentile;

/// Longer than what the driver takes for a daemon that died at once, and than it needs for the next one
/// that waits for a volume.
const LIVES: Duration = Duration::from_millis(100);
/// Longer than what the driver takes for a keeper that died early: before the next one it waits.
const KEEPER_LIVES: Duration = Duration::from_secs(11);
const KEEPERS: usize = 5;
/// As the driver's default.
const WARM: u8 = 1;
/// Whose connections the keeper holds when its memory is read.
const VOLUMES: usize = 20;

pub(crate) fn run(runs: usize) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    part("build the static binaries", products)?;
    scene::run(
        &[
            ("child processes", |sandbox, runs| child_processes(sandbox, runs, WARM)),
            ("child processes, none waits", |sandbox, runs| child_processes(sandbox, runs, 0)),
            ("mount pods", |sandbox, runs| mount_pods(sandbox, runs, WARM)),
            ("mount pods, none waits", |sandbox, runs| mount_pods(sandbox, runs, 0)),
        ],
        runs,
    )
}

fn child_processes(sandbox: &Sandbox, runs: usize, warm_daemons: u8) -> Result<Vec<Row>> {
    sandbox.make_dir("pool")?;
    let keeper = binaries::find("hawser-keeper")?.display().to_string();
    let warm = warm_daemons.to_string();
    let mut driver = lone_driver::start(
        sandbox,
        &[
            "--node-id",
            "bench",
            "--pool-capacity",
            "10Gi",
            "--keeper-binary",
            &keeper,
            "--warm-daemons",
            &warm,
        ],
    )?;
    let client = client(sandbox);
    let mut rows = takeovers(sandbox, &client, runs, "child process", warm_daemons)?;
    if warm_daemons > 0 {
        rows.extend(memory(sandbox, &client)?);
        rows.push(keepers(sandbox, &client)?);
    }
    driver.stop(TIMEOUT)?;
    end(keeper_of(sandbox)?, Signal::SIGTERM)?;
    Ok(rows)
}

fn mount_pods(sandbox: &Sandbox, runs: usize, warm_daemons: u8) -> Result<Vec<Row>> {
    let launcher = Launcher::Manifest;
    let options = NodeOptions { launcher, keeper: Keeper::Process, warm_daemons, ..NodeOptions::default() };
    let node = step("start hawser-csi and hawser-kubelet", || Node::start(sandbox, options))?;
    let client = client(sandbox);
    let mut rows = takeovers(sandbox, &client, runs, "mount pod", warm_daemons)?;
    if warm_daemons > 0 {
        rows.push(stages(sandbox, &client, runs)?);
    }
    node.stop()?;
    Ok(rows)
}

fn takeovers(
    sandbox: &Sandbox,
    client: &Client,
    runs: usize,
    daemon: &str,
    warm_daemons: u8,
) -> Result<Vec<Row>> {
    let volume = staged(client, "takeover")?;
    let daemons = match warm_daemons {
        0 => format!("{daemon}, none waits"),
        _ => format!("{daemon}, one waits"),
    };
    let waits = step(&format!("{runs} daemons killed, {daemons}"), || waits(sandbox, &volume, runs))?;
    remove(client, &volume)?;
    let (middle, last) = match warm_daemons {
        0 => (None, None),
        _ => (Some(Bar::AtMost(5.0)), Some(Bar::AtMost(20.0))),
    };
    let p99 = percentile(&waits, 99);
    Ok(vec![
        Row::new(format!("takeover: kill to the next answer, {daemons}"), "ms", waits, middle),
        Row::new(format!("takeover: the same, 99th percentile, {daemons}"), "ms", vec![p99], last),
    ])
}

/// From the keeper's death until another one holds the volume's connection.
fn keepers(sandbox: &Sandbox, client: &Client) -> Result<Row> {
    let volume = staged(client, "keepers")?;
    let times = step(&format!("{KEEPERS} keepers killed"), || {
        let mut times = Vec::new();
        for _ in 0..KEEPERS {
            thread::park_timeout(KEEPER_LIVES);
            let keeper = keeper_of(sandbox)?;
            let killed = Instant::now();
            end(keeper, Signal::SIGKILL)?;
            while !pids(sandbox, "hawser-keeper")?.into_iter().any(|pid| pid != keeper && has_connection(pid))
            {
                ensure!(killed.elapsed() < TIMEOUT, "no keeper holds the volume's connection");
            }
            times.push(milliseconds(killed.elapsed()));
        }
        Ok(times)
    })?;
    remove(client, &volume)?;
    Ok(Row::new("takeover: the keeper's death until another one holds the volume", "ms", times, None))
}

/// With a mount pod that waits for a volume.
fn stages(sandbox: &Sandbox, client: &Client, runs: usize) -> Result<Row> {
    let times = step(&format!("{runs} volumes by mount pods that wait"), || {
        let mut times = Vec::new();
        for run in 0..=runs {
            wait_until_one_waits(sandbox)?;
            let volume = client.create(&format!("stage-{run}"))?;
            Client::make_directories(&volume)?;
            let started = Instant::now();
            client.stage(&volume)?;
            fs::metadata(&volume.globalmount).context("stat the volume")?;
            if run > 0 {
                times.push(milliseconds(started.elapsed()));
            }
            remove(client, &volume)?;
        }
        Ok(times)
    })?;
    let title = "takeover: NodeStageVolume until the first stat, mount pod that waits";
    Ok(Row::new(title, "ms", times, Some(Bar::AtMost(5.0))))
}

/// Resident memory of the keeper and of idle daemons.
fn memory(sandbox: &Sandbox, client: &Client) -> Result<Vec<Row>> {
    let names = (0..VOLUMES).map(|number| format!("memory-{number}"));
    let volumes: Vec<Volume> = names.map(|name| staged(client, &name)).collect::<Result<_>>()?;
    let keeper = resident(keeper_of(sandbox)?)?.0;
    let mut daemons = Vec::new();
    for pid in pids(sandbox, "hawser-volume")? {
        if has_connection(pid) {
            daemons.push(resident(pid)?.0);
        }
    }
    ensure!(daemons.len() == VOLUMES, "{} daemons serve", daemons.len());
    volumes.iter().try_for_each(|volume| remove(client, volume))?;
    let most = 1.0 + VOLUMES as f64 * 4.0 / 1024.0;
    Ok(vec![
        Row::new(
            format!("takeover: the keeper's resident memory, {VOLUMES} volumes"),
            "MiB",
            vec![keeper],
            Some(Bar::AtMost(most)),
        ),
        Row::new("takeover: an idle daemon's resident memory", "MiB", daemons, Some(Bar::AtMost(3.0))),
    ])
}

fn staged(client: &Client, name: &str) -> Result<Volume> {
    let volume = client.create(name)?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    Ok(volume)
}

fn remove(client: &Client, volume: &Volume) -> Result<()> {
    // After an answer, the driver still records the takeover.
    eventually("the volume is unstaged", TIMEOUT, || client.unstage(volume))?;
    client.delete(volume)
}

fn wait_until_one_waits(sandbox: &Sandbox) -> Result<()> {
    eventually("a mount pod waits for a volume", TIMEOUT, || {
        let daemons = pids(sandbox, "hawser-volume")?;
        ensure!(daemons.iter().any(|pid| !has_connection(*pid)), "{daemons:?}");
        Ok(())
    })?;
    // It has started, but may not have said so.
    thread::park_timeout(LIVES);
    Ok(())
}

pub(super) fn keeper_of(sandbox: &Sandbox) -> Result<i32> {
    let keepers = pids(sandbox, "hawser-keeper")?;
    let [keeper] = keepers[..] else { return Err(anyhow!("one keeper: {keepers:?}")) };
    Ok(keeper)
}

/// Milliseconds from each kill to the next answer.
fn waits(sandbox: &Sandbox, volume: &Volume, runs: usize) -> Result<Vec<f64>> {
    let mut waits = Vec::new();
    for run in 0..=runs {
        thread::park_timeout(LIVES);
        let mut daemons = pids(sandbox, "hawser-volume")?;
        daemons.retain(|pid| has_connection(*pid));
        let [daemon] = daemons[..] else { return Err(anyhow!("one daemon that serves: {daemons:?}")) };
        let killed = Instant::now();
        end(daemon, Signal::SIGKILL)?;
        // Never looked up before, so the kernel must ask.
        match fs::metadata(volume.globalmount.join(format!("absent-{run}"))) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => return Err(anyhow!("run {run}: {other:?}")),
        }
        if run > 0 {
            waits.push(milliseconds(killed.elapsed()));
        }
    }
    Ok(waits)
}

pub(super) fn pids(sandbox: &Sandbox, program: &str) -> Result<Vec<i32>> {
    let mut processes = sandbox.tag().processes()?;
    processes.retain(|process| process.name == program && !process.command_line.is_empty());
    Ok(processes.into_iter().map(|process| process.pid).collect())
}

pub(super) fn end(pid: i32, signal: Signal) -> Result<()> {
    let process = open_pidfd(pid)?.context("it runs")?;
    signal_pidfd(&process, signal as i32)?;
    ensure!(wait_for_end(&process, TIMEOUT)?, "process {pid} does not end");
    Ok(())
}
