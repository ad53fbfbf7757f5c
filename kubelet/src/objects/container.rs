//! One container of a pod, as its manifest describes it.

use serde::{Deserialize, Serialize};

use super::{
    KeySelector, Lifecycle, ObjectFieldSelector, ObjectSelector, Probe, ResourceFieldSelector, Resources,
    SecurityContext, null_as_default,
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    pub name: String,
    #[serde(default)]
    pub image: String,
    /// Absent: see [`Container::pull_policy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// Replaces the image's entrypoint when not empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub args: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub working_dir: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub env: Vec<EnvVar>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub env_from: Vec<EnvFromSource>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub ports: Vec<ContainerPort>,
    #[serde(default, deserialize_with = "null_as_default")]
    pub resources: ResourceRequirements,
    /// Whether a change of a resource restarts the container; not if there is no policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub resize_policy: Vec<ContainerResizePolicy>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub volume_mounts: Vec<VolumeMount>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_context: Option<SecurityContext>,
    /// Its stdin is for clients that attach; otherwise it is empty.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub stdin: bool,
    /// It ends with the first of them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub stdin_once: bool,
    /// Stdin, stdout and stderr are a terminal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub tty: bool,
    #[serde(default = "default_termination_message_path")]
    pub termination_message_path: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub termination_message_policy: TerminationMessagePolicy,
    /// Init containers only, and only `Always`: see [`Container::is_sidecar`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startup_probe: Option<Probe>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub liveness_probe: Option<Probe>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness_probe: Option<Probe>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

impl Container {
    /// The written policy, or Kubernetes' default: `Always` for the tag
    /// `latest` or no tag, `IfNotPresent` for any other tag or a digest.
    pub fn pull_policy(&self) -> PullPolicy {
        self.image_pull_policy.unwrap_or_else(|| {
            if self.image.contains('@') {
                return PullPolicy::IfNotPresent;
            }
            // A colon before the last slash belongs to a registry's port.
            let last = self.image.rsplit('/').next().unwrap_or_default();
            match last.split_once(':') {
                None | Some((_, "latest")) => PullPolicy::Always,
                Some(_) => PullPolicy::IfNotPresent,
            }
        })
    }
}

fn default_termination_message_path() -> String {
    "/dev/termination-log".to_owned()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TerminationMessagePolicy {
    #[default]
    File,
    FallbackToLogsOnError,
}

/// `value`, where `$(NAME)` stands for an earlier variable and `$$` for `$`;
/// or `value_from`, never both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub value: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvVarSource>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EnvVarSource {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field_ref: Option<ObjectFieldSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_field_ref: Option<ResourceFieldSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeySelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeySelector>,
}

/// Every key of a ConfigMap or Secret as a variable; exactly one is set (checked by `manifest`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EnvFromSource {
    /// Before each key.
    #[serde(skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub prefix: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ObjectSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<ObjectSelector>,
}

/// Says which port the program listens on, and opens it on the host if `host_port` is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub container_port: u16,
    /// 0: none.
    #[serde(default, skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub host_port: u16,
    /// The host's address; empty: all of them.
    #[serde(
        default,
        rename = "hostIP",
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_as_default"
    )]
    pub host_ip: String,
    #[serde(default = "default_protocol")]
    pub protocol: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(port: &u16) -> bool {
    *port == 0
}

fn default_protocol() -> String {
    "TCP".to_owned()
}

/// Keys: `cpu`, `memory`, ….
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceRequirements {
    #[serde(skip_serializing_if = "Resources::is_empty", deserialize_with = "null_as_default")]
    pub limits: Resources,
    /// A limit without a request is its request too (see `manifest`).
    #[serde(skip_serializing_if = "Resources::is_empty", deserialize_with = "null_as_default")]
    pub requests: Resources,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerResizePolicy {
    /// `cpu` or `memory`.
    pub resource_name: String,
    /// `NotRequired` or `RestartContainer`.
    pub restart_policy: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    /// One of the pod's volumes.
    pub name: String,
    pub mount_path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_propagation: Option<MountPropagation>,
    /// Whether `read_only` holds for what is mounted below the volume too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recursive_read_only: Option<RecursiveReadOnly>,
    /// The part of the volume that is mounted; the whole volume if empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub sub_path: String,
    /// The same with `$(NAME)` for variables of the container; never both.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub sub_path_expr: String,
}

impl VolumeMount {
    pub fn is_recursive_read_only(&self) -> bool {
        matches!(self.recursive_read_only, Some(RecursiveReadOnly::IfPossible | RecursiveReadOnly::Enabled))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecursiveReadOnly {
    Disabled,
    /// As `Enabled` if the runtime can do it, otherwise as `Disabled`.
    IfPossible,
    Enabled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountPropagation {
    None,
    HostToContainer,
    /// Privileged containers only.
    Bidirectional,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull_policy_of(image: &str) -> PullPolicy {
        let container: Container =
            serde_json::from_value(serde_json::json!({"name": "c", "image": image})).unwrap();
        container.pull_policy()
    }

    #[test]
    fn only_a_moving_tag_is_always_pulled() {
        assert_eq!(pull_policy_of("demo"), PullPolicy::Always);
        assert_eq!(pull_policy_of("demo:latest"), PullPolicy::Always);
        assert_eq!(pull_policy_of("registry:5000/demo"), PullPolicy::Always);
        assert_eq!(pull_policy_of("registry:5000/demo:1.2"), PullPolicy::IfNotPresent);
        assert_eq!(pull_policy_of("demo@sha256:00"), PullPolicy::IfNotPresent);
    }
}
