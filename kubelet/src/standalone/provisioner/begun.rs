//! The note on a claim whose CreateVolume was called: what a repeated call needs. Before the driver's
//! answer is clear, claim and class may change, and class and source may go.
//!
//! Invariant: while a claim has the note, CreateVolume gets what the note says. A driver that has the
//! volume answers other parameters with ALREADY_EXISTS, and then its id is not known. If the note itself
//! gets this answer, it is the wrong one: claim and class count again, since only they can be corrected.

use std::collections::BTreeMap;

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

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Begun {
    pub(super) class: StorageClass,
    pub(super) source: Option<Handle>,
    /// The claim's. Notes of earlier versions have none: they repeat the call with the claim as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    spec: Option<PersistentVolumeClaimSpec>,
    /// The claim's, as far as the names of the class's Secrets contain them. Earlier versions kept none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
    /// The driver has answered ALREADY_EXISTS: it has a volume of this name, made with other parameters.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_made_otherwise: bool,
}

impl Begun {
    pub(super) fn new(claim: &PersistentVolumeClaim, class: &StorageClass, source: Option<Handle>) -> Self {
        let metadata = ObjectMeta { name: class.metadata.name.clone(), ..ObjectMeta::default() };
        let class = StorageClass { metadata, ..class.clone() };
        let is_used = |key: &str| {
            let token = format!("pvc.annotations['{key}']");
            key != VOLUME_BEING_CREATED && class.parameters.values().any(|value| value.contains(&token))
        };
        let mut annotations = claim.metadata.annotations.clone();
        annotations.retain(|key, _| is_used(key));
        let (spec, annotations) = (Some(claim.spec.clone()), Some(annotations));
        Self { class, source, spec, annotations, is_made_otherwise: false }
    }

    /// After the driver's answer ALREADY_EXISTS.
    pub(super) fn refuted(&self) -> Self {
        Self { spec: None, is_made_otherwise: true, ..self.clone() }
    }

    /// Whether claim and class count again, not the note.
    pub(super) fn is_refuted(&self) -> bool {
        self.is_made_otherwise && self.spec.is_none()
    }

    /// The note of a deleted claim's next call, after `refuted`. The claim cannot get annotations any more,
    /// so those that it had count too.
    pub(super) fn of_deleted(mut self, refuted: Self) -> Self {
        let mut annotations = refuted.annotations.unwrap_or_default();
        annotations.extend(self.annotations.unwrap_or_default());
        self.annotations = Some(annotations);
        self.is_made_otherwise = true;
        self
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
        if let Some(annotations) = &self.annotations {
            claim.metadata.annotations.clone_from(annotations);
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
        let written = serde_json::to_value(&begun).unwrap();
        let fields: Vec<&String> = written.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["class", "source"]);
        assert!(!begun.is_refuted());
    }

    #[test]
    fn a_note_has_the_annotations_that_the_class_names() {
        let claim: PersistentVolumeClaim = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "annotations": {"team": "red", "x": "y", VOLUME_BEING_CREATED: "{}"}},
            "spec": {},
        }))
        .unwrap();
        let class: StorageClass = serde_json::from_value(serde_json::json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "fast"},
            "provisioner": "d",
            "parameters": {"csi.storage.k8s.io/provisioner-secret-name": "${pvc.annotations['team']}"},
        }))
        .unwrap();
        let begun = Begun::new(&claim, &class, None);
        let mut current = claim.clone();
        current.metadata.annotations.clear();
        let kept = [("team".to_owned(), "red".to_owned())].into();
        assert_eq!(begun.claim(&current).metadata.annotations, kept);
        let again = Begun::new(&current, &class, None).of_deleted(begun.refuted());
        assert!(begun.refuted().is_refuted() && !again.is_refuted() && again.is_made_otherwise);
        assert_eq!(again.claim(&current).metadata.annotations, kept);
    }
}
