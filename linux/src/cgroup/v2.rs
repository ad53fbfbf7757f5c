//! Cgroup v2: controllers that a group enables for its children, v2's files for each limit, one
//! file that kills a whole group.
//!
//! Invariant: a controller is enabled only where it is not enabled yet. The kernel refuses to
//! enable it again in a group that has processes (cgroup-v2.rst, "No Internal Process Constraint").

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::limits::{Files, Limit, file, or_max, or_unlimited};
use super::{read, write, write_all, write_present};
use crate::{Error, Result};

/// Has a line `oom_kill N`.
pub(super) const MEMORY_EVENTS: &str = "memory.events";

/// mkdir -p of `path` below `root`; every group above the last one enables `controllers`. Returns
/// the new directories, also with an error.
pub fn ensure_dirs(
    root: &Path,
    path: &Path,
    controllers: &[&str],
) -> std::result::Result<Vec<PathBuf>, (Error, Vec<PathBuf>)> {
    let mut made = Vec::new();
    let mut dir = root.to_owned();
    for name in path.strip_prefix("/").unwrap_or(path) {
        if let Err(error) = hand_down(&dir, controllers) {
            return Err((error, made));
        }
        dir.push(name);
        match fs::create_dir(&dir) {
            Ok(()) => made.push(dir.clone()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err((Error::at("create cgroup", &dir, e), made)),
        }
    }
    Ok(made)
}

/// Enables these controllers for the groups below `dir`.
fn hand_down(dir: &Path, controllers: &[&str]) -> Result<()> {
    const OP: &str = "hand down cgroup controllers";
    if controllers.is_empty() {
        return Ok(());
    }
    let file = dir.join("cgroup.subtree_control");
    let enabled = read(&file)?;
    let missing: Vec<String> = controllers
        .iter()
        .filter(|name| !enabled.split_whitespace().any(|known| known == **name))
        .map(|name| format!("+{name}"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let wanted = missing.join(" ");
    let problem = match fs::write(&file, &wanted) {
        Ok(()) => return Ok(()),
        Err(e) => e,
    };
    let reason = match problem.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            let pids = read(&dir.join("cgroup.procs")).unwrap_or_default();
            let pids: Vec<&str> = pids.split_whitespace().take(5).collect();
            format!(
                ": the group has processes of its own (pids {}), and cgroup v2 limits only groups whose \
                 parent has none; move them to another group, or choose another parent group",
                pids.join(" ")
            )
        }
        Some(Errno::ENOENT) => {
            let available = read(&dir.join("cgroup.controllers")).unwrap_or_default();
            format!(
                ": the group itself has only {:?}; its parent must hand the others down",
                available.trim()
            )
        }
        _ => String::new(),
    };
    Err(Error::new(OP, format!("{wanted} in {}{reason}", dir.display()), problem))
}

/// Moves the whole process `pid` into `dir`; 0 is the calling process.
pub(super) fn admit(dir: &Path, pid: i32) -> Result<()> {
    write(&dir.join("cgroup.procs"), &pid.to_string())
}

/// Limits the number and depth of groups that the processes of `dir` may make below it.
pub(super) fn limit_groups_below(dir: &Path, descendants: u32, depth: u32) -> Result<()> {
    write(&dir.join("cgroup.max.descendants"), &descendants.to_string())?;
    write(&dir.join("cgroup.max.depth"), &depth.to_string())
}

pub(super) fn set(dir: &Path, limit: &Limit<'_>) -> Result<()> {
    write_all(dir, &files(limit))?;
    write_present(dir, &files_of_newer_kernels(limit)).map(drop)
}

fn files(limit: &Limit<'_>) -> Files {
    match *limit {
        Limit::Memory { bytes } | Limit::MemoryAndSwap { bytes, .. } => {
            vec![file("memory.max", or_max(bytes))]
        }
        Limit::CpuShares(shares) => vec![file("cpu.weight", weight(shares))],
        Limit::CpuQuota { quota, period } => vec![file("cpu.max", format!("{} {period}", or_max(quota)))],
        Limit::Pids(most) => vec![file("pids.max", or_max(most))],
        Limit::CpusetCpus(cpus) => vec![file("cpuset.cpus", cpus)],
        Limit::CpusetMems(mems) => vec![file("cpuset.mems", mems)],
        Limit::HugePages { size, bytes } => {
            vec![file(&format!("hugetlb.{size}.max"), or_unlimited(bytes, "max"))]
        }
    }
}

fn files_of_newer_kernels(limit: &Limit<'_>) -> Files {
    match *limit {
        // Reservations (Linux 5.7): without them a process gets SIGBUS when it touches a page that
        // mmap(2) promised.
        Limit::HugePages { size, bytes } => {
            vec![file(&format!("hugetlb.{size}.rsvd.max"), or_unlimited(bytes, "max"))]
        }
        // A kernel without swap has no such file.
        Limit::MemoryAndSwap { bytes, both } => {
            let swap = if both < 0 || bytes < 0 { -1 } else { (both - bytes).max(0) };
            vec![file("memory.swap.max", or_max(swap))]
        }
        _ => Vec::new(),
    }
}

/// Converts v1's cpu.shares to v2's cpu.weight: the kernel's bounds, mapped as in runc, 2..262144
/// -> 1..10000.
fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// Sends SIGKILL to every process in `dir` and below, also to those that fork meanwhile. `false` if
/// the kernel lacks the file (before Linux 5.14).
pub(super) fn kill(dir: &Path) -> Result<bool> {
    match write(&dir.join("cgroup.kill"), "1") {
        Ok(()) => Ok(true),
        Err(_) if !dir.join("cgroup.kill").exists() => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_become_a_weight_and_no_quota_is_max() {
        assert_eq!(files(&Limit::CpuShares(1024)), [file("cpu.weight", 39)]);
        assert_eq!(files(&Limit::CpuQuota { quota: -1, period: 100_000 }), [file("cpu.max", "max 100000")]);
    }

    #[test]
    fn huge_pages_are_limited_when_reserved_and_when_used() {
        let limit = Limit::HugePages { size: "2MB", bytes: 4 << 20 };
        assert_eq!(files(&limit), [file("hugetlb.2MB.max", 4 << 20)]);
        assert_eq!(files_of_newer_kernels(&limit), [file("hugetlb.2MB.rsvd.max", 4 << 20)]);
    }
}
