//! The next actions for a pod, as an ordered list, from its object and the runtime's state of it.
//! No I/O: `worker` executes the list.
//!
//! Invariant: a plan with a kill contains nothing else. The worker observes the pod again before it
//! releases anything that surviving containers may use.

use std::time::Duration;

use proto::cri::{ContainerState, ContainerStatus};

use crate::keyed_backoff::KeyedBackoff;
use crate::objects::{Pod, RestartPolicy, Time};
use crate::observed::{Observed, attempt_of, full_name_of, instance_of, name_of, time};

/// The worker follows the order. A failed action of the pod ends the round; a failed action of a
/// container skips the rest of that container's actions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Report CrashLoopBackOff for a container.
    BackOff {
        container: Container,
        remaining: Duration,
    },
    /// Create the pod's cgroup and directories.
    Prepare,
    /// Wait until all volumes of the pod are mounted.
    MountVolumes,
    /// Stop the remains of an earlier sandbox. Keep its containers: they record what has run.
    StopSandbox {
        id: String,
    },
    CreateSandbox {
        attempt: u32,
    },
    /// Use a ready sandbox.
    EnterSandbox {
        id: String,
        attempt: u32,
    },
    /// Find or pull the container's image by its pull policy.
    PullImage {
        container: Container,
    },
    /// Remove an old instance of a container.
    Remove {
        container: Container,
        id: String,
        number: u32,
    },
    Start(Start),
    /// Stop containers concurrently; each has the whole grace period.
    Kill {
        targets: Vec<Target>,
        grace: Duration,
    },
    /// No container runs or will start again: release the pod's resources.
    Finish,
}

/// Index into spec.containers.
pub(crate) type Container = usize;

/// A container instance to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) container: Container,
    pub(crate) restart_count: u32,
    /// When the instance before it ended.
    pub(crate) after: Option<Time>,
}

/// A running container to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) id: String,
    /// As in the pod's spec.
    pub(crate) name: String,
    /// `namespace/pod/container`.
    pub(crate) full_name: String,
}

impl Action {
    /// The action's container; `None` for an action on the whole pod.
    pub(crate) fn container(&self) -> Option<Container> {
        match self {
            Self::BackOff { container, .. }
            | Self::PullImage { container }
            | Self::Remove { container, .. } => Some(*container),
            Self::Start(start) => Some(start.container),
            Self::Prepare
            | Self::MountVolumes
            | Self::StopSandbox { .. }
            | Self::CreateSandbox { .. }
            | Self::EnterSandbox { .. }
            | Self::Kill { .. }
            | Self::Finish => None,
        }
    }
}

/// The back-off key for a container's restarts.
pub(crate) fn restart_key(container: &str) -> String {
    format!("restart {container}")
}

/// The next actions of a pod that must run; empty if everything runs.
pub(crate) fn run(pod: &Pod, observed: &Observed, restarts: &KeyedBackoff, now: Time) -> Vec<Action> {
    let ready = observed.ready_sandbox();
    // A pod with restartPolicy Never gets no second sandbox for containers that have run.
    let lost = ready.is_none() && !observed.containers.is_empty();
    if lost && pod.spec.restart_policy == RestartPolicy::Never {
        return vec![Action::Finish];
    }
    let (mut plan, mut starts) = (Vec::new(), Vec::new());
    let mut running = false;
    for (index, container) in pod.spec.containers.iter().enumerate() {
        let newest = observed.newest(&container.name);
        match next(newest, ready.is_some(), pod.spec.restart_policy) {
            Next::Nothing => {}
            Next::KeepRunning => running = true,
            Next::Start { restart_count, after } => {
                let key = restart_key(&container.name);
                match after.and_then(|ended| restarts.remaining(&key, ended, now)) {
                    Some(remaining) => plan.push(Action::BackOff { container: index, remaining }),
                    None => starts.push(Start { container: index, restart_count, after }),
                }
            }
        }
    }
    if starts.is_empty() && plan.is_empty() && !running {
        return vec![Action::Finish];
    }
    if starts.is_empty() {
        return plan;
    }
    plan.extend([Action::Prepare, Action::MountVolumes]);
    plan.extend(sandbox(observed));
    for start in starts {
        plan.push(Action::PullImage { container: start.container });
        plan.extend(removals(start.container, &pod.spec.containers[start.container].name, observed));
        plan.push(Action::Start(start));
    }
    plan
}

/// The next actions of a pod that must end: deleted, evicted or orphaned.
pub(crate) fn end(observed: &Observed, grace: Duration) -> Vec<Action> {
    let targets: Vec<Target> = observed.running().map(Target::of).collect();
    if targets.is_empty() { vec![Action::Finish] } else { vec![Action::Kill { targets, grace }] }
}

impl Target {
    fn of(container: &ContainerStatus) -> Self {
        Self {
            id: container.id.clone(),
            name: name_of(container).to_owned(),
            full_name: full_name_of(container),
        }
    }
}

/// The steps to a ready sandbox.
fn sandbox(observed: &Observed) -> Vec<Action> {
    if let Some(sandbox) = observed.ready_sandbox() {
        return vec![Action::EnterSandbox { id: sandbox.id.clone(), attempt: attempt_of(sandbox) }];
    }
    let stops = observed.sandboxes.iter().map(|old| Action::StopSandbox { id: old.id.clone() });
    let attempt = observed.sandboxes.first().map_or(0, |newest| attempt_of(newest) + 1);
    stops.chain([Action::CreateSandbox { attempt }]).collect()
}

/// All ended instances but the newest, and any that was created but never started.
fn removals<'a>(
    container: Container,
    name: &'a str,
    observed: &'a Observed,
) -> impl Iterator<Item = Action> + 'a {
    let mut has_kept_one = false;
    let old = observed.instances(name).filter(move |instance| {
        let ended = instance.state() == ContainerState::ContainerExited;
        !ended || std::mem::replace(&mut has_kept_one, true)
    });
    old.map(move |instance| Action::Remove {
        container,
        id: instance.id.clone(),
        number: instance_of(instance),
    })
}

/// The next step for one container.
enum Next {
    Nothing,
    KeepRunning,
    Start { restart_count: u32, after: Option<Time> },
}

fn next(newest: Option<&ContainerStatus>, sandbox_ready: bool, policy: RestartPolicy) -> Next {
    let Some(newest) = newest else { return Next::Start { restart_count: 0, after: None } };
    let again = |after| Next::Start { restart_count: instance_of(newest) + 1, after };
    match newest.state() {
        ContainerState::ContainerRunning if sandbox_ready => Next::KeepRunning,
        ContainerState::ContainerRunning
        | ContainerState::ContainerCreated
        | ContainerState::ContainerUnknown => again(None),
        ContainerState::ContainerExited => match policy {
            RestartPolicy::Never => Next::Nothing,
            RestartPolicy::OnFailure if newest.exit_code == 0 => Next::Nothing,
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

    fn instance(name: &str, number: u32, state: ContainerState, exit_code: i32) -> ContainerStatus {
        ContainerStatus {
            id: format!("{name}{number}"),
            metadata: Some(ContainerMetadata { name: name.into(), attempt: number }),
            state: state.into(),
            exit_code,
            finished_at: 1_000_000_000_000,
            ..ContainerStatus::default()
        }
    }

    fn container(name: &str, state: ContainerState, exit_code: i32) -> ContainerStatus {
        instance(name, 4, state, exit_code)
    }

    fn observed(sandbox: PodSandboxStatus, containers: &[ContainerStatus]) -> Observed {
        Observed { sandboxes: vec![sandbox], containers: containers.to_vec() }
    }

    fn plan(policy: &str, observed: &Observed) -> Vec<Action> {
        run(&pod(policy), observed, &KeyedBackoff::default(), now())
    }

    fn now() -> Time {
        Time::from_second(1001).unwrap()
    }

    /// One word for each action.
    fn words(plan: &[Action]) -> String {
        let word = |action: &Action| match action {
            Action::BackOff { container, remaining } => {
                format!("back-off:{container}:{}s", remaining.as_secs())
            }
            Action::Prepare => "prepare".to_owned(),
            Action::MountVolumes => "mount".to_owned(),
            Action::StopSandbox { id } => format!("stop:{id}"),
            Action::CreateSandbox { attempt } => format!("create:{attempt}"),
            Action::EnterSandbox { id, attempt } => format!("enter:{id}:{attempt}"),
            Action::PullImage { container } => format!("pull:{container}"),
            Action::Remove { container, id, number } => format!("remove:{container}:{id}:{number}"),
            Action::Start(start) => format!("start:{}:{}", start.container, start.restart_count),
            Action::Kill { targets, grace } => {
                let ids: Vec<&str> = targets.iter().map(|target| target.id.as_str()).collect();
                format!("kill:{}:{}s", ids.join("+"), grace.as_secs())
            }
            Action::Finish => "finish".to_owned(),
        };
        plan.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    use ContainerState::{
        ContainerCreated as Created, ContainerExited as Exited, ContainerRunning as Running,
    };
    use PodSandboxState::{SandboxNotready as NotReady, SandboxReady as Ready};

    #[test]
    fn a_new_pod_gets_a_sandbox_and_all_containers() {
        assert_eq!(
            words(&plan("Always", &Observed::default())),
            "prepare mount create:0 pull:0 start:0:0 pull:1 start:1:0"
        );
    }

    #[test]
    fn an_adopted_running_pod_needs_no_action() {
        let observed = observed(sandbox(Ready), &[container("a", Running, 0), container("b", Running, 0)]);
        assert_eq!(plan("Always", &observed), []);
    }

    #[test]
    fn the_restart_policy_decides_about_an_ended_container() {
        let observed = observed(sandbox(Ready), &[container("a", Exited, 0), container("b", Exited, 1)]);
        assert_eq!(
            words(&plan("Always", &observed)),
            "prepare mount enter:s:3 pull:0 start:0:5 pull:1 start:1:5"
        );
        assert_eq!(words(&plan("OnFailure", &observed)), "prepare mount enter:s:3 pull:1 start:1:5");
        assert_eq!(plan("Never", &observed), [Action::Finish]);
    }

    #[test]
    fn a_lost_sandbox_is_replaced_unless_the_pod_never_restarts() {
        let observed = observed(sandbox(NotReady), &[container("a", Running, 0), container("b", Exited, 0)]);
        assert_eq!(
            words(&plan("OnFailure", &observed)),
            "prepare mount stop:s create:4 pull:0 remove:0:a4:4 start:0:5"
        );
        assert_eq!(plan("Never", &observed), [Action::Finish]);
    }

    #[test]
    fn a_crashing_container_waits_while_its_back_off_lasts() {
        let of_a = |b| observed(sandbox(Ready), &[container("a", Exited, 1), container("b", b, 1)]);
        let mut restarts = KeyedBackoff::default();
        restarts.step(&restart_key("a"), now(), now());
        let plan = |observed| words(&run(&pod("Always"), &observed, &restarts, now()));
        assert_eq!(plan(of_a(Running)), "back-off:0:9s");
        assert_eq!(plan(of_a(Exited)), "back-off:0:9s prepare mount enter:s:3 pull:1 start:1:5");
    }

    #[test]
    fn only_the_newest_ended_instance_is_kept_for_a_restart() {
        let instances = [
            instance("a", 9, Created, 0),
            instance("a", 8, Exited, 1),
            instance("a", 7, Exited, 1),
            instance("b", 0, Running, 0),
        ];
        assert_eq!(
            words(&plan("Always", &observed(sandbox(Ready), &instances))),
            "prepare mount enter:s:3 pull:0 remove:0:a9:9 remove:0:a7:7 start:0:10"
        );
    }

    #[test]
    fn a_pod_is_killed_before_its_resources_are_released() {
        let grace = Duration::from_secs(7);
        let containers = [container("a", Running, 0), container("b", Running, 0), container("c", Exited, 0)];
        let running = observed(sandbox(Ready), &containers);
        assert_eq!(words(&end(&running, grace)), "kill:a4+b4:7s");
        assert_eq!(words(&end(&observed(sandbox(Ready), &containers[2..]), grace)), "finish");
        assert_eq!(words(&end(&Observed::default(), grace)), "finish");
    }
}
