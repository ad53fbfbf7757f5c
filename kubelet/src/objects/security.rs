//! Security contexts of pods and containers.

use serde::{Deserialize, Serialize};

use super::null_as_default;

/// What holds for every container of a pod that does not say otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSecurityContext {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_group: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_non_root: Option<bool>,
    /// A supplemental group, and the group of volumes that support ownership.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fs_group: Option<u32>,
    /// Of claims; emptyDirs are always given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fs_group_change_policy: Option<FsGroupChangePolicy>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub supplemental_groups: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supplemental_groups_policy: Option<SupplementalGroupsPolicy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp_profile: Option<SeccompProfile>,
    /// Kernel settings of the pod's namespaces.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub sysctls: Vec<Sysctl>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sysctl {
    /// Separated by dots, or by slashes.
    pub name: String,
    pub value: String,
}

/// When a volume's files are given to `fs_group` that may be its already.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsGroupChangePolicy {
    #[default]
    Always,
    /// Only if its root is another group's or lacks what the group needs.
    OnRootMismatch,
}

/// Which groups a container's first process has beside its own and `supplemental_groups`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SupplementalGroupsPolicy {
    /// Those that the image's /etc/group gives its user.
    #[default]
    Merge,
    /// None.
    Strict,
}

/// A container's own; wins over the pod's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SecurityContext {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub privileged: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_group: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_non_root: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only_root_filesystem: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_privilege_escalation: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp_profile: Option<SeccompProfile>,
}

/// Names without the `CAP_` prefix, or `ALL`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub add: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub drop: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeccompProfile {
    #[serde(rename = "type")]
    pub profile_type: SeccompProfileType,
    /// Only with `Localhost`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub localhost_profile: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeccompProfileType {
    RuntimeDefault,
    Unconfined,
    Localhost,
}
