//! Why a volume cannot be served. Single requests fail with a [`crate::failure::Failure`].

use std::io;
use std::path::PathBuf;

use proto::versions::Versions;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("environment variable {variable} is empty or not set: the driver gives every daemon a nonce")]
    NonceMissing { variable: &'static str },
    #[error("{step}")]
    Kernel {
        step: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error(
        "the driver at {} closed the connection after Hello (protocol version {versions}): \
         it does not know this nonce, or not this version",
        socket.display()
    )]
    Refused { socket: PathBuf, versions: Versions },
    #[error(
        "the driver at {} speaks version {driver} of the hand-over protocol, this daemon version {own}: \
         use both of one release",
        socket.display()
    )]
    Version { socket: PathBuf, own: Versions, driver: Versions },
    #[error("assignment from {}: {field}: {reason}", socket.display())]
    Assignment { socket: PathBuf, field: &'static str, reason: String },
    #[error("open files: hard limit {hard} of RLIMIT_NOFILE is below {least}")]
    DescriptorLimit { hard: u64, least: u64 },
    #[error("ignore SIGTERM")]
    Signals {
        #[source]
        source: io::Error,
    },
    #[error("system call filter")]
    Seccomp {
        #[source]
        source: seccompiler::Error,
    },
    #[error("start thread {name}")]
    Thread {
        name: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("keeper")]
    Keeper {
        #[source]
        source: keeper::Error,
    },
    #[error("data path passthrough: the driver runs without a keeper, which registers the files")]
    PassthroughWithoutKeeper,
    #[error("Proceed from the driver: {reason}")]
    Proceed { reason: String },
    #[error("state table: {reason}")]
    StateTable { reason: String },
    #[error(
        "state table: the earlier daemon wrote version {found}, this one reads versions {oldest} to {newest}: \
         use a daemon of a release in between, or stage the volume anew"
    )]
    StateVersion { found: u64, oldest: u64, newest: u64 },
    #[error("connection of the earlier daemon: {reason}: stage the volume anew")]
    InitTerms { reason: String },
    #[error("answer FUSE_INIT")]
    Handshake {
        #[source]
        source: io::Error,
    },
    #[error("serve FUSE requests")]
    Session {
        #[source]
        source: io::Error,
    },
}
