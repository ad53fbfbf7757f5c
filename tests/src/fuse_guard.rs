//! Aborts a FUSE connection of the sandbox that has stopped answering, so that
//! no test run hangs in a system call that nothing can interrupt.
//!
//! Wedged means: requests have been waiting at every look for [`SUSPICION`], and
//! then a statfs of the mount is not answered within [`TIMEOUT`]. The probe is
//! sent only on suspicion: a mount that is looked into cannot be unmounted.
//!
//! Invariant: mounts that the namespace had from the machine are left alone: users may be at
//! work there.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use linux::mount::{MountFlags, UnmountMode};
use linux::mountinfo::MountEntry;

use crate::eventually::here;

const LOOK: Duration = Duration::from_millis(100);
const SUSPICION: Duration = Duration::from_millis(400);
/// Of one statfs. On a busy machine a healthy daemon may need seconds.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A mount whose daemon has not answered INIT yet is being staged; drivers have
/// their own deadline, and this one is for those that have none.
const START_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct FuseGuard {
    /// The mount of fusectl.
    fusectl: PathBuf,
    inherited: Arc<HashSet<u64>>,
    is_off: Arc<AtomicBool>,
    stop: Option<Sender<()>>,
    watcher: Option<JoinHandle<()>>,
}

impl FuseGuard {
    /// Mounts fusectl at `fusectl` and watches the FUSE mounts of the calling
    /// thread's mount namespace, which the watching thread inherits.
    pub(crate) fn start(fusectl: &Path) -> Result<Self> {
        fs::create_dir_all(fusectl).with_context(|| fusectl.display().to_string())?;
        linux::mount::mount_fs("fusectl", "fusectl", fusectl, MountFlags::default(), "")
            .context("mount fusectl")?;
        let inherited = Arc::new(fuse_mounts().iter().map(|mount| mount.mount_id).collect());
        let others = Arc::clone(&inherited);
        let (stop, stopped) = channel();
        let dir = fusectl.to_path_buf();
        let is_off = Arc::new(AtomicBool::new(false));
        let switch = is_off.clone();
        let watcher = thread::Builder::new()
            .name("fuse-guard".to_owned())
            .spawn(move || watch(&dir, &others, &switch, &stopped))
            .context("start the FUSE guard")?;
        let fusectl = fusectl.to_path_buf();
        Ok(Self { fusectl, inherited, is_off, stop: Some(stop), watcher: Some(watcher) })
    }

    /// No more aborts before [`Self::finish`].
    pub(crate) fn switch_off(&self) {
        self.is_off.store(true, Ordering::Relaxed);
    }

    /// Aborts every FUSE connection that was mounted in the calling thread's mount
    /// namespace since the start, and ends the watch.
    pub(crate) fn finish(&mut self) {
        drop(self.stop.take());
        if let Some(watcher) = self.watcher.take() {
            let _panicked = watcher.join();
        }
        for mount in own_mounts(&self.inherited) {
            abort(&self.fusectl, mount.minor);
        }
        let _not_mounted = linux::mount::unmount(&self.fusectl, UnmountMode::Detach);
    }
}

/// FUSE mounts of the calling thread's mount namespace (/proc/self would be that of the main thread).
pub(crate) fn fuse_mounts() -> Vec<MountEntry> {
    let mounts = crate::mount_table::mounts().unwrap_or_default();
    mounts.into_iter().filter(|mount| mount.fs_type == "fuse" || mount.fs_type.starts_with("fuse.")).collect()
}

fn own_mounts(inherited: &HashSet<u64>) -> Vec<MountEntry> {
    fuse_mounts().into_iter().filter(|mount| !inherited.contains(&mount.mount_id)).collect()
}

fn watch(fusectl: &Path, inherited: &HashSet<u64>, is_off: &AtomicBool, stopped: &Receiver<()>) {
    let mut waiting_since: HashMap<u32, Instant> = HashMap::new();
    let mut answered: HashMap<u32, bool> = HashMap::new();
    while matches!(stopped.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout)) {
        if is_off.load(Ordering::Relaxed) {
            continue;
        }
        // Before the mount table is read, which has hundreds of lines if hundreds of pods are measured.
        let idle = idle_connections(fusectl);
        if idle.is_complete && waiting_since.is_empty() {
            answered.extend(idle.minors.into_iter().map(|minor| (minor, true)));
            continue;
        }
        let mounts = own_mounts(inherited);
        waiting_since.retain(|minor, _| mounts.iter().any(|mount| mount.minor == *minor));
        for mount in &mounts {
            if requests_waiting(fusectl, mount.minor) == 0 {
                waiting_since.remove(&mount.minor);
                answered.insert(mount.minor, true);
                continue;
            }
            let since = *waiting_since.entry(mount.minor).or_insert_with(Instant::now);
            let suspicion = here(if answered.contains_key(&mount.minor) { SUSPICION } else { START_TIMEOUT });
            if since.elapsed() >= suspicion {
                waiting_since.remove(&mount.minor);
                if !answers(&mount.mount_point) {
                    abort(fusectl, mount.minor);
                }
            }
        }
    }
}

/// The machine's connections in which no request waits.
struct Idle {
    minors: Vec<u32>,
    /// There are no others.
    is_complete: bool,
}

fn idle_connections(fusectl: &Path) -> Idle {
    let mut idle = Idle { minors: Vec::new(), is_complete: true };
    for entry in fs::read_dir(fusectl).into_iter().flatten().flatten() {
        let minor: Option<u32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        match minor.filter(|minor| requests_waiting(fusectl, *minor) == 0) {
            Some(minor) => idle.minors.push(minor),
            None => idle.is_complete = false,
        }
    }
    idle
}

fn requests_waiting(fusectl: &Path, minor: u32) -> u64 {
    let file = fusectl.join(minor.to_string()).join("waiting");
    fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Whether a statfs comes back, with whatever answer. The asking thread of a
/// mount that never answers ends when the connection is aborted.
fn answers(mount_point: &Path) -> bool {
    let (answered, answer) = channel();
    let path = mount_point.to_path_buf();
    thread::spawn(move || {
        let _any_answer = nix::sys::statfs::statfs(&path);
        let _nobody_waits = answered.send(());
    });
    answer.recv_timeout(here(TIMEOUT)).is_ok()
}

#[expect(clippy::print_stderr, reason = "the test's output must show why its calls failed")]
fn abort(fusectl: &Path, minor: u32) {
    match linux::mount::abort_fuse(fusectl, minor) {
        Ok(()) => eprintln!("test support: aborted FUSE connection {minor}"),
        Err(error) => eprintln!("test support: abort FUSE connection {minor}: {error}"),
    }
}
