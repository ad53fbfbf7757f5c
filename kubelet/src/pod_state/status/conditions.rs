//! A pod's conditions (kubelet, status/generate.go).

use crate::objects::{ConditionStatus, ContainerState, ContainerStatus, PodPhase, PodSpec, PodStatus};

use super::phase::has_begun;

/// A condition's name, and why it is as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) holds: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl Verdict {
    pub(super) fn plain(holds: bool) -> Self {
        Self { holds, reason: "", message: String::new() }
    }

    fn not(reason: &'static str, message: String) -> Self {
        Self { holds: false, reason, message }
    }
}

/// `Initialized`.
pub(super) fn initialized(
    spec: &PodSpec,
    phase: PodPhase,
    init: &[ContainerStatus],
    containers: &[ContainerStatus],
) -> Verdict {
    if spec.init_containers.is_empty() {
        return Verdict::plain(true);
    }
    if phase == PodPhase::Succeeded {
        return Verdict { holds: true, reason: "PodCompleted", message: String::new() };
    }
    if has_begun(containers) {
        return Verdict::plain(true);
    }
    let is_sidecar = |name: &str| spec.container_named(name).is_some_and(|c| c.is_sidecar());
    let incomplete = init.iter().filter(|status| match &status.state {
        _ if is_sidecar(&status.name) => status.started != Some(true),
        ContainerState::Terminated(ended) => ended.exit_code != 0,
        ContainerState::Waiting(_) | ContainerState::Running(_) => true,
    });
    let names: Vec<&str> = incomplete.map(|status| status.name.as_str()).collect();
    if names.is_empty() {
        return Verdict::plain(true);
    }
    let message = format!("containers with incomplete status: [{}]", names.join(" "));
    Verdict::not("ContainersNotInitialized", message)
}

/// `ContainersReady`.
pub(super) fn containers_ready(
    spec: &PodSpec,
    phase: PodPhase,
    init: &[ContainerStatus],
    containers: &[ContainerStatus],
) -> Verdict {
    let is_sidecar = |name: &str| spec.container_named(name).is_some_and(|c| c.is_sidecar());
    let counted = init.iter().filter(|status| is_sidecar(&status.name)).chain(containers);
    let unready: Vec<&str> =
        counted.filter(|status| !status.ready).map(|status| status.name.as_str()).collect();
    match phase {
        PodPhase::Succeeded => Verdict::not("PodCompleted", String::new()),
        PodPhase::Failed => Verdict::not("PodFailed", String::new()),
        _ if unready.is_empty() => Verdict::plain(true),
        _ => {
            let message = format!("containers with unready status: [{}]", unready.join(" "));
            Verdict::not("ContainersNotReady", message)
        }
    }
}

/// `Ready`: the containers and the readiness gates.
pub(super) fn ready(spec: &PodSpec, previous: &PodStatus, containers: &Verdict) -> Verdict {
    if !containers.holds {
        return containers.clone();
    }
    let mut messages = Vec::new();
    for gate in spec.readiness_gates.iter().map(|gate| &gate.condition_type) {
        match previous.conditions.iter().find(|condition| condition.condition_type == *gate) {
            None => messages
                .push(format!("corresponding condition of pod readiness gate \"{gate}\" does not exist.")),
            Some(condition) if condition.status != ConditionStatus::True => messages.push(format!(
                "the status of pod readiness gate \"{gate}\" is not \"True\", but {:?}",
                condition.status
            )),
            Some(_) => {}
        }
    }
    if messages.is_empty() {
        return Verdict::plain(true);
    }
    Verdict::not("ReadinessGatesNotReady", messages.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> PodSpec {
        serde_json::from_value(serde_json::json!({
            "readinessGates": [{"conditionType": "example.com/open"}],
            "initContainers": [{"name": "init"}, {"name": "side", "restartPolicy": "Always"}],
            "containers": [{"name": "c"}]
        }))
        .unwrap()
    }

    fn status(name: &str, state: &str, ready: bool) -> ContainerStatus {
        serde_json::from_value(serde_json::json!({
            "name": name, "ready": ready, "started": ready, "state": {state: {"exitCode": 0}}
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_is_initialized_once_each_init_container_ended_and_each_sidecar_started() {
        let waiting = [status("c", "waiting", false)];
        let of = |init: &[ContainerStatus], containers: &[ContainerStatus]| {
            initialized(&spec(), PodPhase::Pending, init, containers)
        };
        let found = of(&[status("init", "running", false), status("side", "waiting", false)], &waiting);
        assert_eq!(found.reason, "ContainersNotInitialized");
        assert_eq!(found.message, "containers with incomplete status: [init side]");
        let done = status("init", "terminated", false);
        assert!(!of(&[done.clone(), status("side", "running", false)], &waiting).holds);
        assert!(of(&[done.clone(), status("side", "running", true)], &waiting).holds);
        assert!(of(&[done, status("side", "waiting", false)], &[status("c", "running", false)]).holds);
    }

    #[test]
    fn ready_needs_containers_sidecars_and_gates() {
        let phase = PodPhase::Running;
        let (c, side) = (status("c", "running", true), status("side", "running", false));
        let found = containers_ready(&spec(), phase, &[side], std::slice::from_ref(&c));
        assert_eq!(found.message, "containers with unready status: [side]");
        let side = status("side", "running", true);
        let containers = containers_ready(&spec(), phase, &[side], &[c]);
        assert!(containers.holds);
        let mut previous = PodStatus::default();
        let found = ready(&spec(), &previous, &containers);
        assert_eq!(found.reason, "ReadinessGatesNotReady");
        assert!(found.message.contains("\"example.com/open\" does not exist"), "{}", found.message);
        let condition = serde_json::json!({"type": "example.com/open", "status": "True"});
        previous.conditions = vec![serde_json::from_value(condition).unwrap()];
        assert!(ready(&spec(), &previous, &containers).holds);
    }
}
