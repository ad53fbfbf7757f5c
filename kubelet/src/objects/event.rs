//! What happened to an object, for people.

use serde::{Deserialize, Serialize};

use super::{Kind, ObjectMeta, ObjectRef, Time, object};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub involved_object: ObjectRef,
    /// One word: `FailedMount`.
    pub reason: String,
    /// A sentence that says what to do where something can be done.
    pub message: String,
    pub source: EventSource,
    #[serde(rename = "type")]
    pub event_type: EventType,
    /// How often the same thing happened between the two times.
    pub count: u32,
    pub first_timestamp: Time,
    pub last_timestamp: Time,
}

object!(Event, Kind::Event);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventSource {
    pub component: String,
    pub host: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}
