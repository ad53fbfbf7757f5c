//! The parent cgroup of a pod's containers, with kubelet's names and values: `<cgroup
//! root>/kubepods[/burstable|/besteffort]/pod<uid>`. The runtime creates the containers' own
//! cgroups below it.
//!
//! Supports every mounted hierarchy: v1, v2, and both (hybrid). A missing controller enforces no
//! limit, and is logged once.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::cgroup::{v1, v2};
use linux::mountinfo;
use tracing::debug;

use crate::backoff::Backoff;

/// Quota period of kubelet, in microseconds.
pub(crate) const CPU_PERIOD_US: i64 = 100_000;
const MIN_QUOTA_US: i64 = 1_000;
/// Ten million processors, close to the kernel's maximum (kernel/sched/core.c, `max_cfs_runtime`).
const MAX_QUOTA_US: i64 = 1_000_000_000_000;
const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
/// A killed container's cgroup may briefly remain after its last process.
const REMOVAL_DEADLINE: Duration = Duration::from_secs(5);

/// A failed operation on a cgroup's file or directory.
#[derive(Debug, thiserror::Error)]
#[error("{op} {object}")]
pub struct Error {
    op: &'static str,
    object: String,
    #[source]
    source: io::Error,
}

impl Error {
    fn at(op: &'static str, path: &Path, source: io::Error) -> Self {
        Self { op, object: path.display().to_string(), source }
    }
}

impl From<linux::Error> for Error {
    fn from(error: linux::Error) -> Self {
        Self { op: error.op, object: error.object, source: error.source }
    }
}

/// The limits of a pod's cgroup; `None` means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) cpu_shares: i64,
    /// In microseconds per [`CPU_PERIOD_US`].
    pub(crate) cpu_quota_us: Option<i64>,
    pub(crate) memory_bytes: Option<i64>,
    /// The limit for processes and threads together.
    pub(crate) pids: Option<i64>,
}

/// cpu.shares for thousandths of a core.
pub(crate) fn shares(milli_cpu: i64) -> i64 {
    (milli_cpu.saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// The CFS quota for thousandths of a core, per [`CPU_PERIOD_US`].
pub(crate) fn quota_us(milli_cpu: i64) -> i64 {
    (milli_cpu.saturating_mul(CPU_PERIOD_US) / 1000).clamp(MIN_QUOTA_US, MAX_QUOTA_US)
}

/// Converts v1's cpu.shares to cgroup v2's cpu.weight (runc's conversion).
fn weight(shares: i64) -> i64 {
    1 + (shares.clamp(MIN_SHARES, MAX_SHARES) - 2) * 9_999 / 262_142
}

/// The mounted hierarchies.
#[derive(Debug, Clone)]
pub(crate) struct Hierarchies {
    v1: Vec<Hierarchy>,
    v2: Option<PathBuf>,
}

#[derive(Debug, Clone)]
struct Hierarchy {
    mount_point: PathBuf,
    controllers: Vec<String>,
}

impl Hierarchies {
    pub(crate) fn mounted() -> linux::Result<Self> {
        let mut found = Self { v1: Vec::new(), v2: None };
        for entry in mountinfo::read()? {
            match entry.fs_type.as_str() {
                "cgroup" => found.v1.push(Hierarchy {
                    mount_point: entry.mount_point,
                    controllers: entry.super_options.split(',').map(str::to_owned).collect(),
                }),
                "cgroup2" if found.v2.is_none() => found.v2 = Some(entry.mount_point),
                _ => {}
            }
        }
        Ok(found)
    }

    /// Creates `path` (absolute, as CRI's cgroup_parent) and sets its limits.
    pub(crate) fn ensure(&self, path: &str, limits: &Limits) -> Result<(), Error> {
        let path = path.trim_start_matches('/');
        for hierarchy in &self.v1 {
            let has = |name: &str| hierarchy.controllers.iter().any(|c| c == name);
            let dir = hierarchy.mount_point.join(path);
            if has("cpu") {
                make_dir(&dir)?;
                set_v1_cpu(&dir, limits)?;
            }
            if has("memory") {
                make_dir(&dir)?;
                if let Some(bytes) = limits.memory_bytes {
                    v1::limit_memory(&dir, bytes)?;
                }
            }
            if let Some(pids) = limits.pids.filter(|_| has("pids")) {
                make_dir(&dir)?;
                write(&dir.join("pids.max"), &pids.to_string())?;
            }
        }
        if let Some(mount_point) = &self.v2 {
            ensure_v2(mount_point, path, limits)?;
        }
        Ok(())
    }

    /// kubelet's settings for each container on cgroup v2: an out-of-memory kill ends the whole
    /// container, and a memory limit allows no additional swap. `pod` is the pod's cgroup, which
    /// has the same files.
    pub(crate) fn container_files(&self, pod: &str) -> HashMap<String, String> {
        let Some(mount_point) = &self.v2 else { return HashMap::new() };
        let dir = mount_point.join(pod.trim_start_matches('/'));
        [("memory.oom.group", "1"), ("memory.swap.max", "0")]
            .into_iter()
            .filter(|(file, _)| dir.join(file).exists())
            .map(|(file, value)| (file.to_owned(), value.to_owned()))
            .collect()
    }

    /// kubelet's limit of memory and swap together on cgroup v1 for a container of `pod`, the pod's cgroup: its
    /// memory limit, so that it gets no additional swap. 0, which is no limit, where the kernel does not
    /// count swap.
    pub(crate) fn memory_and_swap(&self, pod: &str, memory_bytes: i64) -> i64 {
        let mut with_memory = self.v1.iter().filter(|h| h.controllers.iter().any(|c| c == "memory"));
        let counts_swap = with_memory.any(|hierarchy| {
            let group = hierarchy.mount_point.join(pod.trim_start_matches('/'));
            group.join("memory.memsw.limit_in_bytes").exists()
        });
        if counts_swap { memory_bytes } else { 0 }
    }

    /// Removes `path` and its descendants in every hierarchy.
    pub(crate) async fn remove(&self, path: &str) -> Result<(), Error> {
        let path = path.trim_start_matches('/');
        for mount_point in self.v1.iter().map(|h| &h.mount_point).chain(&self.v2) {
            remove_tree(&mount_point.join(path)).await?;
        }
        Ok(())
    }
}

fn set_v1_cpu(dir: &Path, limits: &Limits) -> Result<(), Error> {
    write(&dir.join("cpu.shares"), &limits.cpu_shares.to_string())?;
    if let Some(quota) = limits.cpu_quota_us {
        write(&dir.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
        write(&dir.join("cpu.cfs_quota_us"), &quota.to_string())?;
    }
    Ok(())
}

fn ensure_v2(mount_point: &Path, path: &str, limits: &Limits) -> Result<(), Error> {
    let mut dir = mount_point.to_owned();
    let controllers = std::fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let has = |name: &str| controllers.split_whitespace().any(|c| c == name);
    if !["cpu", "memory", "pids"].into_iter().any(has) {
        return Ok(());
    }
    let wanted: Vec<&str> = ["cpu", "memory", "pids"].into_iter().filter(|n| has(n)).collect();
    v2::ensure_dirs(mount_point, Path::new(path), &wanted).map_err(|(error, _)| error)?;
    dir.push(path);
    if has("cpu") {
        write(&dir.join("cpu.weight"), &weight(limits.cpu_shares).to_string())?;
        if let Some(quota) = limits.cpu_quota_us {
            write(&dir.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}"))?;
        }
    }
    for (controller, file, limit) in
        [("memory", "memory.max", limits.memory_bytes), ("pids", "pids.max", limits.pids)]
    {
        if let Some(limit) = limit.filter(|_| has(controller)) {
            write(&dir.join(file), &limit.to_string())?;
        }
    }
    Ok(())
}

/// Also removes nested cgroups, which a container may have created.
async fn remove_tree(dir: &Path) -> Result<(), Error> {
    let deadline = tokio::time::Instant::now() + REMOVAL_DEADLINE;
    let mut pause = Backoff::new(Duration::from_millis(2), Duration::from_millis(100));
    loop {
        match linux::cgroup::remove_tree(dir) {
            Ok(()) => return Ok(()),
            Err(e)
                if e.source.kind() == io::ErrorKind::ResourceBusy
                    && tokio::time::Instant::now() < deadline =>
            {
                debug!(cgroup = %dir.display(), "cgroup still busy");
                tokio::time::sleep(pause.step()).await;
            }
            Err(e) => return Err(e.into()),
        }
    }
}

fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(|source| Error::at("create cgroup", dir, source))
}

fn write(path: &Path, value: &str) -> Result<(), Error> {
    std::fs::write(path, value).map_err(|source| Error::at("write", path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kubelets() {
        assert_eq!(shares(0), 2);
        assert_eq!(shares(100), 102);
        assert_eq!(shares(1000), 1024);
        assert_eq!(quota_us(500), 50_000);
        assert_eq!(quota_us(1), 1_000);
        assert_eq!(quota_us(i64::MAX), MAX_QUOTA_US);
        assert_eq!(shares(i64::MAX), MAX_SHARES);
        assert_eq!(weight(2), 1);
        assert_eq!(weight(1024), 39);
        assert_eq!(weight(262_144), 10_000);
    }

    #[test]
    fn a_container_gets_the_files_of_its_pods_cgroup() {
        let files = |hierarchies: &Hierarchies| hierarchies.container_files("/pods/a");
        let tree = tempfile::tempdir().unwrap();
        let v2 = Hierarchies { v1: Vec::new(), v2: Some(tree.path().to_owned()) };
        assert_eq!(files(&v2), HashMap::new());
        std::fs::create_dir_all(tree.path().join("pods/a")).unwrap();
        std::fs::write(tree.path().join("pods/a/memory.oom.group"), "0").unwrap();
        assert_eq!(files(&v2), HashMap::from([("memory.oom.group".to_owned(), "1".to_owned())]));
        assert_eq!(files(&Hierarchies { v1: Vec::new(), v2: None }), HashMap::new());
    }

    #[test]
    fn on_cgroup_v1_a_memory_limit_is_also_that_of_memory_and_swap_where_swap_counts() {
        let tree = tempfile::tempdir().unwrap();
        let memory =
            Hierarchy { mount_point: tree.path().to_owned(), controllers: vec!["memory".to_owned()] };
        let v1 = Hierarchies { v1: vec![memory], v2: None };
        std::fs::create_dir_all(tree.path().join("pods/a")).unwrap();
        assert_eq!(v1.memory_and_swap("/pods/a", 7), 0);
        std::fs::write(tree.path().join("pods/a/memory.memsw.limit_in_bytes"), "").unwrap();
        assert_eq!((v1.memory_and_swap("/pods/a", 7), v1.memory_and_swap("/pods/a", 0)), (7, 0));
    }

    #[tokio::test]
    async fn the_kernel_enforces_the_limit_on_processes() {
        let hierarchies = Hierarchies::mounted().unwrap();
        let path = format!("/hawser-test-{}", std::process::id());
        let limits = Limits { pids: Some(123), ..Limits::default() };
        hierarchies.ensure(&path, &limits).unwrap();
        let v1 = hierarchies.v1.iter().map(|h| &h.mount_point);
        let files = v1.chain(&hierarchies.v2).map(|m| m.join(path.trim_start_matches('/')).join("pids.max"));
        let found: Vec<_> = files.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
        hierarchies.remove(&path).await.unwrap();
        assert_eq!(found, ["123\n"], "one hierarchy has the controller: {hierarchies:?}");
    }
}
