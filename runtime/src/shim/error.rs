//! Why the shim refuses a call. The protocol transmits it as text, with its causes.

use std::io;
use std::path::PathBuf;

use oci_spec::OciSpecError;

use crate::error::chain;
use crate::launcher::error::LaunchError;

/// Limit of the reason why a container did not start.
const MAX_PROBLEM_BYTES: usize = 4096;

pub(super) type Result<T> = std::result::Result<T, ShimError>;

#[derive(Debug, thiserror::Error)]
pub(super) enum ShimError {
    #[error("container {container} is running")]
    Running { container: String },
    #[error("the process whose PID namespace it shares has ended")]
    NoPidNamespace,
    #[error("it was started before")]
    StartedBefore,
    #[error("no such container in this pod")]
    NoContainer,
    #[error("descriptors of the request: the shim has no room for them")]
    NoRoomForDescriptors,
    #[error("descriptors: the call takes at most {most}")]
    TooManyDescriptors { most: usize },
    #[error("descriptors: {found} came, the call takes {wanted}")]
    WrongDescriptors { found: usize, wanted: usize },
    #[error("it is not running")]
    NotRunning,
    #[error("{most} clients are attached to containers of this pod: no more are")]
    TooManyAttached { most: usize },
    #[error("{most} programs that exec has started in this pod are running: no more are started")]
    TooManyExecs { most: usize },
    #[error("read config.json")]
    Specification {
        #[source]
        source: OciSpecError,
    },
    #[error("open log {}", .path.display())]
    OpenLog {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("reopen log")]
    ReopenLog {
        #[source]
        source: io::Error,
    },
    #[error("pipe for {name}")]
    Pipe {
        name: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("read the outcome pipe")]
    Outcome {
        #[source]
        source: io::Error,
    },
    /// The child's text in the outcome pipe.
    #[error("{said}")]
    Child { said: String },
    /// The OCI runtime's text in the container's stderr.
    #[error("{said}")]
    OciRuntime { said: String },
    #[error("it ended before it was started")]
    EndedEarly,
    #[error(transparent)]
    Kernel(#[from] linux::Error),
}

impl ShimError {
    /// The text may contain megabytes from an image, and an answer is one line of limited length.
    pub(super) fn shortened(&self) -> String {
        trace::shortened(chain(self), MAX_PROBLEM_BYTES)
    }
}
