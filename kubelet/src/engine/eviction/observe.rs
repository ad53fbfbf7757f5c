//! What is left of the node's memory, disks and processes, and what pods use of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::statvfs::statvfs;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::disk::is_one_file_system;
use super::limits::Usage;
use super::measure::{self, Scope};
use super::monitor::{Left, Observations};
use crate::capacity::pressure::Signal;
use crate::clients::cri::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use crate::node::machine;
use crate::objects::Pod;
use crate::worker::Tools;

/// For the disk usage of all pods: one whose measurement has begun and takes longer counts as most.
const DISK_TIME: Duration = Duration::from_secs(60);
const AT_A_TIME: usize = 4;

/// What one pod uses of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodUsage {
    pub(super) total: u64,
    /// By container, where containers have a request of their own.
    pub(super) containers: BTreeMap<String, u64>,
}

/// By uid; a pod whose measurement failed or took too long is not there.
pub(super) type Usages = BTreeMap<String, PodUsage>;

pub(super) async fn node(tools: &Tools) -> Observations {
    let mut found = Observations::new();
    found.insert(Signal::MemoryAvailable, memory(&tools.cgroup_root));
    file_system(&tools.root_dir, [Signal::NodefsAvailable, Signal::NodefsInodesFree], &mut found);
    // A runtime that does not answer has other problems.
    for directory in tools.cri.image_directories().await.unwrap_or_default() {
        file_system(&directory, [Signal::ImagefsAvailable, Signal::ImagefsInodesFree], &mut found);
    }
    if let Some(left) = processes() {
        found.insert(Signal::PidAvailable, vec![left]);
    }
    found
}

/// Of the machine, and of the group of all pods and those above it, where one has a limit (kubelet:
/// allocatableMemory.available).
fn memory(cgroup_root: &str) -> Vec<Left> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_of_machine(&text));
    let pods = Path::new("/").join(cgroup_root.trim_matches('/')).join("kubepods");
    let limited = linux::cgroup::Hierarchies::known().ok().into_iter().flat_map(|hierarchies| {
        let groups = pods.ancestors().filter_map(move |group| {
            let memory = hierarchies.usage(group).memory?;
            let capacity = memory.limit?;
            Some(Left { available: capacity.saturating_sub(memory.working_set()), capacity })
        });
        groups.collect::<Vec<_>>()
    });
    machine.into_iter().chain(limited).collect()
}

/// Free memory and the part of the page cache that the kernel takes back first: what is not in the working
/// set of the machine.
fn memory_of_machine(meminfo: &str) -> Option<Left> {
    let bytes = |name| machine::memory(meminfo, name);
    let available = bytes("MemFree")?.saturating_add(bytes("Inactive(file)")?);
    Some(Left { available, capacity: bytes("MemTotal")? })
}

/// Some file systems have no fixed number of inodes.
fn file_system(directory: &Path, [bytes, inodes]: [Signal; 2], found: &mut Observations) {
    let Ok(disk) = statvfs(directory) else { return };
    let (unit, blocks, free_blocks): (u64, u64, u64) =
        (disk.fragment_size(), disk.blocks(), disk.blocks_available());
    let space = Left { available: free_blocks.saturating_mul(unit), capacity: blocks.saturating_mul(unit) };
    let files = Left { available: disk.files_free(), capacity: disk.files() };
    for (signal, left) in [(bytes, space), (inodes, files)] {
        if left.capacity > 0 {
            found.entry(signal).or_default().push(left);
        }
    }
}

/// Tasks of the whole machine.
fn processes() -> Option<Left> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let most = [number("/proc/sys/kernel/pid_max"), number("/proc/sys/kernel/threads-max")];
    let capacity = most.into_iter().flatten().min()?;
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(Left { available: capacity.saturating_sub(machine::tasks(&load)?), capacity })
}

/// What the pods use of the signal's resource.
pub(super) async fn pods(tools: &Arc<Tools>, signal: Signal, pods: &[Arc<Pod>]) -> Usages {
    match signal {
        Signal::MemoryAvailable => memory_of_pods(tools, pods).await,
        Signal::PidAvailable => tasks_of_pods(tools, pods),
        Signal::NodefsAvailable | Signal::ImagefsAvailable => {
            disk_of_pods(tools, signal, pods, |usage| {
                let empty_dirs: u64 =
                    usage.empty_dirs.values().fold(0, |sum, used| sum.saturating_add(*used));
                let total = usage.containers.values().fold(empty_dirs, |sum, used| sum.saturating_add(*used));
                PodUsage { total, containers: usage.containers }
            })
            .await
        }
        Signal::NodefsInodesFree | Signal::ImagefsInodesFree => {
            let inodes = |usage: Usage| PodUsage { total: usage.inodes, containers: BTreeMap::new() };
            disk_of_pods(tools, signal, pods, inodes).await
        }
    }
}

/// A pod without containers uses none.
async fn memory_of_pods(tools: &Tools, pods: &[Arc<Pod>]) -> Usages {
    let Ok(all) = tools.cri.container_stats(None).await else { return Usages::new() };
    let mut usages: Usages = pods.iter().map(|pod| (pod.metadata.uid.clone(), PodUsage::default())).collect();
    for stats in all {
        let Some(attributes) = stats.attributes else { continue };
        let label = |name| attributes.labels.get(name).map_or("", String::as_str);
        let Some(usage) = usages.get_mut(label(POD_UID_LABEL)) else { continue };
        let used = stats.memory.and_then(|memory| memory.working_set_bytes).map_or(0, |bytes| bytes.value);
        usage.total = usage.total.saturating_add(used);
        // Stats of an ended container do not replace those of its successor.
        let of_container = usage.containers.entry(label(CONTAINER_NAME_LABEL).to_owned()).or_default();
        *of_container = (*of_container).max(used);
    }
    usages
}

fn tasks_of_pods(tools: &Tools, pods: &[Arc<Pod>]) -> Usages {
    let Ok(hierarchies) = linux::cgroup::Hierarchies::known() else { return Usages::new() };
    let usage = |pod: &Arc<Pod>| {
        let group = crate::pod::resources::cgroup_path(&tools.cgroup_root, pod);
        // A pod that has not started has no group.
        let total = hierarchies.usage(Path::new(&group)).tasks.unwrap_or_default();
        (pod.metadata.uid.clone(), PodUsage { total, containers: BTreeMap::new() })
    };
    pods.iter().map(usage).collect()
}

/// Whether images and layers are on another disk than the kubelet's root directory.
pub(super) async fn images_are_apart(tools: &Tools) -> bool {
    let directories = tools.cri.image_directories().await.unwrap_or_default();
    directories.iter().any(|directory| !is_one_file_system(directory, &tools.root_dir))
}

/// Of the disk that the signal is about.
async fn disk_of_pods(
    tools: &Arc<Tools>,
    signal: Signal,
    pods: &[Arc<Pod>],
    usage_of: fn(Usage) -> PodUsage,
) -> Usages {
    let scope = match (images_are_apart(tools).await, signal.is_of_images()) {
        (false, _) => Scope::Whole,
        (true, true) => Scope::Layers,
        (true, false) => Scope::WithoutLayers,
    };
    let measure_one = |pod: &Arc<Pod>| {
        let (tools, pod) = (Arc::clone(tools), Arc::clone(pod));
        async move { Some(usage_of(measure::of_pod(&tools, &pod, scope).await.ok()?)) }
    };
    let measurements = pods.iter().map(|pod| (pod.metadata.uid.clone(), measure_one(pod)));
    measured(measurements, DISK_TIME).await
}

/// Pods whose measurement has not begun within the time say nothing about their usage, so they count as
/// using nothing; each that is slow or fails is left out.
async fn measured<F>(measurements: impl Iterator<Item = (String, F)>, time: Duration) -> Usages
where
    F: Future<Output = Option<PodUsage>> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(AT_A_TIME));
    let waiting = Arc::new(Mutex::new(BTreeSet::new()));
    let not_begun = || waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let mut tasks = JoinSet::new();
    for (uid, measurement) in measurements {
        not_begun().insert(uid.clone());
        let (permits, waiting) = (Arc::clone(&permits), Arc::clone(&waiting));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&uid);
            measurement.await.map(|usage| (uid, usage))
        });
    }
    let deadline = Instant::now() + time;
    let mut usages = Usages::new();
    while let Ok(Some(measured)) = timeout_at(deadline, tasks.join_next()).await {
        usages.extend(measured.ok().flatten());
    }
    usages.extend(not_begun().iter().map(|uid| (uid.clone(), PodUsage::default())));
    usages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_files_are_read() {
        let meminfo = "MemTotal:  1000 kB\nMemFree:    100 kB\nInactive(file):   50 kB\nInactive:  400 kB\n";
        let left = memory_of_machine(meminfo).unwrap();
        assert_eq!(left, Left { available: 150 << 10, capacity: 1000 << 10 });
        assert_eq!(memory_of_machine("MemTotal: 1 kB\n"), None);
        let left = processes().unwrap();
        assert!(left.available > 0 && left.available < left.capacity, "{left:?}");
    }

    #[test]
    fn a_file_system_without_fixed_inodes_has_no_signal_for_them() {
        let mut found = Observations::new();
        file_system(Path::new("/proc"), [Signal::NodefsAvailable, Signal::NodefsInodesFree], &mut found);
        assert_eq!(found, Observations::new());
        file_system(Path::new("/dev/shm"), [Signal::NodefsAvailable, Signal::NodefsInodesFree], &mut found);
        assert_eq!(found.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn only_pods_that_are_slow_or_fail_are_unknown() {
        let used = PodUsage { total: 7, containers: BTreeMap::new() };
        let measurements = (0..10).map(|number| {
            let used = used.clone();
            let measurement = async move {
                match number {
                    0 => Some(used),
                    1 => None,
                    _ => std::future::pending().await,
                }
            };
            (number.to_string(), measurement)
        });
        let usages = measured(measurements, DISK_TIME).await;
        assert_eq!(usages["0"], used);
        let unknown: Vec<_> =
            (0..10).map(|number| number.to_string()).filter(|uid| !usages.contains_key(uid)).collect();
        assert_eq!(unknown, ["1", "2", "3", "4", "5"]);
        assert_eq!(usages["6"], PodUsage::default());
    }
}
