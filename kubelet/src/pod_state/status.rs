//! A pod's status, made from what the runtime has of it (kubernetes,
//! kubelet_pods.go and status/generate.go). No I/O but the termination messages
//! that the caller read.

mod conditions;
mod phase;
mod unknown;

use std::collections::{BTreeMap, BTreeSet};

use proto::{cri, signals};

use crate::objects::{
    ConditionStatus, Container, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, Pod, PodCondition, PodIp, PodPhase, PodStatus,
    ResourceRequirements, RestartPolicy, Time,
};
use crate::pod::resources;
use crate::pod_state::observed::{Observed, image_asked_for, instance_of, time};
use crate::pod_state::plan;
use crate::pod_state::probe_results::ProbeResults;
use conditions::Verdict;

/// Condition of a pod for which this machine does not restrict devices. It is there
/// only where it is False: everywhere else the rules are in force.
pub(crate) const DEVICE_CONTROL: &str = "hawser.dev/DeviceControl";
/// The runtime's reason for a running container without device control.
pub(crate) const DEVICE_CONTROL_MISSING: &str = "DeviceControlMissing";

/// Condition of a pod whose sandbox is ready, with its network.
const READY_TO_START: &str = "PodReadyToStartContainers";

/// Why containers wait, by name: kept by the worker from its last attempts.
pub(crate) type Waiting = BTreeMap<String, ContainerStateWaiting>;

/// What a status is made from.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) observed: &'a Observed,
    pub(crate) waiting: &'a Waiting,
    pub(crate) probes: &'a ProbeResults,
    /// By container id.
    pub(crate) termination_messages: &'a BTreeMap<String, String>,
    /// Ended containers that another instance follows, by id.
    pub(crate) replaced: &'a BTreeSet<String>,
    /// Why the containers do not have the limits of their manifest.
    pub(crate) resize_problem: Option<&'a str>,
    pub(crate) runtime_name: &'a str,
    pub(crate) host_ip: &'a str,
    pub(crate) now: Time,
}

impl Sources<'_> {
    pub(crate) fn status(&self) -> PodStatus {
        let previous = &self.pod.status;
        let spec = &self.pod.spec;
        let mut init: Vec<ContainerStatus> =
            spec.init_containers.iter().map(|c| self.init_container(c)).collect();
        let mut containers: Vec<ContainerStatus> =
            spec.containers.iter().map(|c| self.container(c)).collect();
        if previous.is_decided() && self.observed.running().next().is_none() {
            unknown::mark(&mut init, &mut containers);
        }
        let phase = match previous.phase {
            ended @ (PodPhase::Succeeded | PodPhase::Failed) => ended,
            // A container that ended for its successor ends no pod.
            before if self.is_replacing() => before,
            _ => match phase::of(spec, &init, &containers) {
                PodPhase::Succeeded if self.restarts_after_probe() => PodPhase::Running,
                phase => phase,
            },
        };
        let ips = if spec.host_network { vec![self.host_ip.to_owned()] } else { self.observed.pod_ips() };
        PodStatus {
            phase,
            observed_generation: self.pod.metadata.generation,
            conditions: self.conditions(phase, &init, &containers),
            message: previous.message.clone(),
            reason: previous.reason.clone(),
            host_ip: self.host_ip.to_owned(),
            host_ips: vec![PodIp { ip: self.host_ip.to_owned() }],
            pod_ip: ips.first().cloned().unwrap_or_default(),
            pod_ips: ips.into_iter().map(|ip| PodIp { ip }).collect(),
            start_time: Some(self.start_time()),
            init_container_statuses: init,
            container_statuses: containers,
            qos_class: Some(resources::qos_class(self.pod)),
        }
    }

    /// A sidecar does not count: it does not start again once the containers have ended.
    fn is_replacing(&self) -> bool {
        let containers = self.pod.spec.all_containers().filter(|c| !c.is_sidecar());
        containers.filter_map(|c| self.observed.newest(&c.name)).any(|c| self.replaced.contains(&c.id))
    }

    /// Whether a container starts again though it has ended with exit code 0: it was killed for a failed probe.
    fn restarts_after_probe(&self) -> bool {
        let containers = &self.pod.spec.containers;
        let mut newest =
            containers.iter().filter_map(|c| self.observed.newest(&c.name).map(|ended| (c, ended)));
        newest.any(|(container, ended)| self.starts_again(container, ended))
    }

    /// An earlier kubelet's pod started with its first sandbox.
    fn start_time(&self) -> Time {
        let oldest = self.observed.sandboxes.last().and_then(|sandbox| second(sandbox.created_at));
        self.pod.status.start_time.or(oldest).unwrap_or(self.now)
    }

    /// Only a sidecar starts and becomes ready; another init container is ready when it succeeded.
    fn init_container(&self, container: &Container) -> ContainerStatus {
        let status = self.container(container);
        if container.is_sidecar() {
            return status;
        }
        let ready = matches!(&status.state, ContainerState::Terminated(ended) if ended.exit_code == 0);
        ContainerStatus { ready, started: Some(false), ..status }
    }

    fn container(&self, container: &Container) -> ContainerStatus {
        let name = container.name.as_str();
        let mut instances = self.observed.instances(name);
        let newest = instances.next();
        let before = instances.find(|c| c.state() == cri::ContainerState::ContainerExited);
        let terminated = |c| ContainerState::Terminated(self.terminated(c));
        let reason =
            if self.pod.spec.init_containers.is_empty() { "ContainerCreating" } else { "PodInitializing" };
        let waiting = || {
            ContainerState::Waiting(self.waiting.get(name).cloned().unwrap_or_else(|| {
                ContainerStateWaiting { reason: reason.to_owned(), message: String::new() }
            }))
        };
        let (state, last_state) = match newest {
            None => (waiting(), None),
            Some(c) => match c.state() {
                cri::ContainerState::ContainerRunning => {
                    let running = ContainerStateRunning { started_at: second(c.started_at) };
                    (ContainerState::Running(running), before.map(terminated))
                }
                cri::ContainerState::ContainerExited
                    if self.replaced.contains(&c.id)
                        || self.waiting.contains_key(name) && self.starts_again(container, c) =>
                {
                    (waiting(), Some(terminated(c)))
                }
                cri::ContainerState::ContainerExited => (terminated(c), before.map(terminated)),
                cri::ContainerState::ContainerCreated | cri::ContainerState::ContainerUnknown => {
                    (waiting(), before.map(terminated))
                }
            },
        };
        let running = newest.filter(|_| matches!(state, ContainerState::Running(_)));
        ContainerStatus {
            name: name.to_owned(),
            ready: running.is_some_and(|c| self.probes.is_ready(container, &c.id)),
            started: Some(running.is_some_and(|c| self.probes.is_started(container, &c.id))),
            state,
            last_state,
            restart_count: newest.map_or(0, instance_of),
            // It may have changed since.
            image: newest.and_then(image_asked_for).unwrap_or(&container.image).to_owned(),
            resources: resources_of(container, running),
            stop_signal: newest.and_then(|c| signals::name(c.stop_signal())),
            image_id: newest.map(image_id).unwrap_or_default(),
            container_id: newest.map(|c| self.container_id(c)).unwrap_or_default(),
        }
    }

    /// Kubelet: ShouldContainerBeRestarted.
    fn starts_again(&self, container: &Container, ended: &cri::ContainerStatus) -> bool {
        let spec = &self.pod.spec;
        let is_init = spec.init_containers.iter().any(|init| init.name == container.name);
        let policy = match spec.restart_policy {
            _ if container.is_sidecar() => RestartPolicy::Always,
            RestartPolicy::Always if is_init => RestartPolicy::OnFailure,
            policy => policy,
        };
        plan::restarts(policy, ended, self.probes)
    }

    fn terminated(&self, container: &cri::ContainerStatus) -> ContainerStateTerminated {
        let message = self.termination_messages.get(&container.id).cloned();
        let default_reason = if container.exit_code == 0 { "Completed" } else { "Error" };
        ContainerStateTerminated {
            exit_code: container.exit_code,
            signal: None,
            reason: match container.reason.as_str() {
                "" => default_reason.to_owned(),
                reason => reason.to_owned(),
            },
            message: message.filter(|m| !m.is_empty()).unwrap_or_else(|| container.message.clone()),
            started_at: second(container.started_at),
            finished_at: second(container.finished_at),
            container_id: self.container_id(container),
        }
    }

    fn container_id(&self, container: &cri::ContainerStatus) -> String {
        format!("{}://{}", self.runtime_name, container.id)
    }

    fn conditions(
        &self,
        phase: PodPhase,
        init: &[ContainerStatus],
        containers: &[ContainerStatus],
    ) -> Vec<PodCondition> {
        let spec = &self.pod.spec;
        let containers_ready = conditions::containers_ready(spec, phase, init, containers);
        let ready = conditions::ready(spec, &self.pod.status, &containers_ready);
        let initialized = conditions::initialized(spec, phase, init, containers);
        let has_sandbox = self.observed.ready_sandbox().is_some();
        let mut conditions = vec![
            (READY_TO_START, Verdict::plain(has_sandbox)),
            ("Initialized", initialized),
            ("Ready", ready),
            ("ContainersReady", containers_ready),
            ("PodScheduled", Verdict::plain(true)),
        ];
        let uncontrolled = self.observed.running().find(|c| c.reason == DEVICE_CONTROL_MISSING);
        if let Some(container) = uncontrolled {
            let message = container.message.clone();
            let verdict = Verdict { holds: false, reason: DEVICE_CONTROL_MISSING, message };
            conditions.push((DEVICE_CONTROL, verdict));
        }
        if let Some(problem) = self.resize_problem {
            let verdict = Verdict { holds: true, reason: "Error", message: problem.to_owned() };
            conditions.push(("PodResizeInProgress", verdict));
        }
        conditions.into_iter().map(|(name, verdict)| self.condition(name, verdict)).collect()
    }

    /// Keeps the time of the last change of `name`.
    fn condition(&self, name: &str, verdict: Verdict) -> PodCondition {
        let status = if verdict.holds { ConditionStatus::True } else { ConditionStatus::False };
        let previous = self.pod.status.conditions.iter().find(|c| c.condition_type == name);
        let unchanged = previous.filter(|c| c.status == status).and_then(|c| c.last_transition_time);
        PodCondition {
            condition_type: name.to_owned(),
            observed_generation: self.pod.metadata.generation,
            status,
            last_transition_time: Some(unchanged.unwrap_or(self.now)),
            reason: verdict.reason.to_owned(),
            message: verdict.message,
        }
    }
}

/// Notes that the pod's sandboxes are stopped; whether that changes anything.
pub(crate) fn note_no_sandbox(status: &mut PodStatus, now: Time) -> bool {
    let ready = status.conditions.iter_mut().find(|c| c.condition_type == READY_TO_START);
    let Some(ready) = ready.filter(|c| c.status != ConditionStatus::False) else { return false };
    ready.status = ConditionStatus::False;
    ready.last_transition_time = Some(now);
    true
}

/// What is in force; without a running container, what will be.
fn resources_of(
    container: &Container,
    running: Option<&cri::ContainerStatus>,
) -> Option<ResourceRequirements> {
    let linux = running.and_then(|c| c.resources.as_ref()?.linux.as_ref());
    let found = match linux {
        Some(linux) => resources::resize::actual(container, linux),
        None => container.resources.clone(),
    };
    (!found.limits.is_empty() || !found.requests.is_empty()).then_some(found)
}

fn image_id(container: &cri::ContainerStatus) -> String {
    let id = if container.image_id.is_empty() { &container.image_ref } else { &container.image_id };
    id.clone()
}

/// Kubernetes' objects carry whole seconds.
fn second(nanoseconds: i64) -> Option<Time> {
    time(nanoseconds).and_then(|t| Time::from_second(t.as_second()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::kubernetes::assert_reads_as;

    #[test]
    fn a_pod_without_containers_yet_says_what_it_waits_for() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "image": "demo"}]}
        }))
        .unwrap();
        let waiting = Waiting::from([(
            "c".to_owned(),
            ContainerStateWaiting { reason: "ErrImagePull".into(), message: "no such image".into() },
        )]);
        let status = Sources {
            pod: &pod,
            observed: &Observed::default(),
            waiting: &waiting,
            probes: &ProbeResults::default(),
            termination_messages: &BTreeMap::new(),
            replaced: &BTreeSet::new(),
            resize_problem: None,
            runtime_name: "hawser",
            host_ip: "192.0.2.1",
            now: Time::UNIX_EPOCH,
        }
        .status();
        assert_eq!(status.phase, PodPhase::Pending);
        let ContainerState::Waiting(why) = &status.container_statuses[0].state else { panic!("waits") };
        assert_eq!(why.reason, "ErrImagePull");
        let ready = status.conditions.iter().find(|c| c.condition_type == "Ready").unwrap();
        assert_eq!(ready.message, "containers with unready status: [c]");
    }

    fn container(attempt: u32, state: cri::ContainerState) -> cri::ContainerStatus {
        let nanosecond = 1_700_000_000_123_456_789;
        cri::ContainerStatus {
            id: format!("c{attempt}"),
            metadata: Some(cri::ContainerMetadata { name: "c".to_owned(), attempt }),
            state: state.into(),
            started_at: nanosecond,
            finished_at: nanosecond,
            exit_code: 137,
            reason: "OOMKilled".to_owned(),
            message: "over its limit".to_owned(),
            image_id: "sha256:0".to_owned(),
            ..cri::ContainerStatus::default()
        }
    }

    fn sandbox() -> cri::PodSandboxStatus {
        let network = cri::PodSandboxNetworkStatus {
            ip: "192.0.2.7".to_owned(),
            additional_ips: vec![cri::PodIp { ip: "2001:db8::7".to_owned() }],
        };
        cri::PodSandboxStatus { network: Some(network), ..cri::PodSandboxStatus::default() }
    }

    /// The status of a pod with these instances of container `c`, the newest first.
    fn written(previous: PodStatus, instances: &[cri::ContainerStatus], waiting: &Waiting) -> PodStatus {
        written_with("Always", previous, instances, waiting)
    }

    fn written_with(
        policy: &str,
        previous: PodStatus,
        instances: &[cri::ContainerStatus],
        waiting: &Waiting,
    ) -> PodStatus {
        let mut pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {
                "restartPolicy": policy,
                "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
                "containers": [{"name": "c", "image": "demo"}]
            }
        }))
        .unwrap();
        pod.status = previous;
        Sources {
            pod: &pod,
            observed: &Observed {
                sandboxes: vec![sandbox()],
                containers: instances.to_vec(),
                ..Observed::default()
            },
            waiting,
            probes: &ProbeResults::default(),
            termination_messages: &BTreeMap::new(),
            replaced: &BTreeSet::new(),
            resize_problem: None,
            runtime_name: "hawser",
            host_ip: "192.0.2.1",
            now: Time::UNIX_EPOCH,
        }
        .status()
    }

    #[test]
    fn a_container_that_failed_to_start_waits_only_if_it_starts_again() {
        let failed = container(0, cri::ContainerState::ContainerExited);
        let why = ContainerStateWaiting { reason: "RunContainerError".to_owned(), message: String::new() };
        let waiting = Waiting::from([("c".to_owned(), why)]);
        let state = |policy| {
            let status = written_with(policy, PodStatus::default(), std::slice::from_ref(&failed), &waiting);
            status.container_statuses[0].state.clone()
        };
        assert!(matches!(state("OnFailure"), ContainerState::Waiting(_)));
        let ContainerState::Terminated(ended) = state("Never") else { panic!("it never starts again") };
        assert_eq!(ended.exit_code, 137);
    }

    /// The phase of a running pod with a sidecar, whose only container has ended with exit code 0.
    fn phase_at_the_end(policy: &str, probes: &ProbeResults, replaced: &[&str]) -> PodPhase {
        let mut pod: Pod = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {
                "restartPolicy": policy,
                "initContainers": [{"name": "s", "restartPolicy": "Always"}],
                "containers": [{"name": "c"}]
            }
        }))
        .unwrap();
        pod.status.phase = PodPhase::Running;
        let exited = cri::ContainerState::ContainerExited;
        let mut sidecar = container(0, exited);
        sidecar.id = "s0".to_owned();
        sidecar.metadata = Some(cri::ContainerMetadata { name: "s".to_owned(), attempt: 0 });
        let main = cri::ContainerStatus { exit_code: 0, ..container(0, exited) };
        Sources {
            pod: &pod,
            observed: &Observed {
                sandboxes: vec![sandbox()],
                containers: vec![main, sidecar],
                ..Observed::default()
            },
            waiting: &Waiting::new(),
            probes,
            termination_messages: &BTreeMap::new(),
            replaced: &replaced.iter().map(|&id| id.to_owned()).collect(),
            resize_problem: None,
            runtime_name: "hawser",
            host_ip: "192.0.2.1",
            now: Time::UNIX_EPOCH,
        }
        .status()
        .phase
    }

    #[test]
    fn a_container_that_ends_with_0_after_a_failed_probe_ends_its_pod_only_if_it_does_not_restart() {
        use crate::objects::ProbeKind::{Liveness, Readiness, Startup};
        for (kind, policy, phase) in [
            (Liveness, "OnFailure", PodPhase::Running),
            (Startup, "OnFailure", PodPhase::Running),
            (Readiness, "OnFailure", PodPhase::Succeeded),
            (Liveness, "Never", PodPhase::Succeeded),
        ] {
            let mut probes = ProbeResults::default();
            probes.set("c0", kind, false);
            if kind != Readiness {
                probes.note_kill("c0");
            }
            assert_eq!(phase_at_the_end(policy, &probes, &[]), phase, "{kind:?} {policy}");
        }
    }

    #[test]
    fn a_container_that_ends_with_0_during_a_probe_ends_its_pod_though_the_probe_fails() {
        let mut probes = ProbeResults::default();
        probes.set("c0", crate::objects::ProbeKind::Liveness, false);
        assert_eq!(phase_at_the_end("OnFailure", &probes, &[]), PodPhase::Succeeded);
    }

    #[test]
    fn a_sidecar_that_is_replaced_does_not_keep_its_pod_from_its_end() {
        let none = ProbeResults::default();
        assert_eq!(phase_at_the_end("Never", &none, &["s0"]), PodPhase::Succeeded);
        assert_eq!(phase_at_the_end("Never", &none, &["c0"]), PodPhase::Running);
    }

    #[test]
    fn kubernetes_reads_every_status_that_the_kubelet_writes() {
        use cri::ContainerState::{ContainerExited, ContainerRunning};
        let (running, ended) = (container(1, ContainerRunning), container(0, ContainerExited));
        let uncontrolled =
            cri::ContainerStatus { reason: DEVICE_CONTROL_MISSING.to_owned(), ..running.clone() };
        let back_off =
            ContainerStateWaiting { reason: "CrashLoopBackOff".to_owned(), message: "back-off".to_owned() };
        let looping = Waiting::from([("c".to_owned(), back_off)]);
        let evicted = PodStatus {
            phase: PodPhase::Failed,
            reason: "Evicted".to_owned(),
            message: "Pod ephemeral local storage usage exceeds the total limit".to_owned(),
            ..PodStatus::default()
        };
        let (fresh, idle) = (PodStatus::default, Waiting::new());
        for status in [
            written(fresh(), &[], &idle),
            written(fresh(), std::slice::from_ref(&running), &idle),
            written(fresh(), &[running, ended.clone()], &idle),
            written(fresh(), &[uncontrolled], &idle),
            written(fresh(), std::slice::from_ref(&ended), &idle),
            written(fresh(), std::slice::from_ref(&ended), &looping),
            written(evicted, &[ended], &idle),
        ] {
            assert_reads_as::<k8s_openapi::api::core::v1::PodStatus>(&status);
        }
    }
}
