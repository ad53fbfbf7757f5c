//! Snapshots of the store, their classes and contents.

use std::sync::Arc;

use super::desired::{Fixed, Mergeable};
use super::{Error, Store};
use crate::objects::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};

/// Annotations of snapshots' contents that only the kubelet writes.
const OWN_ANNOTATIONS: &str = "snapshot.storage.kubernetes.io/";
/// The class's parameters, in the annotations of a content: the class may be gone before it.
pub(crate) const CLASS_PARAMETERS: &str = "hawser.dev/snapshot-class-parameters";

impl Store {
    pub fn snapshots(&self) -> Vec<Arc<VolumeSnapshot>> {
        self.state().snapshots.objects()
    }

    pub fn snapshot(&self, namespace: &str, name: &str) -> Option<Arc<VolumeSnapshot>> {
        self.state().snapshots.object(namespace, name)
    }

    pub fn snapshot_classes(&self) -> Vec<Arc<VolumeSnapshotClass>> {
        self.state().snapshot_classes.objects()
    }

    pub fn snapshot_contents(&self) -> Vec<Arc<VolumeSnapshotContent>> {
        self.state().snapshot_contents.objects()
    }

    pub fn snapshot_content(&self, name: &str) -> Option<Arc<VolumeSnapshotContent>> {
        self.state().snapshot_contents.object("", name)
    }

    /// Writes a snapshot (status, deletion mark) to disk; may block for some milliseconds.
    pub fn put_snapshot(&self, snapshot: VolumeSnapshot) -> Result<(), Error> {
        self.put(snapshot)
    }

    /// Writes a content to disk; may block for some milliseconds.
    pub fn put_snapshot_content(&self, content: VolumeSnapshotContent) -> Result<(), Error> {
        self.put(content)
    }

    /// Marks a snapshot for deletion; does nothing if there is none.
    pub fn mark_snapshot_deleted(&self, namespace: &str, name: &str) -> Result<(), Error> {
        self.mark_deleted::<VolumeSnapshot>(namespace, name).map(drop)
    }

    /// Marks a content for deletion; does nothing if there is none.
    pub fn mark_snapshot_content_deleted(&self, name: &str) -> Result<(), Error> {
        self.mark_deleted::<VolumeSnapshotContent>("", name).map(drop)
    }

    /// Removes a snapshot; succeeds if there is none.
    pub fn remove_snapshot(&self, namespace: &str, name: &str) -> Result<(), Error> {
        self.remove::<VolumeSnapshot>(namespace, name)
    }

    /// Removes a class of snapshots; succeeds if there is none.
    pub fn remove_snapshot_class(&self, name: &str) -> Result<(), Error> {
        self.remove::<VolumeSnapshotClass>("", name)
    }

    /// Removes a content; succeeds if there is none.
    pub fn remove_snapshot_content(&self, name: &str) -> Result<(), Error> {
        self.remove::<VolumeSnapshotContent>("", name)
    }
}

impl Mergeable for VolumeSnapshot {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        if self.spec.volume_snapshot_class_name.is_none() {
            self.spec.volume_snapshot_class_name.clone_from(&known.spec.volume_snapshot_class_name);
        }
        self.status = known.status.clone();
        if self.spec.source == known.spec.source { Ok(()) } else { Err(Fixed::after_creation("spec.source")) }
    }
}

/// A class applies only to snapshots made later.
impl Mergeable for VolumeSnapshotClass {
    fn merge(&mut self, _known: &Self) -> Result<(), Fixed> {
        Ok(())
    }
}

impl Mergeable for VolumeSnapshotContent {
    fn merge(&mut self, known: &Self) -> Result<(), Fixed> {
        let (named, before) = (&mut self.spec.volume_snapshot_ref, &known.spec.volume_snapshot_ref);
        if named.uid.is_empty() {
            named.uid.clone_from(&before.uid);
        }
        let is_same_uid = before.uid.is_empty() || named.uid == before.uid;
        if named.namespace != before.namespace || named.name != before.name || !is_same_uid {
            return Err(Fixed::after_creation("spec.volumeSnapshotRef"));
        }
        let kept = known.metadata.annotations.iter();
        let kept = kept.filter(|(key, _)| key.starts_with(OWN_ANNOTATIONS) || *key == CLASS_PARAMETERS);
        self.metadata.annotations.extend(kept.map(|(key, value)| (key.clone(), value.clone())));
        self.status = known.status.clone();
        if self.spec.source == known.spec.source && self.spec.driver == known.spec.driver {
            Ok(())
        } else {
            Err(Fixed::after_creation("spec.source"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(snapshot: &str) -> VolumeSnapshotContent {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": "c"},
            "spec": {
                "volumeSnapshotRef": {"namespace": "default", "name": snapshot}, "driver": "d",
                "deletionPolicy": "Delete", "source": {"volumeHandle": "v"},
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_content_that_is_applied_again_keeps_its_snapshot_and_the_kubelets_annotations() {
        let mut known = content("s");
        known.spec.volume_snapshot_ref.uid = "u".to_owned();
        for key in ["snapshot.storage.kubernetes.io/volumesnapshot-being-created", CLASS_PARAMETERS, "own"] {
            known.metadata.annotations.insert(key.to_owned(), "yes".to_owned());
        }
        let mut again = content("s");
        again.merge(&known).unwrap();
        assert_eq!((again.spec.volume_snapshot_ref.uid.as_str(), again.metadata.annotations.len()), ("u", 2));
        assert!(content("other").merge(&known).is_err());
        again.spec.volume_snapshot_ref.uid = "w".to_owned();
        assert!(again.merge(&known).is_err());
    }
}
