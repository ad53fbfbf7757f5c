//! Stops evicted pods, and detects pods whose containers were removed.
//!
//! Invariant: no kubelet starts an evicted pod again. Its containers show a kubelet that it has
//! run, so they are removed only after the pod's status is on disk.

use std::time::Duration;

use super::Worker;
use super::termination::{stop_all, stop_sandboxes};
use crate::backoff::Backoff;
use crate::objects::{EventType, Object, PodPhase};
use crate::observed::Observed;
use crate::plan::{self, Action};
use crate::standalone::store::EVICTED;

/// kubelet's grace period for pods over their limits.
const GRACE: Duration = Duration::from_secs(1);

impl Worker {
    /// Checks the status in the store, which the eviction wrote.
    pub(super) fn is_evicted(&self) -> bool {
        let status = self.tools.store.pod_status(self.uid());
        status.is_some_and(|status| status.phase == PodPhase::Failed && status.reason == EVICTED)
    }

    /// Stops the pod and frees its disk space. Its logs stay.
    pub(super) async fn end_evicted(&mut self) {
        if let Some(status) = self.tools.store.pod_status(self.uid()) {
            self.tools.sinks.set_pod_status(&self.pod.reference(), &status);
            self.pod.status = status;
        }
        let pod = self.pod.reference();
        // This may fail on a full disk. If the kubelet is killed before the next attempt, the next
        // kubelet sees only a failed pod.
        self.tools.store.keep_pod_status(self.uid());
        let mut backoff = Backoff::operation();
        while let Err(message) = self.try_end_evicted().await {
            self.record(EventType::Warning, "FailedKillPod", &message);
            tokio::time::sleep(backoff.step()).await;
        }
        stop_sandboxes(&self.tools, &pod).await;
        self.tools.volumes.unmount_pod(&pod).await;
        // There is space now, unless other pods have used it.
        let mut backoff = Backoff::operation();
        while !self.tools.store.keep_pod_status(self.uid()) && !self.is_deleted() {
            tokio::time::sleep(backoff.step()).await;
        }
        if let Ok(containers) = self.tools.cri.list_containers(Some(self.uid())).await {
            for container in containers {
                if let Err(error) = self.tools.cri.remove_container(&container.id).await {
                    tracing::warn!(%error, "a container of an evicted pod was not removed");
                }
            }
        }
    }

    async fn try_end_evicted(&mut self) -> Result<(), String> {
        loop {
            let observed = Observed::of(&self.tools.cri, self.uid()).await;
            let observed = observed.map_err(|error| error.to_string())?;
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

    /// Whether an earlier kubelet saw the pod end and its containers are gone.
    pub(super) fn has_ended_before(&self, observed: &Observed) -> bool {
        let has_ended = matches!(self.pod.status.phase, PodPhase::Succeeded | PodPhase::Failed);
        has_ended && observed.containers.is_empty()
    }
}
