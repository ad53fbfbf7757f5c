//! The next actions for a pod, as an ordered list, from its object and the runtime's state of it.
//! No I/O: `worker` executes the list.
//!
//! Invariant: a plan with a kill contains nothing else. The worker observes the pod again before it
//! releases anything that surviving containers may use.

mod init;

use std::collections::BTreeSet;
use std::time::Duration;

use proto::cri::{ContainerState, ContainerStatus};

use crate::backoff::keyed::KeyedBackoff;
use crate::objects::{self, Pod, ProbeKind, RestartPolicy, Time};
use crate::pod::resources::resize::Difference;
use crate::pod_state::observed::{
    Observed, attempt_of, full_name_of, image_asked_for, instance_of, name_of, time,
};
use crate::pod_state::probe_results::ProbeResults;

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
    /// Remove a sandbox that was stopped before an earlier restart and has no containers left.
    RemoveSandbox {
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
    /// Give running containers the limits of their manifest.
    Resize {
        containers: Vec<Container>,
    },
    /// Stop containers concurrently; each has the whole grace period, or its own.
    Kill {
        targets: Vec<Target>,
        grace: Duration,
    },
    /// No container runs or will start again: release the pod's resources.
    Finish,
}

/// Place in the pod's init containers and containers ([`objects::PodSpec::container_at`]).
pub(crate) type Container = usize;

/// A container instance to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) container: Container,
    pub(crate) restart_count: u32,
    /// When the instance before it ended; `None` if its end does not count for the back-off.
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
    pub(crate) cause: Cause,
    /// The probe's own grace period.
    pub(crate) grace: Option<Duration>,
}

/// Why a container is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It goes with its pod, or its postStart hook failed.
    End,
    Probe(ProbeKind),
    /// Its image has changed.
    Changed,
    /// A resource has changed whose policy asks for a restart.
    Resized,
    /// It goes on in another sandbox.
    SandboxLost,
}

impl Cause {
    /// Whether another instance starts, however this one ends.
    pub(crate) fn replaces(self) -> bool {
        matches!(self, Self::Changed | Self::Resized | Self::SandboxLost)
    }
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
            | Self::RemoveSandbox { .. }
            | Self::CreateSandbox { .. }
            | Self::EnterSandbox { .. }
            | Self::Resize { .. }
            | Self::Kill { .. }
            | Self::Finish => None,
        }
    }
}

/// What a plan is made from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) observed: &'a Observed,
    pub(crate) probes: &'a ProbeResults,
    /// By container name.
    pub(crate) restarts: &'a KeyedBackoff,
    /// Ended containers that were stopped for another instance, by id.
    pub(crate) replaced: &'a BTreeSet<String>,
    pub(crate) now: Time,
}

impl Situation<'_> {
    /// The newest instance of a container in the ready sandbox.
    fn current(&self, name: &str) -> Option<&ContainerStatus> {
        let sandbox = self.observed.ready_sandbox()?;
        self.observed.newest(name).filter(|newest| self.observed.is_in(newest, sandbox))
    }
}

/// The next actions of a pod that must run; empty if everything runs.
pub(crate) fn run(situation: &Situation<'_>) -> Vec<Action> {
    let Situation { pod, observed, .. } = *situation;
    let grace = Duration::from_secs(pod.spec.termination_grace_period_seconds);
    let ready = observed.ready_sandbox();
    let left = left_in_lost_sandboxes(pod, observed);
    if !left.is_empty() {
        return vec![Action::Kill { targets: left, grace }];
    }
    // A pod with restartPolicy Never gets no second sandbox for containers that have run. One that was only
    // created, before a kill of its sandbox, has not.
    let have_run = observed.containers.iter().any(|c| c.state() != ContainerState::ContainerCreated);
    let lost = ready.is_none() && have_run;
    if lost && pod.spec.restart_policy == RestartPolicy::Never {
        return vec![Action::Finish];
    }
    let (mut starts, mut kills, mut resizes) = (Vec::new(), Vec::new(), Vec::new());
    let mut has_ended = true;
    for (index, container) in pod.spec.containers.iter().enumerate() {
        let step = next(observed.newest(&container.name), situation, container);
        has_ended &= matches!(step, Next::Nothing);
        match step {
            Next::Nothing | Next::KeepRunning => {}
            Next::Resize => resizes.push(pod.spec.init_containers.len() + index),
            Next::Kill(target) => kills.push(target),
            Next::Start => {
                let place = pod.spec.init_containers.len() + index;
                starts.push(instance_to_start(situation, place, &container.name));
            }
        }
    }
    if has_ended {
        return end(observed, grace);
    }
    let init = init::steps(situation);
    if init.state == init::State::Failed {
        return end(observed, grace);
    }
    kills.extend(init.kills);
    if !kills.is_empty() {
        return vec![Action::Kill { targets: kills, grace }];
    }
    if init.state != init::State::Done {
        starts.clear();
    }
    starts.splice(0..0, init.starts);
    resizes.extend(init.resizes);
    start_all(situation, starts, resizes)
}

/// What still runs without a ready sandbox: it ends before its sandbox is stopped, which would leave it no
/// time.
fn left_in_lost_sandboxes(pod: &Pod, observed: &Observed) -> Vec<Target> {
    if observed.ready_sandbox().is_some() {
        return Vec::new();
    }
    let restarts = pod.spec.restart_policy != RestartPolicy::Never;
    let cause = if restarts { Cause::SandboxLost } else { Cause::End };
    observed.running().map(|container| Target { cause, ..Target::of(container) }).collect()
}

fn start_all(situation: &Situation<'_>, starts: Vec<Start>, resizes: Vec<Container>) -> Vec<Action> {
    let Situation { pod, observed, restarts, now, .. } = *situation;
    let mut plan = Vec::new();
    let mut due = Vec::new();
    for start in starts {
        let name = &pod.spec.container_at(start.container).name;
        match start.after.and_then(|ended| restarts.remaining(name, ended, now)) {
            Some(remaining) => plan.push(Action::BackOff { container: start.container, remaining }),
            None => due.push(start),
        }
    }
    if !resizes.is_empty() {
        plan.push(Action::Resize { containers: resizes });
    }
    if due.is_empty() {
        return plan;
    }
    plan.extend([Action::Prepare, Action::MountVolumes]);
    plan.extend(sandbox(observed));
    for start in due {
        plan.push(Action::PullImage { container: start.container });
        plan.extend(removals(start.container, &pod.spec.container_at(start.container).name, observed));
        plan.push(Action::Start(start));
    }
    plan
}

/// The next actions of a pod that must end: deleted, failed, succeeded or orphaned.
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
            cause: Cause::End,
            grace: None,
        }
    }

    /// The probe's own grace period counts where a probe ends the container.
    fn because(running: &ContainerStatus, container: &objects::Container, cause: Cause) -> Self {
        let probe = match cause {
            Cause::Probe(kind) => container.probe(kind),
            Cause::End | Cause::Changed | Cause::Resized | Cause::SandboxLost => None,
        };
        let grace = probe.and_then(|probe| probe.termination_grace_period_seconds);
        Self { cause, grace: grace.map(Duration::from_secs), ..Self::of(running) }
    }
}

/// The steps to a ready sandbox.
fn sandbox(observed: &Observed) -> Vec<Action> {
    if let Some(sandbox) = observed.ready_sandbox() {
        return vec![Action::EnterSandbox { id: sandbox.id.clone(), attempt: attempt_of(sandbox) }];
    }
    let Some((newest, older)) = observed.sandboxes.split_first() else {
        return vec![Action::CreateSandbox { attempt: 0 }];
    };
    // The oldest one shows when the pod started.
    let between = older.split_last().map_or(&[][..], |(_oldest, between)| between);
    let has_containers = |id: &String| observed.sandbox_of.values().any(|owner| owner == id);
    let empty = between.iter().filter(|old| !has_containers(&old.id));
    let mut steps = vec![Action::StopSandbox { id: newest.id.clone() }];
    steps.extend(empty.map(|old| Action::RemoveSandbox { id: old.id.clone() }));
    steps.push(Action::CreateSandbox { attempt: attempt_of(newest) + 1 });
    steps
}

/// All ended instances but the newest, and any that was created but never started. A container that runs
/// in the ready sandbox is never removed.
fn removals<'a>(
    container: Container,
    name: &'a str,
    observed: &'a Observed,
) -> impl Iterator<Item = Action> + 'a {
    let mut has_kept_one = false;
    let old = observed.instances(name).filter(move |instance| match instance.state() {
        ContainerState::ContainerExited => std::mem::replace(&mut has_kept_one, true),
        ContainerState::ContainerRunning => {
            observed.ready_sandbox().is_none_or(|ready| !observed.is_in(instance, ready))
        }
        ContainerState::ContainerCreated | ContainerState::ContainerUnknown => true,
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
    Resize,
    Kill(Target),
    Start,
}

fn next(newest: Option<&ContainerStatus>, situation: &Situation<'_>, container: &objects::Container) -> Next {
    let Some(newest) = newest else { return Next::Start };
    match newest.state() {
        ContainerState::ContainerRunning => match cause_of_restart(situation, newest, container) {
            Some(cause) => Next::Kill(Target::because(newest, container, cause)),
            None if difference(situation.pod, container, newest).is_any() => Next::Resize,
            None => Next::KeepRunning,
        },
        ContainerState::ContainerCreated | ContainerState::ContainerUnknown => Next::Start,
        ContainerState::ContainerExited => {
            let is_replaced = situation.replaced.contains(&newest.id);
            let policy = situation.pod.spec.restart_policy;
            if is_replaced || restarts(policy, newest, situation.probes) {
                Next::Start
            } else {
                Next::Nothing
            }
        }
    }
}

/// Whether the policy starts another instance after one that has ended.
pub(crate) fn restarts(policy: RestartPolicy, ended: &ContainerStatus, probes: &ProbeResults) -> bool {
    match policy {
        RestartPolicy::Never => false,
        // After a kill for a failed probe, the exit code only says how the program takes SIGTERM.
        RestartPolicy::OnFailure => ended.exit_code != 0 || probes.was_killed(&ended.id),
        RestartPolicy::Always => true,
    }
}

/// Whether the pod ended before, as its status says that is kept on disk. Then its containers show nothing:
/// some may have been removed since.
pub(crate) fn has_ended_before(pod: &Pod, observed: &Observed) -> bool {
    pod.status.phase.has_ended() && observed.running().next().is_none()
}

/// Why a running container must end for another instance (kubelet: computePodActions).
fn cause_of_restart(
    situation: &Situation<'_>,
    running: &ContainerStatus,
    container: &objects::Container,
) -> Option<Cause> {
    if image_asked_for(running).is_some_and(|image| image != container.image) {
        return Some(Cause::Changed);
    }
    if let Some(kind) = situation.probes.failed(&running.id) {
        return Some(Cause::Probe(kind));
    }
    difference(situation.pod, container, running).needs_restart(container).then_some(Cause::Resized)
}

/// None if the runtime does not report a container's resources.
fn difference(pod: &Pod, container: &objects::Container, running: &ContainerStatus) -> Difference {
    let actual = running.resources.as_ref().and_then(|resources| resources.linux.as_ref());
    actual.map(|actual| Difference::of(pod, container, actual)).unwrap_or_default()
}

/// The container's next instance.
fn instance_to_start(situation: &Situation<'_>, container: Container, name: &str) -> Start {
    let newest = situation.observed.newest(name);
    let ended = newest.filter(|newest| newest.state() == ContainerState::ContainerExited);
    // In a new sandbox an init container that succeeded runs again at once.
    let failed = ended.filter(|ended| {
        container >= situation.pod.spec.init_containers.len()
            || ended.exit_code != 0
            || situation.pod.spec.container_at(container).is_sidecar()
    });
    let counted = failed.filter(|ended| !had_another_definition(situation, container, ended));
    Start {
        container,
        restart_count: newest.map_or(0, |newest| instance_of(newest) + 1),
        after: counted.and_then(|ended| time(ended.finished_at)),
    }
}

/// Whether the next instance of a container starts because of a changed definition: the one before was stopped
/// for the change, though the manifest may have changed back since, or ended by itself with another image. Its
/// end is no crash of what starts. In kubelet such an end counts.
///
/// The loss of a sandbox is no change: containers that were stopped for it are not in the ready sandbox.
fn had_another_definition(situation: &Situation<'_>, container: Container, ended: &ContainerStatus) -> bool {
    let container = situation.pod.spec.container_at(container);
    let is_current = situation.current(&container.name).is_some_and(|current| current.id == ended.id);
    (is_current && situation.replaced.contains(&ended.id))
        || image_asked_for(ended).is_some_and(|image| image != container.image)
}

#[cfg(test)]
mod tests;
