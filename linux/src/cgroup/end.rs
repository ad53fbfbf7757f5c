//! The end of a group: its processes killed, its directories removed, also the
//! groups that a privileged container made below its own.
//!
//! Invariant: nothing here recurses or waits without a deadline.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Cgroup, Version, v2};
use crate::{Error, Result, process};

impl Cgroup {
    /// The processes in it and below, as pids of the reader.
    pub fn pids(&self) -> Vec<i32> {
        let dirs = self.dirs.iter().flat_map(|(_, dir)| groups_below(dir));
        let mut pids: Vec<i32> = dirs
            .filter_map(|dir| fs::read_to_string(dir.join("cgroup.procs")).ok())
            .flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<_>>())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Removes its directories; absence is a success. `EBUSY` while it has processes.
    pub fn remove(&self) -> Result<()> {
        self.dirs.iter().try_for_each(|(_, dir)| match fs::remove_dir(dir) {
            Err(e) if e.kind() == ErrorKind::ResourceBusy => remove_tree(dir),
            removed => absent_is_fine(dir, removed),
        })
    }

    /// Lets its processes go on which it stopped itself: the freezer of v1 keeps SIGKILL from them
    /// (kernel/cgroup/legacy_freezer.c). On v2 a frozen process can be killed.
    pub fn thaw(&self) -> Result<()> {
        let v1 = self.dirs.iter().filter(|(version, _)| *version == Version::V1);
        // Parents first: a group below a frozen one stays frozen.
        let groups = v1.flat_map(|(_, dir)| groups_below(dir)).map(|dir| dir.join("freezer.state"));
        groups.filter(|file| file.exists()).try_for_each(|file| match super::write(&file, "THAWED") {
            // Another has removed the group.
            Err(_) if !file.exists() => Ok(()),
            written => written,
        })
    }

    /// Kills every process in it and removes it. `EBUSY` if one still lives after `timeout`.
    pub fn end(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let pids = self.pids();
            if pids.is_empty() || Instant::now() >= deadline {
                return self.remove();
            }
            self.kill_all_at_once()?;
            self.thaw()?;
            for pid in pids {
                let Some(pidfd) = process::open_pidfd(pid)? else { continue };
                process::signal_pidfd(&pidfd, libc::SIGKILL)?;
                process::wait_for_end(&pidfd, deadline.saturating_duration_since(Instant::now()))?;
            }
        }
    }

    /// Where there is cgroup v2: without a race against fork(2).
    fn kill_all_at_once(&self) -> Result<()> {
        let v2 = self.dirs.iter().filter(|(version, dir)| *version == Version::V2 && dir.is_dir());
        v2.map(|(_, dir)| dir).try_for_each(|dir| v2::kill(dir).map(drop))
    }
}

/// `dir` and the groups below it, each after its parent.
fn groups_below(dir: &Path) -> Vec<PathBuf> {
    let mut groups = vec![dir.to_owned()];
    let mut next = 0;
    while let Some(group) = groups.get(next) {
        // A group may go while we look.
        let entries = fs::read_dir(group).into_iter().flatten().flatten();
        let below: Vec<PathBuf> =
            entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect();
        groups.extend(below);
        next += 1;
    }
    groups
}

fn remove_tree(dir: &Path) -> Result<()> {
    groups_below(dir).iter().rev().try_for_each(|group| absent_is_fine(group, fs::remove_dir(group)))
}

fn absent_is_fine(dir: &Path, removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::at("remove cgroup", dir, e)),
        _ => Ok(()),
    }
}
