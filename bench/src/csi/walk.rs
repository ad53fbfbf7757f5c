//! Walks over all files of a volume, as find(1) with a test of each does: how many inodes the kernel knows meanwhile, and
//! what the daemon's memory is before, after, and when the kernel has forgotten them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ::tests::{Sandbox, eventually};
use anyhow::{Context, Result, anyhow, ensure};
use nix::mount::MsFlags;

use super::TIMEOUT;
use super::client::Volume;
use super::takeover::pids;
use crate::rows::{Row, resident};

const WALKS: usize = 2;
const KNOWN: &str = "hawser_volume_known_nodes ";
const LIMIT: &str = "hawser_volume_known_node_limit ";
const REFUSED: &str = "hawser_volume_refused_nodes_total ";
/// The daemon returns memory within this time.
const RETURNED: Duration = Duration::from_millis(500);
/// Between two looks at the metrics.
const LOOK: Duration = Duration::from_millis(50);

/// `files`: in the volume, which is staged.
pub(super) fn over(sandbox: &Sandbox, volume: &Volume, files: usize) -> Result<Vec<Row>> {
    let metrics = volume.metrics(&sandbox.path("run"));
    let daemon = *pids(sandbox, "hawser-volume")?.first().context("no daemon serves")?;
    let memory = || resident(daemon).map(|(resident_mib, _)| resident_mib);
    let limit = metric(&metrics, LIMIT)?;
    let before = memory()?;
    let (mut took, mut most, mut walked, mut forgotten) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..WALKS {
        let (seconds, known) = most_known(&metrics, || walk_all(&volume.globalmount, files))?;
        took.push(seconds);
        most.push(known);
        walked.push(memory()?);
        // The kernel drops what it does not use.
        nix::mount::mount(None::<&str>, &volume.globalmount, None::<&str>, remounted(), None::<&str>)
            .context("remount the volume")?;
        eventually("the kernel knows the root alone", TIMEOUT, || {
            let known = metric(&metrics, KNOWN)?;
            ensure!(known <= 1.0, "{known} inodes");
            Ok(())
        })?;
        forgotten.push(settled(memory)?);
    }
    let refused = metric(&metrics, REFUSED)?;
    ensure!(refused == 0.0, "{refused} lookups were refused");
    ensure!(most.iter().all(|known| *known < 2.0 * limit), "{most:?} known inodes, with a limit of {limit}");
    Ok(vec![
        Row::new(format!("a walk with a stat of each of {files} files"), "s", took, None),
        Row::new(format!("known inodes meanwhile, of a limit of {limit}, at most"), "", most, None),
        Row::new("the daemon's resident memory before the walks", "MiB", vec![before], None),
        Row::new("after a walk", "MiB", walked, None),
        Row::new("when the kernel has forgotten the files", "MiB", forgotten, None),
    ])
}

/// The figure when it falls no more: the daemon returns memory soon after the last file was forgotten.
fn settled(figure: impl Fn() -> Result<f64>) -> Result<f64> {
    let mut last = f64::INFINITY;
    loop {
        let now = figure()?;
        if now >= last {
            return Ok(now);
        }
        last = now;
        let begun = Instant::now();
        while begun.elapsed() < RETURNED {
            thread::park_timeout(RETURNED);
        }
    }
}

fn remounted() -> MsFlags {
    MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV
}

/// Seconds.
fn walk_all(dir: &Path, files: usize) -> Result<f64> {
    let begun = Instant::now();
    let found = walk(dir)?;
    ensure!(found == files, "{found} files instead of {files}");
    Ok(begun.elapsed().as_secs_f64())
}

fn walk(dir: &Path) -> Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        let metadata = path.symlink_metadata().with_context(|| path.display().to_string())?;
        files += if metadata.is_dir() { walk(&path)? } else { 1 };
    }
    Ok(files)
}

/// What `run` returns, and the most inodes that the kernel knew meanwhile.
fn most_known<T>(metrics: &Path, run: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| -> Result<f64> {
            let mut most = 0.0_f64;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(metric(metrics, KNOWN)?);
                thread::park_timeout(LOOK);
            }
            Ok(most.max(metric(metrics, KNOWN)?))
        });
        let done = run();
        is_over.store(true, Ordering::Relaxed);
        let most = watcher.join().map_err(|_| anyhow!("the thread that reads metrics panicked"))??;
        Ok((done?, most))
    })
}

/// A value of the daemon's page.
fn metric(socket: &Path, name: &str) -> Result<f64> {
    let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").context("ask for metrics")?;
    let mut page = String::new();
    stream.read_to_string(&mut page).context("read metrics")?;
    let line = page.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    line.trim().parse().with_context(|| format!("{name}{line}"))
}
