//! One pod's worker: a task that brings its pod to the object's desired state, and finally tears it
//! down. Object changes and runtime events wake it; it then observes the pod and executes the plan
//! of `plan`.
//!
//! Invariant: a worker ends only after its pod or the pod's object is removed. Workers never wait
//! for each other: a mount pod starts while the worker of the pod that needs it waits for its
//! volume.

mod deadline;
mod failed;
mod hooks;
mod images;
mod messages;
mod own_files;
mod stop;
mod sub_paths;
mod sync_pod;
mod termination;
mod tools;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tracing::warn;

use crate::admission::Admitted;
use crate::backoff::Backoff;
use crate::keyed_backoff::KeyedBackoff;
use crate::objects::{EventType, Object, Pod, PodCondition, RestartPolicy, Time};
use crate::observed::Observed;
use crate::plan::{self, Situation, Target};
use crate::probes::Probes;
use crate::status::{DEVICE_CONTROL, DEVICE_CONTROL_MISSING, Sources, Waiting};
use crate::volumes::MountedVolumes;
use hooks::Call;
use messages::Messages;
use stop::Stopping;
use tools::IsSlow;

pub(crate) use own_files::FileWork;
pub(crate) use termination::tear_down_orphan;
pub(crate) use tools::{Starts, Tools, host_ip};

#[derive(Debug)]
pub(crate) struct Worker {
    tools: Arc<Tools>,
    /// As admitted, with the last published status.
    pod: Pod,
    wake: Arc<Notify>,
    /// Set once all are mounted; a restarted container uses them again.
    mounted: Option<MountedVolumes>,
    waiting: Waiting,
    messages: Messages,
    restarts: KeyedBackoff,
    pulls: KeyedBackoff,
    /// Back-off of failed steps.
    retries: Backoff,
    probes: Probes,
    /// When the pod's activity began.
    started: Option<Time>,
    /// The pod's share of the node, until it has ended.
    admitted: Option<Admitted>,
    /// Containers whose preStop hook has begun, by id: it runs once.
    pre_stopped: BTreeSet<String>,
    finished: bool,
    is_slow: IsSlow,
}

/// When to observe the pod again.
#[derive(Debug)]
enum Next {
    /// The pod must end: it was deleted, failed, or reached its deadline during the round.
    MustEnd,
    Finished,
    /// At the next event, or after this time at the latest.
    Within(Option<Duration>),
}

impl Worker {
    pub(crate) fn new(tools: Arc<Tools>, pod: Arc<Pod>, wake: Arc<Notify>) -> Self {
        let probes = Probes::new(tools.cri.clone(), tools.sinks.clone(), pod.reference(), Arc::clone(&wake));
        Self {
            probes,
            started: None,
            admitted: None,
            pre_stopped: BTreeSet::new(),
            tools,
            pod: Arc::unwrap_or_clone(pod),
            wake,
            mounted: None,
            waiting: Waiting::default(),
            messages: Messages::default(),
            restarts: KeyedBackoff::default(),
            pulls: KeyedBackoff::default(),
            retries: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)),
            finished: false,
            is_slow: IsSlow::default(),
        }
    }

    pub(crate) async fn run(mut self) {
        while !self.is_deleted() {
            // The future is large and a pod mostly waits, so box it: it needs memory only while it
            // runs.
            match Box::pin(self.sync_once()).await {
                // The next round ends the pod.
                Next::MustEnd => {}
                Next::Finished => {
                    Box::pin(self.finish()).await;
                    self.wake.notified().await;
                }
                Next::Within(None) => self.wake.notified().await,
                Next::Within(Some(pause)) => {
                    // Continue after an event and after the timeout.
                    let _elapsed = tokio::time::timeout(pause, self.wake.notified()).await;
                }
            }
        }
        Box::pin(self.terminate()).await;
    }

    async fn sync_once(&mut self) -> Next {
        if self.finished {
            return Next::Finished;
        }
        if self.is_failed() {
            self.end_failed().await;
            return Next::Finished;
        }
        let observed = match Observed::of(&self.tools.cri, self.uid()).await {
            Ok(observed) => observed,
            Err(error) => {
                warn!(pod = self.pod.metadata.name, %error, "cannot observe the pod");
                return Next::Within(Some(self.retries.step()));
            }
        };
        if self.has_ended_before(&observed) {
            return Next::Finished;
        }
        self.note_start(&observed);
        if !self.is_admitted(&observed) || self.fail_after_deadline() {
            self.end_failed().await;
            return Next::Finished;
        }
        let plan = plan::run(&Situation {
            pod: &self.pod,
            observed: &observed,
            probes: &self.probes.results(),
            restarts: &self.restarts,
            now: Time::now(),
        });
        match (self.carry_out(plan, &observed).await, self.until_deadline()) {
            (Next::Within(pause), Some(left)) => Next::Within(Some(pause.map_or(left, |p| p.min(left)))),
            (next, _) => next,
        }
    }

    /// Takes the pod's share of the node; otherwise fails the pod. A pod that an earlier kubelet has
    /// started is not judged again.
    fn is_admitted(&mut self, observed: &Observed) -> bool {
        if self.admitted.is_some() {
            return true;
        }
        let has_run = !observed.sandboxes.is_empty() || !observed.containers.is_empty();
        match self.tools.admission.admit(&self.pod, has_run) {
            Ok(admitted) => {
                self.admitted = Some(admitted);
                true
            }
            Err(rejection) => {
                self.record(EventType::Warning, &rejection.reason, &rejection.message);
                let message = format!("Pod was rejected: {}", rejection.message);
                self.tools.store.fail_pod(self.uid(), &rejection.reason, &message);
                false
            }
        }
    }

    fn uid(&self) -> &str {
        &self.pod.metadata.uid
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.pod.metadata.namespace, self.pod.metadata.name)
    }

    /// Also true if the object is gone or belongs to a successor.
    fn is_deleted(&self) -> bool {
        let metadata = &self.pod.metadata;
        let known = self.tools.store.pod(&metadata.namespace, &metadata.name);
        known.is_none_or(|pod| pod.metadata.uid != metadata.uid || pod.metadata.is_deleted())
    }

    async fn until_deleted(&self) {
        while !self.is_deleted() {
            self.wake.notified().await;
        }
    }

    /// Whether the pod's round must stop: the pod is deleted, failed, or past its deadline.
    fn must_end(&self) -> bool {
        self.is_deleted() || self.is_failed() || self.until_deadline().is_some_and(|left| left.is_zero())
    }

    /// Takes the events of containers: the caller wakes the worker again.
    async fn until_end(&self) {
        while !self.must_end() {
            let left = self.until_deadline().unwrap_or(Duration::MAX);
            // At the deadline, or at the event of a deletion or an eviction.
            let _elapsed = tokio::time::timeout(left, self.wake.notified()).await;
        }
    }

    async fn publish_status(&mut self, observed: &Observed) {
        self.messages.read_new(&self.tools, &self.pod, observed).await;
        self.probes.follow(&self.pod, observed, &self.tools.host_ip);
        let status = Sources {
            pod: &self.pod,
            observed,
            waiting: &self.waiting,
            probes: &self.probes.results(),
            termination_messages: self.messages.by_container_id(),
            runtime_name: &self.tools.runtime_name,
            host_ip: &self.tools.host_ip,
            now: crate::objects::now(),
        }
        .status();
        let missing = |conditions: &[PodCondition]| {
            conditions.iter().find(|c| c.condition_type == DEVICE_CONTROL).map(|c| c.message.clone())
        };
        if let Some(message) = missing(&status.conditions)
            && missing(&self.pod.status.conditions).is_none()
        {
            self.record(EventType::Warning, DEVICE_CONTROL_MISSING, &message);
        }
        self.tools.sinks.set_pod_status(&self.pod.reference(), &status);
        self.pod.status = status;
    }

    /// Records an event for each kill.
    fn announce(&self, targets: &[Target]) {
        for target in targets {
            let name = &target.name;
            let message = match target.failed_probe {
                None => format!("Stopping container {name}"),
                Some(kind) => {
                    let kind = kind.as_str().to_lowercase();
                    let restarts = self.pod.spec.restart_policy != RestartPolicy::Never
                        || self.pod.spec.container_named(name).is_some_and(|c| c.is_sidecar());
                    let then = if restarts { ", will be restarted" } else { "" };
                    format!("Container {name} failed {kind} probe{then}")
                }
            };
            self.record(EventType::Normal, "Killing", &message);
        }
    }

    /// Stops containers with their preStop hooks.
    fn stopping(
        &mut self,
        targets: &[Target],
        grace: Duration,
    ) -> impl Future<Output = crate::cri::Result<()>> + use<> {
        let mut all = Vec::new();
        for target in targets {
            let container = self.pod.spec.container_named(&target.name);
            let hook = container.and_then(|c| Some((c, c.lifecycle.as_ref()?.pre_stop.as_ref()?)));
            let hook = hook.filter(|_| self.pre_stopped.insert(target.id.clone()));
            let pre_stop = hook.map(|(container, hook)| Call {
                cri: self.tools.cri.clone(),
                hook: hook.clone(),
                container: container.clone(),
                id: target.id.clone(),
                pod_ip: self.pod.status.pod_ip.clone(),
            });
            all.push(Stopping {
                target: target.clone(),
                pre_stop,
                rank: stop::rank(&self.pod, &target.name),
            });
        }
        stop::stop_all(Arc::clone(&self.tools), self.pod.reference(), all, grace)
    }

    fn record(&self, event_type: EventType, reason: &str, message: &str) {
        self.tools.sinks.record(&self.pod.reference(), event_type, reason, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_waiting_pod_uses_little_memory() {
        let bytes = size_of_future(Worker::run);
        assert!(bytes < 4096, "{bytes}");
    }
}
