//! References from pods to ConfigMaps, Secrets and the pod's own fields: as volumes and as
//! variables of the environment.

use serde::{Deserialize, Serialize};

use super::{Quantity, null_as_default};

/// A field of the pod itself: `metadata.name`, `status.podIP`, ….
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectFieldSelector {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    pub field_path: String,
}

/// A limit or request of a container, such as `limits.memory`, in units of `divisor`, rounded up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceFieldSelector {
    /// In the environment: the container itself if empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub container_name: String,
    pub resource: String,
    /// 1 if absent or 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divisor: Option<Quantity>,
}

/// One key of a ConfigMap or Secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeySelector {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub name: String,
    pub key: String,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub optional: bool,
}

/// A whole ConfigMap or Secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectSelector {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub name: String,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub optional: bool,
}

/// A key's file in a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyToPath {
    pub key: String,
    /// Below the volume's root.
    pub path: String,
    /// Permission bits; the volume's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

/// The files of a ConfigMap; every key is one if `items` is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigMapVolume {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub name: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub items: Vec<KeyToPath>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_mode: Option<u32>,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub optional: bool,
}

/// The files of a Secret; every key is one if `items` is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SecretVolume {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub secret_name: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub items: Vec<KeyToPath>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_mode: Option<u32>,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub optional: bool,
}

/// Fields of the pod as files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DownwardVolume {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub items: Vec<DownwardFile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_mode: Option<u32>,
}

/// Exactly one of the references is set (checked by `manifest`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DownwardFile {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field_ref: Option<ObjectFieldSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_field_ref: Option<ResourceFieldSelector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

/// Several sources in one volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProjectedVolume {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub sources: Vec<ProjectedSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_mode: Option<u32>,
}

/// Exactly one is set (checked by `manifest`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProjectedSource {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<KeysProjection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<KeysProjection>,
    #[serde(rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    pub downward_api: Option<DownwardProjection>,
}

/// The files of a ConfigMap or Secret in a projected volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeysProjection {
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub name: String,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub items: Vec<KeyToPath>,
    #[serde(skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub optional: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DownwardProjection {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub items: Vec<DownwardFile>,
}
