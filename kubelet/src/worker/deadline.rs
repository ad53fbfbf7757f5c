//! activeDeadlineSeconds: a pod that is active for too long fails (kubelet, active_deadline.go).

use std::time::Duration;

use super::Worker;
use crate::objects::{EventType, Time};
use crate::pod_state::observed::{Observed, time};
use crate::store::DEADLINE_EXCEEDED;

const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

impl Worker {
    /// The time until the pod's deadline; `None` without one, and for a pod that has ended.
    pub(super) fn until_deadline(&self) -> Option<Duration> {
        if self.pod.status.phase.has_ended() {
            return None;
        }
        let active = Duration::from_secs(self.pod.spec.active_deadline_seconds?);
        let started = self.started?;
        let passed = Duration::try_from(Time::now().duration_since(started)).unwrap_or_default();
        Some(active.saturating_sub(passed))
    }

    /// A pod of an earlier kubelet started with its first sandbox.
    pub(super) fn note_start(&mut self, observed: &Observed) {
        let oldest = observed.sandboxes.last().and_then(|sandbox| time(sandbox.created_at));
        let known = self.pod.status.start_time.or(oldest);
        self.started.get_or_insert_with(|| known.unwrap_or_else(Time::now));
    }

    /// Fails the pod after its deadline; whether it did.
    pub(super) fn fail_after_deadline(&self) -> bool {
        let is_over = self.until_deadline().is_some_and(|left| left.is_zero());
        let fails = is_over && self.tools.store.fail_pod(self.uid(), DEADLINE_EXCEEDED, MESSAGE);
        if fails {
            self.record(EventType::Normal, DEADLINE_EXCEEDED, MESSAGE);
        }
        fails
    }
}
