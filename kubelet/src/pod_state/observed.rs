//! The runtime's state of one pod, read each time: the kubelet keeps no copy.

use std::collections::BTreeMap;

use proto::cri::{self, ContainerState, PodSandboxState};

use crate::clients::cri::{
    CONTAINER_NAME_LABEL, Cri, IMAGE_ANNOTATION, POD_NAME_LABEL, POD_NAMESPACE_LABEL, Result,
};
use crate::objects::Time;

/// Both lists are newest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    pub(crate) sandboxes: Vec<cri::PodSandboxStatus>,
    pub(crate) containers: Vec<cri::ContainerStatus>,
    /// The id of the sandbox of each container, by the container's id. A status does not have it.
    pub(crate) sandbox_of: BTreeMap<String, String>,
}

impl Observed {
    pub(crate) async fn of(cri: &Cri, pod_uid: &str) -> Result<Self> {
        let mut observed = Self::default();
        for sandbox in cri.list_pod_sandboxes(Some(pod_uid)).await? {
            observed.sandboxes.extend(cri.pod_sandbox_status(&sandbox.id).await?);
        }
        for container in cri.list_containers(Some(pod_uid)).await? {
            observed.containers.extend(cri.container_status(&container.id).await?);
            observed.sandbox_of.insert(container.id, container.pod_sandbox_id);
        }
        observed.sandboxes.sort_by_key(|s| std::cmp::Reverse((attempt_of(s), s.created_at)));
        observed.containers.sort_by_key(|c| std::cmp::Reverse((instance_of(c), c.created_at)));
        Ok(observed)
    }

    pub(crate) fn ready_sandbox(&self) -> Option<&cri::PodSandboxStatus> {
        self.sandboxes.first().filter(|s| s.state() == PodSandboxState::SandboxReady)
    }

    /// Whether the container was created in the sandbox. Times do not say so: the clock may step back.
    pub(crate) fn is_in(&self, container: &cri::ContainerStatus, sandbox: &cri::PodSandboxStatus) -> bool {
        self.sandbox_of.get(&container.id) == Some(&sandbox.id)
    }

    /// All instances of one container, newest first.
    pub(crate) fn instances<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a cri::ContainerStatus> {
        self.containers.iter().filter(move |c| name_of(c) == name)
    }

    pub(crate) fn newest(&self, name: &str) -> Option<&cri::ContainerStatus> {
        self.containers.iter().find(|c| name_of(c) == name)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &cri::ContainerStatus> {
        self.containers.iter().filter(|c| c.state() == ContainerState::ContainerRunning)
    }

    pub(crate) fn pod_ips(&self) -> Vec<String> {
        self.sandboxes.first().map(pod_ips).unwrap_or_default()
    }
}

pub(crate) fn pod_ips(sandbox: &cri::PodSandboxStatus) -> Vec<String> {
    let Some(network) = &sandbox.network else { return Vec::new() };
    let more = network.additional_ips.iter().map(|ip| ip.ip.clone());
    std::iter::once(network.ip.clone()).chain(more).filter(|ip| !ip.is_empty()).collect()
}

/// 0 for the first instance of a container.
pub(crate) fn instance_of(container: &cri::ContainerStatus) -> u32 {
    container.metadata.as_ref().map_or(0, |m| m.attempt)
}

pub(crate) fn attempt_of(sandbox: &cri::PodSandboxStatus) -> u32 {
    sandbox.metadata.as_ref().map_or(0, |m| m.attempt)
}

pub(crate) fn name_of(container: &cri::ContainerStatus) -> &str {
    let metadata = container.metadata.as_ref().map(|m| m.name.as_str());
    metadata.or(container.labels.get(CONTAINER_NAME_LABEL).map(String::as_str)).unwrap_or_default()
}

/// The image as the manifest named it when the container was made; `None` if it is not known.
pub(crate) fn image_asked_for(container: &cri::ContainerStatus) -> Option<&str> {
    let annotated = container.annotations.get(IMAGE_ANNOTATION);
    // Containers of earlier builds have no annotation.
    let as_asked = container.image.as_ref().map(|image| &image.user_specified_image);
    annotated.or(as_asked.filter(|image| !image.is_empty())).map(String::as_str)
}

/// `namespace/pod/container`, from the labels.
pub(crate) fn full_name_of(container: &cri::ContainerStatus) -> String {
    let label = |key| container.labels.get(key).map_or("", String::as_str);
    format!("{}/{}/{}", label(POD_NAMESPACE_LABEL), label(POD_NAME_LABEL), name_of(container))
}

/// CRI's nanoseconds since 1970; 0 means never.
pub(crate) fn time(nanoseconds: i64) -> Option<Time> {
    (nanoseconds != 0).then(|| Time::from_nanosecond(i128::from(nanoseconds)).ok()).flatten()
}
