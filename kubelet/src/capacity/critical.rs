//! Critical pods: those with system priority, mount pods, and the keeper's.

use proto::mount_pod::{KEEPER_ROLE, ROLE, ROLE_LABEL};

use crate::objects::Pod;

/// kubelet's SystemCriticalPriority.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Whether a pod must never be evicted.
pub(crate) fn is_critical(pod: &Pod) -> bool {
    let class = pod.spec.priority_class_name.as_str();
    serves_volumes(pod)
        || matches!(class, "system-node-critical" | "system-cluster-critical")
        || pod.spec.priority.is_some_and(|priority| priority >= CRITICAL_PRIORITY)
}

/// Among pods, the higher one stays longer. Kubernetes writes the number of a class into the pod.
pub(crate) fn priority(pod: &Pod) -> i32 {
    let of_class = match pod.spec.priority_class_name.as_str() {
        "system-node-critical" => CRITICAL_PRIORITY + 1000,
        "system-cluster-critical" => CRITICAL_PRIORITY,
        _ => 0,
    };
    pod.spec.priority.unwrap_or(of_class)
}

/// Whether a pod runs the daemon of a volume.
pub(crate) fn is_mount_pod(pod: &Pod) -> bool {
    pod.metadata.labels.get(ROLE_LABEL).is_some_and(|role| role == ROLE)
}

/// Whether other pods' volumes need the pod: a mount pod, or the keeper's.
pub(crate) fn serves_volumes(pod: &Pod) -> bool {
    pod.metadata.labels.get(ROLE_LABEL).is_some_and(|role| role == ROLE || role == KEEPER_ROLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_high_priority_is_critical() {
        let pod = |fields: serde_json::Value| -> Pod {
            let mut spec = serde_json::json!({"containers": []});
            spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            serde_json::from_value(serde_json::json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec
            }))
            .unwrap()
        };
        assert!(!is_critical(&pod(serde_json::json!({"priority": 1_999_999_999}))));
        assert!(is_critical(&pod(serde_json::json!({"priority": 2_000_000_000}))));
        assert!(!is_critical(&pod(serde_json::json!({"priorityClassName": "high"}))));
        assert!(is_critical(&pod(serde_json::json!({"priorityClassName": "system-cluster-critical"}))));
    }
}
