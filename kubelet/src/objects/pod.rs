//! A pod: what is wanted of it. What became of it is in `pod_status`.

use serde::{Deserialize, Serialize};

use super::{
    ConfigMapVolume, Container, DownwardVolume, Kind, ObjectMeta, PersistentVolumeClaimSpec,
    PodSecurityContext, PodStatus, ProjectedVolume, Quantity, SecretVolume, null_as_default, object,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    pub spec: PodSpec,
    #[serde(default, deserialize_with = "null_as_default")]
    pub status: PodStatus,
}

object!(Pod, Kind::Pod);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Run one after another before the containers; sidecars keep running beside them.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub init_containers: Vec<Container>,
    pub containers: Vec<Container>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub volumes: Vec<Volume>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub restart_policy: RestartPolicy,
    #[serde(default = "default_grace")]
    pub termination_grace_period_seconds: u64,
    /// Counted from the pod's start; then the pod fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_deadline_seconds: Option<u64>,
    /// Conditions that must be True for the pod to be ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub readiness_gates: Vec<PodReadinessGate>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub host_network: bool,
    #[serde(
        default,
        rename = "hostPID",
        skip_serializing_if = "std::ops::Not::not",
        deserialize_with = "null_as_default"
    )]
    pub host_pid: bool,
    #[serde(
        default,
        rename = "hostIPC",
        skip_serializing_if = "std::ops::Not::not",
        deserialize_with = "null_as_default"
    )]
    pub host_ipc: bool,
    /// The containers see each other's processes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub share_process_namespace: bool,
    /// The pod's name where empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub hostname: String,
    /// Gives the pod a domain.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub subdomain: String,
    /// The kernel's host name has the domain.
    #[serde(
        default,
        rename = "setHostnameAsFQDN",
        skip_serializing_if = "std::ops::Not::not",
        deserialize_with = "null_as_default"
    )]
    pub set_hostname_as_fqdn: bool,
    /// Secrets with credentials of registries.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// More lines of /etc/hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub host_aliases: Vec<HostAlias>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub dns_policy: DnsPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns_config: Option<PodDnsConfig>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub security_context: PodSecurityContext,
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub node_name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os: Option<PodOs>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub priority_class_name: String,
    /// Only `valueFrom.fieldRef` shows it: there are no service accounts.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub service_account_name: String,
}

/// The system that the pod's programs are for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodOs {
    /// Only `linux` (checked by `manifest`).
    pub name: String,
}

/// An object of the pod's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LocalObjectReference {
    #[serde(deserialize_with = "null_as_default")]
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodReadinessGate {
    pub condition_type: String,
}

fn default_grace() -> u64 {
    30
}

/// A line of /etc/hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAlias {
    pub ip: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub hostnames: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DnsPolicy {
    /// Without a cluster there is no cluster DNS: the same as `Default`.
    #[default]
    ClusterFirst,
    ClusterFirstWithHostNet,
    /// The node's own resolv.conf.
    Default,
    /// Only `dns_config`.
    None,
}

/// Added to what the policy gives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodDnsConfig {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub nameservers: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub searches: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub options: Vec<PodDnsOption>,
}

/// `name` or `name:value` of resolv.conf's `options`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodDnsOption {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

/// One volume; exactly one of the sources is set (checked by `manifest`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDirVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<PvcVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<SecretVolume>,
    #[serde(default, rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    pub downward_api: Option<DownwardVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projected: Option<ProjectedVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<EphemeralVolume>,
}

/// Where a volume comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeSource<'a> {
    EmptyDir(&'a EmptyDirVolume),
    HostPath(&'a HostPathVolume),
    Claim(&'a PvcVolume),
    ConfigMap(&'a ConfigMapVolume),
    Secret(&'a SecretVolume),
    Downward(&'a DownwardVolume),
    Projected(&'a ProjectedVolume),
    Ephemeral(&'a EphemeralVolume),
}

impl Volume {
    /// The volume's source; `None` when it has none or more than one.
    pub fn source(&self) -> Option<VolumeSource<'_>> {
        let mut given = self.sources();
        match (given.next(), given.next()) {
            (Some(source), None) => Some(source),
            _ => None,
        }
    }

    /// The claim that a pod of this name mounts here, if any: one that it names, or its own.
    pub fn claim_name(&self, pod: &str) -> Option<String> {
        match self.source()? {
            VolumeSource::Claim(source) => Some(source.claim_name.clone()),
            VolumeSource::Ephemeral(_) => Some(format!("{pod}-{}", self.name)),
            _ => None,
        }
    }

    /// Every source that is set.
    pub fn sources(&self) -> impl Iterator<Item = VolumeSource<'_>> {
        [
            self.empty_dir.as_ref().map(VolumeSource::EmptyDir),
            self.host_path.as_ref().map(VolumeSource::HostPath),
            self.persistent_volume_claim.as_ref().map(VolumeSource::Claim),
            self.config_map.as_ref().map(VolumeSource::ConfigMap),
            self.secret.as_ref().map(VolumeSource::Secret),
            self.downward_api.as_ref().map(VolumeSource::Downward),
            self.projected.as_ref().map(VolumeSource::Projected),
            self.ephemeral.as_ref().map(VolumeSource::Ephemeral),
        ]
        .into_iter()
        .flatten()
    }
}

/// A directory that lives as long as the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EmptyDirVolume {
    /// `""` (disk) or `Memory` (tmpfs).
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub medium: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<Quantity>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPathVolume {
    pub path: String,
    #[serde(default, rename = "type", deserialize_with = "null_as_default")]
    pub path_type: HostPathType,
}

/// What must be at a host path before it is mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostPathType {
    /// Nothing is checked.
    #[default]
    #[serde(rename = "")]
    Unset,
    DirectoryOrCreate,
    Directory,
    FileOrCreate,
    File,
    Socket,
    CharDevice,
    BlockDevice,
}

/// A claim that is made with the pod and goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EphemeralVolume {
    pub volume_claim_template: ClaimTemplate,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimTemplate {
    /// Labels and annotations of the claim.
    #[serde(default, deserialize_with = "null_as_default")]
    pub metadata: ObjectMeta,
    pub spec: PersistentVolumeClaimSpec,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PvcVolume {
    /// A claim of the pod's namespace.
    pub claim_name: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub read_only: bool,
}
