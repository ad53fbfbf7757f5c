//! All errors of the runtime, and the only table of their gRPC codes.

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use linux::chain;
use tonic::{Code, Status};

use crate::cni::error::PluginProblem;
use crate::images::error::ImageError;
use crate::registry::error::PullProblem;
use crate::shim_client::error::ShimProblem;
use crate::spec::host_path::HostPathProblem;
use crate::spec::mount_policy::MountRefusal;

pub(crate) type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A request field whose value is invalid; a retry cannot help.
    #[error("{field}: {problem}")]
    InvalidArgument { field: String, problem: String },
    /// A request field that asks for something unsupported.
    #[error("{field}: {value} is not supported")]
    Unsupported { field: &'static str, value: String },
    #[error("{kind} {id:?} not found")]
    NotFound { kind: &'static str, id: String },
    #[error("{kind} {name:?} already exists as {id}")]
    AlreadyExists { kind: &'static str, name: String, id: String },
    #[error("{kind} {id} is {state}, not {wanted}")]
    WrongState { kind: &'static str, id: String, state: String, wanted: &'static str },
    #[error("image {image:?} is in no OCI layout or archive under {}{}", .images_dir.display(), list(.broken))]
    ImageMissing { image: String, images_dir: PathBuf, broken: Vec<String> },
    /// Before the images directory is added to it.
    #[error("pull")]
    Pull {
        #[source]
        source: Box<PullProblem>,
    },
    #[error("image {image:?} is in no OCI layout or archive under {}{}, and was not pulled", .images_dir.display(), list(.broken))]
    ImageNotPulled {
        image: String,
        images_dir: PathBuf,
        broken: Vec<String>,
        #[source]
        source: Box<PullProblem>,
    },
    /// Each offer is a digest and the place that has it.
    #[error("image {image:?} is {} but {}: remove one of them, or name the image with its digest", .offers[0], .offers[1])]
    ImageAmbiguous { image: String, offers: [String; 2] },
    #[error("image {image:?}: {place}")]
    ImageCorrupt {
        image: String,
        place: String,
        #[source]
        source: Box<ImageError>,
    },
    #[error("{field}: {}", .path.display())]
    HostPath {
        field: String,
        path: PathBuf,
        #[source]
        source: HostPathProblem,
    },
    #[error("{field}: refused")]
    MountRefused {
        field: String,
        #[source]
        source: MountRefusal,
    },
    #[error(
        "{field}: {wanted} has no effect, since the mount of {} is not shared: run mount --make-rshared {}",
        .path.display(), .mount_point.display()
    )]
    NotShared { field: String, wanted: &'static str, path: PathBuf, mount_point: PathBuf },
    #[error("cni: {problem}")]
    NetworkConfig { problem: String },
    #[error("cni: read {}", .path.display())]
    NetworkConfigUnreadable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cni: parse {}", .path.display())]
    NetworkConfigInvalid {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cni plugin {plugin:?} {verb} for network {network:?} ({})", .config.display())]
    Plugin {
        plugin: String,
        verb: &'static str,
        network: String,
        config: PathBuf,
        #[source]
        source: Box<PluginProblem>,
    },
    #[error("start container {container}")]
    Start {
        container: String,
        #[source]
        source: ShimProblem,
    },
    #[error("exec in container {container}")]
    Exec {
        container: String,
        #[source]
        source: ShimProblem,
    },
    #[error("attach to container {container}")]
    Attach {
        container: String,
        #[source]
        source: ShimProblem,
    },
    /// kubelet knows an exec probe's timeout by the code.
    #[error("exec in container {container}: it did not end within {} s and was killed", .limit.as_secs())]
    ExecTimeout { container: String, limit: Duration },
    #[error("shim of sandbox {sandbox}")]
    Shim {
        sandbox: String,
        #[source]
        source: ShimProblem,
    },
    #[error("parse {}", .path.display())]
    Record {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// A record of a pod that may run cannot be read now. The runtime does not start, and the pod runs on.
    #[error("adopt pod sandbox {sandbox}")]
    Adopt {
        sandbox: String,
        #[source]
        source: Box<Error>,
    },
    #[error("{} is in use by another runtime", .root_dir.display())]
    Locked { root_dir: PathBuf },
    #[error("connect")]
    Connect {
        #[source]
        source: std::io::Error,
    },
    #[error("{what}")]
    Busy { what: &'static str },
    #[error("the runtime is being stopped")]
    Ending,
    #[error("a task of the runtime ended early: {task}")]
    Task { task: &'static str },
    #[error("serve CRI on {}", .socket.display())]
    Serve {
        socket: PathBuf,
        #[source]
        source: ServeProblem,
    },
    /// Undoing a failed operation failed too; the error has both.
    #[error("{}; undoing it: {}", chain(.cause), .rollback.iter().map(|e| chain(e)).collect::<Vec<_>>().join("; "))]
    Rollback { cause: Box<Error>, rollback: Vec<Error> },
    #[error(transparent)]
    Kernel(#[from] linux::Error),
}

/// Why a runtime does not serve its socket.
#[derive(Debug, thiserror::Error)]
pub enum ServeProblem {
    #[error("listen")]
    Listen {
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Server(tonic::transport::Error),
    #[error("remove the socket")]
    Remove {
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::InvalidArgument { field: field.into(), problem: problem.into() }
    }

    pub(crate) fn io(op: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::Kernel(linux::Error::at(op, path, source))
    }

    /// Adds the errors of the roll-back.
    pub(crate) fn after_rollback(self, rollback: Vec<Error>) -> Self {
        if rollback.is_empty() { self } else { Self::Rollback { cause: Box::new(self), rollback } }
    }

    fn code(&self) -> Code {
        match self {
            Self::InvalidArgument { .. } | Self::HostPath { .. } | Self::MountRefused { .. } => {
                Code::InvalidArgument
            }
            Self::Unsupported { .. } => Code::Unimplemented,
            Self::NotFound { .. } | Self::ImageMissing { .. } => Code::NotFound,
            Self::AlreadyExists { .. } => Code::AlreadyExists,
            Self::WrongState { .. } | Self::ImageAmbiguous { .. } | Self::NotShared { .. } => {
                Code::FailedPrecondition
            }
            Self::Pull { source } | Self::ImageNotPulled { source, .. } if source.is_missing() => {
                Code::NotFound
            }
            Self::Pull { source } | Self::ImageNotPulled { source, .. } if source.is_refused() => {
                Code::PermissionDenied
            }
            Self::Pull { .. } | Self::ImageNotPulled { .. } => Code::Unavailable,
            Self::ImageCorrupt { .. } => Code::DataLoss,
            Self::Busy { .. } => Code::ResourceExhausted,
            Self::ExecTimeout { .. } => Code::DeadlineExceeded,
            Self::Connect { .. }
            | Self::Adopt { .. }
            | Self::Ending
            | Self::Locked { .. }
            | Self::Task { .. }
            | Self::Serve { .. } => Code::Unavailable,
            Self::NetworkConfig { .. }
            | Self::NetworkConfigUnreadable { .. }
            | Self::NetworkConfigInvalid { .. }
            | Self::Plugin { .. }
            | Self::Start { .. }
            | Self::Exec { .. }
            | Self::Attach { .. }
            | Self::Shim { .. }
            | Self::Record { .. }
            | Self::Rollback { .. }
            | Self::Kernel(_) => Code::Unknown, // what containerd answers; the kubelet only reads the text
        }
    }
}

/// A status is sent in a header, and a client closes the whole connection, with the calls of all
/// pods, if headers exceed 16 KiB. Percent-encoding triples a byte.
const MAX_STATUS_BYTES: usize = 4096;

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Status::new(error.code(), trace::shortened(chain(&error), MAX_STATUS_BYTES))
    }
}

fn list(broken: &[String]) -> String {
    if broken.is_empty() { String::new() } else { format!(" (unreadable: {})", broken.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_no_longer_than_a_header_may_be() {
        let error = Error::NotFound { kind: "user", id: "\u{fc}".repeat(100_000) };
        let status = Status::from(error);
        assert!(status.message().len() <= MAX_STATUS_BYTES + 3);
        assert!(status.message().ends_with("\u{fc}..."), "whole characters");
    }
}
