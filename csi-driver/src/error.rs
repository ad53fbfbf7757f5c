//! All errors of RPCs. `status.rs` chooses the gRPC code of each.

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use linux::chain;
use proto::versions::Versions;

use crate::model::access_mode::AccessMode;
use crate::model::ids::{SnapshotId, VolumeId};

/// Most bytes of a request's value in a message.
const MAX_VALUE_BYTES: usize = 128;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    // The request itself.
    #[error("{field} is required")]
    MissingField { field: &'static str },
    #[error("{field}: {value:?}: {reason}")]
    InvalidField { field: &'static str, value: String, reason: String },
    #[error("parameters: unknown parameter {name:?}: known are {known}")]
    UnknownParameter { name: String, known: String },

    // The objects of the request.
    #[error("volume {volume_id:?} does not exist")]
    UnknownVolume { volume_id: String },
    #[error("snapshot {snapshot_id:?} does not exist")]
    UnknownSnapshot { snapshot_id: String },
    #[error("node {node_id:?} is not known: known are {known}")]
    UnknownNode { node_id: String, known: String },
    #[error("volume {volume_id} is neither staged nor published at {}", path.display())]
    NotAtPath { volume_id: VolumeId, path: PathBuf },
    #[error("volume {name:?} exists with {what} {found}, wanted {wanted}")]
    ExistsOtherwise { name: String, what: &'static str, found: String, wanted: String },
    #[error("volume {volume_id} is staged at {} with {found}, wanted {wanted}", path.display())]
    StagedOtherwise { volume_id: VolumeId, path: PathBuf, found: String, wanted: String },
    #[error("volume {volume_id} is published at {} with {found}, wanted {wanted}", path.display())]
    PublishedOtherwise { volume_id: VolumeId, path: PathBuf, found: String, wanted: String },
    #[error("snapshot {name:?} exists already, of volume {found} instead of volume {wanted}")]
    SnapshotOtherwise { name: String, found: VolumeId, wanted: String },
    #[error("volume {volume_id} is attached to node {node_id} with {found}, wanted {wanted}")]
    AttachedOtherwise { volume_id: VolumeId, node_id: String, found: String, wanted: String },

    // The order of calls.
    #[error("volume {volume_id} is not staged at {}", path.display())]
    NotStaged { volume_id: VolumeId, path: PathBuf },
    #[error("volume {volume_id} is staged at {}, not at {}", staged.display(), wanted.display())]
    StagedElsewhere { volume_id: VolumeId, staged: PathBuf, wanted: PathBuf },
    #[error(
        "the daemon of volume {volume_id} serves another directory than {}, which the pool has now: take the \
         volume's pods down",
        path.display()
    )]
    ServesAnother { volume_id: VolumeId, path: PathBuf },
    #[error("volume {volume_id} is still published at {}", path.display())]
    StillPublished { volume_id: VolumeId, path: PathBuf },
    #[error("volume {volume_id} is still staged at {}", path.display())]
    StillStaged { volume_id: VolumeId, path: PathBuf },
    #[error(
        "volume {volume_id} is published at {} and {mode} allows no second target",
        published.display()
    )]
    SecondTarget { volume_id: VolumeId, published: PathBuf, mode: AccessMode },
    #[error("{field} {}: {reason}", path.display())]
    UnusablePath { field: &'static str, path: PathBuf, reason: String },
    /// The path was valid when it was checked earlier, so the caller must retry.
    #[error("{field} {}: {reason}: restore the directories of this path, and call again", path.display())]
    PathChanged { field: &'static str, path: PathBuf, reason: String },
    #[error("{} is a mount of {found}, not of volume {volume_id}", path.display())]
    ForeignMount { volume_id: VolumeId, path: PathBuf, found: String },
    #[error("volume {volume_id} is attached to node {node_id}, and {mode} allows no second node")]
    AttachedElsewhere { volume_id: VolumeId, node_id: String, mode: AccessMode },
    #[error(
        "volume {volume_id}: publish_context {key:?} is not that of an attachment to node {node_id}: call ControllerPublishVolume first"
    )]
    NotAttached { volume_id: VolumeId, node_id: String, key: &'static str },
    #[error("volume {volume_id} is still attached to node {node_id}")]
    StillAttached { volume_id: VolumeId, node_id: String },
    #[error(
        "pool {} is {fs_type}, which cannot reflink: set snapshotMode to blocking-copy in the parameters of \
         the {class}",
        pool.display()
    )]
    NoReflink { pool: PathBuf, fs_type: String, class: &'static str },
    #[error("{what}: the kernel cannot limit it, since the pool {} is {reason}: {remedy}", pool.display())]
    NoKernelQuota { what: String, pool: PathBuf, reason: String, remedy: String },
    #[error(
        "parameters.dataPath: passthrough needs a kernel with CONFIG_FUSE_PASSTHROUGH (Linux 6.9 or newer), and \
         this one ({release}) lacks it: choose daemon"
    )]
    NoPassthrough { release: String },
    #[error(
        "parameters.dataPath: passthrough needs a keeper, which registers the files, and this driver has none: name \
         one with --keeper-binary, or choose daemon"
    )]
    NoKeeper,
    #[error("the daemon of volume {volume_id} has no control socket: {what} works after the next stage")]
    NoControl { volume_id: VolumeId, what: &'static str },

    // Space and place.
    #[error("claim of {wanted_bytes} bytes is larger than the pool of {pool_bytes} bytes")]
    LargerThanPool { wanted_bytes: u64, pool_bytes: u64 },
    #[error(
        "claim of {wanted_bytes} bytes exceeds what is left of the pool: {committed_bytes} of {pool_bytes} bytes are committed"
    )]
    PoolFull { wanted_bytes: u64, committed_bytes: u64, pool_bytes: u64 },
    #[error(
        "claim of {wanted} inodes exceeds what is left of the pool's file system: {committed} of {promised} inodes are committed"
    )]
    PoolOutOfInodes { wanted: u64, committed: u64, promised: u64 },
    #[error("{origin} needs {source_bytes} bytes, and the claim has {wanted_bytes}")]
    SourceLarger { origin: String, source_bytes: u64, wanted_bytes: u64 },
    #[error("volume {volume_id} has {size_bytes} bytes, wanted {wanted}")]
    BeyondSize { volume_id: VolumeId, size_bytes: u64, wanted: String },
    #[error("node {node_id} has {limit} volumes attached, as many as --max-volumes allows")]
    TooManyVolumes { node_id: String, limit: u64 },
    #[error(
        "the volumes of this pool are reachable on {key}={node_id} only, which accessibility_requirements exclude"
    )]
    OutOfTopology { key: String, node_id: String },
    /// The caller may choose another node, so the code is another one than that of `source`.
    #[error("the volume cannot be created on {key}={node_id}")]
    NotOnThisNode {
        key: String,
        node_id: String,
        #[source]
        source: Box<Error>,
    },

    // Concurrent operations.
    #[error("another operation on {what} is under way")]
    Pending { what: String },
    #[error("{operation}: {most} slow calls are under way: call again")]
    Crowded { operation: &'static str, most: usize },
    #[error(
        "{what}: {} has data of this id already, but the journal has no entry for it: move the data away, or \
         restore the entry",
        path.display()
    )]
    UnknownData { what: String, path: PathBuf },
    #[error("volume {volume_id} is being deleted")]
    BeingDeleted { volume_id: VolumeId },
    #[error("starting_token: {value:?} is unknown: list again from the start")]
    BadToken { value: String },
    #[error("{what} is being copied: {}", progress(*done_bytes, *total_bytes))]
    Copying { what: String, done_bytes: u64, total_bytes: u64 },
    #[error("the writers of volume {volume_id} could not be held back until the snapshot was cut")]
    LeaseLost { volume_id: VolumeId },
    #[error("volume {volume_id} is not filled yet: call CreateVolume again")]
    Unfilled { volume_id: VolumeId },
    #[error("{} is busy: a process still uses it", path.display())]
    Busy { path: PathBuf },
    #[error("{what} took longer than {} s", limit.as_secs())]
    Deadline { what: String, limit: Duration },
    #[error(
        "{what} was given up, since the volume's daemon has ended: repeat the call when another one serves"
    )]
    Interrupted { what: String },

    // The daemon.
    #[error("start the daemon of volume {volume_id}, {launch}")]
    Launch {
        volume_id: VolumeId,
        /// In the launcher's words.
        launch: String,
        #[source]
        source: linux::Error,
    },
    #[error("no daemon dialled {} within {} s: waited for {launch}", socket.display(), waited.as_secs())]
    DialTimeout { socket: PathBuf, waited: Duration, launch: String },
    #[error("the stage of volume {volume_id} was undone before its daemon connected")]
    Abandoned { volume_id: VolumeId },
    #[error("the daemon of volume {volume_id}, {launch}, ended before it served{}", last_log_line(log.as_deref()))]
    DaemonEnded { volume_id: VolumeId, launch: String, log: Option<String> },
    #[error("the daemon of volume {volume_id} refused to serve: {reason}")]
    DaemonRefused { volume_id: VolumeId, reason: String },
    #[error(
        "the daemon of volume {volume_id} speaks version {daemon} of the hand-over protocol, this driver version \
         {driver}: use both of one release"
    )]
    DaemonVersion { volume_id: VolumeId, daemon: Versions, driver: Versions },
    #[error(
        "the new daemon of volume {volume_id} speaks version {version} of the hand-over protocol, and can follow \
         one that serves from version {first} on: configure a newer program"
    )]
    CannotPrepare { volume_id: VolumeId, version: u32, first: u32 },
    #[error("volume {volume_id} cannot be staged with {what}: {reason}")]
    CannotStage { volume_id: VolumeId, what: &'static str, reason: &'static str },
    #[error(
        "volume {volume_id} cannot be copied, since written data is still in the cache of the kernel: {reason}"
    )]
    NotWrittenBack { volume_id: VolumeId, reason: String },
    #[error("the daemon of volume {volume_id} cannot do {what}: {reason}")]
    DaemonCannot { volume_id: VolumeId, what: &'static str, reason: String },
    #[error("the daemon of volume {volume_id} cannot be replaced: {reason}")]
    CannotUpgrade { volume_id: VolumeId, reason: String },
    #[error("hand over volume {volume_id}: {reason}")]
    HandOver { volume_id: VolumeId, reason: String },
    #[error(
        "the daemon of volume {volume_id} returned a wrong descriptor as {role}: {reason}: unless its connection is \
         held elsewhere, it ends with the daemon"
    )]
    WrongDescriptor { volume_id: VolumeId, role: &'static str, reason: String },
    #[error(
        "the daemon of volume {volume_id} (pid {pid}) is still running after SIGKILL: check the pool's disk"
    )]
    DaemonLives { volume_id: VolumeId, pid: i32 },

    #[error("the daemon of volume {volume_id} did not answer {what} within {} s", limit.as_secs())]
    Silent { volume_id: VolumeId, what: &'static str, limit: Duration },
    #[error("the daemon of volume {volume_id} refused {what}: {reason}")]
    ControlRefused { volume_id: VolumeId, what: &'static str, reason: String },

    #[error("the daemon of volume {volume_id} ended while it was asked for {what}")]
    ControlLost { volume_id: VolumeId, what: &'static str },

    // The machine.
    #[error("pool {} is away: {reason}", path.display())]
    PoolAway { path: PathBuf, reason: String },
    #[error("snapshot {snapshot_id} failed: {reason}: delete it and make it again")]
    SnapshotFailed { snapshot_id: SnapshotId, reason: String },
    #[error("{step}")]
    Kernel {
        step: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error("journal {}: {reason}", path.display())]
    JournalUnreadable { path: PathBuf, reason: String },
    #[error("the driver cannot work: {what}: {reason}")]
    Unready { what: &'static str, reason: String },
    #[error("{operation} ended unexpectedly")]
    Panicked { operation: &'static str },
    /// The earlier call's leftovers still exist, so the caller must retry.
    #[error("{what}: what an earlier call left is still there")]
    Uncleared {
        what: String,
        #[source]
        source: Box<Error>,
    },
    /// Something may be left behind, so the caller must retry.
    #[error("{}; and rolling back: {}", chain(cause), chain(rollback))]
    Rollback { cause: Box<Error>, rollback: Box<Error> },
}

impl Error {
    pub(crate) fn invalid(field: &'static str, value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidField {
            field,
            value: trace::shortened(value.into(), MAX_VALUE_BYTES),
            reason: reason.into(),
        }
    }

    /// An earlier call's leftovers still exist because of `source`.
    pub(crate) fn uncleared(volume_id: &VolumeId, source: Self) -> Self {
        Self::Uncleared { what: format!("volume {volume_id}"), source: Box::new(source) }
    }

    pub(crate) fn uncleared_snapshot(id: &SnapshotId, source: Self) -> Self {
        Self::Uncleared { what: format!("snapshot {id}"), source: Box::new(source) }
    }

    /// `cause`, with the result of undoing what it left.
    pub(crate) fn rolled_back(cause: Self, undone: Result<()>) -> Self {
        match undone {
            Ok(()) => cause,
            Err(rollback) => Self::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
        }
    }

    pub(crate) fn changed(field: &'static str, path: &Path, reason: impl Into<String>) -> Self {
        Self::PathChanged { field, path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn unusable(field: &'static str, path: &Path, reason: impl Into<String>) -> Self {
        Self::UnusablePath { field, path: path.to_owned(), reason: reason.into() }
    }
}

fn progress(done_bytes: u64, total_bytes: u64) -> String {
    match (done_bytes, total_bytes) {
        (0, 0) => "the copy begins; call again".to_owned(),
        // The source is empty, or was not counted.
        (done, 0) => format!("{done} bytes are done; call again"),
        (done, total) => format!("{done} of {total} bytes are done"),
    }
}

fn last_log_line(log: Option<&str>) -> String {
    log.map(|line| format!("; its last log line: {line}")).unwrap_or_default()
}

/// Names the operation in which a kernel error occurred.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T>;
}

impl<T> Step<T> for linux::Result<T> {
    fn step(self, step: &'static str) -> Result<T> {
        self.map_err(|source| Error::Kernel { step, source })
    }
}
