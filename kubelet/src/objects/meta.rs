//! `metadata`: names, identity, times.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::null_as_default;

/// A moment, as RFC 3339 in UTC.
pub type Time = jiff::Timestamp;

/// Now, cut to the second as in Kubernetes' objects.
pub fn now() -> Time {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// A random UUID from the kernel, in its usual text form.
pub fn new_uid() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ObjectMeta {
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
    /// Empty for kinds without a namespace.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub namespace: String,
    /// Pods: derived from their content where the manifest gives none. Others: random.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub uid: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub annotations: BTreeMap<String, String>,
    /// Of pods: 1, and one more for each change of the spec and for the deletion. Only the kubelet writes it; 0 where
    /// it is not counted.
    #[serde(skip_serializing_if = "is_not_counted", deserialize_with = "null_as_default")]
    pub generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_timestamp: Option<Time>,
    /// Set once the object is to go; it stays until everything behind it is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_timestamp: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_grace_period_seconds: Option<u64>,
    /// The objects without which this one goes; only the kubelet writes it.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub owner_references: Vec<OwnerReference>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub controller: bool,
    pub block_owner_deletion: bool,
}

/// Not written: a pod's uid follows from its serialized manifest.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature of skip_serializing_if")]
pub(super) fn is_not_counted(generation: &u64) -> bool {
    *generation == 0
}

impl ObjectMeta {
    pub fn is_deleted(&self) -> bool {
        self.deletion_timestamp.is_some()
    }
}
