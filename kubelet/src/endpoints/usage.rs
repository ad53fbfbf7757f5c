//! What pods, containers and the node use: the runtime's figures and the kernel's.
//!
//! Clients that ask at the same time, or within a second of each other, get the same figures, or the same
//! error: their number does not determine the work of the runtime.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use proto::cri;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::clients::cri::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use crate::engine::{Handle, StreamError};
use crate::node::machine;

/// How long figures, and failures, are used.
const AGE: Duration = Duration::from_secs(1);
/// For the runtime's answers, other clients' waits included.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The runtime's figures by pod uid.
#[derive(Debug, Default)]
pub(super) struct Usage {
    pods: HashMap<String, PodUsage>,
}

#[derive(Debug, Default)]
pub(super) struct PodUsage {
    /// `None`: the runtime has no figures of pods.
    pub(super) pod: Option<cri::LinuxPodSandboxStats>,
    /// By name. A container that does not run has no figures of processor and memory.
    pub(super) containers: HashMap<String, cri::ContainerStats>,
}

/// Figures of the whole node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NodeUsage {
    pub(super) cpu_nanoseconds: u64,
    /// What is neither free nor inactive page cache, in bytes.
    pub(super) working_set_bytes: u64,
    pub(super) available_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) swap_used_bytes: u64,
    /// Seconds since 1970.
    pub(super) boot_time: i64,
    pub(super) processes: u64,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub(super) enum Missing {
    #[error(transparent)]
    Runtime(#[from] StreamError),
    #[error("the runtime has not answered within {} s", TIMEOUT.as_secs())]
    Late,
}

/// What all clients share.
type Shared = Result<Arc<Usage>, Arc<Missing>>;

#[derive(Debug)]
pub(super) struct UsageCache {
    engine: Handle,
    last: Last,
}

#[derive(Debug, Default)]
struct Last(Mutex<Option<(Instant, Shared)>>);

impl UsageCache {
    pub(super) fn new(engine: Handle) -> Self {
        Self { engine, last: Last::default() }
    }

    /// The figures, at most a second old.
    pub(super) async fn get(&self) -> Shared {
        self.last.or(Usage::ask(&self.engine)).await
    }
}

impl Last {
    /// What `ask` has answered last, or answers now.
    async fn or(&self, ask: impl Future<Output = Result<Usage, StreamError>>) -> Shared {
        let deadline = Instant::now() + TIMEOUT;
        let locked = timeout_at(deadline, self.0.lock()).await;
        let mut last = locked.map_err(|_elapsed| Arc::new(Missing::Late))?;
        if let Some((time, shared)) = &*last
            && time.elapsed() < AGE
        {
            return shared.clone();
        }
        let asked = match timeout_at(deadline, ask).await {
            Ok(answered) => answered.map_err(Missing::Runtime),
            Err(_elapsed) => Err(Missing::Late),
        };
        let shared = asked.map(Arc::new).map_err(Arc::new);
        *last = Some((Instant::now(), shared.clone()));
        shared
    }
}

impl Usage {
    async fn ask(engine: &Handle) -> Result<Self, StreamError> {
        let runtime = engine.runtime().await?;
        let mut usage = Self::default();
        for stats in runtime.container_stats(None).await? {
            let Some(attributes) = &stats.attributes else { continue };
            let label = |name: &str| attributes.labels.get(name).cloned();
            let (Some(uid), Some(name)) = (label(POD_UID_LABEL), label(CONTAINER_NAME_LABEL)) else {
                continue;
            };
            let containers = &mut usage.pods.entry(uid).or_default().containers;
            // An earlier instance that has not been removed has no figures.
            if stats.cpu.is_some() || !containers.contains_key(&name) {
                containers.insert(name, stats);
            }
        }
        for stats in runtime.list_pod_stats().await?.unwrap_or_default() {
            let uid = stats.attributes.and_then(|mut attributes| attributes.labels.remove(POD_UID_LABEL));
            if let Some(uid) = uid {
                usage.pods.entry(uid).or_default().pod = stats.linux;
            }
        }
        Ok(usage)
    }

    pub(super) fn of_pod(&self, uid: &str) -> Option<&PodUsage> {
        self.pods.get(uid)
    }
}

/// A figure and when it was measured, in nanoseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) value: u64,
    pub(super) time: i64,
}

pub(super) fn value(value: Option<&cri::UInt64Value>) -> Option<u64> {
    value.map(|value| value.value)
}

/// Processor time in nanoseconds.
pub(super) fn cpu(cpu: Option<&cri::CpuUsage>) -> Option<Measured> {
    let cpu = cpu?;
    Some(Measured { value: value(cpu.usage_core_nano_seconds.as_ref())?, time: cpu.timestamp })
}

/// Memory in bytes.
pub(super) fn working_set(memory: Option<&cri::MemoryUsage>) -> Option<Measured> {
    let memory = memory?;
    Some(Measured { value: value(memory.working_set_bytes.as_ref())?, time: memory.timestamp })
}

impl PodUsage {
    /// The pod's own figure, or the sum of its containers' if the runtime has none.
    pub(super) fn total(
        &self,
        of_pod: impl Fn(&cri::LinuxPodSandboxStats) -> Option<Measured>,
        of_container: impl Fn(&cri::ContainerStats) -> Option<Measured>,
    ) -> Option<Measured> {
        let sum = || {
            self.containers
                .values()
                .filter_map(of_container)
                .reduce(|a, b| Measured { value: a.value.saturating_add(b.value), time: a.time.max(b.time) })
        };
        self.pod.as_ref().and_then(of_pod).or_else(sum)
    }

    pub(super) fn cpu(&self) -> Option<Measured> {
        self.total(|pod| cpu(pod.cpu.as_ref()), |container| cpu(container.cpu.as_ref()))
    }

    pub(super) fn working_set(&self) -> Option<Measured> {
        self.total(|pod| working_set(pod.memory.as_ref()), |container| working_set(container.memory.as_ref()))
    }
}

impl NodeUsage {
    pub(super) fn read() -> io::Result<Self> {
        let (stat, memory) =
            (std::fs::read_to_string("/proc/stat")?, std::fs::read_to_string("/proc/meminfo")?);
        let loads = std::fs::read_to_string("/proc/loadavg")?;
        Self::of(&stat, &memory, &loads).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// From `/proc/stat`, `/proc/meminfo` and `/proc/loadavg`.
    fn of(stat: &str, memory: &str, loads: &str) -> Option<Self> {
        let bytes = |name| machine::memory(memory, name);
        let total = bytes("MemTotal")?;
        let used = total.saturating_sub(bytes("MemFree")?);
        let working_set = used.saturating_sub(bytes("Inactive(file)")?);
        let swap = bytes("SwapTotal").zip(bytes("SwapFree"));
        let boot_time = stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
        Some(Self {
            cpu_nanoseconds: machine::processor_time(stat)?,
            working_set_bytes: working_set,
            available_bytes: total.saturating_sub(working_set),
            used_bytes: used,
            swap_used_bytes: swap.map_or(0, |(total, free)| total.saturating_sub(free)),
            boot_time,
            processes: machine::tasks(loads).unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_read_as_the_kernel_writes_it() {
        let stat = "cpu  10 1 5 1000 50 2 3 4 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\nbtime 1700000000\n";
        let memory =
            "MemTotal: 8000 kB\nMemFree: 100 kB\nInactive(file): 900 kB\nSwapTotal: 10 kB\nSwapFree: 4 kB\n";
        let usage = NodeUsage::of(stat, memory, "0.1 0.2 0.3 2/345 6789\n").unwrap();
        assert_eq!(usage.cpu_nanoseconds, (10 + 1 + 5 + 2 + 3 + 4) * 10_000_000);
        assert_eq!((usage.working_set_bytes, usage.available_bytes), (7000 * 1024, 1000 * 1024));
        assert_eq!((usage.used_bytes, usage.swap_used_bytes), (7900 * 1024, 6 * 1024));
        assert_eq!((usage.boot_time, usage.processes), (1_700_000_000, 345));
        assert_eq!(NodeUsage::of("intr 5\n", memory, ""), None);
        assert!(NodeUsage::read().unwrap().cpu_nanoseconds > 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_used_as_long_as_figures_are() {
        let last = Last::default();
        let failed = last.or(async { Err(StreamError::Ending) }).await.unwrap_err();
        assert!(matches!(*failed, Missing::Runtime(StreamError::Ending)), "{failed}");
        let again = last.or(async { Ok(Usage::default()) }).await.unwrap_err();
        assert!(Arc::ptr_eq(&failed, &again), "{again}");
        tokio::time::advance(AGE).await;
        last.or(async { Ok(Usage::default()) }).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_does_not_answer_keeps_no_client_waiting() {
        let (last, began) = (Last::default(), Instant::now());
        let (first, second) = tokio::join!(last.or(std::future::pending()), last.or(std::future::pending()));
        for late in [first, second] {
            assert!(matches!(*late.unwrap_err(), Missing::Late));
        }
        assert!(began.elapsed() < TIMEOUT + AGE, "{:?}", began.elapsed());
    }

    #[test]
    fn a_pod_without_figures_of_its_own_is_the_sum_of_its_containers() {
        let container = |nanoseconds, time| cri::ContainerStats {
            cpu: Some(cri::CpuUsage {
                timestamp: time,
                usage_core_nano_seconds: Some(cri::UInt64Value { value: nanoseconds }),
                ..cri::CpuUsage::default()
            }),
            ..cri::ContainerStats::default()
        };
        let containers =
            HashMap::from([("a".to_owned(), container(3, 10)), ("b".to_owned(), container(4, 20))]);
        let mut usage = PodUsage { pod: None, containers };
        assert_eq!(usage.cpu(), Some(Measured { value: 7, time: 20 }));
        assert_eq!(usage.working_set(), None);
        let cpu = container(9, 30).cpu;
        usage.pod = Some(cri::LinuxPodSandboxStats { cpu, ..cri::LinuxPodSandboxStats::default() });
        assert_eq!(usage.cpu(), Some(Measured { value: 9, time: 30 }));
    }
}
