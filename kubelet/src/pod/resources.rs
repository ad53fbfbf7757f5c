//! Derives QoS class, cgroup values and OOM score from a pod's requests and limits.

pub(crate) mod resize;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proto::cri::LinuxContainerResources;

use crate::node::machine;
use crate::objects::{Container, Pod, QosClass, Quantity};
use crate::pod::cgroup::{CPU_PERIOD_US, Limits, quota_us, shares};
use crate::pod::fields::Capacity;

const GUARANTEED_OOM_SCORE: i64 = -997;
const BEST_EFFORT_OOM_SCORE: i64 = 1000;
/// kubelet's IsNodeCriticalPod. Its first condition (static, or of a system priority) is true for
/// every pod here: the administrator wrote its manifest.
const NODE_CRITICAL_CLASS: &str = "system-node-critical";

/// The pod's QoS class (apis/core/v1/helper/qos).
pub(crate) fn qos_class(pod: &Pod) -> QosClass {
    let containers: Vec<&Container> = pod.spec.all_containers().collect();
    let named = |c: &&Container| {
        ["cpu", "memory"].iter().any(|r| {
            let amount = c.resources.requests.get(*r).or(c.resources.limits.get(*r));
            amount.is_some_and(|q| q.milli_value() > 0)
        })
    };
    let guaranteed = |c: &&Container| {
        ["cpu", "memory"].iter().all(|r| {
            let limit = c.resources.limits.get(*r).filter(|q| q.milli_value() > 0);
            limit.is_some_and(|limit| c.resources.requests.get(*r).unwrap_or(limit) == limit)
        })
    };
    if !containers.iter().any(named) {
        QosClass::BestEffort
    } else if containers.iter().all(guaranteed) {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// The pod's cgroup, below the cgroup root.
pub(crate) fn cgroup_path(cgroup_root: &str, pod: &Pod) -> String {
    let root = cgroup_root.trim_end_matches('/');
    let uid = &pod.metadata.uid;
    match qos_class(pod) {
        QosClass::Guaranteed => format!("{root}/kubepods/pod{uid}"),
        QosClass::Burstable => format!("{root}/kubepods/burstable/pod{uid}"),
        QosClass::BestEffort => format!("{root}/kubepods/besteffort/pod{uid}"),
    }
}

/// Every possible path of a pod's cgroup, for an unknown class.
pub(crate) fn cgroup_paths_of_uid(cgroup_root: &str, uid: &str) -> [String; 3] {
    let root = cgroup_root.trim_end_matches('/');
    ["", "/burstable", "/besteffort"].map(|class| format!("{root}/kubepods{class}/pod{uid}"))
}

/// What a pod takes of the node, or may take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    pub(crate) storage_bytes: i64,
}

/// A pod's requests (kubernetes, component-helpers/resource).
pub(crate) fn requests(pod: &Pod) -> Amounts {
    amounts(pod, request)
}

/// A pod's limits; a container without one counts 0.
pub(crate) fn limits(pod: &Pod) -> Amounts {
    amounts(pod, |container, resource| container.resources.limits.get(resource))
}

/// A pod's requests of every other resource (kubernetes, `ScalarResources`), more than 0 each.
pub(crate) fn scalar_requests(pod: &Pod) -> BTreeMap<String, i64> {
    let containers = || pod.spec.all_containers().map(|container| &container.resources);
    let names = containers().flat_map(|of| of.requests.keys().chain(of.limits.keys()));
    let names: BTreeSet<&String> =
        names.filter(|name| !["cpu", "memory", "ephemeral-storage"].contains(&name.as_str())).collect();
    let requests = names.into_iter().map(|name| (name.clone(), effective(pod, |c| bytes(request(c, name)))));
    requests.filter(|(_, amount)| *amount > 0).collect()
}

fn amounts(pod: &Pod, of: for<'a> fn(&'a Container, &str) -> Option<&'a Quantity>) -> Amounts {
    Amounts {
        cpu_millis: effective(pod, |c| milli_cpu(of(c, "cpu"))),
        memory_bytes: effective(pod, |c| bytes(of(c, "memory"))),
        storage_bytes: effective(pod, |c| bytes(of(c, "ephemeral-storage"))),
    }
}

/// The most that runs at a time: all containers and sidecars, or one init container and the sidecars that
/// started before it. The sum of a manifest's amounts may exceed an i64.
fn effective(pod: &Pod, amount: impl Fn(&Container) -> i64) -> i64 {
    let (mut sidecars, mut most) = (0_i64, 0_i64);
    for container in &pod.spec.init_containers {
        let with_it = sidecars.saturating_add(amount(container));
        most = most.max(with_it);
        if container.is_sidecar() {
            sidecars = with_it;
        }
    }
    let containers = pod.spec.containers.iter().map(amount).fold(0, i64::saturating_add);
    most.max(containers.saturating_add(sidecars))
}

/// The pod's own limits, if every container has one. The limit on processes is the node's
/// setting. As in Kubernetes, an amount of 0 is no limit.
pub(crate) fn pod_limits(pod: &Pod, pids: Option<i64>) -> Limits {
    let every_one_has = |resource: &str| {
        let mut containers = pod.spec.all_containers().peekable();
        containers.peek().is_some() && containers.all(|c| limit(c, resource).is_some())
    };
    let of_pod = |resource: &'static str, amount: fn(Option<&Quantity>) -> i64| {
        every_one_has(resource).then(|| effective(pod, |c| amount(limit(c, resource))))
    };
    Limits {
        cpu_shares: shares(requests(pod).cpu_millis),
        cpu_quota_us: of_pod("cpu", milli_cpu).map(quota_us),
        memory_bytes: of_pod("memory", bytes),
        pids,
    }
}

/// One container's resources for CRI.
pub(crate) fn of_container(
    pod: &Pod,
    container: &Container,
    node_memory_bytes: i64,
) -> LinuxContainerResources {
    let cpu_limit = limit(container, "cpu");
    let oom_score_adj = if pod.spec.priority_class_name == NODE_CRITICAL_CLASS {
        // The kernel kills node-critical pods last: the death of a mount pod breaks its users.
        GUARANTEED_OOM_SCORE
    } else {
        oom_score_adj(qos_class(pod), memory_of_oom_score(pod, container), node_memory_bytes)
    };
    LinuxContainerResources {
        cpu_shares: shares(milli_cpu(request(container, "cpu"))),
        cpu_period: if cpu_limit.is_some() { CPU_PERIOD_US } else { 0 },
        cpu_quota: cpu_limit.map_or(0, |q| quota_us(milli_cpu(Some(q)))),
        memory_limit_in_bytes: bytes(limit(container, "memory")),
        oom_score_adj,
        ..LinuxContainerResources::default()
    }
}

/// What a container without limits may use: the node's processors and memory, and the file system of
/// `root_dir`.
pub(crate) fn node_capacity(root_dir: &Path) -> Capacity {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let disk = nix::sys::statvfs::statvfs(root_dir).map_or(0, |disk| {
        let (blocks, size): (u64, u64) = (disk.blocks(), disk.fragment_size());
        blocks.saturating_mul(size)
    });
    Capacity {
        milli_cpu: cpus as u64 * 1000,
        memory_bytes: u64::try_from(node_memory_bytes()).unwrap_or_default(),
        ephemeral_storage_bytes: disk,
    }
}

/// The kernel kills a sidecar no earlier than the container that requests least.
fn memory_of_oom_score(pod: &Pod, container: &Container) -> i64 {
    let own = bytes(request(container, "memory"));
    let least = pod.spec.containers.iter().map(|c| bytes(request(c, "memory"))).min();
    if container.is_sidecar() { own.max(least.unwrap_or(0)) } else { own }
}

/// MemTotal; 0 if unreadable.
pub(crate) fn node_memory_bytes() -> i64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    machine::memory(&text, "MemTotal").and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(0)
}

fn oom_score_adj(class: QosClass, requested_bytes: i64, node_bytes: i64) -> i64 {
    match class {
        QosClass::Guaranteed => GUARANTEED_OOM_SCORE,
        QosClass::BestEffort => BEST_EFFORT_OOM_SCORE,
        QosClass::Burstable if node_bytes == 0 => 999,
        QosClass::Burstable => {
            let share = i128::from(requested_bytes) * 1000 / i128::from(node_bytes);
            i64::try_from(1000 - share).unwrap_or(3).clamp(3, 999)
        }
    }
}

fn request<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    container.resources.requests.get(resource).or(container.resources.limits.get(resource))
}

/// None for an amount of 0.
fn limit<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    container.resources.limits.get(resource).filter(|amount| amount.milli_value() > 0)
}

fn milli_cpu(quantity: Option<&Quantity>) -> i64 {
    quantity.map_or(0, |q| i64::try_from(q.milli_value()).unwrap_or(i64::MAX / 2048))
}

fn bytes(quantity: Option<&Quantity>) -> i64 {
    quantity.map_or(0, |q| i64::try_from(q.value()).unwrap_or(i64::MAX / 2048))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resources: &[serde_json::Value]) -> Pod {
        let containers: Vec<_> = resources
            .iter()
            .enumerate()
            .map(|(i, r)| serde_json::json!({"name": format!("c{i}"), "resources": r}))
            .collect();
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "uid": "u"},
            "spec": {"containers": containers}
        }))
        .unwrap()
    }

    #[test]
    fn the_class_and_its_cgroup_follow_requests_and_limits() {
        let none = serde_json::json!({});
        let full = serde_json::json!({"limits": {"cpu": "500m", "memory": "64Mi"}});
        let half = serde_json::json!({"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}});
        let cgroup = |p: &Pod| cgroup_path("/hawser", p);
        assert_eq!(cgroup(&pod(std::slice::from_ref(&none))), "/hawser/kubepods/besteffort/podu");
        assert_eq!(cgroup(&pod(std::slice::from_ref(&full))), "/hawser/kubepods/podu");
        assert_eq!(cgroup(&pod(&[full.clone(), none])), "/hawser/kubepods/burstable/podu");
        assert_eq!(qos_class(&pod(&[half])), QosClass::Burstable);
    }

    #[test]
    fn the_kernel_kills_node_critical_pods_last() {
        let burstable = serde_json::json!({"requests": {"memory": "32Mi"}});
        let score = |p: &Pod| of_container(p, &p.spec.containers[0], 4 << 30).oom_score_adj;
        let mut mount_pod = pod(&[burstable]);
        assert_eq!(score(&mount_pod), 993);
        mount_pod.spec.priority_class_name = "system-node-critical".to_owned();
        assert_eq!(score(&mount_pod), -997);
        mount_pod.spec.priority_class_name = "system-cluster-critical".to_owned();
        assert_eq!(score(&mount_pod), 993);
    }

    #[test]
    fn a_pod_is_limited_only_where_every_container_is() {
        let full = serde_json::json!({"limits": {"cpu": "500m", "memory": "64Mi"}});
        let half = serde_json::json!({"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}});
        let limits = pod_limits(&pod(&[full, half]), Some(9));
        let wanted =
            Limits { cpu_shares: 614, cpu_quota_us: None, memory_bytes: Some(128 << 20), pids: Some(9) };
        assert_eq!(limits, wanted);
    }

    #[test]
    fn a_limit_of_0_is_no_limit() {
        let zero = serde_json::json!({"limits": {"cpu": "0", "memory": 0}});
        let unlimited = pod(std::slice::from_ref(&zero));
        let limits = pod_limits(&unlimited, None);
        assert_eq!((limits.cpu_quota_us, limits.memory_bytes), (None, None));
        let of = of_container(&unlimited, &unlimited.spec.containers[0], 4 << 30);
        assert_eq!((of.cpu_period, of.cpu_quota, of.memory_limit_in_bytes), (0, 0, 0));
        let full = serde_json::json!({"limits": {"cpu": "500m", "memory": "64Mi"}});
        let limits = pod_limits(&pod(&[full, zero]), None);
        assert_eq!((limits.cpu_quota_us, limits.memory_bytes), (None, None));
    }

    #[test]
    fn the_oom_score_falls_with_the_share_of_memory_that_was_requested() {
        assert_eq!(oom_score_adj(QosClass::Burstable, 1 << 30, 4 << 30), 750);
        assert_eq!(oom_score_adj(QosClass::Burstable, 8 << 30, 4 << 30), 3);
        assert_eq!(oom_score_adj(QosClass::Burstable, 0, 4 << 30), 999);
        assert_eq!(oom_score_adj(QosClass::Guaranteed, 0, 1), -997);
        assert_eq!(oom_score_adj(QosClass::BestEffort, 0, 1), 1000);
    }

    #[test]
    fn a_pod_takes_the_most_that_runs_at_a_time() {
        let container = |name: &str, cpu: &str, policy: serde_json::Value| {
            serde_json::json!({
                "name": name, "restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}
            })
        };
        let of = |init: serde_json::Value, main: &str| {
            let mut pod = pod(&[]);
            pod.spec.init_containers = serde_json::from_value(init).unwrap();
            let main = container("c", main, serde_json::Value::Null);
            pod.spec.containers = vec![serde_json::from_value(main).unwrap()];
            (requests(&pod).cpu_millis, qos_class(&pod))
        };
        let never = serde_json::Value::Null;
        let (first, side, last) = (
            container("first", "500m", never.clone()),
            container("side", "100m", "Always".into()),
            container("last", "700m", never),
        );
        assert_eq!(of(serde_json::json!([first]), "300m").0, 500);
        assert_eq!(of(serde_json::json!([first, side]), "300m").0, 500);
        assert_eq!(of(serde_json::json!([first, side]), "600m").0, 700);
        assert_eq!(of(serde_json::json!([first, side, last]), "600m").0, 800);
        assert_eq!(of(serde_json::json!([last, side]), "0").1, QosClass::Burstable);
    }

    #[test]
    fn a_sidecar_is_not_killed_before_its_containers() {
        let mut pod = pod(&[serde_json::json!({"requests": {"memory": "1Gi"}})]);
        let side = serde_json::json!({"name": "s", "restartPolicy": "Always"});
        pod.spec.init_containers = vec![serde_json::from_value(side).unwrap()];
        let score = |container| of_container(&pod, container, 4 << 30).oom_score_adj;
        assert_eq!((score(&pod.spec.init_containers[0]), score(&pod.spec.containers[0])), (750, 750));
    }
}
