//! Whether the node has room for a pod (kubelet, lifecycle/predicate.go), and what its pods hold.
//!
//! A pod that serves volumes is always admitted: the pods that need it are admitted already.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::critical::serves_volumes;
use crate::objects::{Pod, PodPhase};
use crate::preemption::{self, Missing, Resource};
use crate::pressure::{EVICTED, NodePressure};
use crate::resources::{self, Requests};

/// What the node offers to pods; all of it is allocatable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    /// Of the root directory's file system.
    pub(crate) storage_bytes: i64,
    pub(crate) pods: u32,
}

impl Capacity {
    /// The machine's, with the administrator's limit of pods.
    pub(crate) fn of_machine(root_dir: &Path, pods: u32) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let storage = nix::sys::statvfs::statvfs(root_dir)
            .map_or(0, |disk| disk.blocks().saturating_mul(disk.fragment_size()));
        Self {
            cpu_millis: i64::try_from(cpus).unwrap_or(i64::MAX / 1000) * 1000,
            memory_bytes: resources::node_memory_bytes(),
            storage_bytes: i64::try_from(storage).unwrap_or(i64::MAX),
            pods,
        }
    }
}

/// The status of a pod that is not admitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) reason: String,
    pub(crate) message: String,
    /// What other pods would have to free; empty if that does not suffice.
    pub(crate) missing: Vec<Missing>,
}

/// What one pod holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Share {
    requests: Requests,
    host_ports: Vec<HostPort>,
}

/// A port of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HostPort {
    /// Empty: every address.
    ip: String,
    port: u16,
    protocol: String,
}

impl HostPort {
    fn conflicts_with(&self, other: &Self) -> bool {
        let anywhere = |ip: &str| matches!(ip, "" | "0.0.0.0" | "::");
        (self.port, &self.protocol) == (other.port, &other.protocol)
            && (self.ip == other.ip || anywhere(&self.ip) || anywhere(&other.ip))
    }
}

#[derive(Debug)]
pub(crate) struct Admission {
    node_name: String,
    capacity: Capacity,
    pressure: NodePressure,
    /// By uid. Locked while a pod is judged and takes its share, so that no two pods take the same room.
    shares: Arc<Mutex<BTreeMap<String, Share>>>,
}

/// An admitted pod's share; dropping it releases the share.
#[derive(Debug)]
pub(crate) struct Admitted {
    uid: String,
    shares: Arc<Mutex<BTreeMap<String, Share>>>,
}

/// The share of a critical pod, and the pods that must end before it starts, by uid.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) admitted: Admitted,
    pub(crate) awaited: BTreeSet<String>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.uid);
    }
}

impl Admitted {
    /// Takes the share that the changed pod holds.
    pub(crate) fn update(&self, pod: &Pod) {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.insert(self.uid.clone(), Share::of(pod));
    }
}

/// Whether a running pod can become `wanted` beside the node's other pods (kubelet, allocation_manager.go).
/// What it does not ask more of is not judged.
pub(crate) fn fits_resized(
    capacity: Capacity,
    pods: &[Arc<Pod>],
    known: &Pod,
    wanted: &Pod,
) -> Result<(), Rejection> {
    let (before, after) = (resources::requests(known), resources::requests(wanted));
    let others = pods.iter().filter(|other| other.metadata.uid != known.metadata.uid && !has_ended(other));
    let others: Vec<Requests> = others.map(|other| resources::requests(other)).collect();
    let used = |of: fn(&Requests) -> i64| others.iter().map(of).fold(0, i64::saturating_add);
    if after.cpu_millis > before.cpu_millis {
        fits(Resource::Cpu, after.cpu_millis, used(|r| r.cpu_millis), capacity.cpu_millis)?;
    }
    if after.memory_bytes > before.memory_bytes {
        fits(Resource::Memory, after.memory_bytes, used(|r| r.memory_bytes), capacity.memory_bytes)?;
    }
    Ok(())
}

fn has_ended(pod: &Pod) -> bool {
    matches!(pod.status.phase, PodPhase::Succeeded | PodPhase::Failed)
}

/// Whether a pod frees its share without being preempted.
fn is_ending(pod: &Pod) -> bool {
    has_ended(pod) || pod.metadata.is_deleted()
}

impl Admission {
    pub(crate) fn new(node_name: &str, capacity: Capacity, pressure: NodePressure) -> Self {
        Self { node_name: node_name.to_owned(), capacity, pressure, shares: Arc::default() }
    }

    /// The uids of the pods that hold a share.
    pub(crate) fn holders(&self) -> BTreeSet<String> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Takes the share of a pod. One that `has_run` is not judged.
    pub(crate) fn admit(&self, pod: &Pod, has_run: bool) -> Result<Admitted, Rejection> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let (uid, share) = (pod.metadata.uid.clone(), Share::of(pod));
        if !has_run && !serves_volumes(pod) {
            let others = shares.iter().filter(|(other, _)| **other != uid).map(|(_, share)| share);
            self.judge(pod, &share, &others.collect::<Vec<_>>())?;
        }
        shares.insert(uid.clone(), share);
        Ok(Admitted { uid, shares: Arc::clone(&self.shares) })
    }

    /// Takes the share of a critical pod; others make room for it (kubelet, preemption.go). Pods that are
    /// ending free their shares first; `end` is called for each pod that must go besides. `pods` are the
    /// node's: they are read under the lock, so that a pod that makes room for another pod is ending.
    pub(crate) fn preempt(
        &self,
        pod: &Pod,
        pods: impl FnOnce() -> Vec<Arc<Pod>>,
        mut end: impl FnMut(&Pod),
    ) -> Result<Room, Rejection> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let (uid, share) = (pod.metadata.uid.clone(), Share::of(pod));
        let others: BTreeMap<&String, &Share> = shares.iter().filter(|(other, _)| **other != uid).collect();
        let mut awaited = BTreeSet::new();
        if let Err(rejection) = self.judge(pod, &share, &others.values().copied().collect::<Vec<_>>()) {
            if rejection.missing.is_empty() {
                return Err(rejection);
            }
            let mut staying = pods();
            staying.retain(|other| others.contains_key(&other.metadata.uid) && !is_ending(other));
            let held: Vec<&Share> =
                staying.iter().filter_map(|other| others.get(&other.metadata.uid).copied()).collect();
            let missing: Vec<Missing> =
                self.shortages(&share, &held).into_iter().map(|(_, missing)| missing).collect();
            let victims = preemption::victims(pod, &staying, &missing).ok_or(rejection)?;
            for victim in &victims {
                end(victim);
            }
            staying.retain(|other| !victims.iter().any(|victim| victim.metadata.uid == other.metadata.uid));
            let stays = |uid: &String| staying.iter().any(|other| other.metadata.uid == *uid);
            awaited.extend(others.into_keys().filter(|other| !stays(other)).cloned());
        }
        shares.insert(uid.clone(), share);
        Ok(Room { admitted: Admitted { uid, shares: Arc::clone(&self.shares) }, awaited })
    }

    /// Counts a pod that runs since before this kubelet, until its worker takes its share.
    pub(crate) fn expect(&self, pod: &Pod) {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.insert(pod.metadata.uid.clone(), Share::of(pod));
    }

    /// Ends the share of a pod that was expected and is deleted before its worker took it.
    pub(crate) fn release(&self, uid: &str) {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }

    fn judge(&self, pod: &Pod, share: &Share, others: &[&Share]) -> Result<(), Rejection> {
        if let Some(message) = self.pressure.refusal(pod) {
            return Err(Rejection { reason: EVICTED.to_owned(), message, missing: Vec::new() });
        }
        let short = self.shortages(share, others);
        let placed = self.judge_place(pod, share, others);
        let Some((first, _)) = short.first() else { return placed };
        let missing = short.iter().map(|(_, missing)| *missing).filter(|_| placed.is_ok()).collect();
        Err(Rejection { missing, ..first.clone() })
    }

    fn shortages(&self, share: &Share, others: &[&Share]) -> Vec<(Rejection, Missing)> {
        let Capacity { cpu_millis, memory_bytes, storage_bytes, pods } = self.capacity;
        let used = |of: fn(&Requests) -> i64| {
            others.iter().map(|share| of(&share.requests)).fold(0, i64::saturating_add)
        };
        let wanted = &share.requests;
        let running = i64::try_from(others.len()).unwrap_or(i64::MAX);
        let all = [
            (Resource::Pods, 1, running, pods.into()),
            (Resource::Cpu, wanted.cpu_millis, used(|r| r.cpu_millis), cpu_millis),
            (Resource::Memory, wanted.memory_bytes, used(|r| r.memory_bytes), memory_bytes),
            (Resource::Storage, wanted.storage_bytes, used(|r| r.storage_bytes), storage_bytes),
        ];
        let short = all.into_iter().filter_map(|(resource, requested, used, capacity)| {
            let rejection = fits(resource, requested, used, capacity).err()?;
            let amount = used.saturating_add(requested).saturating_sub(capacity);
            Some((rejection, Missing { resource, amount }))
        });
        short.collect()
    }

    fn judge_place(&self, pod: &Pod, share: &Share, others: &[&Share]) -> Result<(), Rejection> {
        let node_name = pod.spec.node_name.as_str();
        if !node_name.is_empty() && node_name != self.node_name {
            return Err(predicate("NodeName", "node(s) didn't match the requested node name"));
        }
        let taken = |port: &HostPort| {
            others.iter().flat_map(|share| &share.host_ports).any(|other| other.conflicts_with(port))
        };
        if share.host_ports.iter().any(taken) {
            let message = "node(s) didn't have free ports for the requested pod ports";
            return Err(predicate("NodePorts", message));
        }
        Ok(())
    }
}

/// A request of 0 fits a node that is overcommitted.
fn fits(resource: Resource, requested: i64, used: i64, capacity: i64) -> Result<(), Rejection> {
    if requested == 0 || used.saturating_add(requested) <= capacity {
        return Ok(());
    }
    let resource = resource.as_str();
    Err(Rejection {
        missing: Vec::new(),
        reason: format!("OutOf{resource}"),
        message: format!(
            "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
        ),
    })
}

fn predicate(name: &str, why: &str) -> Rejection {
    let message = format!("Predicate {name} failed: {why}");
    Rejection { reason: name.to_owned(), message, missing: Vec::new() }
}

impl Share {
    fn of(pod: &Pod) -> Self {
        let ports = pod.spec.all_containers().flat_map(|container| &container.ports);
        // A pod in the host's network listens on its ports themselves.
        let in_host = pod.spec.host_network;
        let host_ports = ports.filter_map(|port| {
            let number = if in_host && port.host_port == 0 { port.container_port } else { port.host_port };
            let (ip, protocol) = (port.host_ip.clone(), port.protocol.clone());
            (number > 0).then_some(HostPort { ip, port: number, protocol })
        });
        Self { host_ports: host_ports.collect(), requests: resources::requests(pod) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Admission {
        let capacity = Capacity { cpu_millis: 2000, memory_bytes: 1 << 30, storage_bytes: 1 << 30, pods: 3 };
        Admission::new("demo", capacity, NodePressure::default())
    }

    fn pod(uid: &str, spec: serde_json::Value) -> Pod {
        let mut whole = serde_json::json!({"containers": [{"name": "c"}]});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": uid, "uid": uid}, "spec": whole
        }))
        .unwrap()
    }

    fn requesting(uid: &str, resource: &str, amount: &str) -> Pod {
        let resources = serde_json::json!({"requests": {resource: amount}});
        pod(uid, serde_json::json!({"containers": [{"name": "c", "resources": resources}]}))
    }

    #[test]
    fn a_pod_is_rejected_in_kubelets_words_where_there_is_no_room() {
        let admission = admission();
        let first = admission.admit(&requesting("a", "cpu", "1500m"), false).unwrap();
        let second = requesting("b", "cpu", "600m");
        let rejection = admission.admit(&second, false).unwrap_err();
        assert_eq!(rejection.reason, "OutOfcpu");
        let message = "Node didn't have enough resource: cpu, requested: 600, used: 1500, capacity: 2000";
        assert_eq!(rejection.message, message);
        assert_eq!(rejection.missing, [Missing { resource: Resource::Cpu, amount: 100 }]);
        drop(first);
        let _second = admission.admit(&second, false).unwrap();
        let memory = requesting("c", "memory", "2Gi");
        assert_eq!(admission.admit(&memory, false).unwrap_err().reason, "OutOfmemory");
        let _adopted = admission.admit(&memory, true).unwrap();
        let storage = requesting("d", "ephemeral-storage", "2Gi");
        assert_eq!(admission.admit(&storage, false).unwrap_err().reason, "OutOfephemeral-storage");
        let _without_requests = admission.admit(&pod("e", serde_json::json!({})), false).unwrap();
        assert_eq!(admission.admit(&pod("f", serde_json::json!({})), false).unwrap_err().reason, "OutOfpods");
        let labels = BTreeMap::from([(proto::mount_pod::ROLE_LABEL.into(), proto::mount_pod::ROLE.into())]);
        let mut mount_pod = pod("g", serde_json::json!({}));
        mount_pod.metadata.labels = labels;
        let _served = admission.admit(&mount_pod, false).unwrap();
    }

    #[test]
    fn a_running_pod_grows_only_into_room_that_is_free() {
        let capacity = admission().capacity;
        let known = requesting("a", "cpu", "500m");
        let pods = [Arc::new(known.clone()), Arc::new(requesting("b", "cpu", "1"))];
        let fits = |amount| fits_resized(capacity, &pods, &known, &requesting("a", "cpu", amount));
        fits("1").unwrap();
        let message = "Node didn't have enough resource: cpu, requested: 1001, used: 1000, capacity: 2000";
        assert_eq!(fits("1001m").unwrap_err().message, message);
        // On a node with too many pods already, a pod can still shrink.
        let full = [Arc::new(known.clone()), Arc::new(requesting("b", "cpu", "3"))];
        fits_resized(capacity, &full, &known, &requesting("a", "cpu", "100m")).unwrap();
    }

    #[test]
    fn each_critical_pod_has_another_pod_make_room_and_waits_for_those_that_end() {
        let capacity = Capacity { pods: 2, ..admission().capacity };
        let admission = Admission::new("demo", capacity, NodePressure::default());
        let critical = |uid| pod(uid, serde_json::json!({"priorityClassName": "system-node-critical"}));
        let mut node = vec![pod("a", serde_json::json!({})), pod("b", serde_json::json!({}))];
        let mut shares: Vec<Admitted> =
            node.iter().map(|ordinary| admission.admit(ordinary, false).unwrap()).collect();
        let preempt = |node: &mut Vec<Pod>, pod: &Pod| {
            let mut ended = Vec::new();
            let known = node.iter().cloned().map(Arc::new).collect();
            let room = admission.preempt(pod, || known, |victim| ended.push(victim.metadata.uid.clone()))?;
            for failed in node.iter_mut().filter(|known| ended.contains(&known.metadata.uid)) {
                failed.status.phase = PodPhase::Failed;
            }
            node.push(pod.clone());
            Ok::<_, Rejection>((room, ended))
        };
        let (first, mut ended) = preempt(&mut node, &critical("first")).unwrap();
        assert_eq!(ended.len(), 1);
        assert_eq!(first.awaited.iter().collect::<Vec<_>>(), ended.iter().collect::<Vec<_>>());
        // The first victim still holds its share.
        let (second, others) = preempt(&mut node, &critical("second")).unwrap();
        assert_eq!((others.len(), second.awaited.len()), (1, 2));
        ended.extend(others);
        ended.sort();
        assert_eq!(ended, ["a", "b"]);
        assert_eq!(preempt(&mut node, &critical("third")).unwrap_err().reason, "OutOfpods");
        // A pod that ends by itself makes room, and no other pod must go.
        shares.clear();
        drop(second);
        node.retain(|known| known.metadata.uid == "first");
        let mut succeeded = pod("c", serde_json::json!({}));
        let _succeeded = admission.admit(&succeeded, false).unwrap();
        succeeded.status.phase = PodPhase::Succeeded;
        node.push(succeeded);
        let (third, ended) = preempt(&mut node, &critical("third")).unwrap();
        assert_eq!((third.awaited, ended), (BTreeSet::from(["c".to_owned()]), vec![]));
    }

    #[test]
    fn pods_of_an_earlier_kubelet_count_from_the_start() {
        let admission = admission();
        let running = requesting("a", "cpu", "1500m");
        admission.expect(&running);
        let waiting = requesting("b", "cpu", "600m");
        assert_eq!(admission.admit(&waiting, false).unwrap_err().reason, "OutOfcpu");
        drop(admission.admit(&running, true).unwrap());
        drop(admission.admit(&waiting, false).unwrap());
    }

    #[test]
    fn host_ports_and_node_names_are_checked() {
        let admission = admission();
        let with_port = |uid, port: serde_json::Value| {
            pod(uid, serde_json::json!({"containers": [{"name": "c", "ports": [port]}]}))
        };
        let web = serde_json::json!({"containerPort": 80, "hostPort": 8080});
        let _web = admission.admit(&with_port("a", web.clone()), false).unwrap();
        let rejection = admission.admit(&with_port("b", web), false).unwrap_err();
        assert_eq!((rejection.reason.as_str(), rejection.missing.len()), ("NodePorts", 0));
        assert!(rejection.message.starts_with("Predicate NodePorts failed: node(s) didn't have free ports"));
        let udp = serde_json::json!({"containerPort": 80, "hostPort": 8080, "protocol": "UDP"});
        drop(admission.admit(&with_port("c", udp), false).unwrap());
        let mut on_host = with_port("d", serde_json::json!({"containerPort": 8080}));
        drop(admission.admit(&on_host, false).unwrap());
        on_host.spec.host_network = true;
        assert_eq!(admission.admit(&on_host, false).unwrap_err().reason, "NodePorts");
        let elsewhere = pod("e", serde_json::json!({"nodeName": "other"}));
        assert_eq!(admission.admit(&elsewhere, false).unwrap_err().reason, "NodeName");
    }
}
