//! What is left of the node's memory, disks and processes, and what pods use of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::statvfs::statvfs;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::image_directories::ImageDirectories;
use super::limits::Usage;
use super::measure::{self, Scope};
use super::monitor::{Left, Observations};
use crate::capacity::pressure::Signal;
use crate::node::machine;
use crate::objects::{Container, Pod};
use crate::worker::Tools;

/// For the disk usage of all pods.
const DISK_TIME: Duration = Duration::from_secs(60);
/// Longer than the measurement of any pod whose files can be read. One that has had this time holds a lock that
/// keeps it from being measured, and counts as most.
const POD_TIME: Duration = measure::LAYERS_TIME.saturating_add(Duration::from_secs(5));
const AT_A_TIME: usize = 4;

/// What one pod uses of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PodUsage {
    pub(super) total: u64,
    /// By container, where containers have a request of their own.
    pub(super) containers: BTreeMap<String, u64>,
}

/// By uid; a pod whose measurement failed, or took longer than [`POD_TIME`], is not there.
pub(super) type Usages = BTreeMap<String, PodUsage>;

pub(super) fn node(tools: &Tools, images: &ImageDirectories) -> Observations {
    let mut found = Observations::new();
    found.insert(Signal::MemoryAvailable, memory(&tools.cgroup_root));
    file_system(&tools.root_dir, [Signal::NodefsAvailable, Signal::NodefsInodesFree], &mut found);
    for directory in images.known().iter().flat_map(|known| known.iter()) {
        file_system(directory, [Signal::ImagefsAvailable, Signal::ImagefsInodesFree], &mut found);
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
pub(super) async fn pods(
    tools: &Arc<Tools>,
    images: &ImageDirectories,
    signal: Signal,
    pods: &[Arc<Pod>],
) -> Usages {
    let are_images_apart = images.are_apart_from(&tools.root_dir);
    match signal {
        Signal::MemoryAvailable => memory_of_pods(&tools.cgroup_root, pods),
        Signal::PidAvailable => tasks_of_pods(tools, pods),
        Signal::NodefsAvailable | Signal::ImagefsAvailable => {
            disk_of_pods(tools, are_images_apart, signal, pods, |usage| {
                let empty_dirs: u64 =
                    usage.empty_dirs.values().fold(0, |sum, used| sum.saturating_add(*used));
                let total = usage.containers.values().fold(empty_dirs, |sum, used| sum.saturating_add(*used));
                PodUsage { total, containers: usage.containers }
            })
            .await
        }
        Signal::NodefsInodesFree | Signal::ImagefsInodesFree => {
            let inodes = |usage: Usage| PodUsage { total: usage.inodes, containers: BTreeMap::new() };
            disk_of_pods(tools, are_images_apart, signal, pods, inodes).await
        }
    }
}

/// The kernel's figures alone: before a runtime answers, it may count all writable layers, and the kernel kills
/// when memory is gone. A pod's group has what its containers use, and its emptyDirs in memory.
fn memory_of_pods(cgroup_root: &str, pods: &[Arc<Pod>]) -> Usages {
    let Ok(hierarchies) = linux::cgroup::Hierarchies::known() else { return Usages::new() };
    // What has not started has no group.
    let used = |group: &Path| hierarchies.usage(group).memory.map_or(0, |memory| memory.working_set());
    let usage = |pod: &Arc<Pod>| {
        let group = PathBuf::from(crate::pod::resources::cgroup_path(cgroup_root, pod));
        let of_container = |container: &Container| {
            let (_, id) = pod.status.of_container(&container.name)?.container_id.split_once("://")?;
            Some((container.name.clone(), used(&group.join(id))))
        };
        let containers = pod.spec.all_containers().filter_map(of_container).collect();
        (pod.metadata.uid.clone(), PodUsage { total: used(&group), containers })
    };
    pods.iter().map(usage).collect()
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

/// Of the disk that the signal is about.
async fn disk_of_pods(
    tools: &Arc<Tools>,
    are_images_apart: bool,
    signal: Signal,
    pods: &[Arc<Pod>],
    usage_of: fn(Usage) -> PodUsage,
) -> Usages {
    let scope = match (are_images_apart, signal.is_of_images()) {
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

/// A pod that is not measured because others are slow counts as using nothing, whether its measurement has begun or
/// not: those that cause the delay have figures, or are left out. One is left out if it is slow though it had
/// [`POD_TIME`], or if it fails.
async fn measured<F>(measurements: impl Iterator<Item = (String, F)>, time: Duration) -> Usages
where
    F: Future<Output = Option<PodUsage>> + Send + 'static,
{
    let permits = Arc::new(Semaphore::new(AT_A_TIME));
    let begun = Arc::new(Mutex::new(Begun::new()));
    let mut tasks = JoinSet::new();
    for (uid, measurement) in measurements {
        lock(&begun).insert(uid.clone(), None);
        let (permits, begun) = (Arc::clone(&permits), Arc::clone(&begun));
        tasks.spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            lock(&begun).insert(uid.clone(), Some(Instant::now()));
            (uid, measurement.await)
        });
    }
    let deadline = Instant::now() + time;
    let mut outcomes = BTreeMap::new();
    while let Ok(Some(measured)) = timeout_at(deadline, tasks.join_next()).await {
        outcomes.extend(measured.ok());
    }
    let had_its_time = |begun: &Option<Instant>| begun.is_some_and(|begun| begun + POD_TIME <= deadline);
    for (uid, _) in lock(&begun).iter().filter(|(_, begun)| !had_its_time(begun)) {
        outcomes.entry(uid.clone()).or_insert_with(|| Some(PodUsage::default()));
    }
    outcomes.into_iter().filter_map(|(uid, usage)| Some((uid, usage?))).collect()
}

/// By uid: when the measurement began; `None` until then.
type Begun = BTreeMap<String, Option<Instant>>;

fn lock(begun: &Mutex<Begun>) -> MutexGuard<'_, Begun> {
    begun.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Beside a pod that has not started.
    #[test]
    fn a_pods_memory_is_that_of_its_group_and_a_containers_that_of_the_groups_below() {
        use std::io::{BufRead, BufReader, Write};
        use std::process::{Command, Stdio};
        const BYTES: u64 = 4_000_000;
        let hierarchies = linux::cgroup::Hierarchies::detect().unwrap();
        let root = format!("/hawser-test-eviction-{}", std::process::id());
        let pod = |uid: &str| -> Arc<Pod> {
            Arc::new(
                serde_json::from_value(serde_json::json!({
                    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": uid, "uid": uid},
                    "spec": {"containers": [{"name": "c"}, {"name": "new"}]},
                    "status": {"containerStatuses": [
                        {"name": "c", "containerID": "test://id", "state": {"running": {}}},
                        {"name": "new", "state": {"waiting": {}}},
                    ]},
                }))
                .unwrap(),
            )
        };
        let group = Path::new(&crate::pod::resources::cgroup_path(&root, &pod("a"))).join("id");
        let made = hierarchies.ensure_parent(&group).unwrap();
        let script = format!("read x; x=$(head -c {BYTES} /dev/zero | tr '\\0' a); echo ready; read x");
        let mut process = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let procs = hierarchies.dir("memory", &group).unwrap().join("cgroup.procs");
        std::fs::write(procs, process.id().to_string()).unwrap();
        let mut input = process.stdin.take().unwrap();
        input.write_all(b"\n").unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let usages = memory_of_pods(&root, &[pod("a"), pod("b")]);
        drop(input);
        process.wait().unwrap();
        assert_eq!(linux::cgroup::remove_dirs(&made), [] as [PathBuf; 0]);
        assert_eq!(line, "ready\n");
        let used = usages["a"].containers["c"];
        assert!(BYTES <= used && used <= usages["a"].total && usages["a"].total < 100 * BYTES, "{usages:?}");
        assert_eq!(usages["a"].containers.len(), 1);
        assert_eq!(usages["b"].total, 0);
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

    /// As when slow pods have all of the runtime's turns.
    #[tokio::test(start_paused = true)]
    async fn a_pod_that_began_too_late_to_be_measured_is_as_one_that_has_not_begun() {
        let measurements = (0..2 * AT_A_TIME + 1).map(|number| {
            let measurement = async move {
                if number < AT_A_TIME {
                    tokio::time::sleep(DISK_TIME / 2).await;
                    return Some(PodUsage { total: 7, containers: BTreeMap::new() });
                }
                std::future::pending().await
            };
            (number.to_string(), measurement)
        });
        let usages = measured(measurements, DISK_TIME).await;
        let totals: Vec<_> =
            (0..2 * AT_A_TIME + 1).map(|number| usages.get(&number.to_string()).map(|u| u.total)).collect();
        let zero = Some(0);
        assert_eq!(totals, [Some(7), Some(7), Some(7), Some(7), zero, zero, zero, zero, zero]);
    }
}
