//! The journal's records of volumes and snapshots. Every field that an earlier version did not
//! write has a default, so its entries stay readable.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::capability::Access;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};
use crate::model::name::VolumeName;
use crate::model::parameters::Parameters;
use crate::model::policies::{Allowance, CapacityPolicy, DataPath, Policies};
use crate::model::settings::LaunchSettings;
use crate::model::snapshot_mode::SnapshotMode;

/// One volume, from CreateVolume to the end of DeleteVolume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeRecord {
    pub name: VolumeName,
    pub capacity_bytes: u64,
    pub parameters: Parameters,
    /// Chosen when it was created; see [`Self::policies`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<Policies>,
    /// DeleteVolume has begun.
    pub deleting: bool,
    /// Stored with [`BootRecord`], like `targets`; an earlier version stored both here.
    #[serde(default, skip_serializing)]
    pub stage: Option<StageRecord>,
    /// The published targets by path; there is no separate count.
    #[serde(default, skip_serializing)]
    pub targets: BTreeMap<PathBuf, TargetRecord>,
    /// Never set together with `stage`; stored with it.
    #[serde(default, skip_serializing)]
    pub parked: Option<ParkedRecord>,
    /// What the next publish stages anew, as kubelet does not repeat a NodeStageVolume that was
    /// answered: set when a broken stage is taken down, until the volume is served again or
    /// NodeUnstageVolume. Stored with `stage`.
    #[serde(default, skip_serializing)]
    pub restage: Option<StageSpec>,
    /// The source that it was filled from.
    #[serde(default)]
    pub source: Option<Source>,
    /// False until it has all of `source` and CreateVolume was answered.
    #[serde(default = "filled")]
    pub filled: bool,
    /// By node id. Only with --attach.
    #[serde(default)]
    pub attachments: BTreeMap<String, Attachment>,
}

fn filled() -> bool {
    true
}

impl VolumeRecord {
    /// The volume's stage, or that of its parked mount.
    pub(crate) fn stage_or_parked(&self) -> Option<&StageRecord> {
        self.stage.as_ref().or(self.parked.as_ref().map(|parked| &parked.stage))
    }

    /// What NodeStageVolume was asked for and answered, at the latest change of its group. `None` if
    /// the volume is not staged for kubelet.
    pub(crate) fn answered_stage(&self) -> Option<StageSpec> {
        let served = self.stage.as_ref().filter(|stage| stage.serving.is_some());
        served.map(StageSpec::again).or_else(|| self.restage.clone())
    }

    pub(crate) fn new(name: VolumeName, capacity_bytes: u64, parameters: Parameters) -> Self {
        Self {
            name,
            capacity_bytes,
            parameters,
            policies: None,
            deleting: false,
            stage: None,
            targets: BTreeMap::new(),
            parked: None,
            restage: None,
            source: None,
            filled: true,
            attachments: BTreeMap::new(),
        }
    }

    /// Which way its data takes, and who keeps it within its size.
    pub(crate) fn policies(&self) -> Policies {
        self.policies.unwrap_or_else(|| self.parameters.policies_of_earlier_versions())
    }

    /// Which way its data takes now: that of its stage, or of its class.
    pub(crate) fn data_path(&self) -> DataPath {
        self.stage.as_ref().map_or(self.policies().data_path, |stage| stage.settings.data_path)
    }

    /// Whether the kernel keeps what is written and sends it to the daemon later: by its stage, or its class.
    pub(crate) fn writeback_cache(&self) -> bool {
        self.stage.as_ref().map_or(self.parameters.writeback_cache, |stage| stage.settings.writeback_cache)
    }

    /// Its daemon counts what it holds, and where the pool has quotas, the kernel would limit a new
    /// volume of its class.
    pub(crate) fn lacks_kernel_limit(&self) -> bool {
        self.policies().capacity == CapacityPolicy::Daemon
            && Policies::has_kernel_limit(self.parameters.wanted_policies())
    }

    pub(crate) fn allowance(&self) -> Allowance {
        Allowance { capacity_bytes: self.capacity_bytes, policies: self.policies() }
    }

    /// Checks that its tree may be read and written: it is filled and not being deleted.
    pub(crate) fn check_usable(&self, volume_id: &VolumeId) -> Result<()> {
        if self.deleting {
            return Err(Error::BeingDeleted { volume_id: volume_id.clone() });
        }
        if self.filled { Ok(()) } else { Err(Error::Unfilled { volume_id: volume_id.clone() }) }
    }

    /// The targets that Publish was asked for at `path`, wherever links led at that time.
    pub(crate) fn targets_asked_at(&self, path: &Path) -> Vec<PathBuf> {
        let asked = |(at, target): &(&PathBuf, &TargetRecord)| target.asked.as_ref().unwrap_or(at) == path;
        self.targets.iter().filter(asked).map(|(at, _)| at.clone()).collect()
    }

    /// All paths at which the volume is mounted according to this record, except `path`.
    pub(crate) fn mount_points_beside(&self, path: &Path) -> Vec<&Path> {
        let stage = self.stage.iter().map(|stage| stage.staging_path.as_path());
        stage.chain(self.targets.keys().map(PathBuf::as_path)).filter(|known| *known != path).collect()
    }

    /// The part that ends with this boot.
    pub(crate) fn of_this_boot(&self) -> BootRecord {
        BootRecord {
            stage: self.stage.clone(),
            targets: self.targets.clone(),
            parked: self.parked.clone(),
            restage: self.restage.clone(),
        }
    }

    /// Replaces the part that ends with this boot by `boot`, and returns it.
    pub(crate) fn replace_boot(&mut self, boot: BootRecord) -> BootRecord {
        let BootRecord { stage, targets, parked, restage } = boot;
        BootRecord {
            restage: std::mem::replace(&mut self.restage, restage),
            parked: std::mem::replace(&mut self.parked, parked),
            stage: std::mem::replace(&mut self.stage, stage),
            targets: std::mem::replace(&mut self.targets, targets),
        }
    }
}

/// The part of a volume's record that ends with the machine's boot. The default is a volume that is
/// not on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootRecord {
    #[serde(default)]
    pub stage: Option<StageRecord>,
    #[serde(default)]
    pub targets: BTreeMap<PathBuf, TargetRecord>,
    #[serde(default)]
    pub parked: Option<ParkedRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restage: Option<StageSpec>,
}

impl BootRecord {
    /// The record in a later boot: without processes, whose pids may be reused, and without served
    /// mounts. kubelet stages each volume anew then.
    pub(crate) fn after_the_boot(mut self) -> Self {
        self.restage = None;
        let parked = self.parked.as_mut().map(|parked| &mut parked.stage);
        for stage in self.stage.iter_mut().chain(parked) {
            (stage.serving, stage.handed_to) = (None, None);
            stage.launch.take_if(|launch| launch.process().is_some());
        }
        self
    }
}

/// CreateVolume's volume_content_source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    Snapshot(SnapshotId),
    Volume(VolumeId),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Volume(id) => write!(f, "volume {id}"),
        }
    }
}

/// ControllerPublishVolume has allowed a node to use the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attachment {
    pub access: Access,
    /// In `publish_context`: the node presents it when it stages.
    pub nonce: String,
}

/// NodeStageVolume has begun; the set options show how far it came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StageRecord {
    pub staging_path: PathBuf,
    pub access: Access,
    pub launch: Option<LaunchId>,
    /// `None`: the volume's own key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_key: Option<LaunchKey>,
    /// Set once the daemon has reported that it serves.
    pub serving: Option<Serving>,
    /// The daemon that is to get the volume next, before it serves, or while `serving` does not yet name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handed_to: Option<ProcessId>,
    /// The settings of its daemon.
    #[serde(default)]
    pub settings: LaunchSettings,
    /// The directory that the daemon serves; unknown for a daemon of an earlier version.
    #[serde(default)]
    pub data: Option<DataId>,
    /// The driver aborted its connection: its daemon, running or not, serves no users.
    #[serde(default)]
    pub aborted: bool,
    /// How often another daemon has continued the connection.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub takeovers: u32,
    /// What its daemon's program would ask the kernel for, and the connection lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs_new_stage: Vec<String>,
    /// What the last daemon that served has executed, once the launch of one with another image has taken
    /// the place of its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier_image: Option<String>,
}

/// What a stage is to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StageSpec {
    pub staging_path: PathBuf,
    pub access: Access,
    #[serde(default)]
    pub settings: LaunchSettings,
}

impl StageSpec {
    /// The spec to stage the same volume again.
    pub(crate) fn again(stage: &StageRecord) -> Self {
        Self {
            staging_path: stage.staging_path.clone(),
            access: stage.access,
            settings: stage.settings.clone(),
        }
    }
}

impl StageRecord {
    /// Of a volume that no daemon has been started for yet.
    pub(crate) fn begin(spec: StageSpec) -> Self {
        Self {
            staging_path: spec.staging_path,
            access: spec.access,
            launch: None,
            launch_key: None,
            serving: None,
            handed_to: None,
            settings: spec.settings,
            data: None,
            aborted: false,
            takeovers: 0,
            needs_new_stage: Vec::new(),
            earlier_image: None,
        }
    }

    /// Another daemon serves it.
    pub(crate) fn serve(&mut self, serving: Serving) {
        self.serving = Some(serving);
        (self.handed_to, self.earlier_image) = (None, None);
    }

    pub(crate) fn launch_key(&self, volume_id: &VolumeId) -> LaunchKey {
        self.launch_key.clone().unwrap_or_else(|| volume_id.into())
    }
}

/// Identifies the directory with a volume's data: a pool's path may lead to another one later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataId {
    pub device: u64,
    pub inode: u64,
}

/// NodeUnstageVolume is done, and the daemon waits for the next stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ParkedRecord {
    /// The former stage; nothing is mounted there now.
    pub stage: StageRecord,
    /// When the daemon is to end.
    pub until: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Serving {
    /// `st_dev` minor of the FUSE mount (its major is 0); also the name of its fusectl directory.
    pub connection_minor: u32,
    pub daemon: ProcessId,
    /// Of this daemon, in seconds since 1970; unknown for a daemon of an earlier version.
    #[serde(default)]
    pub since: Option<i64>,
    /// The kernel sends no request again (before Linux 6.9), so no other process holds the connection.
    #[serde(default)]
    pub is_sole_holder: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TargetRecord {
    pub access: Access,
    /// False from before the bind mount until it is verified.
    pub published: bool,
    /// The requested path, if links led from it to this one: they may lead elsewhere at the
    /// unpublish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<PathBuf>,
    /// The volume's group must still be changed for this target: its first publish has begun and
    /// not finished.
    #[serde(default, skip_serializing_if = "is_false")]
    pub owes_group: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// One snapshot, from CreateSnapshot to the end of DeleteSnapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    pub name: VolumeName,
    /// This volume may be deleted: a snapshot outlives its volume.
    pub source: VolumeId,
    /// The smallest capacity of a volume that is restored from it.
    pub source_capacity_bytes: u64,
    /// The source's bytes at the cut: the snapshot's part of the pool.
    pub used_bytes: u64,
    /// The source's inodes; 0 if an earlier version did not count them.
    #[serde(default)]
    pub used_inodes: u64,
    /// The time of the cut.
    pub created: Timestamp,
    pub mode: SnapshotMode,
    pub phase: SnapshotPhase,
    /// How long the source's writers waited.
    pub pause_us: u64,
    /// Nothing limited the source. False if an earlier version made the snapshot.
    #[serde(default, skip_serializing_if = "is_false")]
    pub from_unlimited: bool,
    /// DeleteSnapshot has begun.
    pub deleting: bool,
}

impl SnapshotRecord {
    pub(crate) fn check_not_failed(&self, id: &SnapshotId) -> Result<()> {
        let failed =
            |reason: &str| Error::SnapshotFailed { snapshot_id: id.clone(), reason: reason.to_owned() };
        self.phase.failure().map_or(Ok(()), |reason| Err(failed(reason)))
    }

    /// The data of a failed copy is removed. A lost snapshot keeps its part of the pool: its data may
    /// come back.
    pub(crate) fn is_only_an_entry(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Failed { .. }) && !self.phase.is_lost()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SnapshotPhase {
    /// CreateSnapshot was not answered yet.
    Begun,
    /// The cut is being copied while writers wait; answered with ready_to_use=false.
    Copying,
    Ready,
    /// It was ready, and its data was not in the pool when a driver started. Never deleted for that: an
    /// administrator may put the data back.
    Lost,
    Failed {
        reason: String,
    },
}

/// Why a lost snapshot cannot be used. An earlier version recorded [`SnapshotPhase::Failed`] with
/// exactly this reason.
const LOST: &str = "its data is not in the pool: a deletion began, or it was removed there";

impl SnapshotPhase {
    pub(crate) fn is_lost(&self) -> bool {
        match self {
            Self::Lost => true,
            Self::Failed { reason } => reason == LOST,
            Self::Begun | Self::Copying | Self::Ready => false,
        }
    }

    /// Why it can only be deleted, or must have its data back.
    pub(crate) fn failure(&self) -> Option<&str> {
        match self {
            Self::Lost => Some(LOST),
            Self::Failed { reason } => Some(reason),
            Self::Begun | Self::Copying | Self::Ready => None,
        }
    }
}

/// A time since 1970-01-01T00:00:00Z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Timestamp {
    pub seconds: i64,
    pub nanos: i32,
}

impl Timestamp {
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        }
    }

    /// Rounded to the second.
    pub(crate) fn after(self, delay: Duration) -> Self {
        let seconds = i64::try_from(delay.as_secs()).unwrap_or(i64::MAX);
        Self { seconds: self.seconds.saturating_add(seconds), ..self }
    }
}

impl From<Timestamp> for proto::csi::Timestamp {
    fn from(at: Timestamp) -> Self {
        Self { seconds: at.seconds, nanos: at.nanos }
    }
}
