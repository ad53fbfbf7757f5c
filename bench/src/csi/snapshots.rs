//! How long a volume's changes wait while CreateSnapshot cuts it, alone and beside a process that writes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ::tests::loop_device::{FileSystem, LoopMount};
use ::tests::{Sandbox, eventually, subvolume};
use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use xtask::progress::step;

use super::client::{Client, Volume};
use super::{TIMEOUT, start};
use crate::rows::{Row, milliseconds};

/// In the volume, beside the one that is written.
const FILES: [usize; 3] = [0, 1_000, 10_000];
/// Sparse.
const POOL_BYTES: u64 = 8 << 30;
const VOLUME_BYTES: i64 = 1 << 30;
const BLOCK: usize = 4096;
/// Of the file that is written.
const BLOCKS: u64 = 1024;

type Parameters = &'static [(&'static str, &'static str)];

pub(super) fn on_xfs(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let _pool = LoopMount::new(sandbox, "pool", FileSystem::Xfs, POOL_BYTES)?;
    snapshots(sandbox, runs, "xfs", &[("dataPath", "daemon"), ("capacity", "daemon")])
}

pub(super) fn on_btrfs(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let _pool = LoopMount::new(sandbox, "pool", FileSystem::Btrfs, POOL_BYTES)?;
    let parameters = &[("dataPath", "daemon"), ("capacity", "daemon")];
    snapshots(sandbox, runs, "btrfs, file by file", parameters)
}

pub(super) fn of_a_subvolume(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let pool = LoopMount::new(sandbox, "pool", FileSystem::Btrfs, POOL_BYTES)?;
    subvolume::enable_quotas(pool.dir())?;
    snapshots(sandbox, runs, "btrfs, a subvolume", &[("dataPath", "daemon"), ("capacity", "kernel")])
}

fn snapshots(sandbox: &Sandbox, runs: usize, pool: &'static str, parameters: Parameters) -> Result<Vec<Row>> {
    let (mut driver, client) = start(sandbox)?;
    let mut rows = Vec::new();
    for files in FILES {
        let title = format!("{pool}, {files} files");
        rows.extend(step(&format!("snapshots: {title}"), || {
            let volume = client.create_with(&format!("snapshots-{files}"), VOLUME_BYTES, parameters)?;
            let rows = of_a_volume(sandbox, &client, &volume, (files, runs, &title));
            client.unstage(&volume)?;
            client.delete(&volume)?;
            rows
        })?);
    }
    driver.stop(TIMEOUT)?;
    Ok(rows)
}

fn of_a_volume(
    sandbox: &Sandbox,
    client: &Client,
    volume: &Volume,
    (files, runs, title): (usize, usize, &str),
) -> Result<Vec<Row>> {
    Client::make_directories(volume)?;
    client.stage(volume)?;
    for file in 0..files {
        let path = volume.globalmount.join(format!("file-{file}"));
        fs::write(&path, [0; 512]).with_context(|| path.display().to_string())?;
    }
    // The first one fills caches. It is refused while the daemon counts what the volume holds.
    eventually("a first snapshot", TIMEOUT, || cut(sandbox, client, volume, &format!("first-{files}")))?;
    let (mut took, mut paused) = (Vec::new(), Vec::new());
    for run in 0..runs {
        let (milliseconds, pause) = cut(sandbox, client, volume, &format!("alone-{files}-{run}"))?;
        took.push(milliseconds);
        paused.push(pause);
    }
    let mut rows = vec![
        Row::new(format!("CreateSnapshot: {title}"), "ms", took, None),
        Row::new(format!("its pause: {title}"), "ms", paused, None),
    ];
    let (mut paused, mut longest) = (Vec::new(), Vec::new());
    beside_a_writer(&volume.globalmount.join("written"), |writer| {
        for run in 0..runs {
            writer.longest_write();
            let (_, pause) = cut(sandbox, client, volume, &format!("beside-{files}-{run}"))?;
            paused.push(pause);
            longest.push(milliseconds(writer.longest_write()));
        }
        Ok(())
    })?;
    rows.push(Row::new(format!("its pause beside a writer: {title}"), "ms", paused, None));
    rows.push(Row::new(format!("the writer's longest write(2) meanwhile: {title}"), "ms", longest, None));
    Ok(rows)
}

/// Makes a snapshot and removes it. Milliseconds of the call, and of the pause as the driver's journal has it.
fn cut(sandbox: &Sandbox, client: &Client, volume: &Volume, name: &str) -> Result<(f64, f64)> {
    let begun = Instant::now();
    let id = client.create_snapshot(volume, name)?;
    let took = milliseconds(begun.elapsed());
    let path = sandbox.path("state/snapshots").join(format!("{id}.json"));
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let record: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let pause_us = record["pause_us"].as_f64().with_context(|| format!("{}: no pause_us", path.display()))?;
    client.delete_snapshot(&id)?;
    Ok((took, pause_us / 1000.0))
}

/// Overwrites blocks of one file, one after the other, without a break.
#[derive(Debug, Default)]
struct Writer {
    ends: AtomicBool,
    longest_ns: AtomicU64,
}

impl Writer {
    fn write(&self, file: &File) -> Result<()> {
        for block in (0..BLOCKS).cycle() {
            if self.ends.load(Ordering::Relaxed) {
                return Ok(());
            }
            let begun = Instant::now();
            file.write_all_at(&[1; BLOCK], block * BLOCK as u64).context("write")?;
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.longest_ns.fetch_max(took, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Of those that ended since the last call.
    fn longest_write(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.swap(0, Ordering::Relaxed))
    }
}

fn beside_a_writer(path: &Path, run: impl FnOnce(&Writer) -> Result<()>) -> Result<()> {
    let file = File::create_new(path).with_context(|| path.display().to_string())?;
    let writer = Writer::default();
    thread::scope(|scope| {
        let thread = scope.spawn(|| writer.write(&file));
        let done = run(&writer);
        writer.ends.store(true, Ordering::Relaxed);
        let wrote = thread.join().map_err(|_| anyhow!("the writer panicked"))?;
        done.and(wrote)
    })
}
