//! Volumes and the claims on them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    ConditionStatus, Kind, LabelSelector, ObjectMeta, ObjectRef, Resources, Time, null_as_default, object,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolume {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub spec: PersistentVolumeSpec,
    #[serde(default, deserialize_with = "null_as_default")]
    pub status: PersistentVolumeStatus,
}

object!(PersistentVolume, Kind::PersistentVolume);

impl PersistentVolume {
    pub fn new(metadata: ObjectMeta, spec: PersistentVolumeSpec) -> Self {
        Self {
            api_version: Kind::PersistentVolume.api_version().to_owned(),
            kind: Kind::PersistentVolume.to_string(),
            metadata,
            spec,
            status: PersistentVolumeStatus::default(),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeSpec {
    /// Key `storage`, bytes.
    #[serde(deserialize_with = "null_as_default")]
    pub capacity: Resources,
    #[serde(deserialize_with = "null_as_default")]
    pub access_modes: Vec<AccessMode>,
    /// Retain unless a class said otherwise.
    #[serde(deserialize_with = "null_as_default")]
    pub persistent_volume_reclaim_policy: ReclaimPolicy,
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub storage_class_name: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub mount_options: Vec<String>,
    #[serde(deserialize_with = "null_as_default")]
    pub volume_mode: VolumeMode,
    /// The claim it is bound, or reserved, to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_ref: Option<ObjectRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub csi: Option<CsiVolumeSource>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiVolumeSource {
    pub driver: String,
    /// The driver's own id of the volume.
    pub volume_handle: String,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub read_only: bool,
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub fs_type: String,
    /// The `volume_context` of CreateVolume.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub volume_attributes: BTreeMap<String, String>,
    /// Unused: this kubelet never attaches volumes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_publish_secret_ref: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_stage_secret_ref: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_publish_secret_ref: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_expand_secret_ref: Option<SecretReference>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_expand_secret_ref: Option<SecretReference>,
}

/// Names a Secret in any namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SecretReference {
    pub name: String,
    pub namespace: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PersistentVolumeStatus {
    pub phase: VolumePhase,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumePhase {
    Pending,
    #[default]
    Available,
    Bound,
    /// Its claim is gone, it is not reclaimed yet.
    Released,
    /// Reclaiming it failed.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AccessMode {
    ReadWriteOnce,
    ReadOnlyMany,
    ReadWriteMany,
    ReadWriteOncePod,
}

impl AccessMode {
    /// As in tables: `RWX`.
    pub fn short(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "RWO",
            Self::ReadOnlyMany => "ROX",
            Self::ReadWriteMany => "RWX",
            Self::ReadWriteOncePod => "RWOP",
        }
    }
}

/// What becomes of the data once the claim is deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReclaimPolicy {
    #[default]
    Retain,
    Delete,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeMode {
    #[default]
    Filesystem,
    Block,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistentVolumeClaim {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub spec: PersistentVolumeClaimSpec,
    #[serde(default, deserialize_with = "null_as_default")]
    pub status: PersistentVolumeClaimStatus,
}

object!(PersistentVolumeClaim, Kind::PersistentVolumeClaim);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeClaimSpec {
    #[serde(deserialize_with = "null_as_default")]
    pub access_modes: Vec<AccessMode>,
    #[serde(deserialize_with = "null_as_default")]
    pub resources: ClaimResources,
    /// Absent: the default class; empty: no class, only volumes without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,
    /// The volume it is bound to; a manifest may ask for one.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub volume_name: String,
    #[serde(deserialize_with = "null_as_default")]
    pub volume_mode: VolumeMode,
    /// Which existing volumes it may be bound to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// What the new volume contains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_source: Option<DataSource>,
    /// The same, in Kubernetes' newer field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_source_ref: Option<DataSource>,
}

impl PersistentVolumeClaimSpec {
    pub fn source(&self) -> Option<&DataSource> {
        self.data_source_ref.as_ref().or(self.data_source.as_ref())
    }
}

/// A VolumeSnapshot or a claim in the claim's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataSource {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub api_group: String,
    pub kind: String,
    pub name: String,
}

/// Key `storage`, bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimResources {
    #[serde(deserialize_with = "null_as_default")]
    pub requests: Resources,
    #[serde(skip_serializing_if = "Resources::is_empty", deserialize_with = "null_as_default")]
    pub limits: Resources,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeClaimStatus {
    pub phase: ClaimPhase,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub access_modes: Vec<AccessMode>,
    #[serde(skip_serializing_if = "Resources::is_empty")]
    pub capacity: Resources,
    /// Present while the volume is expanded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<ClaimCondition>,
}

impl PersistentVolumeClaim {
    pub fn has_condition(&self, condition_type: &str) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|c| c.condition_type == condition_type && c.status == ConditionStatus::True)
    }

    /// Whether it was made for the pod with this uid.
    pub(crate) fn has_owner(&self, pod_uid: &str) -> bool {
        self.metadata.owner_references.iter().any(|owner| owner.uid == pod_uid)
    }

    /// Deletes the claim of a pod that is gone. A pod of the same unchanged file has the uid of that pod, so
    /// the claim no longer names its owner: the next pod waits until it is gone, and does not use it.
    pub(crate) fn give_up(&mut self) {
        self.metadata.owner_references.clear();
        self.metadata.deletion_timestamp.get_or_insert_with(super::now);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimCondition {
    #[serde(rename = "type")]
    pub condition_type: String,
    pub status: ConditionStatus,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClaimPhase {
    #[default]
    Pending,
    Bound,
    /// Its volume is gone.
    Lost,
}
