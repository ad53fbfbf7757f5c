//! The end of a pod that was evicted, and of one whose containers are gone.
//!
//! Invariant: an evicted pod is not started again, also by the next kubelet. So
//! its containers, by which a kubelet knows that it ran, go only after its
//! status is on disk.

use std::time::Duration;

use super::Worker;
use super::termination::{stop_all, stop_sandboxes};
use crate::backoff::Backoff;
use crate::objects::{EventType, Object, PodPhase};
use crate::observed::Observed;
use crate::plan::{self, Action};
use crate::standalone::store::EVICTED;

/// kubelet's, for pods that are over their limits.
const GRACE: Duration = Duration::from_secs(1);

impl Worker {
    /// By its status in the store, which the eviction wrote.
    pub(super) fn is_evicted(&self) -> bool {
        let status = self.tools.store.pod_status(self.uid());
        status.is_some_and(|status| status.phase == PodPhase::Failed && status.reason == EVICTED)
    }

    /// Stops the pod and gives back what it took of the disk. Its logs stay.
    pub(super) async fn end_evicted(&mut self) {
        if let Some(status) = self.tools.store.pod_status(self.uid()) {
            self.tools.sinks.set_pod_status(&self.pod.reference(), &status);
            self.pod.status = status;
        }
        let pod = self.pod.reference();
        // A full disk may have no room for it yet. Otherwise a kubelet that is killed on the way
        // leaves the next one a pod that merely failed.
        self.tools.store.keep_pod_status(self.uid());
        let mut backoff = Backoff::operation();
        while let Err(message) = self.try_end_evicted().await {
            self.record(EventType::Warning, "FailedKillPod", &message);
            tokio::time::sleep(backoff.step()).await;
        }
        stop_sandboxes(&self.tools, &pod).await;
        self.tools.volumes.unmount_pod(&pod).await;
        // There is space now, unless others were quicker.
        let mut backoff = Backoff::operation();
        while !self.tools.store.keep_pod_status(self.uid()) && !self.is_deleted() {
            tokio::time::sleep(backoff.step()).await;
        }
        if let Ok(containers) = self.tools.cri.list_containers(Some(self.uid())).await {
            for container in containers {
                if let Err(error) = self.tools.cri.remove_container(&container.id).await {
                    tracing::warn!(%error, "a container of an evicted pod stays");
                }
            }
        }
    }

    async fn try_end_evicted(&mut self) -> Result<(), String> {
        loop {
            let look = Observed::of(&self.tools.cri, self.uid()).await;
            let observed = look.map_err(|error| error.to_string())?;
            if !observed.containers.is_empty() {
                self.waiting.clear();
                self.publish_status(&observed).await;
            }
            let plan = plan::end(&observed, GRACE);
            let [Action::Kill { targets, grace }] = plan.as_slice() else { return Ok(()) };
            self.announce(targets);
            stop_all(&self.tools, &self.pod.reference(), targets, *grace)
                .await
                .map_err(|error| error.to_string())?;
        }
    }

    /// Whether an earlier kubelet saw the pod end and nothing is left to tell of it.
    pub(super) fn has_ended_before(&self, observed: &Observed) -> bool {
        let has_ended = matches!(self.pod.status.phase, PodPhase::Succeeded | PodPhase::Failed);
        has_ended && observed.containers.is_empty()
    }
}
