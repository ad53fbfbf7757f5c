//! What containers and pods use: processor time, memory, swap and tasks from their control groups,
//! the disk space of writable layers, and a pod's network.

mod file_systems;
mod network;
mod pods;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::cgroup::Hierarchies;
use linux::cgroup::usage::Usage;
use proto::cri::{
    ContainerAttributes, ContainerStats, ContainerStatsFilter, CpuUsage, MemoryUsage, SwapUsage, UInt64Value,
};

use crate::blocking::blocking;
use crate::error::Result;
use crate::runtime::Runtime;
use crate::runtime::samples::Processor;
use crate::runtime::state::{Container, selected};
use crate::shim::protocol::now;
use file_systems::Layers;
pub(crate) use file_systems::image_fs;
pub(crate) use pods::{list as list_pods, of_pod};

/// The wait of a call about one pod or container for the counts of its layers: longer than the count of one tree
/// takes, and less than the kubelet waits before it evicts a pod for disk space.
const POD_WAIT: Duration = Duration::from_secs(35);
/// That of a call about the whole node. Its callers want the other figures, which must not wait for the layers of
/// one pod.
const NODE_WAIT: Duration = Duration::from_secs(2);

/// ListContainerStats.
pub(crate) async fn list(
    runtime: &Arc<Runtime>,
    filter: ContainerStatsFilter,
) -> Result<Vec<ContainerStats>> {
    let wait = if filter == ContainerStatsFilter::default() { NODE_WAIT } else { POD_WAIT };
    let wanted = |container: &Arc<Container>| {
        let record = &container.record;
        record.id.starts_with(&filter.id)
            && record.sandbox_id.starts_with(&filter.pod_sandbox_id)
            && selected(&record.config.labels, &filter.label_selector)
    };
    let containers: Vec<_> = runtime.containers().into_iter().filter(wanted).collect();
    let layers = Layers::count(runtime, &containers, wait).await;
    of_all(containers, &layers).await
}

/// ContainerStats.
pub(crate) async fn of_container(runtime: &Arc<Runtime>, id: &str) -> Result<ContainerStats> {
    let containers = vec![runtime.container(id)?];
    let layers = Layers::count(runtime, &containers, POD_WAIT).await;
    Ok(of_all(containers, &layers).await?.pop().expect("one container has one answer"))
}

async fn of_all(containers: Vec<Arc<Container>>, layers: &Layers) -> Result<Vec<ContainerStats>> {
    let groups = containers
        .iter()
        .map(|container| container.state().is_running().then(|| container.record.cgroup_path.clone()));
    let usages = usages(groups.collect()).await?;
    let stats = containers.into_iter().zip(usages).map(|(container, usage)| {
        let figures = Figures::new(&usage, &container.samples.processor);
        ContainerStats {
            attributes: Some(attributes(&container)),
            cpu: figures.cpu,
            memory: figures.memory,
            swap: figures.swap,
            writable_layer: layers.of(&container.id),
            io: None,
        }
    });
    Ok(stats.collect())
}

/// What these groups use: nothing known where there is none.
async fn usages<P: AsRef<Path> + Send + 'static>(groups: Vec<Option<P>>) -> Result<Vec<Usage>> {
    blocking("read control groups", move || {
        let hierarchies = Hierarchies::known()?;
        let usage = |group: Option<P>| group.map(|path| hierarchies.usage(path.as_ref())).unwrap_or_default();
        Ok(groups.into_iter().map(usage).collect())
    })
    .await
}

/// A group's usage as CRI has it.
struct Figures {
    cpu: Option<CpuUsage>,
    memory: Option<MemoryUsage>,
    swap: Option<SwapUsage>,
}

impl Figures {
    fn new(usage: &Usage, processor: &Processor) -> Self {
        let timestamp = now();
        let cpu = usage.cpu_nanoseconds.map(|nanoseconds| CpuUsage {
            timestamp,
            usage_core_nano_seconds: value(nanoseconds),
            usage_nano_cores: processor.rate(Instant::now(), nanoseconds).and_then(value),
            psi: None,
        });
        let memory = usage.memory.map(|memory| MemoryUsage {
            timestamp,
            working_set_bytes: value(memory.working_set()),
            available_bytes: memory.limit.and_then(|limit| value(limit.saturating_sub(memory.working_set()))),
            usage_bytes: value(memory.usage),
            rss_bytes: value(memory.rss),
            page_faults: value(memory.page_faults),
            major_page_faults: value(memory.major_page_faults),
            psi: None,
        });
        let swap = usage.memory.and_then(|memory| memory.swap).map(|swap| SwapUsage {
            timestamp,
            swap_available_bytes: swap.limit.and_then(|limit| value(limit.saturating_sub(swap.usage))),
            swap_usage_bytes: value(swap.usage),
        });
        Self { cpu, memory, swap }
    }
}

/// An optional field of a message.
fn value(value: u64) -> Option<UInt64Value> {
    Some(UInt64Value { value })
}

fn attributes(container: &Container) -> ContainerAttributes {
    let config = &container.record.config;
    ContainerAttributes {
        id: container.id.clone(),
        metadata: config.metadata.clone(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
    }
}
