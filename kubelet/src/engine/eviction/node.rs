//! Evicts pods while the node lacks memory, disk space, inodes or processes: one at a time, in kubelet's
//! order (kubernetes, pkg/kubelet/eviction/eviction_manager.go).
//!
//! Invariant: a pod is evicted only for a threshold that is met after everything else was reclaimed, or could not
//! be reclaimed in time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::garbage::Garbage;
use super::monitor::{Left, Monitor, scarcest};
use super::observe::{self, PodUsage};
use super::rank::{self, Candidate};
use super::{EVICTED, may_be_evicted};
use crate::capacity::critical::priority;
use crate::capacity::pressure::{Condition, NodePressure, PressureLimits, Signal, Threshold};
use crate::clients::cri::POD_UID_LABEL;
use crate::objects::{EventType, Object, ObjectRef, Pod, now};
use crate::pod::resources;
use crate::worker::Tools;

/// The wait for an answer of the runtime, without which the next step goes on.
const RUNTIME_ANSWERS: Duration = Duration::from_secs(5);
/// kubelet's podCleanupTimeout.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(30);
const CLEANUP_PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn watch(
    tools: Arc<Tools>,
    garbage: Arc<Garbage>,
    limits: PressureLimits,
    pressure: NodePressure,
    period: Duration,
) {
    if limits.thresholds.0.is_empty() {
        return std::future::pending().await;
    }
    let node = ObjectRef::node(tools.store.node_name());
    let mut monitor = Monitor::new(limits.thresholds.0, limits.transition);
    let mut awaited = BTreeSet::new();
    // So that the first verdict is about all signals.
    garbage.directories.wait(RUNTIME_ANSWERS).await;
    loop {
        let verdict = monitor.judge(&observe::node(&tools, &garbage.directories), Instant::now());
        for reason in pressure.set(&verdict.conditions, now()) {
            let message = format!("Node {} status is now: {reason}", node.name);
            tools.sinks.record(&node, EventType::Normal, reason, &message);
        }
        let evicted = match verdict.reclaim {
            Some((threshold, left)) => match still_there(&tools, &awaited).await {
                Some(pod) => Some(pod),
                None => reclaim(&tools, &garbage, threshold, left).await,
            },
            None => None,
        };
        match evicted {
            // The next round may need another one at once.
            Some(pod) => {
                awaited.insert(pod.metadata.uid.clone());
                wait_for_cleanup(&tools, &pod).await;
            }
            None => tokio::time::sleep(period).await,
        }
    }
}

/// A pod that was evicted, also by an earlier kubelet, and still takes what it took. Each is waited for
/// once.
async fn still_there(tools: &Tools, awaited: &BTreeSet<String>) -> Option<Arc<Pod>> {
    let mut evicted = tools.store.pods();
    evicted.retain(|pod| pod.status.reason == EVICTED && !awaited.contains(&pod.metadata.uid));
    if evicted.is_empty() {
        return None;
    }
    // A runtime that does not answer must not keep the next pod from its eviction.
    let containers = timeout(RUNTIME_ANSWERS, tools.cri.list_containers(None)).await.ok()?.ok()?;
    let mut owners = containers.iter().filter_map(|container| container.labels.get(POD_UID_LABEL));
    owners.find_map(|owner| evicted.iter().find(|pod| pod.metadata.uid == *owner)).cloned()
}

/// Returns the pod that had to be evicted, if any.
async fn reclaim(
    tools: &Arc<Tools>,
    garbage: &Garbage,
    threshold: Threshold,
    left: Left,
) -> Option<Arc<Pod>> {
    let Threshold { signal, .. } = threshold;
    let node = ObjectRef::node(tools.store.node_name());
    let message = format!("Attempting to reclaim {}", signal.resource());
    tools.sinks.record(&node, EventType::Warning, "EvictionThresholdMet", &message);
    if signal.condition() == Condition::Disk {
        garbage.remove_dead_containers(tools).await;
        // Images do not fill the kubelet's disk if they are on another one.
        if signal.is_of_images() || !garbage.directories.are_apart_from(&tools.root_dir) {
            garbage.remove_images(tools).await;
        }
        scarcest(&threshold, &observe::node(tools, &garbage.directories))?;
    }
    let pods: Vec<Arc<Pod>> = tools.store.pods().into_iter().filter(|pod| may_be_evicted(pod)).collect();
    let usages = observe::pods(tools, &garbage.directories, signal, &pods).await;
    let mut candidates: Vec<Candidate> = pods
        .iter()
        .map(|pod| Candidate {
            uid: pod.metadata.uid.clone(),
            priority: priority(pod),
            usage: usages.get(&pod.metadata.uid).map(|usage| usage.total),
            request: request(signal, pod),
        })
        .collect();
    rank::order(signal, &mut candidates);
    for Candidate { uid, .. } in candidates {
        let Some(pod) = pods.iter().find(|pod| pod.metadata.uid == uid) else { continue };
        let used = usages.get(&uid).cloned().unwrap_or_default();
        let message = eviction_message(threshold, left, pod, &used);
        if tools.store.fail_pod(&uid, EVICTED, &message) {
            tools.sinks.record(&pod.reference(), EventType::Warning, EVICTED, &message);
            return Some(Arc::clone(pod));
        }
    }
    None
}

/// Inodes and processes are not requested.
fn request(signal: Signal, pod: &Pod) -> u64 {
    let requests = resources::requests(pod);
    let amount = match signal {
        Signal::MemoryAvailable => requests.memory_bytes,
        Signal::NodefsAvailable | Signal::ImagefsAvailable => requests.storage_bytes,
        Signal::NodefsInodesFree | Signal::ImagefsInodesFree | Signal::PidAvailable => 0,
    };
    u64::try_from(amount).unwrap_or_default()
}

fn eviction_message(threshold: Threshold, left: Left, pod: &Pod, used: &PodUsage) -> String {
    let Threshold { signal, .. } = threshold;
    let resource = signal.resource();
    let quantity = signal.shown(threshold.amount(left.capacity));
    let available = signal.shown(left.available);
    let mut message = format!(
        "The node was low on resource: {resource}. Threshold quantity: {quantity}, available: {available}. "
    );
    for (name, used) in &used.containers {
        let Some(container) = pod.spec.container_named(name) else { continue };
        let request = container.resources.requests.get(resource);
        if *used > request.map_or(0, crate::objects::Quantity::value) {
            let request = request.map_or_else(|| "0".to_owned(), ToString::to_string);
            message += &format!(
                "Container {name} was using {}, request is {request}, has larger consumption of {resource}. ",
                signal.shown(*used)
            );
        }
    }
    message
}

/// An evicted pod is cleaned up when its containers are removed.
async fn wait_for_cleanup(tools: &Tools, pod: &Pod) {
    let gone = async {
        loop {
            match tools.cri.list_containers(Some(&pod.metadata.uid)).await {
                Ok(containers) if containers.is_empty() => return,
                Ok(_) | Err(_) => tokio::time::sleep(CLEANUP_PAUSE).await,
            }
        }
    };
    let _gone_or_late = timeout(CLEANUP_TIMEOUT, gone).await;
}

#[cfg(test)]
mod tests {
    use super::super::ImageGc;
    use super::*;
    use crate::capacity::pressure::Thresholds;
    use crate::store::{Source, Store};

    #[tokio::test(start_paused = true)]
    async fn memory_is_reclaimed_while_the_runtime_does_not_answer() {
        evicts_within("memory.available<1000Ti", 2 * RUNTIME_ANSWERS).await;
    }

    /// With a runtime that does not answer.
    async fn evicts_within(thresholds: &str, time: Duration) {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("cri.sock");
        let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let pod =
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c, image: i}]}\n";
        for manifest in crate::manifest::parse(pod.as_bytes(), "test").manifests {
            store.apply(manifest.described(), Source::Api).unwrap();
        }
        let tools = Arc::new(Tools::of_test(root.path(), &socket, store.clone()));
        let image_gc = ImageGc { high_percent: 85, low_percent: 80, min_age: Duration::ZERO };
        let thresholds = Thresholds::parse(thresholds).unwrap();
        let limits = PressureLimits { thresholds, transition: Duration::ZERO };
        let watching = super::super::watch_node(tools, image_gc, limits, NodePressure::default());
        let mut changes = store.subscribe();
        let evicted = async {
            while store.pods()[0].status.reason != EVICTED {
                // A lagging receiver looks again too.
                drop(changes.recv().await);
            }
        };
        tokio::select! {
            () = watching => {}
            evicted = tokio::time::timeout(time, evicted) => evicted.expect("within a round"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_is_evicted_from_a_full_disk_though_the_runtime_removes_nothing() {
        evicts_within("nodefs.available<1000Ti", Duration::from_secs(90)).await;
    }

    #[test]
    fn the_message_is_kubelets() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"containers": [
                {"name": "a", "resources": {"requests": {"memory": "10Mi"}}}, {"name": "b"}, {"name": "c"},
            ]}
        }))
        .unwrap();
        let containers = [("a", 20_u64 << 20), ("b", 3 << 20), ("c", 0)];
        let used = PodUsage {
            total: 23 << 20,
            containers: containers.map(|(name, used)| (name.to_owned(), used)).into(),
        };
        let threshold = Thresholds::parse("memory.available<100Mi").unwrap().0[0];
        let left = Left { available: (50 << 20) + 7, capacity: 1 << 30 };
        assert_eq!(
            eviction_message(threshold, left, &pod, &used),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. \
             Container a was using 20Mi, request is 10Mi, has larger consumption of memory. \
             Container b was using 3Mi, request is 0, has larger consumption of memory. "
        );
        let threshold = Thresholds::parse("nodefs.inodesFree<5%").unwrap().0[0];
        assert_eq!(
            eviction_message(threshold, Left { available: 4, capacity: 100 }, &pod, &PodUsage::default()),
            "The node was low on resource: inodes. Threshold quantity: 5, available: 4. "
        );
    }
}
