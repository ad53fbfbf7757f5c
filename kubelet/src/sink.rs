//! The engine's outputs: the status of pods, and events.
//!
//! The engine never reads from a sink. Its own state is in the store, so the store is always a
//! sink. `run` chooses the others.

use std::fmt::Debug;
use std::sync::Arc;

use crate::objects::{EventType, ObjectRef, PodStatus};
use crate::store::Store;

/// The store is a sink; an API server could be another.
///
/// Callers do not wait: a sink with a slow receiver keeps the newest status of each pod and sends
/// it later.
pub trait StatusSink: Debug + Send + Sync {
    /// Sets the whole status of a pod; does nothing if the pod is gone.
    fn set_pod_status(&self, pod: &ObjectRef, status: PodStatus);

    /// Records an event. A repeated reason and message raise the count of the first event.
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

/// All sinks, in calling order. Clones share them.
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
