//! What runtime and shim say to each other: JSON, one message a line, over the
//! unix stream socket `shim.sock` in the sandbox's directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::log::LogCeiling;
use crate::launcher::Overlay;

/// `<sandbox>/shim.json`: what the shim needs before anybody calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShimConfig {
    /// The pod's own uts namespace, with this hostname; `None`: the host's.
    pub(crate) hostname: Option<String>,
    /// An ipc namespace of the pod's own.
    pub(crate) own_ipc: bool,
    /// The OCI runtime to start containers with; `None`: the native launcher.
    pub(crate) oci_runtime: Option<PathBuf>,
    /// Of each container's logs.
    #[serde(default)]
    pub(crate) log_ceiling: Option<LogCeiling>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Comes back in the answer.
    pub(crate) id: u64,
    #[serde(flatten)]
    pub(crate) call: Call,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(crate) enum Call {
    Start {
        container: String,
        /// `None`: output is read and dropped.
        log: Option<PathBuf>,
        overlay: Overlay,
        /// Where device rules cannot be put in force: start without CAP_MKNOD.
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
    /// Also the barrier of a new connection: exits after its answer are announced on it.
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
        /// The shim's own.
        pid: i32,
        containers: BTreeMap<String, ShimStatus>,
    },
    Refused {
        problem: String,
    },
}

/// `<container>/status.json`, written by the shim alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShimStatus {
    /// In the host's pid namespace.
    pub(crate) pid: i32,
    /// Nanoseconds since 1970.
    pub(crate) started_at: i64,
    /// What its specification demands and this machine does not enforce, for a person.
    #[serde(default)]
    pub(crate) not_enforced: Option<String>,
    pub(crate) exit: Option<Exited>,
}

impl ShimStatus {
    /// Of a container that ran, and nothing else is known.
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

/// Nanoseconds since 1970, now.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}
