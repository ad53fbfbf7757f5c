//! Changes of an object as it is now: read, changed and written under the store's lock, so that no
//! change which another task wrote meanwhile is lost.

use std::sync::Arc;

use super::{Durability, Error, Key, Store, Stored, VOLUME_BEING_CREATED};
use crate::objects::{
    ClaimPhase, CsiVolumeSource, EventType, Object, ObjectRef, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeClaimStatus, VolumePhase, VolumeSnapshot, VolumeSnapshotContent, now,
};

/// The name of the volume that is made for a claim.
pub(crate) fn name_of_new_volume(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.metadata.uid)
}

/// Why a claim is not bound to a volume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Store(#[from] Error),
}

/// The event of a claim that has lost its volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loss {
    reason: &'static str,
    message: &'static str,
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

    /// Adds a volume that was made for a claim. Keeps an existing volume of this name, also if it is
    /// marked for deletion: an earlier attempt added it.
    pub(crate) fn add_volume(&self, volume: PersistentVolume) -> Result<(), BindError> {
        let (csi, holder) = (volume.spec.csi.clone(), volume.spec.claim_ref.clone());
        let Some(known) = self.add(volume)? else { return Ok(()) };
        let uid = |holder: &Option<ObjectRef>| holder.as_ref().map(|holder| holder.uid.clone());
        let handle = |csi: &Option<CsiVolumeSource>| {
            csi.as_ref().map(|csi| (csi.driver.clone(), csi.volume_handle.clone()))
        };
        if uid(&known.spec.claim_ref) == uid(&holder) && handle(&known.spec.csi) == handle(&csi) {
            return Ok(());
        }
        let name = &known.metadata.name;
        Err(BindError::Refused(format!("volume \"{name}\" exists already, and was not made for this claim")))
    }

    /// Adds a claim; `false` if there is one of that name, which stays as it is.
    pub(crate) fn add_claim(&self, claim: PersistentVolumeClaim) -> Result<bool, Error> {
        Ok(self.add(claim)?.is_none())
    }

    /// Marks a bound claim as lost if its volume is gone or another claim's; an event says so. Like
    /// Kubernetes' controller (pv_controller.go: syncBoundClaim).
    pub(crate) fn lose_claim(&self, known: &PersistentVolumeClaim) -> Result<(), Error> {
        let mut lost = None;
        let lose = |claim: &mut PersistentVolumeClaim| {
            if claim.metadata.is_deleted() || claim.status.phase != ClaimPhase::Bound {
                return;
            }
            lost = self.volume_is_lost(claim);
            if lost.is_some() {
                claim.status = PersistentVolumeClaimStatus {
                    phase: ClaimPhase::Lost,
                    ..PersistentVolumeClaimStatus::default()
                };
            }
        };
        self.update_claim(known, lose)?;
        if let Some(Loss { reason, message }) = lost {
            self.record(&known.reference(), EventType::Warning, reason, message);
        }
        Ok(())
    }

    /// Why the bound claim has no volume any more.
    pub(crate) fn volume_is_lost(&self, claim: &PersistentVolumeClaim) -> Option<Loss> {
        if claim.spec.volume_name.is_empty() {
            let message = "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!";
            return Some(Loss { reason: "ClaimLost", message });
        }
        let Some(volume) = self.volume(&claim.spec.volume_name) else {
            let message = "Bound claim has lost its PersistentVolume. Data on the volume is lost!";
            return Some(Loss { reason: "ClaimLost", message });
        };
        let holder = volume.spec.claim_ref.as_ref();
        holder.is_some_and(|holder| is_other_claim(claim, holder)).then_some(Loss {
            reason: "ClaimMisbound",
            message: "Two claims are bound to the same volume, this one is bound incorrectly",
        })
    }

    /// Writes what a repeated CreateVolume needs to the annotation [`VOLUME_BEING_CREATED`]; `None` removes
    /// it. Returns `false` if the claim is gone. It is not announced: every attempt would look like a
    /// change by the user, which ends the back-off.
    pub(crate) fn note_creation(
        &self,
        known: &PersistentVolumeClaim,
        note: Option<String>,
    ) -> Result<bool, Error> {
        let _writing = self.writing();
        let key = Key::of(known);
        let current = self.state().claims.get(&key).cloned();
        let current = current.filter(|entry| entry.object.metadata.uid == known.metadata.uid);
        let Some(mut entry) = current else { return Ok(false) };
        if entry.object.metadata.annotations.get(VOLUME_BEING_CREATED) == note.as_ref() {
            return Ok(true);
        }
        let annotations = &mut Arc::make_mut(&mut entry.object).metadata.annotations;
        annotations.remove(VOLUME_BEING_CREATED);
        annotations.extend(note.map(|note| (VOLUME_BEING_CREATED.to_owned(), note)));
        self.keep_unannounced(key, entry, Durability::PowerLoss)?;
        Ok(true)
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
        if volume.metadata.name == name_of_new_volume(&claim) {
            claim.metadata.annotations.remove(VOLUME_BEING_CREATED);
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

    /// Writes a new object unless there is one of its name, which is returned.
    fn add<T: Stored>(&self, object: T) -> Result<Option<Arc<T>>, Error> {
        let _writing = self.writing();
        let Key { namespace, name } = Key::of(&object);
        let known = T::entries(&self.state()).object(&namespace, &name);
        if known.is_none() {
            self.replace(object, Durability::PowerLoss)?;
        }
        Ok(known)
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
    let bound_to = &claim.spec.volume_name;
    if let Some(holder) = holder.filter(|holder| is_other_claim(claim, holder)) {
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

/// A volume's author may name the claim without its uid.
fn is_other_claim(claim: &PersistentVolumeClaim, holder: &ObjectRef) -> bool {
    let metadata = &claim.metadata;
    holder.namespace != metadata.namespace
        || holder.name != metadata.name
        || (!holder.uid.is_empty() && holder.uid != metadata.uid)
}

#[cfg(test)]
mod tests {
    use tokio::sync::broadcast::error::TryRecvError;

    use super::*;
    use crate::store::desired::Mergeable;

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
    #[test]
    fn a_volume_that_an_earlier_attempt_added_keeps_its_mark() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let made = |handle: &str| {
            let mut made = volume("v");
            made.spec.claim_ref = Some(claim("a").reference());
            let (driver, volume_handle) = ("d".to_owned(), handle.to_owned());
            made.spec.csi = Some(CsiVolumeSource { driver, volume_handle, ..CsiVolumeSource::default() });
            made
        };
        store.add_volume(made("h")).unwrap();
        assert!(store.mark_volume_deleted("v").unwrap());
        let again = PersistentVolume {
            metadata: crate::objects::ObjectMeta { uid: "next".to_owned(), ..made("h").metadata },
            ..made("h")
        };
        store.add_volume(again).unwrap();
        let known = store.volume("v").unwrap();
        assert!(known.metadata.is_deleted() && known.metadata.uid == "v", "{known:?}");
        let mut of_other = made("h");
        of_other.spec.claim_ref = Some(claim("b").reference());
        for volume in [made("other"), of_other, volume("v")] {
            let error = store.add_volume(volume).unwrap_err().to_string();
            assert_eq!(error, "volume \"v\" exists already, and was not made for this claim");
        }
    }

    #[test]
    fn the_note_of_a_creation_stays_until_the_claim_has_the_volume() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        store.put_claim(claim("a")).unwrap();
        let note = |store: &Store| {
            store.claim("default", "a").unwrap().metadata.annotations.get(VOLUME_BEING_CREATED).cloned()
        };
        let (begun, mut changes) = (Some("class".to_owned()), store.subscribe());
        assert!(store.note_creation(&claim("a"), begun.clone()).unwrap());
        assert!(!store.note_creation(&claim("b"), begun.clone()).unwrap());
        assert_eq!(changes.try_recv(), Err(TryRecvError::Empty));
        let again = Store::open(root.path(), "node").unwrap();
        assert_eq!(note(&again), begun);
        let mut applied = claim("a");
        applied.merge(&again.claim("default", "a").unwrap()).unwrap();
        assert_eq!(applied.metadata.annotations.get(VOLUME_BEING_CREATED), begun.as_ref());

        assert!(store.note_creation(&claim("a"), None).unwrap());
        assert_eq!(note(&store), None);
        store.note_creation(&claim("a"), begun.clone()).unwrap();
        store.put_volume(volume("v")).unwrap();
        store.bind(&claim("a"), "v").unwrap();
        assert_eq!(note(&store), begun, "the driver may have made another volume");
        store.put_claim((*again.claim("default", "a").unwrap()).clone()).unwrap();
        store.put_volume(volume("pvc-uid-of-a")).unwrap();
        store.bind(&claim("a"), "pvc-uid-of-a").unwrap();
        assert_eq!(note(&store), None);
    }

    #[test]
    fn a_bound_claim_whose_volume_is_gone_is_lost() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        store.put_volume(volume("v")).unwrap();
        store.put_claim(claim("a")).unwrap();
        let phase = || store.claim("default", "a").unwrap().status.phase;
        let lose = || store.lose_claim(&claim("a")).unwrap();
        lose();
        assert_eq!(phase(), ClaimPhase::Pending, "a claim that had no volume has lost none");
        store.bind(&claim("a"), "v").unwrap();
        lose();
        assert_eq!(phase(), ClaimPhase::Bound);
        let mut of_other = volume("v");
        of_other.spec.claim_ref = Some(claim("b").reference());
        let bound = (*store.volume("v").unwrap()).clone();
        store.put_volume(of_other).unwrap();
        lose();
        assert_eq!(phase(), ClaimPhase::Lost);
        store.put_volume(bound).unwrap();
        store.bind(&claim("a"), "v").unwrap();
        store.remove_volume("v").unwrap();
        lose();
        lose();
        let lost = store.claim("default", "a").unwrap();
        assert_eq!((lost.status.phase, lost.status.capacity.len()), (ClaimPhase::Lost, 0));
        let events: Vec<(String, String)> =
            store.events().iter().map(|event| (event.reason.clone(), event.message.clone())).collect();
        let expected = [
            ("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly"),
            ("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!"),
        ];
        assert_eq!(events, expected.map(|(reason, message)| (reason.to_owned(), message.to_owned())));
    }
}
