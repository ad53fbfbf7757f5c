//! Generic ephemeral volumes: the kubelet makes a claim for the pod, which then is mounted as any other
//! claim. The provisioner deletes it once its pod is gone.

use super::error::Error;
use crate::objects::{
    ClaimTemplate, Kind, Object, ObjectMeta, OwnerReference, PersistentVolumeClaim,
    PersistentVolumeClaimStatus, Pod, new_uid, now,
};
use crate::store::Store;

/// Makes the pod's claim `name`, if there is none yet. A claim of this name that was not made for
/// this pod is not its own.
pub(super) fn ensure_claim(
    store: &Store,
    pod: &Pod,
    name: &str,
    template: &ClaimTemplate,
) -> Result<(), Error> {
    if is_made(store, pod, name)? {
        return Ok(());
    }
    let owner = pod.reference();
    let metadata = ObjectMeta {
        name: name.to_owned(),
        namespace: pod.metadata.namespace.clone(),
        uid: new_uid().map_err(|e| Error::io("read", "/proc/sys/kernel/random/uuid".as_ref(), e))?,
        labels: template.metadata.labels.clone(),
        annotations: template.metadata.annotations.clone(),
        creation_timestamp: Some(now()),
        owner_references: vec![OwnerReference {
            api_version: owner.api_version,
            kind: owner.kind,
            name: owner.name,
            uid: owner.uid,
            controller: true,
            block_owner_deletion: true,
        }],
        ..ObjectMeta::default()
    };
    let claim = PersistentVolumeClaim {
        api_version: Kind::PersistentVolumeClaim.api_version().to_owned(),
        kind: Kind::PersistentVolumeClaim.to_string(),
        metadata,
        spec: template.spec.clone(),
        status: PersistentVolumeClaimStatus::default(),
    };
    if !store.add_claim(claim).map_err(Error::Store)? {
        // It was applied meanwhile.
        is_made(store, pod, name)?;
    }
    Ok(())
}

fn is_made(store: &Store, pod: &Pod, name: &str) -> Result<bool, Error> {
    match store.claim(&pod.metadata.namespace, name) {
        Some(claim) if claim.has_owner(&pod.metadata.uid) => Ok(true),
        Some(claim) if claim.metadata.is_deleted() => Err(Error::ClaimDeleted { claim: name.to_owned() }),
        Some(_) => Err(Error::ClaimOfOther { claim: name.to_owned() }),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::objects::VolumeSource;

    fn pod(uid: &str) -> Pod {
        let template = json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        });
        from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": uid},
            "spec": {"containers": [], "volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]}
        }))
        .unwrap()
    }

    #[test]
    fn a_claim_is_made_once_and_only_for_its_pod() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let ensure = |pod: &Pod| {
            let volume = &pod.spec.volumes[0];
            let Some(VolumeSource::Ephemeral(source)) = volume.source() else { panic!("{volume:?}") };
            let name = volume.claim_name(&pod.metadata.name).unwrap();
            ensure_claim(&store, pod, &name, &source.volume_claim_template)
        };
        ensure(&pod("u1")).unwrap();
        let made = store.claim("default", "web-v").unwrap();
        assert_eq!(made.metadata.labels["a"], "b");
        assert_eq!(made.metadata.owner_references[0].uid, "u1");
        ensure(&pod("u1")).unwrap();
        assert_eq!(store.claim("default", "web-v").unwrap().metadata.uid, made.metadata.uid);
        let error = ensure(&pod("u2")).unwrap_err().to_string();
        assert_eq!(
            error,
            "persistentvolumeclaim \"web-v\" was not created for this pod: delete it, or rename the pod"
        );
    }
}
