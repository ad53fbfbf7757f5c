//! The messages between runtime and shim: JSON, one message on each line, over the unix stream
//! socket `shim.sock` in the sandbox's directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::log::LogCeiling;
use crate::launcher::Overlay;

/// `<sandbox>/shim.json`: the shim's configuration, read at its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShimConfig {
    /// The pod's own uts namespace, with this hostname; `None`: the host's.
    pub(crate) hostname: Option<String>,
    /// Whether the pod has its own ipc namespace.
    pub(crate) own_ipc: bool,
    /// The OCI runtime to start containers with; `None`: the native launcher.
    pub(crate) oci_runtime: Option<PathBuf>,
    /// Limit of each container's logs.
    #[serde(default)]
    pub(crate) log_ceiling: Option<LogCeiling>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Repeated in the answer.
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) call: Call,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(crate) enum Call {
    Start {
        container: String,
        /// `None`: output is read and discarded.
        log: Option<PathBuf>,
        overlay: Overlay,
        /// If the device rules cannot be enforced: start without CAP_MKNOD.
        #[serde(default)]
        allow_without_device_control: bool,
    },
    Signal {
        container: String,
        signal: i32,
    },
    ReopenLog {
        container: String,
    },
    /// The first call on a connection: later exits are reported on it.
    List,
    /// Refused while a container runs.
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum Message {
    Answer { id: u64, answer: Answer },
    Exited { container: String, status: ShimStatus },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    Done,
    Started {
        container: String,
        status: ShimStatus,
        warnings: Vec<String>,
    },
    Containers {
        /// The shim's pid.
        pid: i32,
        containers: BTreeMap<String, ShimStatus>,
    },
    Refused {
        problem: String,
    },
}

/// `<container>/status.json`, written only by the shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShimStatus {
    /// The pid in the host's namespace.
    pub(crate) pid: i32,
    /// Nanoseconds since 1970.
    pub(crate) started_at: i64,
    /// Requirements of the specification that this machine does not enforce, as a message.
    #[serde(default)]
    pub(crate) not_enforced: Option<String>,
    pub(crate) exit: Option<Exited>,
}

impl ShimStatus {
    /// The status of a container that ran, without further knowledge.
    pub(crate) fn unknown(started_at: i64) -> Self {
        Self { pid: 0, started_at, not_enforced: None, exit: None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exited {
    /// The exit code, or 128 + signal.
    pub(crate) code: i32,
    /// Nanoseconds since 1970.
    pub(crate) finished_at: i64,
    pub(crate) oom_killed: bool,
}

pub(crate) fn container_dir(sandbox_dir: &Path, container: &str) -> PathBuf {
    sandbox_dir.join("containers").join(container)
}

/// The current time in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}
