//! A pod's init containers and containers as one list.

use super::pod_status::ContainerStatus;
use super::{Container, PodSpec, PodStatus, Probe, ProbeKind};

impl PodSpec {
    /// Init containers, then containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// The container at a place in [`PodSpec::all_containers`].
    ///
    /// # Panics
    ///
    /// If there is no such place.
    pub fn container_at(&self, place: usize) -> &Container {
        match place.checked_sub(self.init_containers.len()) {
            None => &self.init_containers[place],
            Some(index) => &self.containers[index],
        }
    }

    /// The init containers that run as long as the containers do.
    pub fn sidecars(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().filter(|container| container.is_sidecar())
    }

    /// What runs at the same time once the pod has started: sidecars, then containers.
    pub fn lasting_containers(&self) -> impl Iterator<Item = &Container> {
        self.sidecars().chain(&self.containers)
    }

    pub fn container_named(&self, name: &str) -> Option<&Container> {
        self.all_containers().find(|container| container.name == name)
    }
}

impl Container {
    /// Whether an init container keeps running. Containers have no restart policy of their own.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// The name of `lifecycle.stopSignal`; empty without one.
    pub fn stop_signal(&self) -> &str {
        self.lifecycle.as_ref().map_or("", |lifecycle| &lifecycle.stop_signal)
    }

    pub fn probe(&self, kind: ProbeKind) -> Option<&Probe> {
        match kind {
            ProbeKind::Startup => self.startup_probe.as_ref(),
            ProbeKind::Liveness => self.liveness_probe.as_ref(),
            ProbeKind::Readiness => self.readiness_probe.as_ref(),
        }
    }
}

impl PodStatus {
    /// The status of an init container or container.
    pub fn of_container(&self, name: &str) -> Option<&ContainerStatus> {
        self.init_container_statuses.iter().chain(&self.container_statuses).find(|status| status.name == name)
    }
}
