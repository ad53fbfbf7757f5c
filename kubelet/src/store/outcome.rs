//! The outcome of pods that the kubelet failed, and of pods whose containers the runtime no longer has.

use super::{Durability, PodEntry, Store};
use crate::objects::{Kind, PodPhase};

pub(crate) use crate::capacity::pressure::EVICTED;
/// kubelet's reason for pods that were active longer than activeDeadlineSeconds.
pub(crate) const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";

impl Store {
    /// Marks the pod as failed, in memory only (see [`Store::keep_pod_status`]): it must end and
    /// not start again. `false` for a pod that is unknown or has ended.
    pub(crate) fn fail_pod(&self, uid: &str, reason: &str, message: &str) -> bool {
        let mut state = self.state();
        let Some(entry) = state.pods.find_uid_mut(uid) else { return false };
        let pod = std::sync::Arc::make_mut(&mut entry.current.object);
        let status = &mut pod.status;
        if status.phase.has_ended() {
            return false;
        }
        status.phase = PodPhase::Failed;
        status.observed_generation = pod.metadata.generation;
        reason.clone_into(&mut status.reason);
        message.clone_into(&mut status.message);
        let key = super::Key::of(&*entry.current.object);
        drop(state);
        self.announce(Kind::Pod, &key);
        true
    }

    /// Writes the pod with its status to disk, so that the next kubelet knows its outcome. Returns
    /// whether that succeeded.
    pub(crate) fn keep_pod_status(&self, uid: &str) -> bool {
        let _writing = self.writing();
        let Some((key, entry)) = self.state().pods.find_uid_entry(uid) else { return false };
        let kept = self.inner.disk.write(Kind::Pod, &key, &entry, durability(&entry));
        if let Err(error) = &kept {
            tracing::warn!(
                pod = key.name,
                error = linux::chain(error),
                "cannot write a pod's status to disk yet"
            );
        }
        kept.is_ok()
    }
}

pub(super) fn durability(entry: &PodEntry) -> Durability {
    match entry.current.source {
        super::Source::File(_) => Durability::ProcessDeath,
        super::Source::Api | super::Source::Kubelet => Durability::PowerLoss,
    }
}
