//! Processes that were killed and cannot end, since they wait in a FUSE mount: a request that
//! a daemon has read is waited for until it is answered, whatever the signal.
//!
//! Invariant: what is read here is `/proc` and the counts of FUSE connections. Nothing asks a
//! daemon, or waits for the memory of a process.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use linux::mount::FuseConnections;
use linux::mountinfo;
use linux::process::sigkill_is_pending;
use linux::procfs;

/// Of `flags` in proc_pid_stat(5): the thread ends, and closes its files.
const PF_EXITING: u64 = 0x4;

/// A thread, told from a later one of the same id by the time when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Task {
    tid: i32,
    start_time: u64,
}

/// Threads in uninterruptible sleep that were killed or end, and that see a mount of this
/// FUSE connection. One that sees another connection with waiting requests may wait there.
pub(super) fn waiting_for(
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
    let stat = Stat::parse(&procfs::read(&task.join("stat")).ok()?)?;
    if !stat.is_asleep {
        return None;
    }
    if !stat.is_exiting && !sigkill_is_pending(&procfs::read(&task.join("status")).ok()?) {
        return None;
    }
    Some(Task { tid: number_of(task)?, start_time: stat.start_time })
}

struct Stat {
    is_asleep: bool,
    is_exiting: bool,
    start_time: u64,
}

impl Stat {
    /// The fields follow the name, which may hold anything but its last bracket.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split_whitespace().collect();
        let flags: u64 = fields.get(6)?.parse().ok()?;
        Some(Self {
            is_asleep: *fields.first()? == "D",
            is_exiting: flags & PF_EXITING != 0,
            start_time: fields.get(19)?.parse().ok()?,
        })
    }
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
    fn a_thread_that_was_killed_or_ends_is_told_from_others() {
        let stat = |state: &str, flags: u64| {
            let text = format!("7 (a) S (b) {state} 1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 4711 0");
            Stat::parse(&text).map(|stat| (stat.is_asleep, stat.is_exiting, stat.start_time))
        };
        assert_eq!(stat("D", 0x40_0000), Some((true, false, 4711)));
        assert_eq!(stat("S", 0x40_0004), Some((false, true, 4711)));
        assert!(Stat::parse("7 (a) D 1 7").is_none());
    }

    #[test]
    fn nothing_that_runs_waits_for_a_connection_that_is_not_there() {
        let connections = FuseConnections::open().unwrap();
        assert_eq!(waiting_for(u32::MAX, &connections).unwrap(), BTreeSet::new());
    }
}
