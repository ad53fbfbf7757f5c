//! Reads single files of the manifest directory, each in its own thread.
//!
//! The directory may contain anything: a FIFO, a device, a link into a file system that does not
//! answer, a file that grows while it is read.
//!
//! Invariant: no caller waits for a thread of this module. A file that is not read in time counts
//! as unread, and its thread continues. There are at most `THREADS`.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use super::seen::{Fingerprint, SeenFile};
use crate::manifest::{self, FILE_BYTES, TIME};

/// Concurrent readers that are not overdue.
const ACTIVE: usize = 4;
/// All readers, including those that hang in a file system.
const THREADS: usize = 64;
/// Reading and parsing have their own limit; this one detects a hanging file system.
const OVERDUE: Duration = TIME.saturating_add(Duration::from_secs(1));

/// The result for one file.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Missing, or not a regular file.
    NoFile,
    /// The fingerprint is unchanged.
    Unchanged,
    Read(SeenFile),
}

#[derive(Debug)]
pub(super) struct Finished {
    pub(super) outcome: Outcome,
    /// The read started before the request: the file may have changed since.
    pub(super) is_late: bool,
}

#[derive(Debug)]
pub(super) struct Readers {
    running: HashMap<PathBuf, Instant>,
    sender: Sender<(PathBuf, Outcome)>,
    results: Receiver<(PathBuf, Outcome)>,
}

impl Default for Readers {
    fn default() -> Self {
        let (sender, results) = mpsc::channel();
        Self { running: HashMap::new(), sender, results }
    }
}

impl Readers {
    /// Reads these files until `until`. A later call for the same paths returns the rest.
    pub(super) fn read(
        &mut self,
        wanted: &[(PathBuf, Option<Fingerprint>)],
        until: Instant,
    ) -> HashMap<PathBuf, Finished> {
        let begun = Instant::now();
        let mut finished = HashMap::new();
        let mut missing: HashSet<&Path> =
            wanted.iter().map(|(path, _)| path.as_path()).filter(|path| !self.is_overdue(path)).collect();
        let mut waiting = wanted.iter().peekable();
        loop {
            while let Some((path, known)) = waiting.next_if(|(path, _)| self.has_room(path)) {
                self.start(path, known.clone());
            }
            if missing.is_empty() {
                break;
            }
            let left = until.saturating_duration_since(Instant::now());
            let Ok((path, outcome)) = self.results.recv_timeout(left) else { break };
            let since = self.running.remove(&path);
            missing.remove(path.as_path());
            finished.insert(path, Finished { outcome, is_late: since.is_none_or(|since| since < begun) });
        }
        finished
    }

    /// Whether a reader of this path is overdue.
    pub(super) fn is_overdue(&self, path: &Path) -> bool {
        self.running.get(path).is_some_and(|since| since.elapsed() > OVERDUE)
    }

    /// Whether a reader of this path runs or may start.
    fn has_room(&self, path: &Path) -> bool {
        let active = self.running.values().filter(|since| since.elapsed() <= OVERDUE).count();
        self.running.contains_key(path) || (active < ACTIVE && self.running.len() < THREADS)
    }

    fn start(&mut self, path: &Path, known: Option<Fingerprint>) {
        if self.running.contains_key(path) {
            return;
        }
        let (sender, path) = (self.sender.clone(), path.to_owned());
        self.running.insert(path.clone(), Instant::now());
        let job = {
            let path = path.clone();
            move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| read(&path, known.as_ref())));
                let outcome = outcome.unwrap_or_else(|_| {
                    Outcome::Read(SeenFile::broken(Fingerprint::none(), &path, "the parser panicked"))
                });
                // A closed channel means that the directory is no longer followed.
                let _receiver_gone = sender.send((path, outcome));
            }
        };
        if std::thread::Builder::new().name("manifest".to_owned()).spawn(job).is_err() {
            self.running.remove(&path);
        }
    }
}

fn read(path: &Path, known: Option<&Fingerprint>) -> Outcome {
    let broken = |fingerprint, reason: &str| Outcome::Read(SeenFile::broken(fingerprint, path, reason));
    let (file, fingerprint) = match open(path) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Outcome::NoFile,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Outcome::NoFile,
        Err(cause) => return broken(Fingerprint::none(), &cause.to_string()),
    };
    if known == Some(&fingerprint) {
        return Outcome::Unchanged;
    }
    // The store keeps the path as JSON.
    if path.to_str().is_none() {
        return broken(fingerprint, "the name is not UTF-8: rename the file");
    }
    let mut bytes = Vec::new();
    // One byte over the limit shows that the file has grown.
    if let Err(cause) = file.take(FILE_BYTES as u64 + 1).read_to_end(&mut bytes) {
        return broken(fingerprint, &cause.to_string());
    }
    if bytes.is_empty() {
        // Probably truncated before a rewrite, so it withdraws nothing.
        return broken(fingerprint, "the file is empty: remove it to remove its objects");
    }
    let parsed = manifest::parse(&bytes, &path.display().to_string());
    // A slow parse may be fast on an idle machine, so try again.
    let fingerprint = if parsed.out_of_time { Fingerprint::none() } else { fingerprint };
    Outcome::Read(SeenFile::new(fingerprint, parsed))
}

/// Opens a regular file, also through links. Only stats anything else: opening a FIFO blocks, and
/// opening a device may have side effects.
fn open(path: &Path) -> io::Result<Option<(File, Fingerprint)>> {
    let place = OpenOptions::new().read(true).custom_flags(OFlag::O_PATH.bits()).open(path)?;
    let metadata = place.metadata()?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let same = format!("/proc/self/fd/{}", place.as_raw_fd());
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(same)?;
    Ok(Some((file, Fingerprint::of(&metadata))))
}

/// The fingerprint of a regular file that is not a link, without a thread.
pub(super) fn plain_fingerprint(path: &Path) -> Option<Fingerprint> {
    let metadata = fs::symlink_metadata(path).ok()?;
    metadata.is_file().then(|| Fingerprint::of(&metadata))
}
