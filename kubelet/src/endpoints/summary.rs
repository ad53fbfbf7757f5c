//! `/stats/summary`: the figures of node and pods in the shape of kubelet's API stats/v1alpha1
//! (kubernetes, staging/src/k8s.io/kubelet/pkg/apis/stats/v1alpha1/types.go).
//!
//! The figures of volumes are those of the last measurement in the background: none is waited for.

use std::path::Path;

use jiff::Timestamp;
use nix::sys::statvfs::statvfs;
use proto::cri;
use serde_json::{Map, Value, json};

use super::object::object;
use super::usage::{NodeUsage, PodUsage, Usage, value};
use super::volumes::of_volume;
use crate::objects::{ContainerState, ContainerStatus, Pod};
use crate::volumes::Figures;

/// What the summary is made of.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) node_name: &'a str,
    pub(super) node: NodeUsage,
    /// The disk of the kubelet's root directory.
    pub(super) disk: Option<Disk>,
    pub(super) image_disk: Option<Disk>,
    /// What images take of it: bytes and inodes.
    pub(super) images: Option<&'a cri::FilesystemUsage>,
    pub(super) usage: &'a Usage,
    pub(super) volumes: &'a Figures,
    pub(super) now: Timestamp,
}

/// A file system, in bytes and inodes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk {
    capacity: u64,
    available: u64,
    used: u64,
    inodes: u64,
    inodes_free: u64,
}

impl Disk {
    /// Of the file system that holds `path`.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let found = statvfs(path).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
        Some(Self {
            capacity: bytes(found.blocks()),
            available: bytes(found.blocks_available()),
            used: bytes(found.blocks().saturating_sub(found.blocks_free())),
            inodes: found.files(),
            inodes_free: found.files_free(),
        })
    }

    /// Its usage is that of the whole file system, if no other is given.
    fn to_json(self, time: Timestamp, used: Option<(Option<u64>, Option<u64>)>) -> Value {
        let all = (Some(self.used), Some(self.inodes.saturating_sub(self.inodes_free)));
        let (bytes, inodes) = used.unwrap_or(all);
        object([
            ("time", Some(json!(time))),
            ("availableBytes", Some(json!(self.available))),
            ("capacityBytes", Some(json!(self.capacity))),
            ("usedBytes", bytes.map(Value::from)),
            ("inodesFree", Some(json!(self.inodes_free))),
            ("inodes", Some(json!(self.inodes))),
            ("inodesUsed", inodes.map(Value::from)),
        ])
    }
}

pub(super) fn summary(pods: &[impl AsRef<Pod>], facts: &Facts<'_>) -> Value {
    let pods = pods.iter().map(AsRef::as_ref);
    let pods = pods.filter_map(|pod| Some(of_pod(pod, facts.usage.of_pod(&pod.metadata.uid)?, facts)));
    json!({ "node": of_node(facts), "pods": pods.collect::<Vec<_>>() })
}

fn of_node(facts: &Facts<'_>) -> Value {
    let (node, time) = (facts.node, facts.now);
    let images =
        facts.images.map(|images| (value(images.used_bytes.as_ref()), value(images.inodes_used.as_ref())));
    let image_fs = facts.image_disk.map(|disk| disk.to_json(time, images));
    object([
        ("nodeName", Some(json!(facts.node_name))),
        ("startTime", Timestamp::from_second(node.boot_time).ok().map(|time| json!(time))),
        ("cpu", Some(json!({ "time": time, "usageCoreNanoSeconds": node.cpu_nanoseconds }))),
        (
            "memory",
            Some(json!({
                "time": time,
                "availableBytes": node.available_bytes,
                "usageBytes": node.used_bytes,
                "workingSetBytes": node.working_set_bytes,
            })),
        ),
        ("swap", Some(json!({ "time": time, "swapUsageBytes": node.swap_used_bytes }))),
        ("fs", facts.disk.map(|disk| disk.to_json(time, None))),
        ("runtime", image_fs.map(|image_fs| json!({ "imageFs": image_fs }))),
        ("rlimit", Some(json!({ "time": time, "curproc": node.processes }))),
    ])
}

fn of_pod(pod: &Pod, usage: &PodUsage, facts: &Facts<'_>) -> Value {
    let statuses = pod.status.init_container_statuses.iter().chain(&pod.status.container_statuses);
    let containers = statuses.filter_map(|status| of_container(status, usage, facts));
    let linux = usage.pod.as_ref();
    let processes = linux.and_then(|linux| value(linux.process.as_ref()?.process_count.as_ref()));
    let layers = usage.containers.values().filter_map(|stats| stats.writable_layer.as_ref());
    let used = layers.clone().filter_map(|layer| value(layer.used_bytes.as_ref())).sum();
    let inodes = layers.filter_map(|layer| value(layer.inodes_used.as_ref())).sum();
    let storage = facts.disk.map(|disk| disk.to_json(facts.now, Some((Some(used), Some(inodes)))));
    object([
        (
            "podRef",
            Some(json!({
                "name": pod.metadata.name,
                "namespace": pod.metadata.namespace,
                "uid": pod.metadata.uid,
            })),
        ),
        ("startTime", pod.status.start_time.as_ref().map(|time| json!(time))),
        ("containers", Some(containers.collect())),
        ("cpu", linux.and_then(|linux| cpu(linux.cpu.as_ref()))),
        ("memory", linux.and_then(|linux| memory(linux.memory.as_ref()))),
        ("network", linux.and_then(|linux| network(linux.network.as_ref()))),
        ("volume", volumes(pod, facts)),
        ("ephemeral-storage", storage),
        ("process_stats", processes.map(|count| json!({ "process_count": count }))),
    ])
}

/// `None`: the pod has none that are measured.
fn volumes(pod: &Pod, facts: &Facts<'_>) -> Option<Value> {
    let volumes = facts.volumes.get(&pod.metadata.uid).filter(|volumes| !volumes.is_empty())?;
    let volumes = volumes.iter().map(|volume| of_volume(&pod.metadata.namespace, volume));
    Some(volumes.collect())
}

/// `None`: the runtime does not know it (yet).
fn of_container(status: &ContainerStatus, usage: &PodUsage, facts: &Facts<'_>) -> Option<Value> {
    let stats = usage.containers.get(&status.name)?;
    let started = match &status.state {
        ContainerState::Running(running) => running.started_at.as_ref(),
        ContainerState::Terminated(ended) => ended.started_at.as_ref(),
        ContainerState::Waiting(_) => None,
    };
    let layer = stats.writable_layer.as_ref();
    let used = layer.map(|layer| (value(layer.used_bytes.as_ref()), value(layer.inodes_used.as_ref())));
    let root = facts.image_disk.zip(used).map(|(disk, used)| disk.to_json(facts.now, Some(used)));
    Some(object([
        ("name", Some(json!(status.name))),
        ("startTime", started.map(|time| json!(time))),
        ("cpu", cpu(stats.cpu.as_ref())),
        ("memory", memory(stats.memory.as_ref())),
        ("swap", swap(stats.swap.as_ref())),
        ("rootfs", root),
    ]))
}

fn cpu(cpu: Option<&cri::CpuUsage>) -> Option<Value> {
    let cpu = cpu?;
    Some(object([
        ("time", time(cpu.timestamp)),
        ("usageNanoCores", value(cpu.usage_nano_cores.as_ref()).map(Value::from)),
        ("usageCoreNanoSeconds", value(cpu.usage_core_nano_seconds.as_ref()).map(Value::from)),
    ]))
}

fn memory(memory: Option<&cri::MemoryUsage>) -> Option<Value> {
    let memory = memory?;
    Some(object([
        ("time", time(memory.timestamp)),
        ("availableBytes", value(memory.available_bytes.as_ref()).map(Value::from)),
        ("usageBytes", value(memory.usage_bytes.as_ref()).map(Value::from)),
        ("workingSetBytes", value(memory.working_set_bytes.as_ref()).map(Value::from)),
        ("rssBytes", value(memory.rss_bytes.as_ref()).map(Value::from)),
        ("pageFaults", value(memory.page_faults.as_ref()).map(Value::from)),
        ("majorPageFaults", value(memory.major_page_faults.as_ref()).map(Value::from)),
    ]))
}

fn swap(swap: Option<&cri::SwapUsage>) -> Option<Value> {
    let swap = swap?;
    Some(object([
        ("time", time(swap.timestamp)),
        ("swapAvailableBytes", value(swap.swap_available_bytes.as_ref()).map(Value::from)),
        ("swapUsageBytes", value(swap.swap_usage_bytes.as_ref()).map(Value::from)),
    ]))
}

fn network(network: Option<&cri::NetworkUsage>) -> Option<Value> {
    let network = network?;
    // Some runtimes list the default interface among the others, and some do not.
    let default = network.default_interface.iter();
    let default = default.filter(|default| network.interfaces.iter().all(|other| other.name != default.name));
    let interfaces: Vec<Value> =
        default.chain(&network.interfaces).map(|found| interface(found).into()).collect();
    let mut figures = network.default_interface.as_ref().map(interface).unwrap_or_default();
    figures.insert("time".to_owned(), time(network.timestamp)?);
    figures.insert("interfaces".to_owned(), interfaces.into());
    Some(figures.into())
}

fn interface(interface: &cri::NetworkInterfaceUsage) -> Map<String, Value> {
    let figures = [
        ("rxBytes", interface.rx_bytes.as_ref()),
        ("rxErrors", interface.rx_errors.as_ref()),
        ("txBytes", interface.tx_bytes.as_ref()),
        ("txErrors", interface.tx_errors.as_ref()),
    ];
    let figures =
        figures.into_iter().filter_map(|(name, figure)| Some((name.to_owned(), Value::from(value(figure)?))));
    [("name".to_owned(), Value::from(interface.name.clone()))].into_iter().chain(figures).collect()
}

/// Nanoseconds since 1970.
fn time(nanoseconds: i64) -> Option<Value> {
    Timestamp::from_nanosecond(nanoseconds.into()).ok().map(|time| json!(time))
}
