//! How a pod ended, where the runtime can no longer tell: pods that were evicted,
//! and pods whose containers are removed.

use super::{Durability, PodEntry, Store};
use crate::objects::{Kind, PodPhase};

/// kubelet's reason for pods that it ended because of what they took.
pub(crate) const EVICTED: &str = "Evicted";

impl Store {
    /// The pod has failed: it is to be ended, and not to be started again. In
    /// memory only: see [`Store::keep_pod_status`]. `false` for an unknown pod,
    /// and for one that has been evicted.
    pub(crate) fn evict_pod(&self, uid: &str, message: &str) -> bool {
        let mut state = self.state();
        let Some(entry) = state.pods.find_uid_mut(uid) else { return false };
        let status = &mut std::sync::Arc::make_mut(&mut entry.current.object).status;
        if status.reason == EVICTED {
            return false;
        }
        status.phase = PodPhase::Failed;
        EVICTED.clone_into(&mut status.reason);
        message.clone_into(&mut status.message);
        let key = super::Key::of(&*entry.current.object);
        drop(state);
        self.announce(Kind::Pod, &key);
        true
    }

    /// Puts the pod on disk with its status, so that the next kubelet knows how
    /// it ended. Whether that succeeded.
    pub(crate) fn keep_pod_status(&self, uid: &str) -> bool {
        let _writing = self.writing();
        let Some((key, entry)) = self.state().pods.find_uid_entry(uid) else { return false };
        let kept = self.inner.disk.write(Kind::Pod, &key, &entry, durability(&entry));
        if let Err(error) = &kept {
            tracing::warn!(
                pod = key.name,
                error = trace::error_chain(error),
                "a pod's end is not on disk yet"
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
