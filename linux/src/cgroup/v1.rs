//! Cgroup v1: one hierarchy for each controller, threads as members, v1's files for each limit.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use super::limits::{Files, Limit, file, or_max, or_unlimited};
use super::{read, under, write, write_all, write_present};
use crate::device_rules::Policy;
use crate::{Error, Result};

/// The controllers that a mount table may list.
pub(super) const CONTROLLERS: &[&str] = &[
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "hugetlb",
    "net_cls",
    "net_prio",
    "perf_event",
    "rdma",
    "misc",
];

/// Has a line `oom_kill N`.
pub(super) const MEMORY_EVENTS: &str = "memory.oom_control";
pub(super) const FREEZER: &CStr = c"freezer.state";
pub(super) const THAWED: &str = "THAWED";

/// Puts the calling thread into `dir`. That needs no cgroup_threadgroup_rwsem, whose writer waits
/// for an RCU grace period (kernel/cgroup/cgroup.c, `cgroup_procs_write_start`).
pub(super) fn join_as_thread(dir: &Path) -> Result<()> {
    write(&dir.join("tasks"), "0")
}

/// Limits the memory of the group `dir`, and TCP's buffers, which count separately. In bytes;
/// negative: no limit.
pub fn limit_memory(dir: &Path, bytes: i64) -> Result<()> {
    set(dir, &Limit::Memory { bytes })
}

pub(super) fn set(dir: &Path, limit: &Limit<'_>) -> Result<()> {
    if let Limit::MemoryAndSwap { bytes, both } = *limit {
        return limit_memory_and_swap(dir, bytes, both);
    }
    write_all(dir, &files(limit))?;
    write_present(dir, &files_of_some_kernels(limit)).map(drop)
}

/// The limit of both is never below that of memory alone, also in between (`EINVAL`). A kernel
/// that does not count swap has no file for it.
fn limit_memory_and_swap(dir: &Path, bytes: i64, both: i64) -> Result<()> {
    let for_both = [file("memory.memsw.limit_in_bytes", both)];
    let now: u64 = read(&dir.join("memory.limit_in_bytes"))?.trim().parse().unwrap_or(u64::MAX);
    let grows = bytes < 0 || bytes.cast_unsigned() > now;
    if grows {
        write_present(dir, &for_both)?;
    }
    limit_memory(dir, bytes)?;
    if !grows {
        write_present(dir, &for_both)?;
    }
    Ok(())
}

fn files(limit: &Limit<'_>) -> Files {
    match *limit {
        Limit::Memory { bytes } | Limit::MemoryAndSwap { bytes, .. } => {
            vec![file("memory.limit_in_bytes", bytes)]
        }
        Limit::CpuShares(shares) => vec![file("cpu.shares", shares)],
        Limit::CpuQuota { quota, period } => {
            vec![file("cpu.cfs_period_us", period), file("cpu.cfs_quota_us", quota)]
        }
        Limit::Pids(most) => vec![file("pids.max", or_max(most))],
        Limit::CpusetCpus(cpus) => vec![file("cpuset.cpus", cpus)],
        Limit::CpusetMems(mems) => vec![file("cpuset.mems", mems)],
        Limit::HugePages { size, bytes } => {
            // -1 is the largest number of pages.
            vec![file(&format!("hugetlb.{size}.limit_in_bytes"), or_unlimited(bytes, "-1"))]
        }
    }
}

fn files_of_some_kernels(limit: &Limit<'_>) -> Files {
    match *limit {
        // TCP's buffers count towards no other limit: without this one, a pod can use up the memory
        // that all network namespaces share (`net.ipv4.tcp_mem`), which stops the TCP of all other
        // pods.
        Limit::Memory { bytes } | Limit::MemoryAndSwap { bytes, .. } => {
            vec![file("memory.kmem.tcp.limit_in_bytes", bytes)]
        }
        _ => Vec::new(),
    }
}

/// A cpuset group accepts no process until it has cpus and mems. A new one is empty, so it gets
/// those of the nearest group above that has some. From then on, the kernel gives them to the groups
/// made beside it (Documentation/admin-guide/cgroup-v1/cgroups.rst, "clone_children"): each write of
/// ours makes it look at all groups.
pub(super) fn inherit_cpuset(root: &Path, path: &Path) -> Result<()> {
    let group = under(root, path);
    let mut was_empty = false;
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let mut dir = group.clone();
        let mut empty = Vec::new();
        let value = loop {
            let value = read(&dir.join(file))?;
            if !value.trim().is_empty() || dir == root {
                break value;
            }
            empty.push(dir.join(file));
            dir.pop();
        };
        was_empty |= !empty.is_empty();
        empty.iter().rev().try_for_each(|file| write(file, value.trim()))?;
    }
    if let Some(parent) = group.parent().filter(|parent| was_empty && *parent != root) {
        // Without it, the next group is filled as this one was.
        let _only_slower = write(&parent.join("cgroup.clone_children"), "1");
    }
    Ok(())
}

pub(super) fn restrict_devices(dir: &Path, policy: &Policy) -> Result<()> {
    let writes = policy.v1_writes();
    writes.chunk_by(|a, b| a.0 == b.0).try_for_each(|lines| write_lines(dir, lines))
}

/// Writes each line to a file with its own write(2).
fn write_lines(dir: &Path, lines: &[(&str, String)]) -> Result<()> {
    let Some((name, _)) = lines.first() else { return Ok(()) };
    let path = dir.join(name);
    let mut file =
        OpenOptions::new().write(true).open(&path).map_err(|e| Error::at("open cgroup file", &path, e))?;
    lines.iter().try_for_each(|(_, line)| {
        file.write_all(line.as_bytes())
            .map_err(|e| Error::new("write cgroup", format!("{line:?} to {}", path.display()), e))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_written_after_its_period() {
        let quota = Limit::CpuQuota { quota: -1, period: 100_000 };
        assert_eq!(files(&quota), [file("cpu.cfs_period_us", 100_000), file("cpu.cfs_quota_us", -1)]);
    }
}
