//! flock(2) and fcntl(2) locks: who holds one excludes other processes across the deaths of daemons.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, fcntl_lock, flock};
use rustix::io::Errno;

use crate::run::Run;

const BETWEEN: Duration = Duration::from_millis(2);
const FLOCK: &str = "flock";
const FCNTL: &str = "fcntl";
const NUMBER: &str = "number";

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    file.with_context(|| format!("open {}", path.display()))
}

/// Holds both locks until the end. The first step is done when it has them.
pub(crate) fn hold(run: &Run) -> Result<()> {
    let (whole, records) = (open(&run.dir.join(FLOCK))?, open(&run.dir.join(FCNTL))?);
    flock(&whole, FlockOperation::LockExclusive).context("flock")?;
    fcntl_lock(&records, FlockOperation::LockExclusive).context("fcntl")?;
    let mut number = 0_u64;
    while run.goes_on() {
        number += 1;
        run.step(|| {
            whole.write_all_at(&number.to_le_bytes(), 0).context("write")?;
            let mut bytes = [0; 8];
            whole.read_exact_at(&mut bytes, 0).context("read")?;
            ensure!(bytes == number.to_le_bytes(), "another process has written");
            Ok(())
        })??;
        thread::park_timeout(BETWEEN);
    }
    Ok(())
}

/// Asks for both locks while another process holds them.
pub(crate) fn try_all(run: &Run) -> Result<()> {
    while run.goes_on() {
        run.step(|| {
            let (whole, records) = (open(&run.dir.join(FLOCK))?, open(&run.dir.join(FCNTL))?);
            let refused = flock(&whole, FlockOperation::NonBlockingLockExclusive);
            ensure!(refused == Err(Errno::WOULDBLOCK), "flock: {refused:?} while another process holds it");
            let refused = fcntl_lock(&records, FlockOperation::NonBlockingLockExclusive);
            ensure!(
                matches!(refused, Err(Errno::AGAIN | Errno::ACCESS)),
                "fcntl: {refused:?} while another process holds it"
            );
            Ok(())
        })??;
        thread::park_timeout(BETWEEN);
    }
    Ok(())
}

/// Adds one to a number in a file, alone at any time. Reports how often.
pub(crate) fn count(run: &Run) -> Result<()> {
    let mut added = 0_u64;
    while run.goes_on() {
        run.step(|| add(&run.dir.join(NUMBER)))??;
        added += 1;
    }
    std::fs::write(run.report.join("added"), added.to_string()).context("report")
}

fn add(path: &Path) -> Result<()> {
    let file = open(path)?;
    flock(&file, FlockOperation::LockExclusive).context("flock")?;
    let mut text = vec![0; 32];
    let length = file.read_at(&mut text, 0).context("read")?;
    let text = String::from_utf8_lossy(&text[..length]).into_owned();
    let number: u64 = if text.is_empty() { 0 } else { text.trim().parse().with_context(|| text.clone())? };
    file.write_all_at(format!("{}\n", number + 1).as_bytes(), 0).context("write")?;
    flock(&file, FlockOperation::Unlock).context("unlock")
}
