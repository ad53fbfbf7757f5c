//! A pod's phase (kubelet, kubelet_pods.go: getPhase).

use crate::objects::{ContainerState, ContainerStatus, PodPhase, PodSpec, RestartPolicy};

pub(super) fn of(spec: &PodSpec, init: &[ContainerStatus], containers: &[ContainerStatus]) -> PodPhase {
    let counts = Counts::of(containers);
    let (mut running, mut waiting) = (counts.running, counts.waiting);
    let has_begun = has_begun(containers);
    for status in init {
        let is_sidecar = spec.container_named(&status.name).is_some_and(|container| container.is_sidecar());
        if is_sidecar {
            let is_pending = match (&status.state, &status.last_state) {
                (ContainerState::Running(_), _) => status.started != Some(true),
                (ContainerState::Waiting(_), None) => true,
                _ => false,
            };
            running += usize::from(matches!(status.state, ContainerState::Running(_)));
            waiting += usize::from(is_pending && !has_begun);
            continue;
        }
        match last_exit_code(status) {
            Some(0) => {}
            Some(_) if spec.restart_policy == RestartPolicy::Never => return PodPhase::Failed,
            // Kubelet counts neither: a failed one waits for its back-off, and its containers for it.
            Some(_) => {}
            None => waiting += 1,
        }
    }
    if waiting > 0 {
        return PodPhase::Pending;
    }
    if running > 0 {
        return PodPhase::Running;
    }
    match spec.restart_policy {
        _ if counts.ended == 0 => PodPhase::Pending,
        RestartPolicy::Always => PodPhase::Running,
        _ if counts.ended == counts.succeeded => PodPhase::Succeeded,
        RestartPolicy::Never => PodPhase::Failed,
        RestartPolicy::OnFailure => PodPhase::Running,
    }
}

/// Whether any container of the pod has run, so that its init containers are done.
pub(super) fn has_begun(containers: &[ContainerStatus]) -> bool {
    containers.iter().any(|status| {
        status.started == Some(true)
            || status.last_state.is_some()
            || !matches!(status.state, ContainerState::Waiting(_))
    })
}

/// The exit code of an init container that does not run: of its last instance if it waits.
fn last_exit_code(status: &ContainerStatus) -> Option<i32> {
    match (&status.state, &status.last_state) {
        (ContainerState::Terminated(ended), _)
        | (ContainerState::Waiting(_), Some(ContainerState::Terminated(ended))) => Some(ended.exit_code),
        _ => None,
    }
}

#[derive(Default)]
struct Counts {
    running: usize,
    waiting: usize,
    ended: usize,
    succeeded: usize,
}

impl Counts {
    fn of(containers: &[ContainerStatus]) -> Self {
        let mut counts = Self::default();
        for container in containers {
            match (&container.state, &container.last_state) {
                (ContainerState::Running(_), _) => counts.running += 1,
                (ContainerState::Terminated(end), _) => {
                    counts.ended += 1;
                    counts.succeeded += usize::from(end.exit_code == 0);
                }
                (ContainerState::Waiting(_), Some(ContainerState::Terminated(_))) => counts.ended += 1,
                (ContainerState::Waiting(_), _) => counts.waiting += 1,
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(name: &str, state: serde_json::Value, last_state: serde_json::Value) -> ContainerStatus {
        let status = serde_json::json!({"name": name, "state": state, "lastState": last_state});
        serde_json::from_value(status).unwrap()
    }

    fn running() -> ContainerStatus {
        status("c", serde_json::json!({"running": {}}), serde_json::Value::Null)
    }

    fn ended(exit_code: i32) -> ContainerStatus {
        status("c", serde_json::json!({"terminated": {"exitCode": exit_code}}), serde_json::Value::Null)
    }

    fn creating() -> ContainerStatus {
        status("c", serde_json::json!({"waiting": {}}), serde_json::Value::Null)
    }

    fn crash_looping() -> ContainerStatus {
        let last = serde_json::json!({"terminated": {"exitCode": 1}});
        status("c", serde_json::json!({"waiting": {}}), last)
    }

    fn spec(policy: RestartPolicy) -> PodSpec {
        serde_json::from_value(serde_json::json!({
            "restartPolicy": policy,
            "initContainers": [{"name": "init"}, {"name": "side", "restartPolicy": "Always"}],
            "containers": [{"name": "c"}]
        }))
        .unwrap()
    }

    fn init(status: ContainerStatus) -> ContainerStatus {
        ContainerStatus { name: "init".to_owned(), ..status }
    }

    fn sidecar(started: bool, status: ContainerStatus) -> ContainerStatus {
        ContainerStatus { name: "side".to_owned(), started: Some(started), ..status }
    }

    use RestartPolicy::{Always, Never, OnFailure};

    #[test]
    fn phases_are_kubelets() {
        for (policy, containers, expected) in [
            (Always, vec![creating()], PodPhase::Pending),
            (Always, vec![running(), creating()], PodPhase::Pending),
            (Always, vec![running(), ended(1)], PodPhase::Running),
            (Always, vec![crash_looping()], PodPhase::Running),
            (Always, vec![ended(0)], PodPhase::Running),
            (OnFailure, vec![ended(0), ended(0)], PodPhase::Succeeded),
            (OnFailure, vec![ended(0), ended(1)], PodPhase::Running),
            (Never, vec![ended(0)], PodPhase::Succeeded),
            (Never, vec![ended(0), ended(1)], PodPhase::Failed),
            (Never, vec![], PodPhase::Pending),
        ] {
            assert_eq!(of(&spec(policy), &[], &containers), expected, "{policy:?} {containers:?}");
        }
    }

    #[test]
    fn phases_with_init_containers_are_kubelets() {
        let pending = sidecar(false, creating());
        for (policy, init, containers, expected) in [
            (Always, vec![init(running()), pending.clone()], creating(), PodPhase::Pending),
            (Always, vec![init(crash_looping()), pending.clone()], creating(), PodPhase::Pending),
            (Never, vec![init(ended(1)), pending.clone()], creating(), PodPhase::Failed),
            (Always, vec![init(ended(0)), sidecar(false, running())], creating(), PodPhase::Pending),
            (Always, vec![init(ended(0)), sidecar(true, running())], running(), PodPhase::Running),
            (Always, vec![init(ended(0)), sidecar(false, crash_looping())], running(), PodPhase::Running),
            (Never, vec![init(ended(0)), sidecar(true, running())], ended(0), PodPhase::Running),
            (Never, vec![init(ended(0)), sidecar(false, ended(137))], ended(0), PodPhase::Succeeded),
        ] {
            let phase = of(&spec(policy), &init, std::slice::from_ref(&containers));
            assert_eq!(phase, expected, "{policy:?} {init:?} {containers:?}");
        }
    }
}
