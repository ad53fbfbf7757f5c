//! The start of a volume's daemon, as the journal remembers it.

use serde::{Deserialize, Serialize};

/// One process, for as long as this boot lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
}

/// What was started, as the journal remembers it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaunchId {
    /// A child process of the driver, or of an earlier one.
    Process(ProcessId),
    /// A static pod, by its name.
    StaticPod(String),
}

impl LaunchId {
    /// The process, where the launcher knows it before it dials.
    pub(crate) fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Process(process) => Some(*process),
            Self::StaticPod(_) => None,
        }
    }
}
