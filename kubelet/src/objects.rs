//! The Kubernetes objects that the kubelet knows, with exactly the fields it
//! acts on. `manifest` reports every other field of a manifest to the user;
//! [`Document`] keeps all of them.
//!
//! Field names and shapes are those of the Kubernetes API (JSON: camelCase).

mod class;
mod configuration;
mod container;
mod document;
mod event;
#[cfg(test)]
pub(crate) mod kubernetes;
mod label_selector;
mod meta;
mod pod;
mod pod_containers;
mod pod_status;
mod probe;
mod projection;
mod security;
mod snapshot;
mod storage;

use std::fmt;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

pub use ::quantity::{Quantity, QuantityError, Resources};
pub use class::{
    CsiDriver, CsiDriverSpec, FsGroupPolicy, StorageClass, VolumeBindingMode, VolumeLifecycleMode,
};
pub use configuration::{Bytes, ConfigMap, MAX_CONFIGURATION_BYTES, Secret};
pub use container::{
    Container, ContainerPort, ContainerResizePolicy, EnvFromSource, EnvVar, EnvVarSource, MountPropagation,
    PullPolicy, RecursiveReadOnly, ResourceRequirements, TerminationMessagePolicy, VolumeMount,
};
pub use document::Document;
pub use event::{Event, EventSource, EventType};
pub use label_selector::{LabelOperator, LabelRequirement, LabelSelector};
pub use meta::{ObjectMeta, OwnerReference, Time, new_uid, now};
pub use pod::{
    ClaimTemplate, DnsPolicy, EmptyDirVolume, EphemeralVolume, HostAlias, HostPathType, HostPathVolume,
    LocalObjectReference, Pod, PodDnsConfig, PodDnsOption, PodOs, PodReadinessGate, PodSpec, PvcVolume,
    RestartPolicy, Volume, VolumeSource,
};
pub use pod_status::{
    ConditionStatus, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, PodCondition, PodIp, PodPhase, PodStatus, QosClass,
};
pub use probe::{
    ExecAction, GrpcAction, Handler, Hook, HttpGetAction, HttpHeader, Lifecycle, Port, Probe, ProbeKind,
    Scheme, SleepAction, TcpSocketAction,
};
pub use projection::{
    ConfigMapVolume, DownwardFile, DownwardProjection, DownwardVolume, KeySelector, KeyToPath,
    KeysProjection, ObjectFieldSelector, ObjectSelector, ProjectedSource, ProjectedVolume,
    ResourceFieldSelector, SecretVolume,
};
pub use security::{
    Capabilities, FsGroupChangePolicy, PodSecurityContext, SeccompProfile, SeccompProfileType,
    SecurityContext, SupplementalGroupsPolicy, Sysctl,
};
pub use snapshot::{
    SNAPSHOT_GROUP, SnapshotError, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent,
    VolumeSnapshotContentSource, VolumeSnapshotContentSpec, VolumeSnapshotContentStatus,
    VolumeSnapshotSource, VolumeSnapshotSpec, VolumeSnapshotStatus,
};
pub use storage::{
    AccessMode, ClaimCondition, ClaimPhase, ClaimResources, CsiVolumeSource, DataSource, PersistentVolume,
    PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimStatus, PersistentVolumeSpec,
    PersistentVolumeStatus, ReclaimPolicy, SecretReference, VolumeMode, VolumePhase,
};

/// The namespace of what names none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// What every object has.
pub trait Object: Serialize + DeserializeOwned + Clone + Send + Sync + 'static {
    const KIND: Kind;

    fn metadata(&self) -> &ObjectMeta;
    fn metadata_mut(&mut self) -> &mut ObjectMeta;

    /// How events and claims name this object.
    fn reference(&self) -> ObjectRef {
        let meta = self.metadata();
        ObjectRef {
            api_version: Self::KIND.api_version().to_owned(),
            kind: Self::KIND.to_string(),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            uid: meta.uid.clone(),
        }
    }
}

/// The kinds of objects, `Event` (only ever written by the kubelet) and `Node`
/// (only ever referred to) included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Pod,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    CsiDriver,
    VolumeSnapshot,
    VolumeSnapshotClass,
    VolumeSnapshotContent,
    ConfigMap,
    Secret,
    Event,
    Node,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Pod,
        Self::PersistentVolume,
        Self::PersistentVolumeClaim,
        Self::StorageClass,
        Self::CsiDriver,
        Self::VolumeSnapshot,
        Self::VolumeSnapshotClass,
        Self::VolumeSnapshotContent,
        Self::ConfigMap,
        Self::Secret,
        Self::Event,
        Self::Node,
    ];

    /// As in a manifest's `kind`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::PersistentVolume => "PersistentVolume",
            Self::PersistentVolumeClaim => "PersistentVolumeClaim",
            Self::StorageClass => "StorageClass",
            Self::CsiDriver => "CSIDriver",
            Self::VolumeSnapshot => "VolumeSnapshot",
            Self::VolumeSnapshotClass => "VolumeSnapshotClass",
            Self::VolumeSnapshotContent => "VolumeSnapshotContent",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::Event => "Event",
            Self::Node => "Node",
        }
    }

    /// As in a manifest's `apiVersion`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::StorageClass | Self::CsiDriver => "storage.k8s.io/v1",
            Self::VolumeSnapshot | Self::VolumeSnapshotClass | Self::VolumeSnapshotContent => {
                "snapshot.storage.k8s.io/v1"
            }
            Self::Pod
            | Self::PersistentVolume
            | Self::PersistentVolumeClaim
            | Self::ConfigMap
            | Self::Secret
            | Self::Event
            | Self::Node => "v1",
        }
    }

    pub fn is_namespaced(self) -> bool {
        matches!(
            self,
            Self::Pod
                | Self::PersistentVolumeClaim
                | Self::VolumeSnapshot
                | Self::ConfigMap
                | Self::Secret
                | Self::Event
        )
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// `kind` names nothing that this kubelet knows.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind {kind:?}")]
pub struct UnknownKind {
    pub kind: String,
}

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|kind| kind.as_str() == text);
        named.ok_or_else(|| UnknownKind { kind: text.to_owned() })
    }
}

/// One object, named by another (an event's subject, a volume's claim).
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectRef {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

impl ObjectRef {
    /// The node itself, where no object is at fault.
    pub fn node(name: &str) -> Self {
        Self {
            api_version: Kind::Node.api_version().to_owned(),
            kind: Kind::Node.to_string(),
            name: name.to_owned(),
            ..Self::default()
        }
    }
}

/// Kubernetes reads an explicit `null` as an absent field.
fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// The trait of an object type: the same three lines for each of them.
macro_rules! object {
    ($type:ty, $kind:expr) => {
        impl $crate::objects::Object for $type {
            const KIND: $crate::objects::Kind = $kind;

            fn metadata(&self) -> &$crate::objects::ObjectMeta {
                &self.metadata
            }

            fn metadata_mut(&mut self) -> &mut $crate::objects::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}
use object;
