//! Killed processes that cannot end because they wait in a FUSE mount: once a daemon has read a
//! request, the kernel waits for the answer, whatever the signal.
//!
//! Invariant: this module reads only `/proc` and the counts of FUSE connections. It sends no
//! request to a daemon and never waits for a process: of each it reads no files but `status` and
//! `mountinfo`. A reader of others waits while the process executes a program, and that may wait
//! for a daemon.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use linux::mount::FuseConnections;
use linux::mountinfo;
use linux::process::ThreadStatus;
use linux::procfs;

/// A thread that sleeps. Both numbers stay the same for as long as it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Task {
    tid: i32,
    context_switches: u64,
}

/// Threads in uninterruptible sleep that were killed or are exiting, and whose namespace has a
/// mount of this FUSE connection. If it also has a mount of another connection with waiting
/// requests, the thread may wait there.
pub(crate) fn waiting_for(
    connection_minor: u32,
    connections: &FuseConnections,
) -> linux::Result<BTreeSet<Task>> {
    let mut waiting = BTreeSet::new();
    for process in numbers_in(Path::new("/proc"))? {
        // A process that ends meanwhile waits for nothing.
        for task in numbers_in(&process.join("task")).unwrap_or_default() {
            if let Some(found) = killed_and_asleep(&task)
                && must_wait_for(&task, connection_minor, connections)
            {
                waiting.insert(found);
            }
        }
    }
    Ok(waiting)
}

fn numbers_in(dir: &Path) -> linux::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(linux::Error::at("list", dir, e)),
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| number_of(path).is_some()).collect())
}

fn number_of(path: &Path) -> Option<i32> {
    path.file_name()?.to_str()?.parse().ok()
}

fn killed_and_asleep(task: &Path) -> Option<Task> {
    let status = ThreadStatus::parse(&procfs::read(&task.join("status")).ok()?)?;
    let is_killed = status.is_killed || status.is_exiting;
    let context_switches = status.context_switches;
    (status.is_asleep && is_killed).then_some(Task { tid: number_of(task)?, context_switches })
}

fn must_wait_for(task: &Path, connection_minor: u32, connections: &FuseConnections) -> bool {
    let Ok(mounts) = mountinfo::read_at(&task.join("mountinfo")) else { return false };
    let of_daemons = mounts.iter().filter(|mount| mount.fs_type.starts_with("fuse") && mount.major == 0);
    let minors: BTreeSet<u32> = of_daemons.map(|mount| mount.minor).collect();
    let others_wait = |minor: &u32| {
        *minor != connection_minor && connections.waiting(*minor).is_ok_and(|waiting| waiting > Some(0))
    };
    minors.contains(&connection_minor) && !minors.iter().any(others_wait)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_runs_waits_for_a_connection_that_is_not_there() {
        let connections = FuseConnections::open().unwrap();
        assert_eq!(waiting_for(u32::MAX, &connections).unwrap(), BTreeSet::new());
    }
}
