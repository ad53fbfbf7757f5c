//! kubectl's READY, STATUS and RESTARTS columns of a pod (kubernetes, printers/internalversion: printPod).

use super::age;
use crate::objects::{ConditionStatus, ContainerState, ContainerStateTerminated, ContainerStatus, Pod, Time};

/// The READY column: containers and sidecars.
pub(super) fn ready(pod: &Pod) -> String {
    let (spec, status) = (&pod.spec, &pod.status);
    let sidecars = status.init_container_statuses.iter().filter(|status| is_sidecar(pod, status));
    let ready = sidecars.chain(&status.container_statuses).filter(|status| status.ready).count();
    format!("{ready}/{}", spec.containers.len() + spec.sidecars().count())
}

/// The READINESS GATES column of the wide table.
pub(super) fn readiness_gates(pod: &Pod) -> String {
    let gates = &pod.spec.readiness_gates;
    if gates.is_empty() {
        return "<none>".to_owned();
    }
    let open = gates.iter().filter(|gate| is_true(pod, &gate.condition_type)).count();
    format!("{open}/{}", gates.len())
}

/// The STATUS column: the phase, or a more specific reason of a container.
pub(super) fn status(pod: &Pod) -> String {
    let status = &pod.status;
    let ended = status.phase.has_ended();
    if pod.metadata.is_deleted() && !ended {
        return "Terminating".to_owned();
    }
    let word =
        if status.reason.is_empty() { status.phase.as_str().to_owned() } else { status.reason.clone() };
    if let Some(word) = initializing(pod) {
        return word;
    }
    of_containers(pod, word)
}

fn of_containers(pod: &Pod, mut word: String) -> String {
    let mut has_running = false;
    // The first container takes precedence, so it comes last.
    for container in pod.status.container_statuses.iter().rev() {
        match &container.state {
            ContainerState::Waiting(waiting) if !waiting.reason.is_empty() => word = waiting.reason.clone(),
            ContainerState::Terminated(ended) => word = end(ended),
            ContainerState::Running(_) if container.ready => has_running = true,
            ContainerState::Waiting(_) | ContainerState::Running(_) => {}
        }
    }
    match (word.as_str(), has_running) {
        ("Completed", true) if is_true(pod, "Ready") => "Running".to_owned(),
        ("Completed", true) => "NotReady".to_owned(),
        _ => word,
    }
}

/// The word of the first init container that is not done; `None` if all are, or the pod was initialized
/// before.
fn initializing(pod: &Pod) -> Option<String> {
    if is_true(pod, "Initialized") {
        return None;
    }
    let number = pod.spec.init_containers.len();
    pod.status.init_container_statuses.iter().enumerate().find_map(|(place, container)| {
        match &container.state {
            ContainerState::Terminated(ended) if ended.exit_code == 0 => None,
            _ if is_sidecar(pod, container) && container.started == Some(true) => None,
            ContainerState::Terminated(ended) => Some(format!("Init:{}", end(ended))),
            ContainerState::Waiting(waiting)
                if !waiting.reason.is_empty() && waiting.reason != "PodInitializing" =>
            {
                Some(format!("Init:{}", waiting.reason))
            }
            ContainerState::Waiting(_) | ContainerState::Running(_) => Some(format!("Init:{place}/{number}")),
        }
    })
}

fn is_sidecar(pod: &Pod, status: &ContainerStatus) -> bool {
    pod.spec.sidecars().any(|container| container.name == status.name)
}

fn is_true(pod: &Pod, condition: &str) -> bool {
    let holds =
        |c: &crate::objects::PodCondition| c.condition_type == condition && c.status == ConditionStatus::True;
    pod.status.conditions.iter().any(holds)
}

fn end(ended: &ContainerStateTerminated) -> String {
    match (ended.reason.as_str(), ended.signal) {
        ("", Some(signal)) => format!("Signal:{signal}"),
        ("", None) => format!("ExitCode:{}", ended.exit_code),
        (reason, _) => reason.to_owned(),
    }
}

/// The RESTARTS column: the count and the time of the last one. Before the pod is initialized, all init
/// containers count; later, only those that keep running.
pub(super) fn restarts(pod: &Pod, now: Time) -> String {
    let initializing = initializing(pod).is_some();
    let init = pod.status.init_container_statuses.iter();
    let init = init.filter(|status| initializing || is_sidecar(pod, status));
    let main = pod.status.container_statuses.iter().filter(|_| !initializing);
    let containers: Vec<&ContainerStatus> = init.chain(main).collect();
    let count: u64 = containers.iter().map(|container| u64::from(container.restart_count)).sum();
    let last = containers.iter().filter_map(|container| match &container.last_state {
        Some(ContainerState::Terminated(ended)) => ended.finished_at,
        _ => None,
    });
    match last.max() {
        Some(last) if count > 0 => format!("{count} ({} ago)", age::since(Some(last), now)),
        Some(_) | None => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(init: &[serde_json::Value], containers: &[serde_json::Value], conditions: &[&str]) -> Pod {
        let conditions: Vec<_> =
            conditions.iter().map(|name| serde_json::json!({"type": name, "status": "True"})).collect();
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {
                "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
                "containers": [{"name": "a"}],
                "readinessGates": [{"conditionType": "open"}, {"conditionType": "Ready"}],
            },
            "status": {
                "phase": "Pending", "initContainerStatuses": init, "containerStatuses": containers,
                "conditions": conditions,
            }
        }))
        .unwrap()
    }

    fn container(name: &str, state: serde_json::Value, is_up: bool, restarts: u32) -> serde_json::Value {
        serde_json::json!({
            "name": name, "state": state, "ready": is_up, "started": is_up, "restartCount": restarts
        })
    }

    #[test]
    fn the_columns_are_kubectls() {
        let waiting = serde_json::json!({"waiting": {"reason": "PodInitializing"}});
        let back_off = serde_json::json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let running = serde_json::json!({"running": {}});
        let failed = serde_json::json!({"terminated": {"exitCode": 3, "reason": "Error"}});
        let done = serde_json::json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
        let (i, s) = (|state| container("i", state, false, 2), |state, up| container("s", state, up, 1));
        let a = |state: &serde_json::Value, up| container("a", state.clone(), up, 4);
        let columns = |init: &[serde_json::Value], main: &serde_json::Value, conditions: &[&str]| {
            let pod = pod(init, std::slice::from_ref(main), conditions);
            format!("{} {} {}", ready(&pod), status(&pod), restarts(&pod, Time::UNIX_EPOCH))
        };
        let pending = a(&waiting, false);
        let idle = s(waiting.clone(), false);
        assert_eq!(columns(&[i(running.clone()), idle.clone()], &pending, &[]), "0/2 Init:0/2 3");
        assert_eq!(columns(&[i(back_off), idle.clone()], &pending, &[]), "0/2 Init:CrashLoopBackOff 3");
        assert_eq!(columns(&[i(failed), idle], &pending, &[]), "0/2 Init:Error 3");
        let up = s(running.clone(), true);
        assert_eq!(columns(&[i(done.clone()), s(running.clone(), false)], &pending, &[]), "0/2 Init:1/2 3");
        assert_eq!(columns(&[i(done.clone()), up.clone()], &pending, &[]), "1/2 PodInitializing 5");
        let restarted = s(waiting, false);
        let main = a(&running, true);
        assert_eq!(columns(&[i(done.clone()), up], &main, &["Initialized"]), "2/2 Pending 5");
        assert_eq!(columns(&[i(done), restarted], &main, &["Initialized"]), "1/2 Pending 5");
    }

    #[test]
    fn open_gates_are_counted() {
        assert_eq!(readiness_gates(&pod(&[], &[], &["Ready"])), "1/2");
    }
}
