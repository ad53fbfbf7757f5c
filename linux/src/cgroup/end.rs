//! Ends a group: kills its processes and removes its directories, including groups that a container
//! made below its own.
//!
//! Invariant: no function here recurses, waits without a deadline, or names a group below the
//! container's own by its path.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Statx};

use super::{Cgroup, Version, v1, v2};
use crate::tree::{self, Changes, Visitor};
use crate::{Error, Result, process};

/// Interval between rounds of [`Cgroup::kill`]: a process may have frozen the group again.
const ROUND: Duration = Duration::from_millis(100);
/// Limit of the descriptors that [`Cgroup::kill`] has open: other threads need some too. For each such part,
/// it lists the group again.
const HELD_AT_ONCE: usize = 128;

impl Cgroup {
    /// The processes in it and below, as pids in the reader's namespace.
    pub fn pids(&self) -> Result<Vec<i32>> {
        let mut pids = Vec::new();
        for (_, dir) in &self.dirs {
            each_group(dir, |group| {
                let Some(text) = read_in(group, c"cgroup.procs")? else { return Ok(()) };
                pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
                Ok(())
            })?;
        }
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Removes its directories; a missing group is a success. `EBUSY` while it has processes.
    pub fn remove(&self) -> Result<()> {
        self.dirs.iter().try_for_each(|(_, dir)| remove_tree(dir))
    }

    /// Sends SIGKILL to every process in it, then thaws the group: a process that the v1 freezer
    /// has stopped ends only then (kernel/cgroup/legacy_freezer.c). A process forked meanwhile
    /// survives and may freeze the group again, so repeat this until the group is empty.
    pub fn kill(&self) -> Result<()> {
        let killed = self.kill_all_at_once();
        let killed = killed.and_then(|()| kill_members(&self.pids()?, || self.pids()));
        self.thaw().and(killed)
    }

    /// On v2 a frozen process can be killed.
    fn thaw(&self) -> Result<()> {
        self.dirs_of(Version::V1)
            .try_for_each(|dir| each_group(dir, |group| write_in(group, v1::FREEZER, v1::THAWED)))
    }

    /// Limits the number and depth of groups that its processes may make on v2. v1 has no such
    /// limit.
    pub fn limit_groups_below(&self, descendants: u32, depth: u32) -> Result<()> {
        self.dirs_of(Version::V2).try_for_each(|dir| v2::limit_groups_below(dir, descendants, depth))
    }

    /// Kills every process in it and removes it. `EBUSY` if a process is still there after
    /// `timeout`.
    pub fn end(&self, timeout: Duration) -> Result<()> {
        // Usually it is empty; the kernel refuses to remove a group with processes or groups.
        if self.dirs.iter().all(|(_, dir)| is_removed(dir)) {
            return Ok(());
        }
        let deadline = Instant::now() + timeout;
        loop {
            let pids = self.pids()?;
            if pids.is_empty() || Instant::now() >= deadline {
                return self.remove();
            }
            self.kill()?;
            let round = deadline.min(Instant::now() + ROUND);
            for pid in pids {
                let Some(pidfd) = process::open_pidfd(pid)? else { continue };
                if !process::wait_for_end(&pidfd, round.saturating_duration_since(Instant::now()))? {
                    break;
                }
            }
        }
    }

    /// On cgroup v2: without a race against fork(2). This reaches no process whose first thread has ended
    /// (kernel/cgroup/cgroup.c, `__cgroup_kill`).
    fn kill_all_at_once(&self) -> Result<()> {
        self.dirs_of(Version::V2).filter(|dir| dir.is_dir()).try_for_each(|dir| v2::kill(dir).map(drop))
    }
}

/// Sends SIGKILL to those of `pids` that `members` still lists while their pidfds are open: a process may
/// have ended since `pids` were listed, and its pid may belong to one outside the group. Not by
/// /proc/PID/cgroup: on v1, a process whose first thread has ended is in the root group there
/// (`proc_cgroup_show`), and a container can have such processes.
fn kill_members(mut pids: &[i32], members: impl Fn() -> Result<Vec<i32>>) -> Result<()> {
    while !pids.is_empty() {
        let (mut held, mut tried) = open_pidfds(pids)?;
        let members = loop {
            if held.is_empty() {
                break Vec::new();
            }
            match members() {
                Err(e) if lacks_descriptors(&e) && held.len() > 1 => {
                    held.truncate(held.len() / 2);
                    tried = held.last().map_or(0, |(at, _)| at + 1);
                }
                listed => break listed?,
            }
        };
        for (_, pidfd) in held.iter().filter(|(at, _)| members.binary_search(&pids[*at]).is_ok()) {
            process::signal_pidfd(pidfd, libc::SIGKILL)?;
        }
        pids = &pids[tried..];
    }
    Ok(())
}

/// Pidfds of the first of `pids` that still exist, each with its place in `pids`, as many as can be open; and
/// how many of `pids` were tried.
fn open_pidfds(pids: &[i32]) -> Result<(Vec<(usize, OwnedFd)>, usize)> {
    let mut held = Vec::new();
    let tried = pids.len().min(HELD_AT_ONCE);
    for (at, &pid) in pids[..tried].iter().enumerate() {
        match process::open_pidfd(pid) {
            Err(e) if lacks_descriptors(&e) && !held.is_empty() => return Ok((held, at)),
            opened => held.extend(opened?.map(|pidfd| (at, pidfd))),
        }
    }
    Ok((held, tried))
}

fn lacks_descriptors(error: &Error) -> bool {
    matches!(error.errno(), Errno::EMFILE | Errno::ENFILE)
}

fn is_removed(dir: &Path) -> bool {
    fs::remove_dir(dir).map_or_else(|e| e.kind() == ErrorKind::NotFound, |()| true)
}

/// Calls `visit` for each group below `dir`, then for `dir`. A container may have nested them
/// deeper than any path. A missing `dir` is a success.
fn each_group(dir: &Path, visit: impl FnMut(BorrowedFd<'_>) -> Result<()>) -> Result<()> {
    let directory = match tree::open_dir(CWD, dir, ResolveFlags::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        opened => opened.map_err(|e| Error::at("open cgroup", dir, e))?,
    };
    let mut groups = Groups(visit);
    // Each directory in it adds one link.
    if tree::stat(directory.as_fd(), c".")?.stx_nlink <= 2 {
        return groups.leave(directory.as_fd());
    }
    tree::walk(directory.as_fd(), Changes::Tolerated, &AtomicBool::new(false), &mut groups)
}

struct Groups<F>(F);

impl<F: FnMut(BorrowedFd<'_>) -> Result<()>> Visitor for Groups<F> {
    fn file(&mut self, _parent: BorrowedFd<'_>, _name: &CStr, _stat: &Statx) -> Result<()> {
        Ok(())
    }

    fn enter(&mut self, _name: &CStr) -> Result<()> {
        Ok(())
    }

    fn leave(&mut self, directory: BorrowedFd<'_>) -> Result<()> {
        (self.0)(directory)
    }
}

/// `None` if the group has no such file, or is gone.
fn open_in(group: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> Result<Option<File>> {
    match rustix::fs::openat(group, name, flags | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => Ok(Some(file.into())),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => Ok(None),
        Err(e) => Err(tree::at("open", name)(e)),
    }
}

fn read_in(group: BorrowedFd<'_>, name: &CStr) -> Result<Option<String>> {
    let Some(mut file) = open_in(group, name, OFlags::RDONLY)? else { return Ok(None) };
    let mut text = String::new();
    match file.read_to_string(&mut text) {
        // The group is being removed, or has only threads.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP)) => Ok(None),
        Err(e) => Err(Error::new("read", name.to_string_lossy(), e)),
        Ok(_) => Ok(Some(text)),
    }
}

fn write_in(group: BorrowedFd<'_>, name: &CStr, value: &str) -> Result<()> {
    let Some(mut file) = open_in(group, name, OFlags::WRONLY)? else { return Ok(()) };
    match file.write_all(value.as_bytes()) {
        // Another process has removed the group.
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        written => written.map_err(|e| Error::new("write", format!("{value:?} to {name:?}"), e)),
    }
}

/// Removes `dir` and the groups below; a missing group is a success. `EBUSY` while one has
/// processes.
pub fn remove_tree(dir: &Path) -> Result<()> {
    match fs::remove_dir(dir) {
        Err(e) if e.kind() == ErrorKind::ResourceBusy => {
            each_group(dir, remove_empty_groups)?;
            absent_is_fine(dir, fs::remove_dir(dir))
        }
        removed => absent_is_fine(dir, removed),
    }
}

/// The empty groups directly in `parent`.
fn remove_empty_groups(parent: BorrowedFd<'_>) -> Result<()> {
    for entry in Dir::read_from(parent).map_err(tree::at("list", c"."))? {
        let entry = entry.map_err(tree::at("list", c"."))?;
        let name = entry.file_name();
        if entry.file_type() != FileType::Directory || name == c"." || name == c".." {
            continue;
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(tree::at("remove cgroup", name)(e)),
        }
    }
    Ok(())
}

fn absent_is_fine(dir: &Path, removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::at("remove cgroup", dir, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_process_that_is_not_in_the_group_any_more_is_not_killed() {
        let sleeper = || Command::new("sleep").arg("100").spawn().unwrap();
        let (mut member, mut other) = (sleeper(), sleeper());
        let [of_member, of_other] = [&member, &other].map(|child| child.id().cast_signed());
        // As if `other` had got the pid of a member that ended after it was listed.
        kill_members(&[of_member, of_other], || Ok(vec![of_member])).unwrap();
        assert_eq!(member.wait().unwrap().signal(), Some(libc::SIGKILL));
        kill(Pid::from_raw(of_other), Signal::SIGTERM).unwrap();
        assert_eq!(other.wait().unwrap().signal(), Some(libc::SIGTERM), "SIGKILL would have been first");
        kill_members(&[of_member], || panic!("no process is left")).unwrap();
    }
}
