//! How volumes are made (StorageClass) and what a driver wants from the
//! kubelet (CSIDriver).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Kind, ObjectMeta, ReclaimPolicy, null_as_default, object};

/// Marks the class of claims that name none.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StorageClass {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    /// A CSI driver's name.
    pub provisioner: String,
    /// Passed to CreateVolume.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub parameters: BTreeMap<String, String>,
    #[serde(default = "delete")]
    pub reclaim_policy: ReclaimPolicy,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub mount_options: Vec<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub volume_binding_mode: VolumeBindingMode,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub allow_volume_expansion: bool,
}

object!(StorageClass, Kind::StorageClass);

impl StorageClass {
    pub fn is_default(&self) -> bool {
        self.metadata.annotations.get(DEFAULT_CLASS).is_some_and(|value| value == "true")
    }
}

fn delete() -> ReclaimPolicy {
    ReclaimPolicy::Delete
}

/// When a claim gets its volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeBindingMode {
    #[default]
    Immediate,
    WaitForFirstConsumer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiDriver {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    #[serde(default, deserialize_with = "null_as_default")]
    pub spec: CsiDriverSpec,
}

object!(CsiDriver, Kind::CsiDriver);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiDriverSpec {
    /// Whether ControllerPublishVolume comes before the node's calls.
    pub attach_required: bool,
    /// Whether NodePublishVolume gets the pod's name, namespace and uid.
    pub pod_info_on_mount: bool,
    #[serde(deserialize_with = "null_as_default")]
    pub volume_lifecycle_modes: Vec<VolumeLifecycleMode>,
    #[serde(deserialize_with = "null_as_default")]
    pub fs_group_policy: FsGroupPolicy,
    /// Whether NodePublishVolume is called again while the pod runs.
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub requires_republish: bool,
    /// Says that scheduling looks at capacity; nothing is scheduled here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub storage_capacity: bool,
}

impl Default for CsiDriverSpec {
    fn default() -> Self {
        Self {
            attach_required: true,
            pod_info_on_mount: false,
            volume_lifecycle_modes: vec![VolumeLifecycleMode::Persistent],
            fs_group_policy: FsGroupPolicy::default(),
            requires_republish: false,
            storage_capacity: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeLifecycleMode {
    Persistent,
    Ephemeral,
}

/// When the kubelet gives a volume's files to the pod's fsGroup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsGroupPolicy {
    /// Only with an fsType, and only for single-node writers.
    #[default]
    ReadWriteOnceWithFSType,
    File,
    None,
}
