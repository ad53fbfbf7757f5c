//! A manifest that changes while its pod runs: the worker takes the change over, and gives running
//! containers their new limits (kubelet, kuberuntime_manager.go: doPodResizeAction).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::cri::{ContainerStatus, LinuxContainerResources};

use super::Worker;
use crate::objects::EventType;
use crate::pod::resources;
use crate::pod::resources::resize::{self, Steps};
use crate::pod_state::observed::Observed;
use crate::pod_state::plan;

/// After a resize that the kernel or the runtime refused.
const RETRY: Duration = Duration::from_secs(10);

impl Worker {
    /// The store may have another form of the same pod. Another image resets the back-off of its container, also
    /// one that the container had before.
    pub(super) fn follow_changes(&mut self) {
        let own = &self.pod.metadata;
        let Some(known) = self.tools.store.pod(&own.namespace, &own.name) else { return };
        if known.metadata.uid != own.uid || (known.spec == self.pod.spec && known.metadata == *own) {
            return;
        }
        for container in known.spec.init_containers.iter().chain(&known.spec.containers) {
            let before = self.pod.spec.container_named(&container.name);
            if before.is_some_and(|before| before.image != container.image) {
                self.restarts.forget(&container.name);
            }
        }
        let pod = Arc::make_mut(&mut self.pod);
        pod.spec = known.spec.clone();
        pod.metadata = known.metadata.clone();
        if let Some(admitted) = &self.admitted {
            admitted.update(&self.pod);
        }
    }

    /// Forgets what earlier rounds noted for changes that are made.
    pub(super) fn forget_changes(&mut self, plan: &[plan::Action], observed: &Observed) {
        self.replaced.retain(|id| observed.containers.iter().any(|container| container.id == *id));
        if !plan.iter().any(|action| matches!(action, plan::Action::Resize { .. })) {
            self.resize_problem = None;
        }
    }

    /// Returns when to try again; `None` if all containers have their limits.
    pub(super) async fn resize(&mut self, places: &[plan::Container]) -> Option<Duration> {
        let resized = self.try_resize(places).await;
        let names: Vec<&str> =
            places.iter().map(|place| self.pod.spec.container_at(*place).name.as_str()).collect();
        match resized {
            Ok(()) => {
                let message = format!("Pod resize completed: {}", names.join(", "));
                self.record(EventType::Normal, "ResizeCompleted", &message);
                self.resize_problem = None;
                None
            }
            Err(problem) => {
                let message = format!("Pod resize error: {}: {problem}", names.join(", "));
                if self.resize_problem.as_ref() != Some(&problem) {
                    self.record(EventType::Warning, "ResizeError", &message);
                }
                self.resize_problem = Some(problem);
                Some(RETRY)
            }
        }
    }

    /// First what shrinks, then the pod's own limits, then what grows: the kernel allows no container more
    /// than its pod.
    async fn try_resize(&self, places: &[plan::Container]) -> Result<(), String> {
        let observed = self.observe().await.map_err(|e| e.to_string())?;
        let mut all: Vec<(String, Steps)> = Vec::new();
        for place in places {
            let container = self.pod.spec.container_at(*place);
            let running = observed
                .running()
                .find(|running| crate::pod_state::observed::name_of(running) == container.name);
            if let Some(running) = running
                && let Some(actual) = limits(running)
            {
                all.push((running.id.clone(), resize::steps(&self.pod, container, actual)));
            }
        }
        self.check_memory(&all).await?;
        for (id, steps) in &all {
            self.set(id, &steps.smaller).await?;
        }
        self.tools.ensure_pod_cgroup(&self.pod).map_err(|error| linux::chain(&error))?;
        for (id, steps) in &all {
            self.set(id, &steps.larger).await?;
        }
        Ok(())
    }

    async fn set(&self, id: &str, limits: &LinuxContainerResources) -> Result<(), String> {
        if *limits == LinuxContainerResources::default() {
            return Ok(());
        }
        let group = resources::cgroup_path(&self.tools.cgroup_root, &self.pod);
        let memory_and_swap = self.tools.hierarchies.memory_and_swap(&group, limits.memory_limit_in_bytes);
        let limits =
            LinuxContainerResources { memory_swap_limit_in_bytes: memory_and_swap, ..limits.clone() };
        let set = self.tools.cri.update_container_resources(id, limits).await;
        set.map_err(|error| error.message)
    }

    /// A limit below what a container uses would have the kernel end it (cgroup v2).
    async fn check_memory(&self, all: &[(String, Steps)]) -> Result<(), String> {
        let shrinking = all.iter().filter(|(_, steps)| steps.smaller.memory_limit_in_bytes > 0);
        let shrinking: BTreeMap<&str, u64> = shrinking
            .map(|(id, steps)| (id.as_str(), steps.smaller.memory_limit_in_bytes.cast_unsigned()))
            .collect();
        if shrinking.is_empty() {
            return Ok(());
        }
        let stats = self.tools.cri.container_stats(Some(self.uid())).await.map_err(|e| e.to_string())?;
        for used in stats {
            let Some(attributes) = used.attributes else { continue };
            let Some(limit) = shrinking.get(attributes.id.as_str()) else { continue };
            let usage =
                used.memory.and_then(|memory| memory.working_set_bytes).map_or(0, |bytes| bytes.value);
            if usage >= *limit {
                let name = attributes.metadata.map(|metadata| metadata.name).unwrap_or_default();
                return Err(format!(
                    "attempting to set container \"{name}\" memory limit ({limit}) below current usage ({usage})"
                ));
            }
        }
        Ok(())
    }
}

fn limits(container: &ContainerStatus) -> Option<&LinuxContainerResources> {
    container.resources.as_ref()?.linux.as_ref()
}
