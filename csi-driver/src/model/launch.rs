//! The start of a volume's daemon, as the journal records it.

use serde::{Deserialize, Serialize};

/// A process, identified within this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
}

/// What was started, as the journal records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaunchId {
    /// A child process of this driver or of an earlier one.
    Process(ProcessId),
    /// A static pod, by its name.
    StaticPod(String),
}

impl LaunchId {
    /// The process, if the launcher knows it before the daemon dials in.
    pub(crate) fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Process(process) => Some(*process),
            Self::StaticPod(_) => None,
        }
    }
}
