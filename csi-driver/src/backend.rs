//! Where the data of volumes and snapshots is. The engine uses it only through [`VolumeBackend`].
//! There is one backend, `local`: each volume is a directory on this node.
//!
//! A backend makes no decisions about calls. The journal records what exists and which operation is
//! under way. The engine holds a volume's lock while it changes the volume's data.

pub(crate) mod copies;
pub(crate) mod local;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use proto::handover::{Role, assignment};

use crate::backend::copies::{Count, Progress};
use crate::error::Result;
use crate::model::capacity::{Room, VolumeLimits};
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::policies::{Allowance, CapacityPolicy, Policies, Wanted};
use crate::model::records::{DataId, Source};
use crate::model::snapshot_mode::SnapshotMode;
use crate::model::topology::Topology;

/// What the backend contributes to a daemon's start.
pub(crate) struct Assigned {
    pub(crate) id: DataId,
    /// The backend's part of the Assignment.
    pub(crate) backend: assignment::Backend,
    /// The descriptors that only this backend passes.
    pub(crate) descriptors: Vec<(Role, OwnedFd)>,
}

/// The data that the backend has, without the journal.
#[derive(Debug, Default)]
pub(crate) struct Diagnosis {
    /// Why the backend cannot be used.
    pub(crate) away: Option<String>,
    /// Empty if they cannot be listed.
    pub(crate) volumes: BTreeSet<VolumeId>,
    pub(crate) snapshots: BTreeSet<SnapshotId>,
    /// Those of `snapshots` that can be restored.
    pub(crate) complete_snapshots: BTreeSet<SnapshotId>,
    /// What copies and deletions left that were killed, or have not ended.
    pub(crate) leftovers: Vec<PathBuf>,
    /// Volumes whose daemon serves other data than [`VolumeBackend::assign`] would pass now.
    pub(crate) serving_other_data: BTreeSet<VolumeId>,
    /// Why the kernel limits no volume, and what changes that.
    pub(crate) no_kernel_limits: Option<String>,
    /// Volumes whose data the kernel cannot limit as they are, although it limits new ones: why, and what
    /// changes that.
    pub(crate) not_to_limit: BTreeMap<VolumeId, String>,
    /// How a clone is made where the kernel limits new volumes. It gives a volume that its daemon
    /// counts the kernel's limit.
    pub(crate) clones_with_kernel_limits: Option<SnapshotMode>,
    /// What the kernel counts is wrong.
    pub(crate) counts_are_wrong: Option<String>,
}

/// Calls may block, unless their documentation gives a limit. Every call that changes data may be
/// repeated after a failure or a kill at any point, also by the next driver.
pub(crate) trait VolumeBackend: Debug + Send + Sync {
    /// The nodes that can create and use volumes.
    fn topology(&self) -> &Topology;

    /// An error while the backend is away: unmounted, replaced by another one, or not answering.
    /// Returns within a limited time.
    fn check_present(&self) -> Result<()>;

    /// What an administrator has to know of the data. Changes nothing, also where nothing was stored
    /// yet. `served` are volumes with running daemons, and the data that each was assigned.
    fn diagnose(&self, served: &BTreeMap<VolumeId, DataId>) -> Diagnosis;

    /// Who limits new volumes, and what changes that: one sentence for administrators.
    fn about_limits(&self) -> String;

    /// Checks that the backend is present and accepts writes.
    fn probe(&self) -> linux::Result<()>;

    /// The space that all volumes together may claim.
    fn room(&self) -> Result<Room>;

    /// The limits of a volume of `capacity_bytes`.
    fn limits(&self, capacity_bytes: u64) -> VolumeLimits;

    /// Whether the kernel has FUSE_PASSTHROUGH.
    fn has_passthrough(&self) -> Result<bool>;

    /// The policies of a new volume. `keeper`: whether the driver has one that registers files for
    /// FUSE_PASSTHROUGH. An error names what the class asks for and cannot have, and how
    /// the administrator gets it.
    fn policies(&self, wanted: Wanted, keeper: bool) -> Result<Policies>;

    /// Creates the volume, empty. An existing one is a success.
    fn create(&self, id: &VolumeId, allowed: Allowance) -> Result<()>;

    /// Makes room for a volume that has grown to its allowance, and returns its limits.
    fn expand(&self, id: &VolumeId, allowed: Allowance) -> Result<VolumeLimits>;

    /// Removes the volume's data. Missing data is a success.
    fn delete(&self, id: &VolumeId) -> Result<()>;

    /// Refuses a new volume where the backend still has data under its id: the journal has lost
    /// that entry.
    fn check_no_volume(&self, id: &VolumeId) -> Result<()>;

    /// True if the data of a volume that was complete is gone.
    fn has_lost_volume(&self, id: &VolumeId) -> Result<bool>;

    /// What the volume holds. Only for a volume that no daemon serves, or that the kernel limits.
    fn used(&self, id: &VolumeId, policy: CapacityPolicy) -> Result<Count>;

    /// Whether a copy of the volume, a snapshot or a clone of that allowance, is one moment even while
    /// the volume is written to.
    fn cuts_at_once(&self, from: &VolumeId, clone: Option<(&VolumeId, Allowance)>) -> Result<bool>;

    /// Passes what the kernel counts of these volumes, which are served, on to their daemons, and limits them again
    /// if the kernel has forgotten that. Failures are only logged.
    fn publish_use(&self, volumes: &[(VolumeId, Allowance)]);

    /// Gives the volume's files to group `gid` (CSI: volume_mount_group), unless they have it.
    fn give_group(&self, id: &VolumeId, gid: u32) -> Result<()>;

    /// The descriptors and settings for the volume's daemon. An error if the kernel is to limit the
    /// volume and cannot any more. Returns within a limited time.
    fn assign(&self, id: &VolumeId, allowed: Allowance) -> Result<Assigned>;

    /// The backend's part of an Assignment to a daemon that continues an earlier one's connection.
    fn assignment(&self) -> assignment::Backend;

    /// The data that [`Self::assign`] would pass now. Returns within a limited time.
    fn data_id(&self, id: &VolumeId) -> Result<DataId>;

    /// An error if a daemon that was assigned `served` has other data than [`Self::assign`] would
    /// pass now, as after a restored backup. No error while the backend is away, or where `served`
    /// is not known (a daemon of an earlier version): the daemon continues. Returns within a
    /// limited time.
    fn check_serves(&self, id: &VolumeId, served: Option<DataId>) -> Result<()>;

    /// How a snapshot or clone can be made if the class allows `allowed`. `class` names the object
    /// that says so, for messages.
    fn snapshot_mode(&self, allowed: Option<SnapshotMode>, class: &'static str) -> Result<SnapshotMode>;

    /// Copies the volume into the snapshot and replaces what an earlier call left of it. The
    /// volume's writers are held back.
    fn snapshot(
        &self,
        id: &SnapshotId,
        from: &VolumeId,
        mode: SnapshotMode,
        progress: &Progress,
    ) -> Result<Count>;

    /// Makes the volume's data from a snapshot or from another volume, whose writers are held back.
    /// The new volume must not be in use.
    fn fill(&self, id: &VolumeId, allowed: Allowance, from: &Source, progress: &Progress) -> Result<Count>;

    /// [`Self::delete`] of a snapshot.
    fn delete_snapshot(&self, id: &SnapshotId) -> Result<()>;

    /// [`Self::check_no_volume`] of a snapshot.
    fn check_no_snapshot(&self, id: &SnapshotId) -> Result<()>;

    /// True if a snapshot that was complete has no data now: its directory alone is none. An error if that
    /// cannot be seen.
    fn has_lost_snapshot(&self, id: &SnapshotId) -> Result<bool>;

    /// When it returns, all earlier writes are on disk.
    fn sync(&self) -> Result<()>;

    /// While a driver starts, deletions and [`Self::sweep`] only move data to the trash. It is
    /// removed while the first calls are already answered.
    fn set_starting(&self, is_starting: bool);

    /// Removes what killed copies, deletions and probes left. None of them may be under way.
    fn sweep(&self) -> Result<()>;
}
