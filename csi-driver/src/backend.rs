//! Where the data of volumes and snapshots is. The engine knows it as [`VolumeBackend`] alone.
//! The one that there is, `local`, keeps a directory a volume on this node.
//!
//! A backend decides nothing about calls: what exists and what is being done to it stands in
//! the journal, and the engine holds a volume's lock while it changes the volume's data.

pub(crate) mod copies;
pub(crate) mod local;

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use proto::handover::{Role, assignment};

use crate::backend::copies::{Count, Progress};
use crate::error::Result;
use crate::model::capacity::{Room, VolumeLimits};
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::records::{DataId, Source};
use crate::model::snapshot_mode::SnapshotMode;

/// What a volume's daemon gets of the backend.
pub(crate) struct Assigned {
    pub(crate) id: DataId,
    /// What the Assignment says of the backend.
    pub(crate) backend: assignment::Backend,
    /// Those that only this backend has.
    pub(crate) descriptors: Vec<(Role, OwnedFd)>,
}

/// Calls may block, unless they say how long they take at most. Each one that changes data may be
/// repeated, also by the next driver, after it failed or was cut short anywhere.
pub(crate) trait VolumeBackend: Debug + Send + Sync {
    /// Whether its data is on this node: then no other node can use a volume, or make it.
    fn is_on_this_node(&self) -> bool;

    /// An error while it is away: unmounted, another one, or silent. Takes a limited time.
    fn check_present(&self) -> Result<()>;

    /// Whether it is there and takes data.
    fn probe(&self) -> linux::Result<()>;

    /// What all volumes together may claim.
    fn room(&self) -> Result<Room>;

    /// What a volume of `capacity_bytes` may hold.
    fn limits(&self, capacity_bytes: u64) -> VolumeLimits;

    /// Makes the volume, empty; one that is there already is right.
    fn create(&self, id: &VolumeId) -> Result<()>;

    /// Makes room for a volume that grows to `capacity_bytes`: what it may hold from now on.
    fn expand(&self, id: &VolumeId, capacity_bytes: u64) -> Result<VolumeLimits>;

    /// Removes the volume's data; none there is a success.
    fn delete(&self, id: &VolumeId) -> Result<()>;

    /// A volume that is new must not begin with data that its journal has forgotten.
    fn check_no_volume(&self, id: &VolumeId) -> Result<()>;

    /// Nothing is there of a volume that was complete.
    fn has_lost_volume(&self, id: &VolumeId) -> Result<bool>;

    /// What a volume that is not served holds.
    fn used(&self, id: &VolumeId) -> Result<Count>;

    /// Gives the volume's files to group `gid` (CSI: volume_mount_group), unless they have it.
    fn give_group(&self, id: &VolumeId, gid: u32) -> Result<()>;

    /// What the volume's daemon is to get. Takes a limited time.
    fn assign(&self, id: &VolumeId) -> Result<Assigned>;

    /// The data that [`Self::assign`] would give a daemon now. Takes a limited time.
    fn data_id(&self, id: &VolumeId) -> Result<DataId>;

    /// An error where a daemon that was assigned `served` has other data than
    /// [`Self::assign`] would give now, as after a restored backup. While the backend is away, or
    /// where `served` is not known, as of an earlier version's daemon, there is none: the daemon
    /// goes on. Takes a limited time.
    fn check_serves(&self, id: &VolumeId, served: Option<DataId>) -> Result<()>;

    /// How a snapshot or clone can be made where the class allows `allowed`; `class` names where
    /// that is written.
    fn snapshot_mode(&self, allowed: Option<SnapshotMode>, class: &'static str) -> Result<SnapshotMode>;

    /// Copies the volume, whose writers are held back, into the snapshot, in place of what an
    /// earlier call left of it.
    fn snapshot(
        &self,
        id: &SnapshotId,
        from: &VolumeId,
        mode: SnapshotMode,
        progress: &Progress,
    ) -> Result<Count>;

    /// Makes the volume's data from another volume's, whose writers are held back, or from a
    /// snapshot's. The volume must not be in use.
    fn fill(&self, id: &VolumeId, from: &Source, progress: &Progress) -> Result<Count>;

    /// [`Self::delete`] of a snapshot.
    fn delete_snapshot(&self, id: &SnapshotId) -> Result<()>;

    /// [`Self::check_no_volume`] of a snapshot.
    fn check_no_snapshot(&self, id: &SnapshotId) -> Result<()>;

    /// [`Self::has_lost_volume`] of a snapshot.
    fn has_lost_snapshot(&self, id: &SnapshotId) -> Result<bool>;

    /// Everything that was written is on disk when it returns.
    fn sync(&self) -> Result<()>;

    /// While a driver starts, deletions and [`Self::sweep`] only move the data away, and its
    /// removal goes on beside the first calls.
    fn set_starting(&self, is_starting: bool);

    /// Removes what killed copies, deletions and probes left. None may be under way.
    fn sweep(&self) -> Result<()>;
}
