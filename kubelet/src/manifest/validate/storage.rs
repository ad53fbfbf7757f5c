//! Rules for volumes, claims and classes.

use super::super::path::FieldPath;
use super::{Findings, names};
use crate::objects::{
    AccessMode, LabelOperator, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec, Resources,
    SNAPSHOT_GROUP, SecretReference, StorageClass, VolumeMode,
};

pub(super) fn check_volume(volume: &PersistentVolume, findings: &mut Findings) {
    let at = FieldPath::root().key("spec");
    let spec = &volume.spec;
    check_storage(&at.key("capacity"), &spec.capacity, findings);
    check_access(&at, &spec.access_modes, spec.volume_mode, findings);
    match &spec.csi {
        None => findings.add(at, "Required value: must specify a volume type (csi is the supported one)"),
        Some(csi) => {
            let at = at.key("csi");
            findings.name(at.key("driver"), &csi.driver, names::subdomain);
            if csi.volume_handle.is_empty() {
                findings.required(at.key("volumeHandle"));
            }
            for (field, reference) in [
                ("controllerPublishSecretRef", &csi.controller_publish_secret_ref),
                ("nodeStageSecretRef", &csi.node_stage_secret_ref),
                ("nodePublishSecretRef", &csi.node_publish_secret_ref),
                ("controllerExpandSecretRef", &csi.controller_expand_secret_ref),
                ("nodeExpandSecretRef", &csi.node_expand_secret_ref),
            ] {
                check_secret(&at.key(field), reference.as_ref(), findings);
            }
        }
    }
}

fn check_secret(at: &FieldPath, reference: Option<&SecretReference>, findings: &mut Findings) {
    if let Some(reference) = reference {
        findings.name(at.key("name"), &reference.name, names::subdomain);
        findings.name(at.key("namespace"), &reference.namespace, names::label);
    }
}

pub(super) fn check_claim(claim: &PersistentVolumeClaim, findings: &mut Findings) {
    check_claim_spec(&FieldPath::root().key("spec"), &claim.spec, findings);
}

pub(super) fn check_claim_spec(at: &FieldPath, spec: &PersistentVolumeClaimSpec, findings: &mut Findings) {
    check_access(at, &spec.access_modes, spec.volume_mode, findings);
    check_storage(&at.below("resources.requests"), &spec.resources.requests, findings);
    check_sources(at, spec, findings);
    if let Some(class) = spec.storage_class_name.as_deref().filter(|class| !class.is_empty()) {
        findings.name(at.key("storageClassName"), class, names::subdomain);
    }
    if !spec.volume_name.is_empty() {
        findings.name(at.key("volumeName"), &spec.volume_name, names::subdomain);
    }
    let selector = spec.selector.iter().flat_map(|selector| &selector.match_expressions);
    for (index, requirement) in selector.enumerate() {
        let at = at.below("selector.matchExpressions").index(index).key("values");
        let takes_values = matches!(requirement.operator, LabelOperator::In | LabelOperator::NotIn);
        if takes_values && requirement.values.is_empty() {
            let rule = "Required value: must be specified when `operator` is 'In' or 'NotIn'";
            findings.add(at, rule);
        } else if !takes_values && !requirement.values.is_empty() {
            let rule = "Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            findings.add(at, rule);
        }
    }
}

fn check_sources(at: &FieldPath, spec: &PersistentVolumeClaimSpec, findings: &mut Findings) {
    for (field, source) in [("dataSource", &spec.data_source), ("dataSourceRef", &spec.data_source_ref)] {
        let Some(source) = source else { continue };
        let at = at.key(field);
        match (source.kind.as_str(), source.api_group.as_str()) {
            ("PersistentVolumeClaim", "") | ("VolumeSnapshot", SNAPSHOT_GROUP) => {}
            (kind, group) => findings.add(
                at.key("kind"),
                format!(
                    "Unsupported value: {kind:?} of apiGroup {group:?}: supported values: \"VolumeSnapshot\" of \
                     apiGroup {SNAPSHOT_GROUP:?}, \"PersistentVolumeClaim\" without an apiGroup"
                ),
            ),
        }
        findings.name(at.key("name"), &source.name, names::subdomain);
    }
    if let (Some(source), Some(newer)) = (&spec.data_source, &spec.data_source_ref)
        && source != newer
    {
        findings.add(at.clone(), "Invalid value: must match dataSourceRef".to_owned());
    }
}

pub(super) fn check_class(class: &StorageClass, findings: &mut Findings) {
    findings.name(FieldPath::root().key("provisioner"), &class.provisioner, names::subdomain);
}

fn check_storage(at: &FieldPath, amounts: &Resources, findings: &mut Findings) {
    match amounts.get("storage") {
        None => findings.required(at.key("storage")),
        Some(amount) if amount.value() == 0 => {
            findings.invalid(at.key("storage"), &amount.to_string(), "must be greater than zero");
        }
        Some(_) => {}
    }
}

fn check_access(at: &FieldPath, modes: &[AccessMode], volume_mode: VolumeMode, findings: &mut Findings) {
    let field = at.key("accessModes");
    if modes.is_empty() {
        findings.add(field, "Required value: at least 1 access mode is required");
    } else if modes.contains(&AccessMode::ReadWriteOncePod) && modes.len() > 1 {
        findings.add(field, "Forbidden: may not use ReadWriteOncePod with other access modes");
    }
    if volume_mode == VolumeMode::Block {
        findings.add(at.key("volumeMode"), "Unsupported value: \"Block\": supported values: \"Filesystem\"");
    }
}
