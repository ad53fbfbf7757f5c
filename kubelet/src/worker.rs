//! One pod's worker: a task that brings its pod to the object's desired state, and finally tears it
//! down. Object changes and runtime events wake it; it then observes the pod and executes the plan
//! of `plan`.
//!
//! Invariant: a worker ends only after its pod or the pod's object is removed. Workers never wait
//! for each other: a mount pod starts while the worker of the pod that needs it waits for its
//! volume.

mod evicted;
mod images;
mod messages;
mod own_files;
mod sub_paths;
mod sync_pod;
mod termination;
mod tools;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tracing::warn;

use crate::backoff::Backoff;
use crate::keyed_backoff::KeyedBackoff;
use crate::objects::{EventType, Object, Pod, PodCondition, Time};
use crate::observed::Observed;
use crate::plan::{self, Target};
use crate::status::{DEVICE_CONTROL, DEVICE_CONTROL_MISSING, Sources, Waiting};
use crate::volumes::MountedVolumes;
use messages::Messages;
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
    finished: bool,
    is_slow: IsSlow,
}

/// When to observe the pod again.
#[derive(Debug)]
enum Next {
    /// The object was marked deleted during the round.
    Deleted,
    Finished,
    /// At the next event, or after this time at the latest.
    Within(Option<Duration>),
}

impl Worker {
    pub(crate) fn new(tools: Arc<Tools>, pod: Arc<Pod>, wake: Arc<Notify>) -> Self {
        Self {
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
                Next::Deleted => {}
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
        if self.is_evicted() {
            self.end_evicted().await;
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
        let plan = plan::run(&self.pod, &observed, &self.restarts, Time::now());
        self.carry_out(plan, &observed).await
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

    async fn publish_status(&mut self, observed: &Observed) {
        self.messages.read_new(&self.tools, &self.pod, observed).await;
        let status = Sources {
            pod: &self.pod,
            observed,
            waiting: &self.waiting,
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
            self.record(EventType::Normal, "Killing", &format!("Stopping container {}", target.name));
        }
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
