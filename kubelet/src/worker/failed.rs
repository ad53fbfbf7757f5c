//! Stops pods that the kubelet failed (evicted, past their deadline, not admitted), and detects pods whose
//! containers were removed.
//!
//! Invariant: no kubelet starts such a pod again. Its containers show a kubelet that it has
//! run, so they are removed only after the pod's status is on disk.

use std::time::Duration;

use super::{Next, Worker};
use crate::backoff::Backoff;
use crate::objects::{EventType, Object};
use crate::pod_state::observed::Observed;
use crate::pod_state::plan::{self, Action};
use crate::store::EVICTED;

/// kubelet's grace period for pods over their limits.
const GRACE: Duration = Duration::from_secs(1);
/// Reason of a pod with restartPolicy Never whose sandbox ended before all its containers had run.
const SANDBOX_LOST: &str = "SandboxLost";
const SANDBOX_LOST_MESSAGE: &str =
    "The pod's sandbox has ended, and its restartPolicy starts no container in another one";

impl Worker {
    /// Checks the status in the store, which an eviction writes.
    pub(super) fn is_failed(&self) -> bool {
        self.tools.store.pod_status(self.uid()).is_some_and(|status| status.is_decided())
    }

    /// Fails a pod that has nothing left to start although containers have not ended: their sandbox is lost.
    /// Kubelet leaves such a pod Pending for ever. Returns whether it failed the pod.
    pub(super) fn fail_unfinished(&self) -> bool {
        if self.pod.status.phase.has_ended() {
            return false;
        }
        let fails = self.tools.store.fail_pod(self.uid(), SANDBOX_LOST, SANDBOX_LOST_MESSAGE);
        if fails {
            self.record(EventType::Warning, SANDBOX_LOST, SANDBOX_LOST_MESSAGE);
        }
        fails
    }

    /// Stops the pod. An evicted one frees its disk space. Its logs stay. If the pod is deleted meanwhile, its
    /// containers may still run, with the grace period of the deletion.
    pub(super) async fn end_failed(&mut self) -> Next {
        if let Some(status) = self.tools.store.pod_status(self.uid()) {
            self.tools.sinks.set_pod_status(&self.pod.reference(), &status);
            self.keep_status(status);
        }
        let pod = self.pod.reference();
        // This may fail on a full disk. If the kubelet is killed before the next attempt, the next
        // kubelet sees only a failed pod.
        self.tools.store.keep_pod_status(self.uid());
        let mut backoff = Backoff::operation();
        while let Err(message) = self.try_end_failed().await {
            self.record(EventType::Warning, "FailedKillPod", &message);
            tokio::time::sleep(backoff.step()).await;
        }
        if self.is_deleted() {
            return Next::MustEnd;
        }
        self.stop_for_good().await;
        self.tools.volumes.unmount_pod(&pod).await;
        // There is space now, unless other pods have used it.
        self.keep_end().await;
        if self.pod.status.reason != EVICTED {
            return Next::Finished;
        }
        if let Ok(containers) = self.tools.cri.list_containers(Some(self.uid())).await {
            for container in containers {
                if let Err(error) = self.tools.cri.remove_container(&container.id).await {
                    tracing::warn!(%error, "a container of an evicted pod was not removed");
                }
            }
        }
        Next::Finished
    }

    async fn try_end_failed(&mut self) -> Result<(), String> {
        loop {
            let observed = Observed::of(&self.tools.cri, self.uid()).await;
            let observed = observed.map_err(|error| error.to_string())?;
            if !observed.containers.is_empty() {
                self.waiting.clear();
                self.publish_status(&observed).await;
            }
            let plan = plan::end(&observed, self.grace_of_failed());
            let [Action::Kill { targets, grace }] = plan.as_slice() else { return Ok(()) };
            self.announce(targets);
            let stopping = self.stopping(targets, *grace);
            tokio::select! {
                stopped = stopping => stopped.map_err(|error| error.to_string())?,
                () = self.until_deleted() => return Ok(()),
            }
        }
    }

    fn grace_of_failed(&self) -> Duration {
        if self.pod.status.reason == EVICTED {
            return GRACE;
        }
        Duration::from_secs(self.pod.spec.termination_grace_period_seconds)
    }
}
