//! What a client may change in a volume that the kubelet made for a claim: what becomes of the data when
//! the claim is deleted, labels and annotations.

use std::sync::Arc;

use super::disk::Durability;
use super::entries::{Entry, Key};
use super::{Error, Outcome, Source, Store};
use crate::objects::{Document, Kind, ObjectMeta, PersistentVolume, PersistentVolumeSpec};

/// Annotations that only the kubelet writes: the volume's driver and the Secret of DeleteVolume.
const OWN_ANNOTATIONS: [&str; 2] = ["pv.kubernetes.io/", "volume.kubernetes.io/"];

impl Store {
    pub(super) fn apply_volume(
        &self,
        volume: PersistentVolume,
        document: Document,
        source: Source,
    ) -> Result<Outcome, Error> {
        let _writing = self.writing();
        let key = Key::of(&volume);
        let known = self.state().volumes.get(&key).cloned();
        match known {
            Some(known) if known.source == Source::Kubelet && source == Source::Api => {
                self.change_made_volume(key, known, volume)
            }
            _ => self.apply_locked(volume, document, source),
        }
    }

    /// The volume stays the kubelet's, so that no file describes it later. The caller holds `writing`.
    fn change_made_volume(
        &self,
        key: Key,
        known: Entry<PersistentVolume>,
        given: PersistentVolume,
    ) -> Result<Outcome, Error> {
        let mut volume = (*known.object).clone();
        volume.spec.persistent_volume_reclaim_policy = given.spec.persistent_volume_reclaim_policy;
        if with_claim_of(given.spec, &volume.spec) != volume.spec {
            let rule = "only persistentVolumeReclaimPolicy can change in a volume that was made for a claim";
            return Err(Error::Immutable {
                kind: Kind::PersistentVolume,
                name: key.name,
                field: "spec",
                rule,
            });
        }
        let ObjectMeta { labels, mut annotations, .. } = given.metadata;
        let is_own = |key: &str| OWN_ANNOTATIONS.iter().any(|own| key.starts_with(own));
        annotations.retain(|key, _| !is_own(key));
        let own = volume.metadata.annotations.into_iter().filter(|(key, _)| is_own(key));
        annotations.extend(own);
        volume.metadata.annotations = annotations;
        volume.metadata.labels = labels;
        if volume == *known.object {
            return Ok(Outcome::Unchanged);
        }
        self.keep(key, Entry { object: Arc::new(volume), ..known }, Durability::PowerLoss)?;
        Ok(Outcome::Configured)
    }
}

/// A description may leave out the claim, or its uid.
fn with_claim_of(mut given: PersistentVolumeSpec, known: &PersistentVolumeSpec) -> PersistentVolumeSpec {
    let is_named = match (&given.claim_ref, &known.claim_ref) {
        (Some(given), Some(known)) => {
            !given.uid.is_empty() || given.namespace != known.namespace || given.name != known.name
        }
        (given, _) => given.is_some(),
    };
    if !is_named {
        given.claim_ref.clone_from(&known.claim_ref);
    }
    given
}
