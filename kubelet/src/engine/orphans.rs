//! Orphaned pods: the runtime or the disk has them and the store does not, because their object was
//! lost while no kubelet ran. Each is torn down before a pod with its name starts: the same pod
//! must not run twice.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use tracing::warn;

use crate::clients::cri::{POD_NAME_LABEL, POD_NAMESPACE_LABEL, POD_UID_LABEL};
use crate::container_config::ROOT_DIR_ANNOTATION;
use crate::objects::{Kind, ObjectRef};
use crate::worker::{Tools, has_ended};

/// Counts the pods of an earlier kubelet before others are admitted.
pub(super) async fn expect_running(tools: &Tools) {
    let Ok(sandboxes) = tools.cri.list_pod_sandboxes(None).await else { return };
    let uids: BTreeSet<&str> =
        sandboxes.iter().filter_map(|s| s.labels.get(POD_UID_LABEL)).map(String::as_str).collect();
    for pod in tools.store.pods() {
        if !uids.contains(pod.metadata.uid.as_str()) || pod.status.phase.has_ended() {
            continue;
        }
        // It may have ended while no kubelet ran.
        if !has_ended(tools, &pod).await {
            tools.admission.expect(&pod);
        }
    }
}

/// Finds the orphans for [`super::workers::Workers::tear_down`].
pub(super) async fn find(tools: &Arc<Tools>, pods_on_disk: Vec<String>) -> Vec<ObjectRef> {
    let mut found: BTreeMap<String, ObjectRef> = BTreeMap::new();
    for uid in pods_on_disk {
        found.insert(uid.clone(), pod_ref("", "", &uid));
    }
    match tools.cri.list_pod_sandboxes(None).await {
        Ok(sandboxes) => {
            for sandbox in sandboxes {
                let label = |name| sandbox.labels.get(name).map_or("", String::as_str);
                let uid = label(POD_UID_LABEL);
                // Other kubelets may share this runtime; ignore their pods.
                let ours =
                    sandbox.annotations.get(ROOT_DIR_ANNOTATION).map(Path::new) == Some(&tools.root_dir);
                if ours && !uid.is_empty() {
                    let pod = pod_ref(label(POD_NAMESPACE_LABEL), label(POD_NAME_LABEL), uid);
                    found.insert(uid.to_owned(), pod);
                }
            }
        }
        Err(error) => warn!(%error, "cannot list sandboxes to find orphaned pods"),
    }
    for known in tools.store.pods() {
        found.remove(&known.metadata.uid);
    }
    found.into_values().collect()
}

fn pod_ref(namespace: &str, name: &str, uid: &str) -> ObjectRef {
    ObjectRef {
        api_version: Kind::Pod.api_version().to_owned(),
        kind: Kind::Pod.to_string(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
    }
}
