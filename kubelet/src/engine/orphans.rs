//! Pods that the runtime or the disk still has and the store does not: their
//! object was lost while no kubelet ran. They are torn down, each before a pod of its
//! name is started: a pod whose record was torn must not run twice.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use tracing::warn;

use crate::container_config::ROOT_DIR_ANNOTATION;
use crate::cri::{POD_NAME_LABEL, POD_NAMESPACE_LABEL, POD_UID_LABEL};
use crate::objects::{Kind, ObjectRef};
use crate::worker::Tools;

/// All of them, to be given to [`super::workers::Workers::tear_down`].
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
                // Others may use this runtime: theirs is none of our business.
                let ours =
                    sandbox.annotations.get(ROOT_DIR_ANNOTATION).map(Path::new) == Some(&tools.root_dir);
                if ours && !uid.is_empty() {
                    let pod = pod_ref(label(POD_NAMESPACE_LABEL), label(POD_NAME_LABEL), uid);
                    found.insert(uid.to_owned(), pod);
                }
            }
        }
        Err(error) => warn!(%error, "cannot look for orphaned sandboxes"),
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
