//! The messages between runtime and shim: JSON, one message on each line, over the unix stream
//! socket `shim.sock` in the sandbox's directory. A request's descriptors go with its first byte
//! (SCM_RIGHTS); the shim's messages have none.
//!
//! Invariant: a runtime understands the shims of earlier versions, which go on with their pods. New
//! fields have defaults, and a shim says in its first answer what it can do.

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
    /// Where control groups are mounted, in the form of mountinfo; `None`: the shim looks itself, in a table
    /// that has lines of every pod.
    #[serde(default)]
    pub(crate) cgroup_mounts: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Repeated in the answer.
    pub(crate) id: u64,
    /// How many come with it.
    #[serde(default)]
    pub(crate) descriptors: usize,
    #[serde(flatten)]
    pub(crate) call: Call,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub(crate) enum Call {
    /// Takes a descriptor for the container's stdin. Without one, and without `stdin`, it is /dev/null.
    Start(Start),
    Signal {
        container: String,
        signal: i32,
    },
    ReopenLog {
        container: String,
    },
    /// Starts a further program in a running container. Takes sockets for its stdout and stderr and, with
    /// `stdin`, for that; with `terminal`, one socket for all. Killed when this connection ends.
    Exec(Exec),
    /// Of the program's terminal, in characters.
    ResizeExec {
        exec: String,
        columns: u16,
        rows: u16,
    },
    /// Connects sockets with a running container: for its stdin, stdout and stderr, as far as they are wanted, in
    /// this order. Ends when the sockets' other ends are closed.
    Attach(Attach),
    /// Of the container's terminal, in characters. Nothing, if it has none.
    ResizeContainer {
        container: String,
        columns: u16,
        rows: u16,
    },
    /// Kills that program and its process group. Nothing, if it has ended.
    KillExec {
        exec: String,
    },
    /// Makes the pod's PID namespace, if there is none yet.
    HoldPids(HoldPids),
    /// The first call on a connection: later exits are reported on it.
    List,
    /// Refused while a container runs.
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) container: String,
    /// `None`: output is read and discarded.
    pub(crate) log: Option<PathBuf>,
    pub(crate) overlay: Overlay,
    /// If the device rules cannot be enforced: start without CAP_MKNOD.
    #[serde(default)]
    pub(crate) allow_without_device_control: bool,
    /// Its stdin is for clients that attach. With a terminal in its specification, it always is.
    #[serde(default)]
    pub(crate) stdin: bool,
    /// Close it when the first such client ends. Not of a terminal.
    #[serde(default)]
    pub(crate) stdin_once: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attach {
    /// Chosen by the runtime, never used twice.
    pub(crate) attach: String,
    pub(crate) container: String,
    pub(crate) stdin: bool,
    pub(crate) stdout: bool,
    pub(crate) stderr: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HoldPids {
    /// The holder's control group.
    pub(crate) cgroup: PathBuf,
    /// The pod's network namespace; `None`: the host's.
    pub(crate) network: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exec {
    /// Chosen by the runtime, never used twice.
    pub(crate) exec: String,
    pub(crate) container: String,
    pub(crate) args: Vec<String>,
    #[serde(default)]
    pub(crate) terminal: bool,
    #[serde(default)]
    pub(crate) stdin: bool,
}

/// The most descriptors that one request may have.
pub(crate) const MOST_DESCRIPTORS: usize = 3;

impl Call {
    pub(crate) fn most_descriptors(&self) -> usize {
        match self {
            Self::Start(_) => 1,
            Self::Exec(_) | Self::Attach(_) => 3,
            Self::Signal { .. }
            | Self::ReopenLog { .. }
            | Self::KillExec { .. }
            | Self::ResizeExec { .. }
            | Self::ResizeContainer { .. }
            | Self::HoldPids(_)
            | Self::List
            | Self::Shutdown => 0,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(crate) enum Message {
    Answer {
        id: u64,
        answer: Answer,
    },
    Exited {
        container: String,
        status: ShimStatus,
    },
    /// A program that [`Call::Exec`] has started. `code`: the exit code, or 128 + signal.
    ExecEnded {
        exec: String,
        code: i32,
    },
    /// What [`Call::Attach`] has connected, and whose sockets are closed now. `problem`: why, unless the container
    /// or the client's stdin has ended.
    Detached {
        attach: String,
        problem: Option<String>,
    },
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
        /// A shim of an earlier version reads requests without their descriptors.
        #[serde(default)]
        receives_descriptors: bool,
        /// A shim of an earlier version does not know [`Call::Exec`].
        #[serde(default)]
        can_exec: bool,
        /// Nor [`Call::Attach`], and it starts containers without a terminal.
        #[serde(default)]
        can_attach: bool,
        /// A shim of an earlier version does not know [`Call::HoldPids`].
        #[serde(default)]
        can_hold_pids: bool,
        containers: BTreeMap<String, ShimStatus>,
    },
    /// The process 1 of the pod's PID namespace.
    Holds {
        pid: i32,
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
    /// Why its program never ran. The code is [`START_ERROR_CODE`] then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) start_problem: Option<String>,
}

/// containerd's exit code for a container whose process never ran.
pub(crate) const START_ERROR_CODE: i32 = 128;

pub(crate) fn container_dir(sandbox_dir: &Path, container: &str) -> PathBuf {
    sandbox_dir.join("containers").join(container)
}

/// The current time in nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_answer_of_an_earlier_shim_is_understood() {
        let message = json!({"message": "answer", "id": 0, "answer": {
            "answer": "containers", "pid": 7, "containers": {"c": {"pid": 8, "started_at": 9, "exit": null}},
        }});
        let Message::Answer { answer: Answer::Containers { receives_descriptors, containers, .. }, .. } =
            serde_json::from_value(message).unwrap()
        else {
            panic!("an answer")
        };
        assert!(!receives_descriptors);
        assert_eq!(containers["c"].pid, 8);
    }

    #[test]
    fn a_request_of_another_version_is_understood() {
        let request = json!({"id": 1, "later": true, "call": "signal", "container": "c", "signal": 9});
        let call = Call::Signal { container: "c".to_owned(), signal: 9 };
        assert_eq!(
            serde_json::from_value::<Request>(request).unwrap(),
            Request { id: 1, descriptors: 0, call }
        );
    }
}
