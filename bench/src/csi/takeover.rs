//! `bench takeover`: how long users wait when a volume's daemon is killed, with a keeper and one daemon
//! that waits for a volume.
//!
//! A figure is the time from the kill to the answer of a stat that the kernel has not cached.

use std::fs;
use std::io::ErrorKind;
use std::thread;
use std::time::{Duration, Instant};

use ::tests::node::has_connection;
use ::tests::{Keeper, Launcher, Network, Node, NodeOptions, Sandbox, binaries, lone_driver};
use anyhow::{Context, Result, anyhow, ensure};
use linux::process::{open_pidfd, signal_pidfd, wait_for_end};
use nix::sys::signal::Signal;
use xtask::build::{products, require_root};
use xtask::progress::{part, say, step};

use super::client::{Client, Volume};
use super::{Bar, RUNS_MIN, Row, Scene, TIMEOUT, Table, client, milliseconds, resident};

/// Longer than what the driver takes for a daemon that died at once.
const LIVES: Duration = Duration::from_millis(100);

pub(crate) fn run(runs: usize) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    part("build the static binaries", products)?;
    let mut table = Table::default();
    for scene in [child_processes as Scene, mount_pods] {
        // Entering a sandbox is for a thread's whole life.
        let rows = thread::scope(|scope| {
            let scene = scope.spawn(move || scene(&Sandbox::enter(Network::Own)?, runs));
            scene.join().map_err(|_| anyhow!("its thread panicked"))?
        });
        table.0.extend(rows?);
    }
    say(&table.to_string());
    Ok(())
}

fn child_processes(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    sandbox.make_dir("pool")?;
    let keeper = binaries::find("hawser-keeper")?.display().to_string();
    let mut driver = lone_driver::start(
        sandbox,
        &["--node-id", "bench", "--pool-capacity", "10Gi", "--keeper-binary", &keeper, "--warm-daemons", "1"],
    )?;
    let client = client(sandbox);
    let volume = client.create("takeover")?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    let waits = step(&format!("{runs} daemons killed, child processes"), || waits(sandbox, &volume, runs))?;
    let keepers = pids(sandbox, "hawser-keeper")?;
    let [keeper] = keepers[..] else { return Err(anyhow!("one keeper: {keepers:?}")) };
    let (keeper_mib, _) = resident(keeper)?;
    client.unstage(&volume)?;
    client.delete(&volume)?;
    driver.stop(TIMEOUT)?;
    end(keeper, Signal::SIGTERM)?;
    let mut rows = rows("child process", waits);
    rows.push(Row::new(
        "takeover: the keeper's resident memory",
        "MiB",
        vec![keeper_mib],
        Some(Bar::AtMost(1.0)),
    ));
    Ok(rows)
}

fn mount_pods(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let (launcher, warm_daemons) = (Launcher::Manifest, 1);
    let options = NodeOptions { launcher, keeper: Keeper::Process, warm_daemons, ..NodeOptions::default() };
    let node = step("start hawser-csi and hawser-kubelet", || Node::start(sandbox, options))?;
    let client = client(sandbox);
    let volume = client.create("takeover")?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    let waits = step(&format!("{runs} daemons killed, mount pods"), || waits(sandbox, &volume, runs))?;
    client.unstage(&volume)?;
    client.delete(&volume)?;
    node.stop()?;
    Ok(rows("mount pod", waits))
}

/// Milliseconds from each kill to the next answer.
fn waits(sandbox: &Sandbox, volume: &Volume, runs: usize) -> Result<Vec<f64>> {
    let mut waits = Vec::new();
    for run in 0..=runs {
        let lived = Instant::now();
        while lived.elapsed() < LIVES {
            thread::park_timeout(LIVES);
        }
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

fn rows(daemon: &str, waits: Vec<f64>) -> Vec<Row> {
    let mut sorted = waits.clone();
    sorted.sort_by(f64::total_cmp);
    let p99 = sorted[(sorted.len() * 99).div_ceil(100).saturating_sub(1)];
    vec![
        Row::new(format!("takeover: kill to the next answer, {daemon}"), "ms", waits, None),
        Row::new(format!("takeover: the same, 99th percentile, {daemon}"), "ms", vec![p99], None),
    ]
}

fn pids(sandbox: &Sandbox, program: &str) -> Result<Vec<i32>> {
    let mut processes = sandbox.tag().processes()?;
    processes.retain(|process| process.name == program && !process.command_line.is_empty());
    Ok(processes.into_iter().map(|process| process.pid).collect())
}

fn end(pid: i32, signal: Signal) -> Result<()> {
    let process = open_pidfd(pid)?.context("it runs")?;
    signal_pidfd(&process, signal as i32)?;
    ensure!(wait_for_end(&process, TIMEOUT)?, "process {pid} does not end");
    Ok(())
}
