//! The limits of running containers whose runtime does not report them, as containerd before 1.7: the kernel's own.
//! A resize compares them with the manifest.

use std::path::Path;

use linux::cgroup::{Enforced, Hierarchies};
use proto::cri::{ContainerResources, ContainerState, ContainerStatus, LinuxContainerResources};

use crate::objects::{Container, Pod};
use crate::pod::cgroup::CPU_PERIOD_US;
use crate::pod::resources;
use crate::pod_state::observed::{Observed, name_of};

/// The kernel counts memory in pages.
const PAGE_BYTES: i64 = 4096;

/// Adds the limits of containers of `pod`, whose group is `group`.
pub(crate) fn fill(observed: &mut Observed, pod: &Pod, group: &str) {
    let is_missing =
        |c: &&mut ContainerStatus| c.resources.is_none() && c.state() == ContainerState::ContainerRunning;
    let mut hierarchies = None;
    for status in observed.containers.iter_mut().filter(is_missing) {
        let Some(container) = pod.spec.all_containers().find(|c| c.name == name_of(status)) else { continue };
        if hierarchies.is_none() {
            // Without control groups there is nothing to add.
            let Ok(found) = Hierarchies::known() else { return };
            hierarchies = Some(found);
        }
        let enforced = hierarchies.as_ref().and_then(|all| all.enforced(&Path::new(group).join(&status.id)));
        status.resources = enforced
            .map(|enforced| ContainerResources { linux: Some(as_reported(enforced, pod, container)) });
    }
}

/// As a runtime would report them. A limit that the kernel has rounded is the manifest's.
fn as_reported(enforced: Enforced, pod: &Pod, container: &Container) -> LinuxContainerResources {
    let wanted = resources::of_container(pod, container, 0).memory_limit_in_bytes;
    let memory = enforced.memory.map_or(0, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    let is_rounded = memory != 0 && memory == wanted - wanted % PAGE_BYTES;
    LinuxContainerResources {
        memory_limit_in_bytes: if is_rounded { wanted } else { memory },
        cpu_quota: enforced.cpu_quota.unwrap_or(-1),
        cpu_period: enforced.cpu_period.unwrap_or(CPU_PERIOD_US),
        cpu_shares: enforced.cpu_shares.unwrap_or(0),
        ..LinuxContainerResources::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::resources::resize::Difference;

    fn pod(limits: &str) -> Pod {
        let limits: serde_json::Value = serde_json::from_str(limits).unwrap();
        let container = serde_json::json!({"name": "c", "image": "i", "resources": {"limits": limits}});
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]},
        }))
        .unwrap()
    }

    #[test]
    fn limits_that_the_kernel_has_rounded_differ_from_no_manifest() {
        let pod = pod(r#"{"memory": "100M", "cpu": "500m"}"#);
        let container = &pod.spec.containers[0];
        let difference = |memory, cpu_quota| {
            let enforced = Enforced { memory, cpu_quota, cpu_period: Some(CPU_PERIOD_US), cpu_shares: None };
            let difference = Difference::of(&pod, container, &as_reported(enforced, &pod, container));
            (difference.memory, difference.cpu)
        };
        assert_eq!(difference(Some(99_999_744), Some(50_000)), (false, false));
        assert_eq!(difference(Some(96_468_992), Some(50_000)), (true, false));
        assert_eq!(difference(None, None), (true, true));
    }
}
