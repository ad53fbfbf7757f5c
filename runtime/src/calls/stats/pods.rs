//! What a whole pod uses.

use std::path::PathBuf;
use std::sync::Arc;

use linux::cgroup::usage::{Memory, Usage};
use proto::cri::{
    LinuxPodSandboxStats, PodSandboxAttributes, PodSandboxStats, PodSandboxStatsFilter, ProcessUsage,
};

use super::{Figures, Layers, NODE_WAIT, POD_WAIT, network, of_all, usages, value};
use crate::blocking::blocking;
use crate::error::Result;
use crate::runtime::Runtime;
use crate::runtime::state::{Phase, Sandbox, SandboxRecord};
use crate::shim::protocol::now;

/// ListPodSandboxStats: of the pods that run.
pub(crate) async fn list(
    runtime: &Arc<Runtime>,
    filter: PodSandboxStatsFilter,
) -> Result<Vec<PodSandboxStats>> {
    let wait = if filter == PodSandboxStatsFilter::default() { NODE_WAIT } else { POD_WAIT };
    let wanted = |sandbox: &Arc<Sandbox>| {
        sandbox.id.starts_with(&filter.id)
            && sandbox.has_labels(&filter.label_selector)
            && sandbox.ready().is_ok()
    };
    let sandboxes: Vec<Arc<Sandbox>> = runtime.sandboxes().into_iter().filter(wanted).collect();
    let containers: Vec<_> =
        sandboxes.iter().flat_map(|sandbox| runtime.containers_of(&sandbox.id)).collect();
    let layers = Layers::count(runtime, &containers, wait).await;
    let mut stats = Vec::with_capacity(sandboxes.len());
    for sandbox in sandboxes {
        stats.push(of(runtime, &sandbox, &layers).await?);
    }
    Ok(stats)
}

/// PodSandboxStats. A pod that was stopped has attributes alone.
pub(crate) async fn of_pod(runtime: &Arc<Runtime>, id: &str) -> Result<PodSandboxStats> {
    let sandbox = runtime.sandbox(id)?;
    let layers = Layers::count(runtime, &runtime.containers_of(&sandbox.id), POD_WAIT).await;
    of(runtime, &sandbox, &layers).await
}

async fn of(runtime: &Arc<Runtime>, sandbox: &Sandbox, layers: &Layers) -> Result<PodSandboxStats> {
    let record = sandbox.record();
    let linux = match record.phase {
        Phase::Ready => Some(figures(runtime, sandbox, &record, layers).await?),
        Phase::Creating | Phase::Broken | Phase::Stopped => None,
    };
    let config = record.config;
    let attributes = PodSandboxAttributes {
        id: record.id,
        metadata: config.metadata,
        labels: config.labels,
        annotations: config.annotations,
    };
    Ok(PodSandboxStats { attributes: Some(attributes), linux })
}

async fn figures(
    runtime: &Arc<Runtime>,
    sandbox: &Sandbox,
    record: &SandboxRecord,
    layers: &Layers,
) -> Result<LinuxPodSandboxStats> {
    let usage = sum(usages(groups(runtime, record)).await?);
    let figures = Figures::new(&usage, &sandbox.processor);
    let network = match record.netns.clone() {
        Some(netns) => blocking("count the pod's packets", move || network::of(&netns)).await?,
        // The host's interfaces are not the pod's.
        None => None,
    };
    let process = usage.tasks.map(|tasks| ProcessUsage { timestamp: now(), process_count: value(tasks) });
    Ok(LinuxPodSandboxStats {
        cpu: figures.cpu,
        memory: figures.memory,
        network,
        process,
        containers: of_all(runtime.containers_of(&sandbox.id), layers).await?,
        io: None,
    })
}

/// The pod's own group, which kubelet has made and named. Without one, those of its containers: the
/// group above them is also that of other pods.
fn groups(runtime: &Runtime, record: &SandboxRecord) -> Vec<Option<PathBuf>> {
    let parent = record.config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str()).unwrap_or_default();
    if !parent.is_empty() {
        return vec![Some(PathBuf::from(parent))];
    }
    let containers = runtime.containers_of(&record.id).into_iter();
    containers
        .filter(|container| container.state().is_running())
        .map(|container| Some(container.record.cgroup_path.clone()))
        .collect()
}

/// One group is as it is; the sum of several has no limit.
fn sum(usages: Vec<Usage>) -> Usage {
    let total = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
    let both = |a: Memory, b: Memory| Memory {
        usage: a.usage.saturating_add(b.usage),
        inactive_file: a.inactive_file.saturating_add(b.inactive_file),
        rss: a.rss.saturating_add(b.rss),
        page_faults: a.page_faults.saturating_add(b.page_faults),
        major_page_faults: a.major_page_faults.saturating_add(b.major_page_faults),
        limit: None,
        swap: None,
    };
    let summed = usages.into_iter().reduce(|a, b| Usage {
        cpu_nanoseconds: total(a.cpu_nanoseconds, b.cpu_nanoseconds),
        memory: a.memory.zip(b.memory).map(|(a, b)| both(a, b)),
        tasks: total(a.tasks, b.tasks),
    });
    summed.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_of_a_pod_are_added_and_one_keeps_its_limit() {
        let group = |usage| Usage {
            cpu_nanoseconds: Some(usage),
            memory: Some(Memory { usage, limit: Some(9), ..Memory::default() }),
            tasks: Some(1),
        };
        assert_eq!(sum(vec![group(3)]), group(3));
        let two = sum(vec![group(3), group(4)]);
        assert_eq!((two.cpu_nanoseconds, two.tasks), (Some(7), Some(2)));
        assert_eq!(two.memory, Some(Memory { usage: 7, ..Memory::default() }));
        assert_eq!(sum(Vec::new()), Usage::default());
    }
}
