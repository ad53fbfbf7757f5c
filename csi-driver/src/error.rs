//! Everything that an RPC can be refused with. What the caller makes of it is
//! decided in one place, `status.rs`.

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use trace::error_chain as chain;

use crate::capability::AccessMode;
use crate::volume::VolumeId;

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

    // What it is about.
    #[error("volume {volume_id:?} does not exist")]
    UnknownVolume { volume_id: String },
    #[error("volume {volume_id} is neither staged nor published at {}", path.display())]
    NotAtPath { volume_id: VolumeId, path: PathBuf },
    #[error("volume {name:?} exists with {what} {found}, wanted {wanted}")]
    ExistsOtherwise { name: String, what: &'static str, found: String, wanted: String },
    #[error("volume {volume_id} is staged at {} with {found}, wanted {wanted}", path.display())]
    StagedOtherwise { volume_id: VolumeId, path: PathBuf, found: String, wanted: String },
    #[error("volume {volume_id} is published at {} with {found}, wanted {wanted}", path.display())]
    PublishedOtherwise { volume_id: VolumeId, path: PathBuf, found: String, wanted: String },

    // The order of calls.
    #[error("volume {volume_id} is not staged at {}", path.display())]
    NotStaged { volume_id: VolumeId, path: PathBuf },
    #[error("volume {volume_id} is staged at {}, not at {}", staged.display(), wanted.display())]
    StagedElsewhere { volume_id: VolumeId, staged: PathBuf, wanted: PathBuf },
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
    #[error("{} is a mount of {found}, not of volume {volume_id}", path.display())]
    ForeignMount { volume_id: VolumeId, path: PathBuf, found: String },

    // Room and place.
    #[error("claim of {wanted_bytes} bytes is larger than the pool of {pool_bytes} bytes")]
    LargerThanPool { wanted_bytes: u64, pool_bytes: u64 },
    #[error(
        "claim of {wanted_bytes} bytes exceeds what is left of the pool: {committed_bytes} of {pool_bytes} bytes are committed"
    )]
    PoolFull { wanted_bytes: u64, committed_bytes: u64, pool_bytes: u64 },
    #[error(
        "the volumes of this pool are reachable on {key}={node_id} only, which accessibility_requirements exclude"
    )]
    OutOfTopology { key: String, node_id: String },

    // What happens at the same time.
    #[error("another operation on volume {volume_id:?} is under way")]
    Pending { volume_id: String },
    #[error("volume {volume_id} is being deleted")]
    BeingDeleted { volume_id: VolumeId },
    #[error("{} is busy: a process still uses it", path.display())]
    Busy { path: PathBuf },
    #[error("{what} took longer than {} s", limit.as_secs())]
    Deadline { what: String, limit: Duration },

    // The daemon.
    #[error("start the daemon of volume {volume_id}")]
    Launch {
        volume_id: VolumeId,
        #[source]
        source: linux::Error,
    },
    #[error("no daemon dialled {} within {} s", socket.display(), waited.as_secs())]
    NobodyDialled { socket: PathBuf, waited: Duration },
    #[error("the stage of volume {volume_id} was taken back before its daemon dialled")]
    Abandoned { volume_id: VolumeId },
    #[error("the daemon of volume {volume_id} ended before it served{}", last_words(log.as_deref()))]
    DaemonEnded { volume_id: VolumeId, log: Option<String> },
    #[error("the daemon of volume {volume_id} refused to serve: {reason}")]
    DaemonRefused { volume_id: VolumeId, reason: String },
    #[error("hand over volume {volume_id}: {reason}")]
    HandOver { volume_id: VolumeId, reason: String },
    #[error("process {pid}, the daemon of volume {volume_id}, lives on after SIGKILL")]
    DaemonLives { volume_id: VolumeId, pid: i32 },

    // The machine.
    #[error("{step}")]
    Kernel {
        step: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error("journal {}: {reason}", path.display())]
    JournalUnreadable { path: PathBuf, reason: String },
    #[error("not able to work: {what}")]
    Unready {
        what: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error("{operation} ended unexpectedly")]
    Panicked { operation: &'static str },
    /// What was there before is still there, so the caller must come back.
    #[error("volume {volume_id}: what an earlier call left is still there")]
    Uncleared {
        volume_id: VolumeId,
        #[source]
        source: Box<Error>,
    },
    /// Something may be left behind, so the caller must come back.
    #[error("{}; and rolling back: {}", chain(cause), chain(rollback))]
    Rollback { cause: Box<Error>, rollback: Box<Error> },
}

impl Error {
    pub(crate) fn invalid(field: &'static str, value: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidField { field, value: value.into(), reason: reason.into() }
    }

    pub(crate) fn unusable(field: &'static str, path: &Path, reason: impl Into<String>) -> Self {
        Self::UnusablePath { field, path: path.to_owned(), reason: reason.into() }
    }
}

fn last_words(log: Option<&str>) -> String {
    log.map(|line| format!("; its last words: {line}")).unwrap_or_default()
}

/// Gives a kernel error its place in what was being done.
pub(crate) trait Step<T> {
    fn step(self, step: &'static str) -> Result<T>;
}

impl<T> Step<T> for linux::Result<T> {
    fn step(self, step: &'static str) -> Result<T> {
        self.map_err(|source| Error::Kernel { step, source })
    }
}
