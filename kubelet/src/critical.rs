//! Pods that the node needs: those of priority, and the daemons behind volumes.

use proto::mount_pod::{ROLE, ROLE_LABEL};

use crate::objects::Pod;

/// kubelet's SystemCriticalPriority.
const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// Whether a pod is one that the node needs: it is never evicted.
pub(crate) fn is_critical(pod: &Pod) -> bool {
    let class = pod.spec.priority_class_name.as_str();
    is_mount_pod(pod)
        || matches!(class, "system-node-critical" | "system-cluster-critical")
        || pod.spec.priority.is_some_and(|priority| priority >= CRITICAL_PRIORITY)
}

/// Whether a pod is the daemon behind a volume.
pub(crate) fn is_mount_pod(pod: &Pod) -> bool {
    pod.metadata.labels.get(ROLE_LABEL).is_some_and(|role| role == ROLE)
}
