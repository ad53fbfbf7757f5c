//! Sandboxes and containers as CRI messages.

use proto::cri::{
    Container as CriContainer, ContainerResources, ContainerStatus, ContainerUser, ImageSpec,
    LinuxContainerUser, LinuxPodSandboxStatus, Namespace, PodIp, PodSandbox, PodSandboxNetworkStatus,
    PodSandboxStatus,
};

use crate::runtime::state::{Container, ContainerRecord, RunState, Sandbox, SandboxRecord};
use crate::spec::stop_signal::cri_signal;

/// Reason in the status of a running container if this machine does not enforce its whole
/// specification; the message has the details.
const NOT_ENFORCED: &str = "DeviceControlMissing";

pub(crate) fn sandbox_status(sandbox: &Sandbox) -> PodSandboxStatus {
    let record = sandbox.record();
    let options = record
        .config
        .linux
        .as_ref()
        .and_then(|l| l.security_context.as_ref())
        .and_then(|c| c.namespace_options.clone());
    PodSandboxStatus {
        id: record.id.clone(),
        metadata: record.config.metadata.clone(),
        state: sandbox.state().into(),
        created_at: record.created_at,
        network: network(&record),
        linux: Some(LinuxPodSandboxStatus { namespaces: Some(Namespace { options }) }),
        labels: record.config.labels,
        annotations: record.config.annotations,
        runtime_handler: record.runtime_handler,
    }
}

/// None for a pod in a network namespace that no plugin was called for. kubelet ends every pod that has a network
/// without an address, unless it is in the node's namespace.
fn network(record: &SandboxRecord) -> Option<PodSandboxNetworkStatus> {
    if record.netns.is_some() && record.network.is_none() {
        return None;
    }
    let mut ips = record.ips.iter();
    Some(PodSandboxNetworkStatus {
        ip: ips.next().cloned().unwrap_or_default(),
        additional_ips: ips.map(|ip| PodIp { ip: ip.clone() }).collect(),
    })
}

pub(crate) fn sandbox_item(sandbox: &Sandbox) -> PodSandbox {
    let record = sandbox.record();
    PodSandbox {
        id: record.id.clone(),
        metadata: record.config.metadata.clone(),
        state: sandbox.state().into(),
        created_at: record.created_at,
        labels: record.config.labels,
        annotations: record.config.annotations,
        runtime_handler: record.runtime_handler,
    }
}

pub(crate) fn container_status(container: &Container) -> ContainerStatus {
    let record = &container.record;
    let config = &record.config;
    let state = container.state();
    let mut status = ContainerStatus {
        id: record.id.clone(),
        metadata: config.metadata.clone(),
        state: state.cri().into(),
        created_at: record.created_at,
        image: image(record),
        image_ref: record.image_ref.clone(),
        image_id: record.image_id.clone(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        mounts: config.mounts.clone(),
        log_path: record.log_path.as_ref().map(|p| p.display().to_string()).unwrap_or_default(),
        stop_signal: cri_signal(record.stop_signal).into(),
        resources: container.resources().map(|linux| ContainerResources { linux: Some(linux) }),
        user: Some(ContainerUser {
            linux: Some(LinuxContainerUser {
                uid: record.user.uid.into(),
                gid: record.user.gid.into(),
                supplemental_groups: record.user.groups.iter().map(|g| i64::from(*g)).collect(),
            }),
        }),
        ..Default::default()
    };
    match state {
        RunState::Created => {}
        RunState::Running { started_at, not_enforced, .. } => {
            status.started_at = started_at;
            if let Some(what) = not_enforced {
                NOT_ENFORCED.clone_into(&mut status.reason);
                status.message = what;
            }
        }
        RunState::Exited(ended) => {
            status.started_at = ended.started_at;
            status.finished_at = ended.finished_at;
            status.exit_code = ended.code;
            status.reason = ended.reason;
            status.message = ended.message;
        }
    }
    status
}

/// By a name, as in containerd: kubelet asks for an id, and pods show what is here.
fn image(record: &ContainerRecord) -> Option<ImageSpec> {
    let mut spec = record.config.image.clone()?;
    let names = [&record.image_tag, &spec.user_specified_image];
    if let Some(name) = names.into_iter().find(|name| !name.is_empty()) {
        spec.image = name.clone();
    }
    Some(spec)
}

pub(crate) fn container_item(container: &Container) -> CriContainer {
    let record = &container.record;
    CriContainer {
        id: record.id.clone(),
        pod_sandbox_id: record.sandbox_id.clone(),
        metadata: record.config.metadata.clone(),
        image: record.config.image.clone(),
        image_ref: record.image_ref.clone(),
        state: container.state().cri().into(),
        created_at: record.created_at,
        labels: record.config.labels.clone(),
        annotations: record.config.annotations.clone(),
        image_id: record.image_id.clone(),
    }
}
