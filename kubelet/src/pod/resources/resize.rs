//! How the limits of a running container differ from its manifest's, and how they become the same
//! (kubelet, kuberuntime_manager.go: computePodResizeAction). No I/O.

use proto::cri::LinuxContainerResources;

use super::{bytes, milli_cpu, of_container};
use crate::objects::{Container, Pod, Quantity, ResourceRequirements};
use crate::pod::cgroup::{CPU_PERIOD_US, quota_us, shares};

/// The resources whose limits differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) cpu: bool,
    pub(crate) memory: bool,
}

impl Difference {
    /// A limit that the manifest does not have is none to set: a container keeps what it has.
    pub(crate) fn of(pod: &Pod, container: &Container, actual: &LinuxContainerResources) -> Self {
        let wanted = of_container(pod, container, 0);
        let differs = |wanted: i64, actual: i64| wanted != 0 && wanted != actual;
        Self {
            // A runtime that does not report a value reports 0; shares are never 0.
            cpu: (actual.cpu_shares != 0 && wanted.cpu_shares != actual.cpu_shares)
                || differs(wanted.cpu_quota, actual.cpu_quota),
            memory: differs(wanted.memory_limit_in_bytes, actual.memory_limit_in_bytes),
        }
    }

    pub(crate) fn is_any(self) -> bool {
        self.cpu || self.memory
    }

    /// Whether the container's resizePolicy asks for a restart.
    pub(crate) fn needs_restart(self, container: &Container) -> bool {
        container.resize_policy.iter().any(|policy| {
            let differs = match policy.resource_name.as_str() {
                "cpu" => self.cpu,
                "memory" => self.memory,
                _ => false,
            };
            differs && policy.restart_policy == "RestartContainer"
        })
    }
}

/// What to set before the pod's own limits change, and what after: no container may have more than its
/// pod in between.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Steps {
    pub(crate) smaller: LinuxContainerResources,
    pub(crate) larger: LinuxContainerResources,
}

/// Only fields that change are set: a runtime leaves the others.
pub(crate) fn steps(pod: &Pod, container: &Container, actual: &LinuxContainerResources) -> Steps {
    let wanted = of_container(pod, container, 0);
    let mut steps = Steps::default();
    let difference = Difference::of(pod, container, actual);
    if difference.memory {
        let now = actual.memory_limit_in_bytes;
        let is_smaller = now == 0 || wanted.memory_limit_in_bytes < now;
        let step = if is_smaller { &mut steps.smaller } else { &mut steps.larger };
        step.memory_limit_in_bytes = wanted.memory_limit_in_bytes;
    }
    if difference.cpu {
        let is_smaller =
            wanted.cpu_quota != 0 && (actual.cpu_quota <= 0 || wanted.cpu_quota < actual.cpu_quota);
        let step = if is_smaller { &mut steps.smaller } else { &mut steps.larger };
        step.cpu_shares = wanted.cpu_shares;
        if wanted.cpu_quota != 0 {
            (step.cpu_quota, step.cpu_period) = (wanted.cpu_quota, CPU_PERIOD_US);
        }
    }
    steps
}

/// What a container has now, in its manifest's words where it is the same.
pub(crate) fn actual(container: &Container, linux: &LinuxContainerResources) -> ResourceRequirements {
    let mut found = container.resources.clone();
    if let Some(limit) = found.limits.get_mut("memory")
        && linux.memory_limit_in_bytes > 0
        && linux.memory_limit_in_bytes != bytes(Some(limit))
    {
        *limit = Quantity::from_bytes(linux.memory_limit_in_bytes.cast_unsigned());
    }
    if let Some(limit) = found.limits.get_mut("cpu")
        && linux.cpu_quota > 0
        && linux.cpu_quota != quota_us(milli_cpu(Some(limit)))
    {
        let period = if linux.cpu_period > 0 { linux.cpu_period } else { CPU_PERIOD_US };
        *limit = millis(linux.cpu_quota.saturating_mul(1000) / period);
    }
    if let Some(request) = found.requests.get_mut("cpu")
        && linux.cpu_shares > 0
        && linux.cpu_shares != shares(milli_cpu(Some(request)))
    {
        // Shares were rounded down.
        *request = millis(linux.cpu_shares.saturating_mul(1000).saturating_add(1023) / 1024);
    }
    found
}

fn millis(cpu: i64) -> Quantity {
    format!("{cpu}m").parse().expect("it is a quantity")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resources: &str) -> Pod {
        let resources: serde_json::Value = serde_json::from_str(resources).unwrap();
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "resources": resources, "resizePolicy": [
                {"resourceName": "memory", "restartPolicy": "RestartContainer"},
                {"resourceName": "cpu", "restartPolicy": "NotRequired"},
            ]}]}
        }))
        .unwrap()
    }

    fn started(pod: &Pod) -> LinuxContainerResources {
        of_container(pod, &pod.spec.containers[0], 1 << 30)
    }

    const SMALL: &str =
        r#"{"limits": {"cpu": "500m", "memory": "32Mi"}, "requests": {"cpu": "100m", "memory": "16Mi"}}"#;
    const LARGE: &str =
        r#"{"limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "200m", "memory": "16Mi"}}"#;

    #[test]
    fn a_difference_names_the_resource_and_the_policy_decides() {
        let (small, large) = (pod(SMALL), pod(LARGE));
        let container = &large.spec.containers[0];
        let same = Difference::of(&small, &small.spec.containers[0], &started(&small));
        assert!(!same.is_any());
        let both = Difference::of(&large, container, &started(&small));
        assert!(both.cpu && both.memory && both.needs_restart(container));
        assert!(!Difference { memory: false, ..both }.needs_restart(container));
        // A runtime that reports nothing, and a manifest without limits.
        let unlimited = pod("{}");
        assert!(!Difference::of(&unlimited, &unlimited.spec.containers[0], &started(&small)).memory);
        let silent = LinuxContainerResources::default();
        assert!(!Difference::of(&unlimited, &unlimited.spec.containers[0], &silent).is_any());
    }

    #[test]
    fn what_shrinks_is_set_before_the_pods_limits_and_what_grows_after_them() {
        let (small, large) = (pod(SMALL), pod(LARGE));
        let growing = steps(&large, &large.spec.containers[0], &started(&small));
        assert_eq!(growing.smaller, LinuxContainerResources::default());
        let set = &growing.larger;
        assert_eq!((set.memory_limit_in_bytes, set.cpu_quota, set.cpu_shares), (64 << 20, 100_000, 204));
        assert_eq!(set.oom_score_adj, 0, "as it was");
        let shrinking = steps(&small, &small.spec.containers[0], &started(&large));
        assert_eq!(shrinking.larger, LinuxContainerResources::default());
        assert_eq!(shrinking.smaller.memory_limit_in_bytes, 32 << 20);
        let mixed = pod(r#"{"limits": {"cpu": "500m", "memory": "64Mi"}}"#);
        let mixed = steps(&mixed, &mixed.spec.containers[0], &started(&large));
        assert_eq!((mixed.smaller.cpu_quota, mixed.larger.memory_limit_in_bytes), (50_000, 0));
    }

    #[test]
    fn the_status_says_what_the_kernel_enforces() {
        let (small, large) = (pod(SMALL), pod(LARGE));
        let container = &large.spec.containers[0];
        assert_eq!(actual(container, &started(&large)), container.resources);
        let before = actual(container, &started(&small));
        assert_eq!((before.limits["cpu"].milli_value(), before.limits["memory"].value()), (500, 32 << 20));
        assert_eq!(before.requests["cpu"].milli_value(), 100);
    }
}
