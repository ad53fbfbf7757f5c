//! What a pod needs next, decided from its object and from what the runtime
//! has of it. No I/O.

use std::time::Duration;

use proto::cri::{ContainerState, ContainerStatus};

use crate::keyed_backoff::KeyedBackoff;
use crate::objects::{Pod, RestartPolicy, Time};
use crate::observed::{Observed, attempt_of, instance_of, time};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Every container has ended and none will start again.
    Finished,
    Run(Steps),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) sandbox: Sandbox,
    pub(crate) start: Vec<Start>,
    /// Containers in CrashLoopBackOff.
    pub(crate) wait: Vec<Wait>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sandbox {
    Keep {
        id: String,
    },
    /// Stop what is left of the old one first.
    Create {
        attempt: u32,
    },
}

/// An instance of a container to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    /// Index into spec.containers.
    pub(crate) container: usize,
    pub(crate) restart_count: u32,
    /// When the instance before it ended.
    pub(crate) after: Option<Time>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) container: usize,
    pub(crate) remaining: Duration,
}

/// The key of a container's restarts in the back-off.
pub(crate) fn restart_key(container: &str) -> String {
    format!("restart {container}")
}

pub(crate) fn decide(pod: &Pod, observed: &Observed, restarts: &KeyedBackoff, now: Time) -> Plan {
    let ready = observed.ready_sandbox();
    // A pod that never restarts does not get a second sandbox for what has run.
    let lost = ready.is_none() && !observed.containers.is_empty();
    if lost && pod.spec.restart_policy == RestartPolicy::Never {
        return Plan::Finished;
    }
    let mut steps = Steps {
        sandbox: match (ready, observed.sandboxes.first()) {
            (Some(sandbox), _) => Sandbox::Keep { id: sandbox.id.clone() },
            (None, newest) => Sandbox::Create { attempt: newest.map_or(0, |s| attempt_of(s) + 1) },
        },
        start: Vec::new(),
        wait: Vec::new(),
    };
    let mut running = false;
    for (index, container) in pod.spec.containers.iter().enumerate() {
        let newest = observed.newest(&container.name);
        match wish(newest, ready.is_some(), pod.spec.restart_policy) {
            Wish::Nothing => {}
            Wish::KeepRunning => running = true,
            Wish::Start { restart_count, after } => {
                let key = restart_key(&container.name);
                match after.and_then(|ended| restarts.remaining(&key, ended, now)) {
                    Some(remaining) => steps.wait.push(Wait { container: index, remaining }),
                    None => steps.start.push(Start { container: index, restart_count, after }),
                }
            }
        }
    }
    if steps.start.is_empty() && steps.wait.is_empty() && !running {
        return Plan::Finished;
    }
    Plan::Run(steps)
}

enum Wish {
    Nothing,
    KeepRunning,
    Start { restart_count: u32, after: Option<Time> },
}

fn wish(newest: Option<&ContainerStatus>, sandbox_ready: bool, policy: RestartPolicy) -> Wish {
    let Some(newest) = newest else { return Wish::Start { restart_count: 0, after: None } };
    let again = |after| Wish::Start { restart_count: instance_of(newest) + 1, after };
    match newest.state() {
        ContainerState::ContainerRunning if sandbox_ready => Wish::KeepRunning,
        ContainerState::ContainerRunning
        | ContainerState::ContainerCreated
        | ContainerState::ContainerUnknown => again(None),
        ContainerState::ContainerExited => match policy {
            RestartPolicy::Never => Wish::Nothing,
            RestartPolicy::OnFailure if newest.exit_code == 0 => Wish::Nothing,
            RestartPolicy::OnFailure | RestartPolicy::Always => again(time(newest.finished_at)),
        },
    }
}

#[cfg(test)]
mod tests {
    use proto::cri::{ContainerMetadata, PodSandboxMetadata, PodSandboxState, PodSandboxStatus};

    use super::*;

    fn pod(policy: &str) -> Pod {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]}
        }))
        .unwrap()
    }

    fn sandbox(state: PodSandboxState) -> PodSandboxStatus {
        PodSandboxStatus {
            id: "s".into(),
            state: state.into(),
            metadata: Some(PodSandboxMetadata { attempt: 3, ..PodSandboxMetadata::default() }),
            ..PodSandboxStatus::default()
        }
    }

    fn container(name: &str, state: ContainerState, exit_code: i32) -> ContainerStatus {
        ContainerStatus {
            metadata: Some(ContainerMetadata { name: name.into(), attempt: 4 }),
            state: state.into(),
            exit_code,
            finished_at: 1_000_000_000_000,
            ..ContainerStatus::default()
        }
    }

    fn observed(sandbox: PodSandboxStatus, containers: &[ContainerStatus]) -> Observed {
        Observed { sandboxes: vec![sandbox], containers: containers.to_vec() }
    }

    fn plan(policy: &str, observed: &Observed) -> Plan {
        decide(&pod(policy), observed, &KeyedBackoff::default(), now())
    }

    fn now() -> Time {
        Time::from_second(1001).unwrap()
    }

    fn starts(plan: Plan) -> Vec<(usize, u32)> {
        match plan {
            Plan::Run(steps) => steps.start.iter().map(|s| (s.container, s.restart_count)).collect(),
            Plan::Finished => panic!("finished"),
        }
    }

    use ContainerState::{ContainerExited as Exited, ContainerRunning as Running};
    use PodSandboxState::{SandboxNotready as NotReady, SandboxReady as Ready};

    #[test]
    fn a_new_pod_gets_a_sandbox_and_all_containers() {
        let Plan::Run(steps) = plan("Always", &Observed::default()) else { panic!("runs") };
        assert_eq!(steps.sandbox, Sandbox::Create { attempt: 0 });
        assert_eq!(steps.start.len(), 2);
    }

    #[test]
    fn an_adopted_running_pod_is_left_alone() {
        let observed = observed(sandbox(Ready), &[container("a", Running, 0), container("b", Running, 0)]);
        let Plan::Run(steps) = plan("Always", &observed) else { panic!("runs") };
        assert_eq!(steps.sandbox, Sandbox::Keep { id: "s".into() });
        assert!(steps.start.is_empty() && steps.wait.is_empty());
    }

    #[test]
    fn the_restart_policy_decides_about_an_ended_container() {
        let observed = observed(sandbox(Ready), &[container("a", Exited, 0), container("b", Exited, 1)]);
        assert_eq!(starts(plan("Always", &observed)), [(0, 5), (1, 5)]);
        assert_eq!(starts(plan("OnFailure", &observed)), [(1, 5)]);
        assert_eq!(plan("Never", &observed), Plan::Finished);
    }

    #[test]
    fn a_lost_sandbox_is_replaced_unless_the_pod_never_restarts() {
        let observed = observed(sandbox(NotReady), &[container("a", Running, 0), container("b", Exited, 0)]);
        let Plan::Run(steps) = plan("OnFailure", &observed) else { panic!("runs") };
        assert_eq!(steps.sandbox, Sandbox::Create { attempt: 4 });
        assert_eq!(steps.start.iter().map(|s| s.container).collect::<Vec<_>>(), [0]);
        assert_eq!(plan("Never", &observed), Plan::Finished);
    }

    #[test]
    fn a_crashing_container_waits_while_its_back_off_lasts() {
        let observed = observed(sandbox(Ready), &[container("a", Exited, 1), container("b", Running, 0)]);
        let mut restarts = KeyedBackoff::default();
        restarts.step(&restart_key("a"), now(), now());
        let Plan::Run(steps) = decide(&pod("Always"), &observed, &restarts, now()) else { panic!("runs") };
        assert_eq!(steps.wait, [Wait { container: 0, remaining: Duration::from_secs(9) }]);
        assert!(steps.start.is_empty());
    }
}
