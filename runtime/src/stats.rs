//! ListContainerStats, only for the disk: the space of a container's writable layer and of its
//! files in the sandbox's directory. It is measured on request.

use std::sync::Arc;
use std::time::Duration;

use linux::disk_usage::{self, Bounds, TimeShares};
use proto::cri::{
    ContainerAttributes, ContainerStats, ContainerStatsFilter, FilesystemIdentifier, FilesystemUsage,
    UInt64Value,
};

use crate::blocking::blocking;
use crate::error::Result;
use crate::runtime::Runtime;
use crate::shim::protocol::now;
use crate::state::Container;

/// Limit for one container; further entries are not counted.
const MAX_ENTRIES: u64 = 5_000_000;
const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Limit for one call; callers wait two minutes (kubelet's runtimeRequestTimeout).
const CALL_TIME_LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn list(
    runtime: &Arc<Runtime>,
    filter: ContainerStatsFilter,
) -> Result<Vec<ContainerStats>> {
    let selected = |container: &Arc<Container>| {
        let record = &container.record;
        record.id.starts_with(&filter.id)
            && record.sandbox_id.starts_with(&filter.pod_sandbox_id)
            && filter.label_selector.iter().all(|(key, value)| record.config.labels.get(key) == Some(value))
    };
    let containers: Vec<Arc<Container>> = runtime.containers().into_iter().filter(selected).collect();
    let mut stats = Vec::with_capacity(containers.len());
    let mut shares = TimeShares::new(CALL_TIME_LIMIT, containers.len());
    for container in containers {
        let runtime = Arc::clone(runtime);
        let bounds = Bounds { entries: MAX_ENTRIES, time: shares.next_share().min(TIME_LIMIT) };
        stats.push(blocking("count a writable layer", move || of(&runtime, &container, bounds)).await?);
    }
    Ok(stats)
}

fn of(runtime: &Runtime, container: &Container, bounds: Bounds) -> Result<ContainerStats> {
    let record = &container.record;
    let Some(sandbox) = runtime.find_sandbox(&record.sandbox_id) else {
        return Ok(ContainerStats { attributes: Some(attributes(container)), ..Default::default() });
    };
    let mut usage = disk_usage::measure(&sandbox.container_dir(&record.id).join("upper"), bounds)?;
    // Every container of the pod may write these files. They count once, for the first container.
    let first = runtime.containers_of(&sandbox.id).into_iter().min_by_key(|c| c.record.created_at);
    if first.is_some_and(|first| first.id == container.id) {
        for name in ["hostname", "hosts", "resolv.conf"] {
            usage.bytes = usage.bytes.saturating_add(disk_usage::of_file(&sandbox.dir.join(name))?);
        }
    }
    let writable_layer = FilesystemUsage {
        timestamp: now(),
        fs_id: Some(FilesystemIdentifier { mountpoint: runtime.root_dir.display().to_string() }),
        used_bytes: Some(UInt64Value { value: usage.bytes }),
        inodes_used: Some(UInt64Value { value: usage.inodes }),
    };
    Ok(ContainerStats {
        attributes: Some(attributes(container)),
        writable_layer: Some(writable_layer),
        ..Default::default()
    })
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
