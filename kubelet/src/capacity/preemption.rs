//! Which pods make room for a critical pod: the least set of less important ones, from the least
//! guaranteed class on (kubernetes, pkg/kubelet/preemption/preemption.go). No I/O.

use std::sync::Arc;

use crate::capacity::critical::{is_critical, priority, serves_volumes};
use crate::objects::{Pod, QosClass};
use crate::pod::resources;

/// kubelet's reason and message of a pod that had to make room.
pub(crate) const PREEMPTING: &str = "Preempting";
pub(crate) const MESSAGE: &str = "Preempted in order to admit critical pod";

/// What a node may lack for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Resource {
    Pods,
    Cpu,
    Memory,
    Storage,
    /// A page size of huge pages, or what no node of this kubelet has.
    Scalar(String),
}

impl Resource {
    /// As in kubelet's reasons and messages.
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Self::Pods => "pods",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Storage => "ephemeral-storage",
            Self::Scalar(name) => name,
        }
    }
}

/// How much of a resource is missing; more than 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) resource: Resource,
    pub(crate) amount: i64,
}

/// The pods of `running` that must go so that all of `missing` is free; `None` if there are not enough.
pub(crate) fn victims(preemptor: &Pod, running: &[Arc<Pod>], missing: &[Missing]) -> Option<Vec<Arc<Pod>>> {
    let may_go = running.iter().filter(|pod| is_preemptable(preemptor, pod));
    let of_class = |class: QosClass| -> Vec<Arc<Pod>> {
        may_go.clone().filter(|pod| resources::qos_class(pod) == class).cloned().collect()
    };
    let best_effort = of_class(QosClass::BestEffort);
    let burstable = of_class(QosClass::Burstable);
    let guaranteed = of_class(QosClass::Guaranteed);
    // Those that are needed even if all of the classes below go.
    let guaranteed = nearest(guaranteed, without(missing, burstable.iter().chain(&best_effort)))?;
    let burstable = nearest(burstable, without(missing, guaranteed.iter().chain(&best_effort)))?;
    let best_effort = nearest(best_effort, without(missing, guaranteed.iter().chain(&burstable)))?;
    Some([best_effort, burstable, guaranteed].concat())
}

/// A critical pod precedes all that are not; among critical ones, priority decides. Pods that serve volumes
/// always stay: the pods that use the volumes run.
fn is_preemptable(preemptor: &Pod, pod: &Pod) -> bool {
    !serves_volumes(pod) && (!is_critical(pod) || priority(preemptor) > priority(pod))
}

/// One pod after the other, each time the one that comes nearest to what is still missing.
fn nearest(mut pods: Vec<Arc<Pod>>, mut missing: Vec<Missing>) -> Option<Vec<Arc<Pod>>> {
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let place = (0..pods.len()).min_by(|a, b| {
            let (a, b) = (&pods[*a], &pods[*b]);
            distance(&missing, a).total_cmp(&distance(&missing, b)).then_with(|| size(a).cmp(&size(b)))
        })?;
        let pod = pods.swap_remove(place);
        missing = without(&missing, [&pod]);
        chosen.push(pod);
    }
    Some(chosen)
}

/// Of two equally near pods, the one that requests less memory goes, then less CPU.
fn size(pod: &Pod) -> (i64, i64) {
    let requests = resources::requests(pod);
    (requests.memory_bytes, requests.cpu_millis)
}

/// The sum of squares of the parts that would still be missing.
fn distance(missing: &[Missing], pod: &Pod) -> f64 {
    let part = |Missing { resource, amount }: &Missing| {
        let left = amount.saturating_sub(held(pod, resource)).max(0);
        #[expect(clippy::cast_precision_loss, reason = "it only compares pods")]
        let part = left as f64 / *amount as f64;
        part * part
    };
    missing.iter().map(part).sum()
}

fn without<'a>(missing: &[Missing], pods: impl IntoIterator<Item = &'a Arc<Pod>>) -> Vec<Missing> {
    let mut left = missing.to_vec();
    for pod in pods {
        for Missing { resource, amount } in &mut left {
            *amount = amount.saturating_sub(held(pod, resource));
        }
    }
    left.retain(|missing| missing.amount > 0);
    left
}

fn held(pod: &Pod, resource: &Resource) -> i64 {
    let requests = resources::requests(pod);
    match resource {
        Resource::Pods => 1,
        Resource::Cpu => requests.cpu_millis,
        Resource::Memory => requests.memory_bytes,
        Resource::Storage => requests.storage_bytes,
        Resource::Scalar(name) => resources::scalar_requests(pod).get(name).copied().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, spec: serde_json::Value, resources: serde_json::Value) -> Arc<Pod> {
        let mut whole = serde_json::json!({"containers": [{"name": "c", "resources": resources}]});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let pod = serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn burstable(name: &str, cpu: &str, memory: &str) -> Arc<Pod> {
        pod(name, serde_json::json!({}), serde_json::json!({"requests": {"cpu": cpu, "memory": memory}}))
    }

    fn guaranteed(name: &str, cpu: &str, memory: &str) -> Arc<Pod> {
        let amounts = serde_json::json!({"cpu": cpu, "memory": memory});
        pod(name, serde_json::json!({}), serde_json::json!({"requests": amounts, "limits": amounts}))
    }

    fn critical(name: &str, class: &str) -> Arc<Pod> {
        let requests = serde_json::json!({"requests": {"cpu": "1", "memory": "1Mi"}});
        pod(name, serde_json::json!({"priorityClassName": class}), requests)
    }

    fn chosen(running: &[Arc<Pod>], missing: &[(Resource, i64)]) -> Option<Vec<String>> {
        let missing: Vec<Missing> = missing
            .iter()
            .map(|(resource, amount)| Missing { resource: resource.clone(), amount: *amount })
            .collect();
        let preemptor = critical("important", "system-node-critical");
        let mut names: Vec<String> =
            victims(&preemptor, running, &missing)?.iter().map(|pod| pod.metadata.name.clone()).collect();
        names.sort();
        Some(names)
    }

    #[test]
    fn as_few_pods_as_possible_go_and_the_one_that_fits_best() {
        let running = [
            burstable("small", "100m", "1Mi"),
            burstable("fits", "500m", "1Mi"),
            burstable("large", "4", "1Gi"),
        ];
        assert_eq!(chosen(&running, &[(Resource::Cpu, 500)]).unwrap(), ["fits"]);
        assert_eq!(
            chosen(&running, &[(Resource::Cpu, 100)]).unwrap(),
            ["small"],
            "equally near: the smaller"
        );
        assert_eq!(chosen(&running, &[(Resource::Cpu, 4500)]).unwrap(), ["fits", "large"]);
        let both = [(Resource::Cpu, 500), (Resource::Memory, 512 << 20)];
        assert_eq!(chosen(&running, &both).unwrap(), ["large"]);
        assert_eq!(chosen(&running, &[(Resource::Cpu, 5000)]), None);
    }

    #[test]
    fn guaranteed_pods_go_last() {
        let none = pod("none", serde_json::json!({}), serde_json::json!({}));
        let running = [guaranteed("guaranteed", "1", "64Mi"), burstable("burstable", "1", "64Mi"), none];
        assert_eq!(chosen(&running, &[(Resource::Pods, 1)]).unwrap(), ["none"]);
        assert_eq!(chosen(&running, &[(Resource::Cpu, 1000)]).unwrap(), ["burstable"]);
        assert_eq!(chosen(&running, &[(Resource::Cpu, 2000)]).unwrap(), ["burstable", "guaranteed"]);
        assert_eq!(chosen(&running, &[(Resource::Pods, 2)]).unwrap(), ["burstable", "none"]);
    }

    #[test]
    fn pods_that_serve_volumes_stay_for_any_priority() {
        use proto::mount_pod::{KEEPER_ROLE, ROLE, ROLE_LABEL};
        let serving = |role: &str| {
            let mut pod = Arc::unwrap_or_clone(burstable(role, "1", "1Mi"));
            pod.metadata.labels.insert(ROLE_LABEL.to_owned(), role.to_owned());
            Arc::new(pod)
        };
        let running = [serving(ROLE), serving(KEEPER_ROLE)];
        let most = serde_json::json!({"priority": i32::MAX});
        let preemptor = pod("most", most, serde_json::json!({"requests": {"cpu": "1"}}));
        let missing = [Missing { resource: Resource::Cpu, amount: 1 }];
        assert_eq!(victims(&preemptor, &running, &missing), None);
    }

    #[test]
    fn a_pod_that_is_as_important_stays() {
        let same = critical("same", "system-node-critical");
        let less = critical("less", "system-cluster-critical");
        assert_eq!(chosen(&[Arc::clone(&same)], &[(Resource::Cpu, 1)]), None);
        assert_eq!(chosen(&[same, less], &[(Resource::Cpu, 1)]).unwrap(), ["less"]);
    }
}
