//! A pod's limits on the disk, and kubelet's messages for a pod that exceeds them (kubernetes,
//! eviction_manager.go and helpers.go). No I/O.

use std::collections::BTreeMap;

use crate::objects::{Container, EmptyDirVolume, Pod, Quantity, Volume, VolumeSource};
use crate::pod::resources;

const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// A pod's disk usage in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// By volume; emptyDirs on the disk only.
    pub(super) empty_dirs: BTreeMap<String, u64>,
    /// Writable layer, logs, /etc/hosts and termination messages, by container.
    pub(super) containers: BTreeMap<String, u64>,
    /// Of everything that was measured.
    pub(super) inodes: u64,
    pub(super) is_complete: bool,
}

/// Whether the pod has any limit.
pub(super) fn has_any(pod: &Pod) -> bool {
    pod.spec.all_containers().any(|c| limit_of(c).is_some())
        || pod.spec.volumes.iter().filter_map(disk_empty_dir).any(|volume| volume.size_limit.is_some())
}

/// Whether a limit covers the containers' own storage, not only the volumes'.
pub(super) fn has_storage_limit(pod: &Pod) -> bool {
    pod.spec.all_containers().any(|c| limit_of(c).is_some())
}

/// The eviction message for the first exceeded limit.
pub(super) fn exceeded(pod: &Pod, usage: &Usage) -> Option<String> {
    empty_dir_exceeded(pod, usage)
        .or_else(|| pod_exceeded(pod, usage))
        .or_else(|| container_exceeded(pod, usage))
}

fn empty_dir_exceeded(pod: &Pod, usage: &Usage) -> Option<String> {
    pod.spec.volumes.iter().find_map(|volume| {
        let limit = disk_empty_dir(volume)?.size_limit.as_ref().filter(|limit| limit.value() > 0)?;
        let used = usage.empty_dirs.get(&volume.name)?;
        (*used > limit.value())
            .then(|| format!("Usage of EmptyDir volume \"{}\" exceeds the limit \"{limit}\". ", volume.name))
    })
}

/// The sum of the limits of what runs at a time applies to the pod's total usage.
fn pod_exceeded(pod: &Pod, usage: &Usage) -> Option<String> {
    let limits: Vec<&Quantity> = pod.spec.all_containers().filter_map(limit_of).collect();
    if limits.is_empty() {
        return None;
    }
    let total = u64::try_from(resources::limits(pod).storage_bytes).unwrap_or_default();
    let parts = usage.empty_dirs.values().chain(usage.containers.values());
    let used = parts.fold(0, |sum: u64, part| sum.saturating_add(*part));
    let shown = match limits.as_slice() {
        [only] => (*only).clone(),
        _ => Quantity::from_bytes(total),
    };
    (used > total)
        .then(|| format!("Pod ephemeral local storage usage exceeds the total limit of containers {shown}. "))
}

fn container_exceeded(pod: &Pod, usage: &Usage) -> Option<String> {
    pod.spec.all_containers().find_map(|container| {
        let limit = limit_of(container)?;
        let used = usage.containers.get(&container.name)?;
        (*used > limit.value()).then(|| {
            format!("Container {} exceeded its local ephemeral storage limit \"{limit}\". ", container.name)
        })
    })
}

/// An emptyDir on the disk; the kernel limits the size of a tmpfs.
pub(super) fn disk_empty_dir(volume: &Volume) -> Option<&EmptyDirVolume> {
    match volume.source() {
        Some(VolumeSource::EmptyDir(source)) if source.medium.is_empty() => Some(source),
        _ => None,
    }
}

fn limit_of(container: &Container) -> Option<&Quantity> {
    container.resources.limits.get(EPHEMERAL_STORAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {
                "containers": [
                    {"name": "a", "resources": {"limits": {"ephemeral-storage": "1Mi"}}},
                    {"name": "b", "resources": {"limits": {"ephemeral-storage": "2Mi"}}},
                ],
                "volumes": [
                    {"name": "small", "emptyDir": {"sizeLimit": "1M"}},
                    {"name": "any", "emptyDir": {}},
                    {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1"}},
                ]
            }
        }))
        .unwrap()
    }

    fn usage(empty_dirs: &[(&str, u64)], containers: &[(&str, u64)]) -> Usage {
        let map = |pairs: &[(&str, u64)]| pairs.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        Usage { empty_dirs: map(empty_dirs), containers: map(containers), inodes: 0, is_complete: true }
    }

    #[test]
    fn the_messages_are_kubelets() {
        let of = |usage| exceeded(&pod(), &usage);
        assert_eq!(of(usage(&[("small", 1_000_000)], &[("a", 1 << 20)])), None, "a limit may be reached");
        assert_eq!(
            of(usage(&[("small", 1_000_001)], &[])).unwrap(),
            "Usage of EmptyDir volume \"small\" exceeds the limit \"1M\". "
        );
        assert_eq!(
            of(usage(&[("any", 3 << 20)], &[("a", 1)])).unwrap(),
            "Pod ephemeral local storage usage exceeds the total limit of containers 3Mi. "
        );
        assert_eq!(
            of(usage(&[], &[("a", (1 << 20) + 1)])).unwrap(),
            "Container a exceeded its local ephemeral storage limit \"1Mi\". "
        );
    }

    #[test]
    fn without_a_limit_nothing_is_measured() {
        let mut pod = pod();
        assert!(has_any(&pod) && has_storage_limit(&pod));
        for container in &mut pod.spec.containers {
            container.resources.limits.clear();
        }
        assert!(has_any(&pod) && !has_storage_limit(&pod));
        pod.spec.volumes.remove(0);
        assert!(!has_any(&pod));
    }
}
