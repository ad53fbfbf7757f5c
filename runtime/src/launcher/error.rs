//! Why a container's first process does not run. The outcome pipe transmits it as text.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use oci_spec::runtime::LinuxNamespaceType;

use crate::spec::mount_policy::MountRefusal;

pub(crate) type Result<T> = std::result::Result<T, LaunchError>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    // The specification.
    #[error("config.json has no {field}")]
    NoField { field: &'static str },
    #[error("namespace {kind} is not supported")]
    NamespaceKind { kind: LinuxNamespaceType },
    #[error("a container without a mount namespace of its own is not supported")]
    NoMountNamespace,
    #[error("linux.resources.devices: {what} {value} is not supported")]
    DeviceRule { what: &'static str, value: String },
    #[error("device {}: number {number}", .path.display())]
    DeviceNumber { path: PathBuf, number: i64 },
    #[error("device {}: not a path", .path.display())]
    DevicePath { path: PathBuf },
    #[error("capability {name} is unknown")]
    Capability { name: String },
    #[error("{field}: {text:?} has a NUL byte")]
    NulByte { field: &'static str, text: String },
    #[error("sysctl {name}: it is not a setting of a namespace but of the whole node")]
    SysctlOfNode { name: String },
    #[error("sysctl {name}: the container shares the {kind} namespace of the node")]
    SysctlOfSharedNamespace { name: String, kind: LinuxNamespaceType },
    #[error("seccomp: SCMP_ACT_NOTIFY is not supported")]
    SeccompNotify,
    #[error("seccomp: argument index {index}")]
    SeccompArgument { index: usize },
    #[error("seccomp: system call {number}")]
    SeccompNumber { number: i64 },
    #[error("seccomp")]
    Seccomp {
        #[from]
        source: seccompiler::BackendError,
    },

    // Mounts.
    #[error("mount {}", .target.display())]
    Mount {
        target: PathBuf,
        #[source]
        source: Box<LaunchError>,
    },
    #[error("make directory {}, a volume of the image", .path.display())]
    ImageVolume {
        path: PathBuf,
        #[source]
        source: Box<LaunchError>,
    },
    #[error("option {option:?} is not one of a bind mount")]
    BindOption { option: String },
    #[error("no source")]
    NoSource,
    #[error("no type")]
    NoType,
    #[error("the image has a link there, to {}", .place.display())]
    LinkInImage { place: PathBuf },
    #[error("a link in the volume at {} leads elsewhere", .volume.display())]
    LinkInVolume { volume: PathBuf },
    #[error("it leads to {}: refused", .place.display())]
    Refused {
        place: PathBuf,
        #[source]
        source: MountRefusal,
    },
    #[error("{op} {name}")]
    CgroupDirectory {
        op: &'static str,
        name: String,
        #[source]
        source: io::Error,
    },

    // The steps of the child.
    #[error("open namespace {}", .path.display())]
    Namespace {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("sysctl {name}={value}: {}", words(.cause))]
    Sysctl { name: String, value: String, cause: io::Error },
    #[error("chdir to {}: {}", .path.display(), words(.cause))]
    WorkingDirectory { path: PathBuf, cause: io::Error },
    #[error("chdir to {}: it leads to {}", .path.display(), .place.display())]
    WorkingDirectoryInProc { path: PathBuf, place: PathBuf },
    #[error("set oom_score_adj {wanted}: {}", words(.cause))]
    OomScoreAdj { wanted: i32, cause: io::Error },
    #[error("process.args is empty")]
    NoArguments,
    #[error("exec: {name:?}: {problem}")]
    Exec { name: OsString, problem: ExecProblem },

    /// The child's text.
    #[error("hold the pod's PID namespace: {said}")]
    Holder { said: String },

    // Limits of the machine.
    #[error(
        "device control: {}: {remedy}, or start the runtime with --allow-without-device-control, \
         which gives containers no CAP_MKNOD instead",
        crate::error::chain(.cause)
    )]
    NoDeviceControl { cause: linux::Error, remedy: &'static str },

    // An OCI runtime.
    #[error("{}", .program.display())]
    Program {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} create: {status}", .program.display())]
    Create { program: PathBuf, status: ExitStatus },
    /// `said`: its last line of output.
    #[error("{} {action}: {said}", .program.display())]
    Action { program: PathBuf, action: String, said: String },
    #[error("{}: {text:?} is no pid", .path.display())]
    Pid { path: PathBuf, text: String },

    #[error("{op} {}", .path.display())]
    File {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{op}")]
    Io {
        op: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Kernel(#[from] linux::Error),
}

/// With the messages that users know from runc and Go.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecProblem {
    #[error("leads out of the container")]
    OutOfContainer,
    #[error("its interpreter is missing in the image")]
    NoInterpreter,
    #[error("permission denied")]
    Denied,
    #[error("no such file or directory")]
    NoFile,
    #[error("executable file not found in $PATH")]
    NotInPath,
    #[error("{}", words(.0))]
    Other(io::Error),
}

impl LaunchError {
    pub(super) fn io(op: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { op, source }
    }

    pub(crate) fn making_volume(self, path: &Path) -> Self {
        Self::ImageVolume { path: path.to_owned(), source: Box::new(self) }
    }

    pub(crate) fn mounting(self, target: impl Into<PathBuf>) -> Self {
        Self::Mount { target: target.into(), source: Box::new(self) }
    }
}

/// `no such file or directory`: Go's wording, without the number.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}
