//! Where the engine reports to: the status of pods, and events.
//!
//! The engine reads no sink; what it must remember is in the store, which is
//! therefore always one of them. `run` chooses the others.

use std::fmt::Debug;
use std::sync::Arc;

use crate::objects::{EventType, ObjectRef, PodStatus};
use crate::standalone::store::Store;

/// The store is a sink; an API server would be another.
///
/// Callers do not wait: a sink whose receiver is slow keeps the newest status of each pod and
/// sends it when it can.
pub trait StatusSink: Debug + Send + Sync {
    /// The whole status of a pod; nothing happens if the pod is gone.
    fn set_pod_status(&self, pod: &ObjectRef, status: PodStatus);

    /// One event. The same reason and message again raise the count of the first.
    fn record(&self, object: &ObjectRef, event_type: EventType, reason: &str, message: &str);
}

impl StatusSink for Store {
    fn set_pod_status(&self, pod: &ObjectRef, status: PodStatus) {
        self.set_pod_status(&pod.uid, status);
    }

    fn record(&self, object: &ObjectRef, event_type: EventType, reason: &str, message: &str) {
        self.record(object, event_type, reason, message);
    }
}

/// All sinks, in the order in which they are reported to. Clones share them.
#[derive(Debug, Clone)]
pub struct Sinks(Arc<[Box<dyn StatusSink>]>);

impl Sinks {
    /// The store and `others`.
    pub fn new(store: Store, others: Vec<Box<dyn StatusSink>>) -> Self {
        let store: Box<dyn StatusSink> = Box::new(store);
        Self([store].into_iter().chain(others).collect())
    }

    pub(crate) fn set_pod_status(&self, pod: &ObjectRef, status: &PodStatus) {
        self.0.iter().for_each(|sink| sink.set_pod_status(pod, status.clone()));
    }

    pub(crate) fn record(&self, object: &ObjectRef, event_type: EventType, reason: &str, message: &str) {
        self.0.iter().for_each(|sink| sink.record(object, event_type, reason, message));
    }
}
