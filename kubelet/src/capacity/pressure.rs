//! The node's conditions of pressure, which eviction finds (kubernetes, eviction_manager.go) and admission
//! and clients read. No I/O.

mod signals;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::capacity::critical::is_critical;
use crate::objects::{Pod, QosClass, Time};
use crate::pod::resources;
pub use signals::{GracePeriods, PressureLimits, Thresholds};
pub(crate) use signals::{Signal, Threshold};

/// kubelet's reason for evicted pods, and for those that are not admitted under pressure.
pub(crate) const EVICTED: &str = "Evicted";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Condition {
    Memory,
    Disk,
    Pid,
}

impl Condition {
    const ALL: [Self; 3] = [Self::Memory, Self::Disk, Self::Pid];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pid => "PIDPressure",
        }
    }

    /// kubelet's reason and message.
    fn words(self, holds: bool) -> (&'static str, &'static str) {
        match (self, holds) {
            (Self::Memory, true) => {
                ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available")
            }
            (Self::Memory, false) => {
                ("KubeletHasSufficientMemory", "kubelet has sufficient memory available")
            }
            (Self::Disk, true) => ("KubeletHasDiskPressure", "kubelet has disk pressure"),
            (Self::Disk, false) => ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            (Self::Pid, true) => ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
            (Self::Pid, false) => ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        }
    }

    /// The reason of kubelet's event for a change.
    fn event(self, holds: bool) -> &'static str {
        match (self, holds) {
            (Self::Memory, true) => "NodeHasInsufficientMemory",
            (Self::Memory, false) => "NodeHasSufficientMemory",
            (Self::Disk, true) => "NodeHasDiskPressure",
            (Self::Disk, false) => "NodeHasNoDiskPressure",
            (Self::Pid, true) => "NodeHasInsufficientPID",
            (Self::Pid, false) => "NodeHasSufficientPID",
        }
    }
}

/// Clones share the conditions.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodePressure {
    /// Those that hold or have held, with the time of the last change.
    known: Arc<Mutex<BTreeMap<Condition, (bool, Time)>>>,
}

impl NodePressure {
    /// Sets what holds; the reasons of the events for what has changed.
    pub(crate) fn set(&self, holding: &[Condition], now: Time) -> Vec<&'static str> {
        let mut known = self.lock();
        let mut events = Vec::new();
        for condition in Condition::ALL {
            let holds = holding.contains(&condition);
            let held = known.get(&condition).is_some_and(|(holds, _)| *holds);
            if holds != held {
                known.insert(condition, (holds, now));
                events.push(condition.event(holds));
            }
        }
        events
    }

    /// Why a pod is not admitted (kubelet: Admit): under memory pressure alone, pods with requests are.
    pub(crate) fn refusal(&self, pod: &Pod) -> Option<String> {
        let known = self.lock();
        let holding: Vec<Condition> =
            known.iter().filter(|(_, (holds, _))| *holds).map(|(condition, _)| *condition).collect();
        let may_run = is_critical(pod)
            || (holding == [Condition::Memory] && resources::qos_class(pod) != QosClass::BestEffort);
        if holding.is_empty() || may_run {
            return None;
        }
        let names: Vec<&str> = holding.iter().map(|condition| condition.as_str()).collect();
        Some(format!("The node had condition: [{}]. ", names.join(" ")))
    }

    /// As in a node's status.
    pub(crate) fn conditions(&self) -> Vec<Value> {
        let known = self.lock();
        let condition = |condition: Condition| {
            let changed = known.get(&condition);
            let holds = changed.is_some_and(|(holds, _)| *holds);
            let (reason, message) = condition.words(holds);
            let status = if holds { "True" } else { "False" };
            let mut value =
                json!({"type": condition.as_str(), "status": status, "reason": reason, "message": message});
            if let Some((_, at)) = changed {
                value["lastTransitionTime"] = json!(at);
            }
            value
        };
        Condition::ALL.into_iter().map(condition).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Condition, (bool, Time)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec
        }))
        .unwrap()
    }

    #[test]
    fn pressure_refuses_pods_as_kubelet_does() {
        let best_effort = pod(json!({"containers": [{"name": "c"}]}));
        let requests = json!({"requests": {"cpu": "1"}});
        let burstable = pod(json!({"containers": [{"name": "c", "resources": requests}]}));
        let critical = pod(json!({"priority": 2_000_000_000, "containers": [{"name": "c"}]}));
        let pressure = NodePressure::default();
        let refused = |pressure: &NodePressure| {
            [&best_effort, &burstable, &critical].map(|pod| pressure.refusal(pod).is_some())
        };
        assert_eq!(refused(&pressure), [false, false, false]);
        assert_eq!(pressure.set(&[Condition::Memory], Time::UNIX_EPOCH), ["NodeHasInsufficientMemory"]);
        assert_eq!(refused(&pressure), [true, false, false]);
        assert_eq!(pressure.refusal(&best_effort).unwrap(), "The node had condition: [MemoryPressure]. ");
        let both = [Condition::Memory, Condition::Disk];
        assert_eq!(pressure.set(&both, Time::UNIX_EPOCH), ["NodeHasDiskPressure"]);
        assert_eq!(refused(&pressure), [true, true, false]);
        let said = pressure.refusal(&burstable).unwrap();
        assert_eq!(said, "The node had condition: [MemoryPressure DiskPressure]. ");
        let statuses: Vec<Value> = pressure.conditions().iter().map(|c| c["status"].clone()).collect();
        assert_eq!(statuses, ["True", "True", "False"]);
        assert_eq!(pressure.set(&[], Time::UNIX_EPOCH), ["NodeHasSufficientMemory", "NodeHasNoDiskPressure"]);
        assert_eq!(pressure.conditions()[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        assert_eq!(refused(&pressure), [false, false, false]);
    }
}
