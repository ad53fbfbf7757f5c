//! Containers of an ended pod that the runtime does not have (kubelet, status_manager.go, TerminatePod).

use crate::objects::{ContainerState, ContainerStateTerminated, ContainerStatus};

const REASON: &str = "ContainerStatusUnknown";
const MESSAGE: &str = "The container could not be located when the pod was terminated";
const EXIT_CODE: i32 = 137;

/// A container that waits will never start: it counts as terminated, once the pod has come to its turn.
pub(super) fn mark(init: &mut [ContainerStatus], containers: &mut [ContainerStatus]) {
    let has_initialized = init.last().is_none_or(has_succeeded) || containers.iter().any(has_begun);
    // Without evidence, the first one was next.
    let begun = init.iter().rposition(has_begun).map_or(1, |last| last + 1).min(init.len());
    init[..begun].iter_mut().for_each(mark_one);
    if has_initialized {
        containers.iter_mut().for_each(mark_one);
    }
}

/// A container of which the runtime has an earlier instance keeps its state.
fn mark_one(status: &mut ContainerStatus) {
    if has_begun(status) {
        return;
    }
    status.state = ContainerState::Terminated(ContainerStateTerminated {
        exit_code: EXIT_CODE,
        signal: None,
        reason: REASON.to_owned(),
        message: MESSAGE.to_owned(),
        started_at: None,
        finished_at: None,
        container_id: String::new(),
    });
}

fn has_begun(status: &ContainerStatus) -> bool {
    !matches!(status.state, ContainerState::Waiting(_)) || status.last_state.is_some()
}

fn has_succeeded(status: &ContainerStatus) -> bool {
    let succeeded =
        |state: &ContainerState| matches!(state, ContainerState::Terminated(ended) if ended.exit_code == 0);
    succeeded(&status.state) || status.last_state.as_ref().is_some_and(succeeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: &str) -> ContainerStatus {
        let (state, last) = match state {
            "failed" => (serde_json::json!({"terminated": {"exitCode": 1}}), None),
            "done" => (serde_json::json!({"terminated": {"exitCode": 0}}), None),
            "again" => {
                (serde_json::json!({"waiting": {}}), Some(serde_json::json!({"terminated": {"exitCode": 1}})))
            }
            other => (serde_json::json!({other: {}}), None),
        };
        let mut status = serde_json::json!({"name": "c", "ready": false, "state": state});
        if let Some(last) = last {
            status["lastState"] = last;
        }
        serde_json::from_value(status).unwrap()
    }

    fn marked(init: &[&str], containers: &[&str]) -> (Vec<bool>, Vec<bool>) {
        let statuses = |states: &[&str]| states.iter().map(|state| status(state)).collect::<Vec<_>>();
        let (mut init, mut containers) = (statuses(init), statuses(containers));
        mark(&mut init, &mut containers);
        let is_marked = |status: &ContainerStatus| match &status.state {
            ContainerState::Terminated(ended) => ended.reason == REASON && ended.exit_code == 137,
            ContainerState::Waiting(_) | ContainerState::Running(_) => false,
        };
        (init.iter().map(is_marked).collect(), containers.iter().map(is_marked).collect())
    }

    #[test]
    fn a_container_that_never_ran_is_unknown_unless_the_pod_had_not_come_to_it() {
        assert_eq!(marked(&[], &["done", "waiting", "again"]), (vec![], vec![false, true, false]));
        assert_eq!(marked(&["done"], &["waiting"]), (vec![false], vec![true]));
        assert_eq!(marked(&["failed"], &["waiting"]), (vec![false], vec![false]));
        assert_eq!(marked(&["waiting", "done", "waiting"], &["waiting"]).0, [true, false, false]);
        assert_eq!(marked(&["waiting", "waiting"], &["waiting"]), (vec![true, false], vec![false]));
    }
}
