//! What the probes of a pod's containers have decided, by container id. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::objects::{Container, ProbeKind};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProbeResults {
    /// An absent entry means that the probe has not decided yet.
    decisions: BTreeMap<String, BTreeMap<ProbeKind, bool>>,
    /// The containers whose stop for a failed probe has begun.
    killed: BTreeSet<String>,
}

impl ProbeResults {
    /// Returns whether this changes anything.
    pub(crate) fn set(&mut self, id: &str, kind: ProbeKind, success: bool) -> bool {
        let of_container = self.decisions.entry(id.to_owned()).or_default();
        of_container.insert(kind, success) != Some(success)
    }

    /// Forgets every other container.
    pub(crate) fn retain(&mut self, ids: &BTreeSet<&str>) {
        self.decisions.retain(|id, _| ids.contains(id.as_str()));
        self.killed.retain(|id| ids.contains(id.as_str()));
    }

    fn get(&self, id: &str, kind: ProbeKind) -> Option<bool> {
        self.decisions.get(id)?.get(&kind).copied()
    }

    /// Whether a running container has started: at once without a startup probe.
    pub(crate) fn is_started(&self, container: &Container, id: &str) -> bool {
        container.startup_probe.is_none() || self.get(id, ProbeKind::Startup) == Some(true)
    }

    /// Whether a running container takes traffic.
    pub(crate) fn is_ready(&self, container: &Container, id: &str) -> bool {
        self.is_started(container, id)
            && (container.readiness_probe.is_none() || self.get(id, ProbeKind::Readiness) == Some(true))
    }

    /// The worker begins to stop a container for a failed probe.
    pub(crate) fn note_kill(&mut self, id: &str) {
        self.killed.insert(id.to_owned());
    }

    /// Whether the worker has begun to stop the container for a failed probe. A failure alone may also be a check
    /// that the end of the container has cut off.
    pub(crate) fn was_killed(&self, id: &str) -> bool {
        self.killed.contains(id)
    }

    /// The probe that ends the container.
    pub(crate) fn failed(&self, id: &str) -> Option<ProbeKind> {
        [ProbeKind::Startup, ProbeKind::Liveness].into_iter().find(|kind| self.get(id, *kind) == Some(false))
    }
}

/// Counts a probe's successes or failures in a row (kubelet, prober/worker.go).
#[derive(Debug, Default)]
pub(crate) struct Run {
    last: Option<bool>,
    length: u32,
}

impl Run {
    /// The probe's decision; `None` below the threshold, where the earlier decision stands.
    pub(crate) fn count(&mut self, success: bool, successes: u32, failures: u32) -> Option<bool> {
        if self.last == Some(success) {
            self.length = self.length.saturating_add(1);
        } else {
            *self = Self { last: Some(success), length: 1 };
        }
        let threshold = if success { successes } else { failures };
        (self.length >= threshold).then_some(success)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(probes: serde_json::Value) -> Container {
        let mut container = serde_json::json!({"name": "c"});
        container.as_object_mut().unwrap().extend(probes.as_object().unwrap().clone());
        serde_json::from_value(container).unwrap()
    }

    #[test]
    fn a_decision_needs_its_threshold_in_a_row() {
        let mut run = Run::default();
        let decisions: Vec<_> = [true, false, false, true, false, false, false, false, true, true]
            .into_iter()
            .map(|success| run.count(success, 2, 3))
            .collect();
        let (none, failed) = (None, Some(false));
        assert_eq!(decisions, [none, none, none, none, none, none, failed, failed, none, Some(true)]);
    }

    #[test]
    fn a_container_without_probes_is_ready_and_one_with_probes_waits_for_them() {
        let mut results = ProbeResults::default();
        let plain = container(serde_json::json!({}));
        assert!(results.is_started(&plain, "x") && results.is_ready(&plain, "x"));
        let probed = container(serde_json::json!({"startupProbe": {}, "readinessProbe": {}}));
        assert!(!results.is_started(&probed, "x") && !results.is_ready(&probed, "x"));
        assert!(results.set("x", ProbeKind::Readiness, true));
        assert!(!results.is_ready(&probed, "x"), "readiness counts after the start only");
        assert!(results.set("x", ProbeKind::Startup, true));
        assert!(results.is_started(&probed, "x") && results.is_ready(&probed, "x"));
        assert!(!results.set("x", ProbeKind::Readiness, true), "nothing changed");
        results.retain(&BTreeSet::from(["y"]));
        assert!(!results.is_started(&probed, "x"), "another container has another id");
    }

    #[test]
    fn startup_and_liveness_end_a_container_and_readiness_does_not() {
        let mut results = ProbeResults::default();
        results.set("x", ProbeKind::Readiness, false);
        assert_eq!(results.failed("x"), None);
        results.set("x", ProbeKind::Liveness, false);
        assert_eq!(results.failed("x"), Some(ProbeKind::Liveness));
        assert_eq!(results.failed("y"), None);
    }

    #[test]
    fn a_failed_probe_kills_nothing_until_the_kill_is_noted() {
        let mut results = ProbeResults::default();
        results.set("x", ProbeKind::Liveness, false);
        assert!(!results.was_killed("x"));
        results.note_kill("x");
        assert!(results.was_killed("x") && !results.was_killed("y"));
        results.retain(&BTreeSet::from(["x"]));
        assert!(results.was_killed("x"));
        results.retain(&BTreeSet::from(["y"]));
        assert_eq!(results, ProbeResults::default(), "another container has another id");
    }
}
