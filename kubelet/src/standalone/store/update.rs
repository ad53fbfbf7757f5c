//! Changes of an object as it is now: read, changed and written under the store's lock, so that no
//! change which another task wrote meanwhile is lost.

use std::sync::Arc;

use super::{Durability, Error, Key, Store, Stored};
use crate::objects::{
    ClaimPhase, Object, PersistentVolume, PersistentVolumeClaim, VolumePhase, VolumeSnapshot,
    VolumeSnapshotContent, now,
};

/// Why a claim is not bound to a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Store(#[from] Error),
}

impl Store {
    /// Changes a claim; `None` if it is gone, or is another claim of that name.
    pub(crate) fn update_claim(
        &self,
        known: &PersistentVolumeClaim,
        change: impl FnOnce(&mut PersistentVolumeClaim),
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, Error> {
        self.update(known, Durability::PowerLoss, change)
    }

    /// Like [`Store::update_claim`], and durable like [`Store::put_bound_claim`].
    pub(crate) fn update_bound_claim(
        &self,
        known: &PersistentVolumeClaim,
        change: impl FnOnce(&mut PersistentVolumeClaim),
    ) -> Result<Option<Arc<PersistentVolumeClaim>>, Error> {
        self.update(known, Durability::PowerLossOrBefore, change)
    }

    /// Changes a volume; `None` if it is gone, or is another volume of that name.
    pub(crate) fn update_volume(
        &self,
        known: &PersistentVolume,
        change: impl FnOnce(&mut PersistentVolume),
    ) -> Result<Option<Arc<PersistentVolume>>, Error> {
        self.update(known, Durability::PowerLoss, change)
    }

    /// Changes a snapshot; `None` if it is gone, or is another snapshot of that name.
    pub(crate) fn update_snapshot(
        &self,
        known: &VolumeSnapshot,
        change: impl FnOnce(&mut VolumeSnapshot),
    ) -> Result<Option<Arc<VolumeSnapshot>>, Error> {
        self.update(known, Durability::PowerLoss, change)
    }

    /// Changes a content; `None` if it is gone, or is another content of that name.
    pub(crate) fn update_snapshot_content(
        &self,
        known: &VolumeSnapshotContent,
        change: impl FnOnce(&mut VolumeSnapshotContent),
    ) -> Result<Option<Arc<VolumeSnapshotContent>>, Error> {
        self.update(known, Durability::PowerLoss, change)
    }

    /// Marks a claim for deletion; `false` if it does not exist.
    pub(crate) fn mark_claim_deleted(&self, namespace: &str, name: &str) -> Result<bool, Error> {
        self.mark_deleted::<PersistentVolumeClaim>(namespace, name)
    }

    /// Marks a volume for deletion; `false` if it does not exist.
    pub(crate) fn mark_volume_deleted(&self, name: &str) -> Result<bool, Error> {
        self.mark_deleted::<PersistentVolume>("", name)
    }

    /// Binds a claim to a volume, unless the volume has become another claim's meanwhile. The volume
    /// is written first: the next attempt completes a partial binding.
    pub(crate) fn bind(&self, claim: &PersistentVolumeClaim, volume: &str) -> Result<(), BindError> {
        let _writing = self.writing();
        let refused = |why: String| BindError::Refused(why);
        let known = self.volume(volume).ok_or_else(|| refused(format!("volume \"{volume}\" is gone")))?;
        let (namespace, name) = (&claim.metadata.namespace, &claim.metadata.name);
        // A claim that was marked deleted during CreateVolume is bound too: its volume goes with it.
        let current = self.claim(namespace, name).filter(|c| c.metadata.uid == claim.metadata.uid);
        let current = current.ok_or_else(|| refused("the claim is gone".to_owned()))?;
        if let Some(why) = cannot_bind(&current, &known) {
            return Err(refused(format!("volume \"{volume}\" {why}")));
        }
        let mut volume = (*known).clone();
        volume.spec.claim_ref = Some(current.reference());
        volume.status.phase = VolumePhase::Bound;
        let mut claim = (*current).clone();
        claim.spec.volume_name.clone_from(&volume.metadata.name);
        if claim.spec.storage_class_name.is_none() && !volume.spec.storage_class_name.is_empty() {
            // The default class, as it was when the volume was made.
            claim.spec.storage_class_name = Some(volume.spec.storage_class_name.clone());
        }
        claim.status.phase = ClaimPhase::Bound;
        claim.status.access_modes.clone_from(&volume.spec.access_modes);
        claim.status.capacity.clone_from(&volume.spec.capacity);
        // A provisioned volume names its claim from the start.
        if volume != *known {
            self.replace(volume, Durability::PowerLoss)?;
        }
        Ok(self.replace(claim, Durability::PowerLossOrBefore)?)
    }

    pub(super) fn mark_deleted<T: Stored + PartialEq>(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<bool, Error> {
        let mark = |object: &mut T| {
            object.metadata_mut().deletion_timestamp.get_or_insert_with(now);
        };
        let key = Key::new(namespace, name);
        self.change(&key, None, Durability::PowerLoss, mark).map(|object| object.is_some())
    }

    fn update<T: Stored + PartialEq>(
        &self,
        known: &T,
        durability: Durability,
        change: impl FnOnce(&mut T),
    ) -> Result<Option<Arc<T>>, Error> {
        self.change(&Key::of(known), Some(&known.metadata().uid), durability, change)
    }

    /// Returns the object afterwards. Writes only a change.
    fn change<T: Stored + PartialEq>(
        &self,
        key: &Key,
        uid: Option<&String>,
        durability: Durability,
        change: impl FnOnce(&mut T),
    ) -> Result<Option<Arc<T>>, Error> {
        let _writing = self.writing();
        let known = T::entries(&self.state()).object(&key.namespace, &key.name);
        let is_meant = |object: &Arc<T>| uid.is_none_or(|uid| object.metadata().uid == *uid);
        let Some(known) = known.filter(is_meant) else { return Ok(None) };
        let mut object = (*known).clone();
        change(&mut object);
        if object == *known {
            return Ok(Some(known));
        }
        self.replace(object.clone(), durability)?;
        Ok(Some(Arc::new(object)))
    }
}

/// Why the volume cannot become this claim's.
fn cannot_bind(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<String> {
    let metadata = &claim.metadata;
    let holder = volume.spec.claim_ref.as_ref();
    let is_other = |holder: &crate::objects::ObjectRef| {
        holder.namespace != metadata.namespace
            || holder.name != metadata.name
            || (!holder.uid.is_empty() && holder.uid != metadata.uid)
    };
    let bound_to = &claim.spec.volume_name;
    if let Some(holder) = holder.filter(|holder| is_other(holder)) {
        Some(format!("is already bound to claim {}/{}", holder.namespace, holder.name))
    } else if matches!(volume.status.phase, VolumePhase::Released | VolumePhase::Failed) {
        Some("was another claim's, and keeps its data".to_owned())
    } else if volume.metadata.is_deleted() && holder.is_none_or(|holder| holder.uid != metadata.uid) {
        Some("is being deleted".to_owned())
    } else if claim.status.phase == ClaimPhase::Bound && *bound_to != volume.metadata.name {
        Some(format!("is not needed: the claim is bound to volume \"{bound_to}\""))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str) -> PersistentVolumeClaim {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}")},
            "spec": {"accessModes": ["ReadWriteOnce"]}
        }))
        .unwrap()
    }

    fn volume(name: &str) -> PersistentVolume {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name, "uid": "v"},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}
        }))
        .unwrap()
    }

    #[test]
    fn two_claims_never_get_the_same_volume() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        store.put_volume(volume("v")).unwrap();
        for name in ["a", "b"] {
            store.put_claim(claim(name)).unwrap();
        }
        store.bind(&claim("a"), "v").unwrap();
        let error = store.bind(&claim("b"), "v").unwrap_err().to_string();
        assert_eq!(error, "volume \"v\" is already bound to claim default/a");
        assert_eq!(store.claim("default", "b").unwrap().status.phase, ClaimPhase::Pending);
        // Completing the first binding again changes nothing.
        store.bind(&claim("a"), "v").unwrap();
        assert_eq!(store.volume("v").unwrap().spec.claim_ref.as_ref().unwrap().uid, "uid-of-a");
        store.put_volume(volume("w")).unwrap();
        store.mark_volume_deleted("w").unwrap();
        let error = store.bind(&claim("b"), "w").unwrap_err().to_string();
        assert_eq!(error, "volume \"w\" is being deleted");
        let error = store.bind(&claim("a"), "w").unwrap_err().to_string();
        assert_eq!(error, "volume \"w\" is being deleted");
    }

    #[test]
    fn a_mark_that_was_set_after_the_read_stays() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        store.put_claim(claim("a")).unwrap();
        let read = store.claim("default", "a").unwrap();
        assert!(store.mark_claim_deleted("default", "a").unwrap());
        let bind = |claim: &mut PersistentVolumeClaim| claim.status.phase = ClaimPhase::Bound;
        assert!(store.update_bound_claim(&read, bind).unwrap().unwrap().metadata.is_deleted());
        let known = store.claim("default", "a").unwrap();
        assert!(known.metadata.is_deleted() && known.status.phase == ClaimPhase::Bound);
        let mut next = claim("a");
        next.metadata.uid = "next".to_owned();
        assert!(store.update_claim(&next, bind).unwrap().is_none());
        assert!(!store.mark_claim_deleted("default", "b").unwrap());
    }
}
