//! Which way a volume's data takes, by what its daemon has seen of it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::scene::TIMEOUT;
use crate::eventually;

/// Of the file that is written to see the way it takes.
pub const BYTES: u64 = 1 << 20;

/// What is written at once to fill a file.
static PIECE: [u8; 64 << 10] = [7; 64 << 10];

/// What the daemon that serves `socket` shows of itself (docs/METRICS.md).
pub fn metrics(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").context("ask for the metrics")?;
    let mut page = String::new();
    stream.read_to_string(&mut page).context("read the metrics")?;
    Ok(page)
}

/// Fails unless the kernel reads and writes a new file in `dir` of the volume without the daemon. `socket`
/// shows the daemon's metrics.
///
/// Several files may be needed: one whose open waited too long for the keeper takes the daemon's way.
pub fn ensure_it_passes(socket: &Path, dir: &Path) -> Result<()> {
    eventually("a file passes the daemon by", TIMEOUT, || {
        let seen = seen_by_daemon(socket, dir)?;
        ensure!(seen == 0, "the daemon has seen {seen} bytes of a file of {BYTES}");
        Ok(())
    })
}

/// Fails unless the daemon writes all of a new file in `dir` of the volume.
pub fn ensure_daemon_answers(socket: &Path, dir: &Path) -> Result<()> {
    let seen = seen_by_daemon(socket, dir)?;
    ensure!(seen >= BYTES, "the daemon has seen {seen} bytes of a file of {BYTES}");
    Ok(())
}

/// Bytes that the daemon has read and written for a file that is written, synchronised, read and removed.
fn seen_by_daemon(socket: &Path, dir: &Path) -> Result<u64> {
    let path = dir.join("which-way");
    let content = vec![7; usize::try_from(BYTES)?];
    let before = moved(&metrics(socket)?)?;
    let mut file = File::create_new(&path).context("create")?;
    let written = file.write_all(&content).and_then(|()| file.sync_all());
    drop(file);
    let read = written.and_then(|()| fs::read(&path));
    fs::remove_file(&path).context("unlink")?;
    ensure!(read.context("write and read")? == content, "other bytes are read");
    let after = moved(&metrics(socket)?)?;
    after.checked_sub(before).with_context(|| format!("another daemon: {before} bytes, then {after}"))
}

/// Bytes that a daemon has read and written for the volume's users.
fn moved(page: &str) -> Result<u64> {
    let direction = |name: &str| -> Result<u64> {
        let sample = format!("hawser_volume_bytes_total{{direction=\"{name}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&sample));
        Ok(value.with_context(|| format!("no {sample}in {page}"))?.parse()?)
    };
    Ok(direction("read")? + direction("written")?)
}

/// Writes a new file of at most `most` bytes: what fitted, and the errno of the write that did not.
pub fn fill(path: &Path, most: u64) -> io::Result<(u64, Option<i32>)> {
    Ok(fill_file(File::create(path)?, most))
}

/// As [`fill`], with a file that the kernel writes without the daemon, whose metrics `socket` shows.
///
/// Several files may be needed: one whose open waited too long for the keeper takes the daemon's way.
pub fn fill_passing(socket: &Path, path: &Path, most: u64) -> Result<(u64, Option<i32>)> {
    let file = eventually("a file passes the daemon by", TIMEOUT, || {
        let before = moved(&metrics(socket)?)?;
        let mut file = File::create(path).context("create")?;
        file.write_all(&PIECE).context("write")?;
        let after = moved(&metrics(socket)?)?;
        ensure!(after == before, "the daemon has seen {before} bytes, then {after}");
        Ok(file)
    })?;
    let (written, refusal) = fill_file(file, most - PIECE.len() as u64);
    Ok((PIECE.len() as u64 + written, refusal))
}

fn fill_file(mut file: File, most: u64) -> (u64, Option<i32>) {
    let mut written = 0;
    while written < most {
        match file.write(&PIECE) {
            Ok(count) => written += count as u64,
            Err(e) => return (written, e.raw_os_error()),
        }
    }
    (written, None)
}
