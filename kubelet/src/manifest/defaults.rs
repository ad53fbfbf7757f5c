//! What Kubernetes' API server fills in, and what a manifest may not decide.

use crate::objects::{Container, Object, Pod};
use crate::store::AnyObject;

/// `namespace`: of an object that names none.
pub(super) fn fill(object: &mut AnyObject, namespace: &str) {
    match object {
        AnyObject::Pod(pod) => {
            fill_metadata(pod.as_mut(), namespace);
            fill_pod(pod);
        }
        AnyObject::Claim(claim) => {
            fill_metadata(claim.as_mut(), namespace);
            claim.status = crate::objects::PersistentVolumeClaimStatus::default();
        }
        AnyObject::Volume(volume) => {
            fill_metadata(volume.as_mut(), namespace);
            volume.status = crate::objects::PersistentVolumeStatus::default();
        }
        AnyObject::Class(class) => {
            fill_metadata(class.as_mut(), namespace);
        }
        AnyObject::CsiDriver(driver) => {
            fill_metadata(driver.as_mut(), namespace);
        }
        AnyObject::Snapshot(snapshot) => {
            fill_metadata(snapshot.as_mut(), namespace);
            snapshot.status = crate::objects::VolumeSnapshotStatus::default();
        }
        AnyObject::SnapshotClass(class) => fill_metadata(class.as_mut(), namespace),
        AnyObject::SnapshotContent(content) => {
            fill_metadata(content.as_mut(), namespace);
            content.status = crate::objects::VolumeSnapshotContentStatus::default();
        }
        AnyObject::ConfigMap(map) => fill_metadata(map.as_mut(), namespace),
        AnyObject::Secret(secret) => {
            fill_metadata(secret.as_mut(), namespace);
            secret.take_string_data();
        }
    }
}

/// Times and the uid are this kubelet's to write: a manifest that was once read from
/// another cluster, or from another object, carries theirs. Everything on the node goes
/// by a pod's uid, so two pods with one would share containers and volumes.
fn fill_metadata<T: Object>(object: &mut T, namespace: &str) {
    let meta = object.metadata_mut();
    meta.uid.clear();
    meta.generation = 0;
    meta.creation_timestamp = None;
    meta.deletion_timestamp = None;
    meta.deletion_grace_period_seconds = None;
    // An object goes with the owner that this kubelet gave it, and with no other.
    meta.owner_references.clear();
    if !T::KIND.is_namespaced() {
        meta.namespace.clear();
    } else if meta.namespace.is_empty() {
        namespace.clone_into(&mut meta.namespace);
    }
}

fn fill_pod(pod: &mut Pod) {
    pod.status = crate::objects::PodStatus::default();
    let spec = &mut pod.spec;
    for container in spec.init_containers.iter_mut().chain(&mut spec.containers) {
        fill_container(container);
    }
}

/// A limit without a request is its own request.
fn fill_container(container: &mut Container) {
    container.image_pull_policy = Some(container.pull_policy());
    let resources = &mut container.resources;
    for (name, limit) in &resources.limits {
        resources.requests.entry(name.clone()).or_insert_with(|| limit.clone());
    }
}
