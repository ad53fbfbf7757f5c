//! Why a shim did not do what the runtime asked.

use std::io;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum ShimProblem {
    #[error("start")]
    Start {
        #[source]
        source: io::Error,
    },
    #[error("it ended at once")]
    EndedAtOnce,
    #[error("call")]
    Send {
        #[source]
        source: io::Error,
    },
    #[error("it ended")]
    Ended,
    #[error("no answer within {} s", .limit.as_secs())]
    NoAnswer { limit: Duration },
    #[error("the shim answered {answer}")]
    UnexpectedAnswer { answer: String },
    #[error(
        "it was started by an earlier version of the runtime and receives no descriptors: start the pod anew"
    )]
    NoDescriptors,
    #[error(
        "the pod was started by an earlier version of the runtime, which has no exec: start the pod anew"
    )]
    CannotExec,
    #[error(
        "the pod was started by an earlier version of the runtime, whose containers have no terminal and no stdin: start the pod anew"
    )]
    CannotAttach,
    #[error("{why}")]
    Detached { why: String },
    #[error(
        "the pod was started by an earlier version of the runtime, which shares no PID namespaces: start \
         the pod anew"
    )]
    CannotHoldPids,
    /// The shim's text, with the causes: the launcher's or the OCI runtime's message.
    #[error("{problem}")]
    Refused { problem: String },
}

impl ShimProblem {
    /// Whether the shim has ended, or has closed the connection.
    pub(crate) fn is_end(&self) -> bool {
        match self {
            Self::Ended | Self::EndedAtOnce => true,
            Self::Send { source } => {
                matches!(source.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
            }
            _ => false,
        }
    }
}
