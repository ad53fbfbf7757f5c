//! The note on a claim whose CreateVolume was called: what a repeated call needs. Before the driver's
//! answer is clear, claim and class may change, and class and source may go.
//!
//! Invariant: while a claim has the note, CreateVolume gets what the note says. A driver that has the
//! volume answers other parameters with ALREADY_EXISTS, and then its id is not known.

use proto::csi::VolumeContentSource;
use proto::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use serde::{Deserialize, Serialize};

use crate::objects::{
    DataSource, ObjectMeta, PersistentVolumeClaim, PersistentVolumeClaimSpec, StorageClass,
};
use crate::store::VOLUME_BEING_CREATED;

/// What a volume is made from, by the driver's id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Handle {
    Snapshot(String),
    Volume(String),
}

impl From<Handle> for VolumeContentSource {
    fn from(handle: Handle) -> Self {
        let source = match handle {
            Handle::Snapshot(snapshot_id) => Type::Snapshot(SnapshotSource { snapshot_id }),
            Handle::Volume(volume_id) => Type::Volume(VolumeSource { volume_id }),
        };
        Self { r#type: Some(source) }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Begun {
    pub(super) class: StorageClass,
    pub(super) source: Option<Handle>,
    /// The claim's. Notes of earlier versions have none: they repeat the call with the claim as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    spec: Option<PersistentVolumeClaimSpec>,
}

impl Begun {
    pub(super) fn new(claim: &PersistentVolumeClaim, class: &StorageClass, source: Option<Handle>) -> Self {
        let metadata = ObjectMeta { name: class.metadata.name.clone(), ..ObjectMeta::default() };
        let class = StorageClass { metadata, ..class.clone() };
        Self { class, source, spec: Some(claim.spec.clone()) }
    }

    pub(super) fn of(claim: &PersistentVolumeClaim) -> Option<Self> {
        serde_json::from_str(claim.metadata.annotations.get(VOLUME_BEING_CREATED)?).ok()
    }

    /// The claim as it was when CreateVolume was called.
    pub(super) fn claim(&self, current: &PersistentVolumeClaim) -> PersistentVolumeClaim {
        let mut claim = current.clone();
        if let Some(spec) = &self.spec {
            claim.spec.clone_from(spec);
        }
        claim
    }

    pub(super) fn data_source(&self) -> Option<&DataSource> {
        self.spec.as_ref().and_then(PersistentVolumeClaimSpec::source)
    }
}

/// Whether the driver may have made a volume for the claim whose id is not known.
pub(super) fn is_noted(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.annotations.contains_key(VOLUME_BEING_CREATED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_an_earlier_version_is_read_and_stays_as_it_is() {
        let note = serde_json::json!({
            "class": {
                "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"},
                "provisioner": "d", "parameters": {"tier": "gold"},
            },
            "source": {"snapshot": "s1"},
        });
        let claim: PersistentVolumeClaim = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "annotations": {VOLUME_BEING_CREATED: note.to_string()}},
            "spec": {"resources": {"requests": {"storage": "1Gi"}}},
        }))
        .unwrap();
        let begun = Begun::of(&claim).unwrap();
        assert_eq!(begun.class.parameters["tier"], "gold");
        assert_eq!(begun.source, Some(Handle::Snapshot("s1".to_owned())));
        assert_eq!((begun.claim(&claim), begun.data_source()), (claim, None));
        assert!(serde_json::to_value(&begun).unwrap().get("spec").is_none());
    }
}
