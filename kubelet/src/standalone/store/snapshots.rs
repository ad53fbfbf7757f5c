//! Snapshots of the store, their classes and contents.

use std::sync::Arc;

use super::desired::{Fixed, Mergeable};
use super::{Error, Store};
use crate::objects::{Object, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, now};

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
        let Some(snapshot) = self.snapshot(namespace, name) else { return Ok(()) };
        marked(&snapshot).map_or(Ok(()), |snapshot| self.put(snapshot))
    }

    /// Marks a content for deletion; does nothing if there is none.
    pub fn mark_snapshot_content_deleted(&self, name: &str) -> Result<(), Error> {
        let Some(content) = self.snapshot_content(name) else { return Ok(()) };
        marked(&content).map_or(Ok(()), |content| self.put(content))
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

/// The object with a deletion time; `None` if it has one already.
fn marked<T: Object>(object: &Arc<T>) -> Option<T> {
    if object.metadata().is_deleted() {
        return None;
    }
    let mut object = (**object).clone();
    object.metadata_mut().deletion_timestamp = Some(now());
    Some(object)
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
        if self.spec.volume_snapshot_ref.uid.is_empty() {
            self.spec.volume_snapshot_ref.uid.clone_from(&known.spec.volume_snapshot_ref.uid);
        }
        self.status = known.status.clone();
        if self.spec.source == known.spec.source && self.spec.driver == known.spec.driver {
            Ok(())
        } else {
            Err(Fixed::after_creation("spec.source"))
        }
    }
}
