//! The pod of a volume's daemon, or of one that is started before it gets a volume.
//!
//! The pod gets no network under Hawser's runtime, no privilege but the six that serving several owners'
//! files takes, no system call that RuntimeDefault refuses, no /dev/fuse, and of the host only the
//! directory with its own dial socket. It is never restarted: a daemon that ended has lost its connection,
//! and the next stage starts another.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, EnvVar, HostPathVolumeSource, Pod, PodSpec, ResourceRequirements,
    SeccompProfile, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proto::handover::NONCE_VARIABLE;
use proto::mount_pod::{
    CONTAINER, NAMESPACE, NETWORK_ANNOTATION, ROLE, ROLE_LABEL, RUN_DIR_ANNOTATION, VOLUME_ID_ANNOTATION,
    VOLUME_LABEL,
};

use super::super::process::WAIT;
use super::super::{LaunchSpec, memory};
use crate::daemon::dial::DialDir;
use crate::model::capacity::parse_bytes;
use crate::model::parameters::Resources;

/// What the class `system-node-critical` stands for. No admission fills it in for a
/// static pod, and kubelet's graceful node shutdown ends pods by it: a mount pod ends
/// after the pods that use its volume.
pub(super) const NODE_CRITICAL: i32 = 2_000_001_000;
const CAPABILITIES: [&str; 6] = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"];
/// Where the dial socket's directory is in the container.
pub(super) const DIAL_DIR: &str = "/run/hawser";
/// What the kernel calls the daemon's process.
pub(super) const PROCESS: &str = "hawser-volume";
const DIAL_VOLUME: &str = "dial";

pub(super) fn of(name: String, spec: LaunchSpec<'_>, image: &str, run_dir: &Path) -> Pod {
    let dial_dir = DialDir::of(run_dir, spec.key);
    let host_path = HostPathVolumeSource {
        path: dial_dir.path().to_string_lossy().into_owned(),
        type_: Some("Directory".to_owned()),
    };
    Pod {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: Some(NAMESPACE.to_owned()),
            labels: Some(labels(spec)),
            annotations: Some(annotations(spec, run_dir)),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            restart_policy: Some("Never".to_owned()),
            priority_class_name: Some("system-node-critical".to_owned()),
            priority: Some(NODE_CRITICAL),
            termination_grace_period_seconds: Some(spec.settings.grace_seconds.into()),
            enable_service_links: Some(false),
            automount_service_account_token: Some(false),
            containers: vec![container(spec, image)],
            volumes: Some(vec![Volume {
                name: DIAL_VOLUME.to_owned(),
                host_path: Some(host_path),
                ..Volume::default()
            }]),
            ..PodSpec::default()
        }),
        ..Pod::default()
    }
}

fn annotations(spec: LaunchSpec<'_>, run_dir: &Path) -> BTreeMap<String, String> {
    let run_dir = run_dir.to_string_lossy();
    let mut annotations = owned([(NETWORK_ANNOTATION, "none"), (RUN_DIR_ANNOTATION, &run_dir)]);
    annotations.extend(spec.volume_id.map(|id| (VOLUME_ID_ANNOTATION.to_owned(), id.to_string())));
    annotations
}

fn labels(spec: LaunchSpec<'_>) -> BTreeMap<String, String> {
    let mut labels = owned([("app.kubernetes.io/managed-by", "hawser-csi"), (ROLE_LABEL, ROLE)]);
    labels.extend(spec.volume_id.map(|id| (VOLUME_LABEL.to_owned(), id.key().to_owned())));
    labels.extend(spec.settings.labels.iter().map(|(key, value)| (key.clone(), value.clone())));
    labels
}

fn container(spec: LaunchSpec<'_>, image: &str) -> Container {
    let settings = spec.settings;
    let socket = format!("{DIAL_DIR}/dial.sock");
    let arguments = ["serve", "--socket", &socket, "--log-level", settings.log_level.as_str()];
    let arguments = arguments.into_iter().chain(spec.volume_id.is_none().then_some(WAIT));
    let default_limit = memory::default_limit_bytes(spec.inode_limit, settings.known_inodes());
    Container {
        name: CONTAINER.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some("Never".to_owned()),
        command: Some(vec![format!("/{PROCESS}")]),
        args: Some(arguments.map(str::to_owned).collect()),
        env: Some(vec![EnvVar {
            name: NONCE_VARIABLE.to_owned(),
            value: Some(spec.nonce.to_owned()),
            ..EnvVar::default()
        }]),
        resources: Some(resources(&settings.resources, default_limit)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                add: Some(CAPABILITIES.map(str::to_owned).to_vec()),
            }),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                ..SeccompProfile::default()
            }),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(vec![VolumeMount {
            name: DIAL_VOLUME.to_owned(),
            mount_path: DIAL_DIR.to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        }]),
        ..Container::default()
    }
}

/// Kubernetes refuses a pod whose limit is below its request: where one of the
/// two is given, the other gives way.
fn resources(given: &Resources, default_limit_bytes: u64) -> ResourceRequirements {
    let cpu_request = given.cpu_request.as_deref().or(given.cpu_limit.as_deref()).unwrap_or("10m");
    let memory_request = given.memory_request.as_deref().unwrap_or("32Mi");
    let bytes = |quantity| parse_bytes(quantity).unwrap_or_default();
    let default_limit = if default_limit_bytes < bytes(memory_request) {
        memory_request.to_owned()
    } else {
        format!("{}Mi", default_limit_bytes >> 20)
    };
    let memory_limit = given.memory_limit.as_deref().unwrap_or(&default_limit);
    let mut limits = quantities([("memory", memory_limit)]);
    if let Some(cpu_limit) = &given.cpu_limit {
        limits.extend(quantities([("cpu", cpu_limit)]));
    }
    ResourceRequirements {
        requests: Some(quantities([("cpu", cpu_request), ("memory", memory_request)])),
        limits: Some(limits),
        ..ResourceRequirements::default()
    }
}

pub(super) fn quantities<const N: usize>(amounts: [(&str, &str); N]) -> BTreeMap<String, Quantity> {
    amounts.map(|(resource, amount)| (resource.to_owned(), Quantity(amount.to_owned()))).into()
}

pub(super) fn owned<const N: usize>(pairs: [(&str, &str); N]) -> BTreeMap<String, String> {
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::parameters::{Parameters, PodParameters};

    #[test]
    fn a_limit_is_never_below_its_request() {
        for (given, requests, limits) in [
            (&[][..], [("cpu", "10m"), ("memory", "32Mi")], &[("memory", "512Mi")][..]),
            (
                &[("mountPodCpuLimit", "5m")],
                [("cpu", "5m"), ("memory", "32Mi")],
                &[("cpu", "5m"), ("memory", "512Mi")],
            ),
            (&[("mountPodMemoryRequest", "1Gi")], [("cpu", "10m"), ("memory", "1Gi")], &[("memory", "1Gi")]),
            (&[("mountPodMemoryLimit", "64Mi")], [("cpu", "10m"), ("memory", "32Mi")], &[("memory", "64Mi")]),
        ] {
            let given = given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            let PodParameters { resources: given, .. } = Parameters::parse(&given).unwrap().pod;
            let shown = resources(&given, 512 << 20);
            assert_eq!(shown.requests, Some(quantities(requests)));
            let wanted = limits.iter().map(|(key, value)| ((*key).to_owned(), Quantity((*value).to_owned())));
            assert_eq!(shown.limits, Some(wanted.collect()));
        }
    }
}
