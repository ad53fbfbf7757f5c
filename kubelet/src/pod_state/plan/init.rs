//! Init containers (kubelet, kuberuntime_container.go: computeInitContainerActions): they run one
//! after another; a sidecar counts as done once it has started, and is kept running.
//!
//! Only containers of the current sandbox count: in a new sandbox, all init containers run again.

use proto::cri::{ContainerState, ContainerStatus};

use super::{Container, Situation, Start, Target, cause_of_restart, difference, instance_to_start};
use crate::objects::{self, RestartPolicy};

/// The next steps of a pod's init containers.
#[derive(Debug, Default)]
pub(super) struct Steps {
    pub(super) starts: Vec<Start>,
    pub(super) kills: Vec<Target>,
    pub(super) resizes: Vec<Container>,
    pub(super) state: State,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// The containers may start.
    Done,
    #[default]
    Waiting,
    /// One has failed, and the pod's restart policy is Never.
    Failed,
}

/// One init container.
enum Step {
    Next,
    Wait,
    Start,
    Kill(Target),
    Fail,
}

pub(super) fn steps(situation: &Situation<'_>) -> Steps {
    let spec = &situation.pod.spec;
    let mut steps = Steps::default();
    // The last one that has run decides: those before it may have been removed.
    let latest = spec.init_containers.iter().rposition(|c| situation.current(&c.name).is_some());
    let has_run = spec.containers.iter().any(|c| situation.current(&c.name).is_some());
    let (settled, next) = match latest {
        _ if has_run => (spec.init_containers.len(), None),
        None => (0, Some(0)),
        Some(latest) => (latest, Some(latest)),
    };
    for (place, sidecar) in spec.init_containers.iter().enumerate().take(settled) {
        if sidecar.is_sidecar() {
            steps.apply(situation, place, of_sidecar(situation, sidecar));
        }
    }
    steps.resizes = sidecars_to_resize(situation);
    let Some(place) = next.filter(|place| *place < spec.init_containers.len()) else {
        steps.state = State::Done;
        return steps;
    };
    let container = &spec.init_containers[place];
    let step = match situation.current(&container.name) {
        None => Step::Start,
        Some(_) if container.is_sidecar() => of_sidecar(situation, container),
        Some(newest) => of_ordinary(newest, spec.restart_policy),
    };
    match step {
        Step::Next if place + 1 == spec.init_containers.len() => steps.state = State::Done,
        Step::Next => steps.apply(situation, place + 1, Step::Start),
        step => steps.apply(situation, place, step),
    }
    steps
}

impl Steps {
    fn apply(&mut self, situation: &Situation<'_>, place: Container, step: Step) {
        match step {
            Step::Next | Step::Wait => {}
            Step::Start => {
                let name = &situation.pod.spec.init_containers[place].name;
                self.starts.push(instance_to_start(situation, place, name));
            }
            Step::Kill(target) => self.kills.push(target),
            Step::Fail => self.state = State::Failed,
        }
    }
}

fn sidecars_to_resize(situation: &Situation<'_>) -> Vec<Container> {
    let sidecars = situation.pod.spec.init_containers.iter().enumerate().filter(|(_, c)| c.is_sidecar());
    let differ = sidecars.filter(|(_, sidecar)| {
        let newest = situation.current(&sidecar.name);
        let running = newest.filter(|newest| newest.state() == ContainerState::ContainerRunning);
        running.is_some_and(|running| difference(situation.pod, sidecar, running).is_any())
    });
    differ.map(|(place, _)| place).collect()
}

fn of_sidecar(situation: &Situation<'_>, sidecar: &objects::Container) -> Step {
    let Some(newest) = situation.current(&sidecar.name) else { return Step::Start };
    match newest.state() {
        ContainerState::ContainerRunning => match cause_of_restart(situation, newest, sidecar) {
            Some(cause) => Step::Kill(Target::because(newest, sidecar, cause)),
            None if situation.probes.is_started(sidecar, &newest.id) => Step::Next,
            None => Step::Wait,
        },
        ContainerState::ContainerCreated
        | ContainerState::ContainerExited
        | ContainerState::ContainerUnknown => Step::Start,
    }
}

fn of_ordinary(newest: &ContainerStatus, policy: RestartPolicy) -> Step {
    match newest.state() {
        ContainerState::ContainerRunning => Step::Wait,
        ContainerState::ContainerExited if newest.exit_code == 0 => Step::Next,
        ContainerState::ContainerExited if policy == RestartPolicy::Never => Step::Fail,
        ContainerState::ContainerCreated
        | ContainerState::ContainerExited
        | ContainerState::ContainerUnknown => Step::Start,
    }
}
