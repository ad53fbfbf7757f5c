//! Whether the node has room for a pod (kubelet, lifecycle/predicate.go), and what its pods hold.
//!
//! A pod that serves volumes is always admitted: the pods that need it are admitted already.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::capacity::critical::{is_critical, serves_volumes};
use crate::capacity::preemption::{self, Missing, Resource};
use crate::capacity::pressure::{EVICTED, NodePressure};
use crate::objects::Pod;
use crate::pod::huge_pages::{self, Pools};
use crate::pod::resources::{self, Amounts};

/// What the node offers to pods. All of it is allocatable, but memory of huge pages only as such.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub(crate) cpu_millis: i64,
    /// With the huge pages.
    pub(crate) memory_bytes: i64,
    pub(crate) huge_pages: Pools,
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
            huge_pages: huge_pages::pools().clone(),
            storage_bytes: i64::try_from(storage).unwrap_or(i64::MAX),
            pods,
        }
    }

    pub(crate) fn allocatable_memory(&self) -> i64 {
        let reserved = self.huge_pages.values().fold(0, |sum: u64, pool| sum.saturating_add(*pool));
        self.memory_bytes.saturating_sub(i64::try_from(reserved).unwrap_or(i64::MAX)).max(0)
    }

    /// Of a resource that is neither of the others: this node has no device plugins.
    fn of_scalar(&self, name: &str) -> i64 {
        let mut pools = self.huge_pages.iter();
        let pool = pools.find(|(page_size, _)| huge_pages::resource(**page_size) == name);
        pool.map_or(0, |(_, bytes)| i64::try_from(*bytes).unwrap_or(i64::MAX))
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
    requests: Amounts,
    /// By name, as in [`resources::scalar_requests`].
    scalars: BTreeMap<String, i64>,
    host_ports: Vec<HostPort>,
    /// The pod was preempted and has not ended yet. kubelet admits no pod meanwhile.
    is_being_freed: bool,
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

/// The share of a pod, and the pods that must end before it starts, by uid.
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
    capacity: &Capacity,
    pods: &[Arc<Pod>],
    known: &Pod,
    wanted: &Pod,
) -> Result<(), Rejection> {
    let (before, after) = (resources::requests(known), resources::requests(wanted));
    let others = pods
        .iter()
        .filter(|other| other.metadata.uid != known.metadata.uid && !other.status.phase.has_ended());
    let others: Vec<Amounts> = others.map(|other| resources::requests(other)).collect();
    let used = |of: fn(&Amounts) -> i64| others.iter().map(of).fold(0, i64::saturating_add);
    if after.cpu_millis > before.cpu_millis {
        fits(&Resource::Cpu, after.cpu_millis, used(|r| r.cpu_millis), capacity.cpu_millis)?;
    }
    if after.memory_bytes > before.memory_bytes {
        fits(&Resource::Memory, after.memory_bytes, used(|r| r.memory_bytes), capacity.allocatable_memory())?;
    }
    Ok(())
}

/// Whether a pod frees its share without being preempted.
fn is_ending(pod: &Pod) -> bool {
    pod.status.phase.has_ended() || pod.metadata.is_deleted()
}

impl Admission {
    pub(crate) fn new(node_name: &str, capacity: Capacity, pressure: NodePressure) -> Self {
        Self { node_name: node_name.to_owned(), capacity, pressure, shares: Arc::default() }
    }

    /// The uids of the pods that hold a share.
    pub(crate) fn holders(&self) -> BTreeSet<String> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Takes the share of a pod. One that `has_run` is not judged. What preempted pods are about to free
    /// is free for every pod, which then waits for them.
    pub(crate) fn admit(&self, pod: &Pod, has_run: bool) -> Result<Room, Rejection> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let (uid, share) = (pod.metadata.uid.clone(), Share::of(pod));
        let mut awaited = BTreeSet::new();
        if !has_run && !serves_volumes(pod) {
            let (freed, staying): (Vec<_>, Vec<_>) = shares
                .iter()
                .filter(|(other, _)| **other != uid)
                .partition(|(_, share)| share.is_being_freed);
            let staying: Vec<&Share> = staying.into_iter().map(|(_, share)| share).collect();
            self.judge(pod, &share, &staying)?;
            let all: Vec<&Share> = staying.into_iter().chain(freed.iter().map(|(_, share)| *share)).collect();
            if self.judge(pod, &share, &all).is_err() {
                awaited.extend(freed.into_iter().map(|(other, _)| other.clone()));
            }
        }
        Ok(Room { admitted: self.take(&mut shares, uid, share), awaited })
    }

    fn take(&self, shares: &mut BTreeMap<String, Share>, uid: String, share: Share) -> Admitted {
        shares.insert(uid.clone(), share);
        Admitted { uid, shares: Arc::clone(&self.shares) }
    }

    /// Takes the share of a critical pod; others make room for it (kubelet, preemption.go). Pods that are
    /// ending free their shares first; `end` is called for each pod that must go besides. `pods` are the
    /// node's: they are read under the lock, so that a pod that makes room for another pod is ending.
    ///
    /// No pod goes for its host port. Like kubelet, the critical pod is refused while a pod holds the port
    /// that was not preempted, even if that pod is ending.
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
        let unpreempted: Vec<&Share> =
            others.values().copied().filter(|share| !share.is_being_freed).collect();
        if let Err(rejection) = self.judge(pod, &share, &unpreempted) {
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
            for victim in victims {
                if let Some(share) = shares.get_mut(&victim.metadata.uid) {
                    share.is_being_freed = true;
                }
            }
        }
        Ok(Room { admitted: self.take(&mut shares, uid, share), awaited })
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
        // Of a critical pod kubelet tells what preemption does not solve (HandleAdmissionFailure).
        if placed.is_err() && is_critical(pod) {
            return placed;
        }
        let missing = short.iter().map(|(_, missing)| missing.clone()).filter(|_| placed.is_ok()).collect();
        Err(Rejection { missing, ..first.clone() })
    }

    fn shortages(&self, share: &Share, others: &[&Share]) -> Vec<(Rejection, Missing)> {
        let Capacity { cpu_millis, storage_bytes, pods, .. } = self.capacity;
        let memory_bytes = self.capacity.allocatable_memory();
        let used = |of: fn(&Amounts) -> i64| {
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
        let scalars = share.scalars.iter().map(|(name, requested)| {
            let held = others.iter().filter_map(|other| other.scalars.get(name));
            let used = held.copied().fold(0, i64::saturating_add);
            (Resource::Scalar(name.clone()), *requested, used, self.capacity.of_scalar(name))
        });
        let short = all.into_iter().chain(scalars).filter_map(|(resource, requested, used, capacity)| {
            let rejection = fits(&resource, requested, used, capacity).err()?;
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
fn fits(resource: &Resource, requested: i64, used: i64, capacity: i64) -> Result<(), Rejection> {
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
        let ports = pod.spec.lasting_containers().flat_map(|container| &container.ports);
        // A pod in the host's network listens on its ports themselves.
        let in_host = pod.spec.host_network;
        let host_ports = ports.filter_map(|port| {
            let number = if in_host && port.host_port == 0 { port.container_port } else { port.host_port };
            let (ip, protocol) = (port.host_ip.clone(), port.protocol.clone());
            (number > 0).then_some(HostPort { ip, port: number, protocol })
        });
        Self {
            host_ports: host_ports.collect(),
            requests: resources::requests(pod),
            scalars: resources::scalar_requests(pod),
            is_being_freed: false,
        }
    }
}
