//! Snapshots of volumes (snapshot.storage.k8s.io/v1).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Kind, ObjectMeta, ObjectRef, Quantity, ReclaimPolicy, Time, VolumeMode, null_as_default, object,
};

/// The API group of the kinds in this module.
pub const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";
/// Marks the class of snapshots that name none.
const DEFAULT_CLASS: &str = "snapshot.storage.kubernetes.io/is-default-class";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshot {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub spec: VolumeSnapshotSpec,
    #[serde(default, deserialize_with = "null_as_default")]
    pub status: VolumeSnapshotStatus,
}

object!(VolumeSnapshot, Kind::VolumeSnapshot);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotSpec {
    pub source: VolumeSnapshotSource,
    /// Absent: the driver's default class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
}

/// Exactly one of them is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotSource {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub persistent_volume_claim_name: String,
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub volume_snapshot_content_name: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotStatus {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub bound_volume_snapshot_content_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// The least size of a volume that is made from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<Quantity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
}

/// Why the last attempt failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotError {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotClass {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub driver: String,
    /// What becomes of the driver's snapshot once the VolumeSnapshot is deleted.
    pub deletion_policy: ReclaimPolicy,
    /// Passed to CreateSnapshot.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub parameters: BTreeMap<String, String>,
}

object!(VolumeSnapshotClass, Kind::VolumeSnapshotClass);

impl VolumeSnapshotClass {
    pub fn is_default(&self) -> bool {
        self.metadata.annotations.get(DEFAULT_CLASS).is_some_and(|value| value == "true")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContent {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub spec: VolumeSnapshotContentSpec,
    #[serde(default, deserialize_with = "null_as_default")]
    pub status: VolumeSnapshotContentStatus,
}

object!(VolumeSnapshotContent, Kind::VolumeSnapshotContent);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentSpec {
    /// The snapshot it is bound, or reserved, to.
    pub volume_snapshot_ref: ObjectRef,
    pub deletion_policy: ReclaimPolicy,
    pub driver: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
    pub source: VolumeSnapshotContentSource,
    /// Unused: every volume is a file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_volume_mode: Option<VolumeMode>,
}

/// Exactly one of them is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotContentSource {
    /// The driver's id of the volume to take a snapshot of.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub volume_handle: String,
    /// The driver's id of a snapshot that exists already.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub snapshot_handle: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotContentStatus {
    /// The driver's own id of the snapshot.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub snapshot_handle: String,
    /// Nanoseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<SnapshotError>,
}
