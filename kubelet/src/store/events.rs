//! Recent events, with a count for repeated ones.
//!
//! They are in memory only: after a restart, a condition that persists causes its event again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::objects::{Event, EventSource, EventType, Kind, ObjectMeta, ObjectRef, Time};

/// Beyond this number, the oldest event of the object with the most events is dropped.
const EVENTS_KEPT: usize = 1000;
/// As in Kubernetes, events expire an hour after their last occurrence.
const SECONDS_KEPT: i64 = 3600;

#[derive(Debug, Default)]
pub(super) struct EventLog {
    host: String,
    /// By last occurrence, oldest first.
    events: VecDeque<Arc<Event>>,
    recorded: u64,
}

impl EventLog {
    pub(super) fn new(host: &str) -> Self {
        Self { host: host.to_owned(), ..Self::default() }
    }

    pub(super) fn record(
        &mut self,
        object: &ObjectRef,
        event_type: EventType,
        reason: &str,
        message: &str,
        now: Time,
    ) -> Arc<Event> {
        let same = self.events.iter().position(|known| {
            known.involved_object == *object
                && known.reason == reason
                && known.message == message
                && known.event_type == event_type
        });
        let mut event = match same.and_then(|at| self.events.remove(at)) {
            Some(known) => known,
            None => Arc::new(self.first(object, event_type, reason, message, now)),
        };
        let counted = Arc::make_mut(&mut event);
        counted.count = counted.count.saturating_add(1);
        counted.last_timestamp = now;
        self.events.push_back(Arc::clone(&event));
        if self.events.len() > EVENTS_KEPT {
            self.drop_one();
        }
        event
    }

    fn drop_one(&mut self) {
        let mut counts: HashMap<&ObjectRef, usize> = HashMap::new();
        for event in &self.events {
            *counts.entry(&event.involved_object).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let oldest = self.events.iter().position(|event| counts.get(&event.involved_object).copied() == most);
        if let Some(oldest) = oldest {
            self.events.remove(oldest);
        }
    }

    pub(super) fn all(&mut self, now: Time) -> Vec<Arc<Event>> {
        let limit = now.as_second() - SECONDS_KEPT;
        while self.events.front().is_some_and(|event| event.last_timestamp.as_second() < limit) {
            self.events.pop_front();
        }
        self.events.iter().cloned().collect()
    }

    fn first(
        &mut self,
        object: &ObjectRef,
        event_type: EventType,
        reason: &str,
        message: &str,
        now: Time,
    ) -> Event {
        self.recorded += 1;
        let namespace =
            if object.namespace.is_empty() { crate::objects::DEFAULT_NAMESPACE } else { &object.namespace };
        Event {
            api_version: Kind::Event.api_version().to_owned(),
            kind: Kind::Event.to_string(),
            metadata: ObjectMeta {
                name: format!("{}.{:x}{:04x}", object.name, now.as_second(), self.recorded),
                namespace: namespace.to_owned(),
                creation_timestamp: Some(now),
                ..ObjectMeta::default()
            },
            involved_object: object.clone(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            source: EventSource { component: "kubelet".to_owned(), host: self.host.clone() },
            event_type,
            count: 0,
            first_timestamp: now,
            last_timestamp: now,
        }
    }
}

/// `pod/web`, or `pod/<namespace>/web`, for the log.
pub(super) fn subject(object: &ObjectRef) -> String {
    let kind = object.kind.to_lowercase();
    match object.namespace.as_str() {
        "" => format!("{kind}/{}", object.name),
        namespace => format!("{kind}/{namespace}/{}", object.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time::from_second(second).unwrap()
    }

    #[test]
    fn a_repeated_event_counts_up_and_moves_to_the_end() {
        let mut log = EventLog::new("node");
        let pod = ObjectRef { kind: "Pod".into(), name: "web".into(), ..ObjectRef::default() };
        log.record(&pod, EventType::Warning, "FailedMount", "no driver", at(10));
        log.record(&pod, EventType::Normal, "Pulled", "image", at(11));
        log.record(&pod, EventType::Warning, "FailedMount", "no driver", at(12));
        let events = log.all(at(12));
        assert_eq!(events.len(), 2);
        assert_eq!(
            (events[1].count, events[1].first_timestamp, events[1].last_timestamp),
            (2, at(10), at(12))
        );
    }

    #[test]
    fn an_object_with_many_events_does_not_push_out_those_of_others() {
        let mut log = EventLog::new("node");
        let quiet = ObjectRef { name: "quiet".into(), ..ObjectRef::default() };
        let noisy = ObjectRef { name: "noisy".into(), ..ObjectRef::default() };
        log.record(&quiet, EventType::Normal, "Started", "", at(100));
        for n in 0..EVENTS_KEPT + 10 {
            log.record(&noisy, EventType::Warning, "Unhealthy", &format!("answer {n}"), at(101));
        }
        let events = log.all(at(101));
        assert_eq!(events.len(), EVENTS_KEPT);
        assert_eq!(events[0].involved_object, quiet);
        assert_eq!(events[1].message, "answer 11", "the oldest go");
    }

    #[test]
    fn events_are_limited_in_number_and_expire() {
        let mut log = EventLog::new("node");
        for n in 0..EVENTS_KEPT + 10 {
            let pod = ObjectRef { name: format!("pod-{n}"), ..ObjectRef::default() };
            log.record(&pod, EventType::Normal, "Started", "", at(100));
        }
        let events = log.all(at(100));
        assert_eq!((events.len(), events[0].involved_object.name.as_str()), (EVENTS_KEPT, "pod-10"));
        assert!(log.all(at(100 + SECONDS_KEPT + 1)).is_empty());
    }
}
