//! Rules for snapshots, their classes and contents.

use super::super::path::FieldPath;
use super::{Findings, names};
use crate::objects::{VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};

pub(super) fn check_snapshot(snapshot: &VolumeSnapshot, findings: &mut Findings) {
    let at = FieldPath::root().key("spec");
    let source = &snapshot.spec.source;
    let fields = [
        ("persistentVolumeClaimName", &source.persistent_volume_claim_name),
        ("volumeSnapshotContentName", &source.volume_snapshot_content_name),
    ];
    exactly_one(&at.key("source"), fields, findings);
    for (name, value) in fields.into_iter().filter(|(_, value)| !value.is_empty()) {
        findings.name(at.key("source").key(name), value, names::subdomain);
    }
    if let Some(class) = &snapshot.spec.volume_snapshot_class_name {
        findings.name(at.key("volumeSnapshotClassName"), class, names::subdomain);
    }
}

pub(super) fn check_class(class: &VolumeSnapshotClass, findings: &mut Findings) {
    findings.name(FieldPath::root().key("driver"), &class.driver, names::subdomain);
}

pub(super) fn check_content(content: &VolumeSnapshotContent, findings: &mut Findings) {
    let at = FieldPath::root().key("spec");
    let spec = &content.spec;
    findings.name(at.key("driver"), &spec.driver, names::subdomain);
    let snapshot = at.key("volumeSnapshotRef");
    findings.name(snapshot.key("name"), &spec.volume_snapshot_ref.name, names::subdomain);
    findings.name(snapshot.key("namespace"), &spec.volume_snapshot_ref.namespace, names::label);
    let source = at.key("source");
    exactly_one(
        &source,
        [("volumeHandle", &spec.source.volume_handle), ("snapshotHandle", &spec.source.snapshot_handle)],
        findings,
    );
}

fn exactly_one(at: &FieldPath, fields: [(&str, &String); 2], findings: &mut Findings) {
    let set = fields.iter().filter(|(_, value)| !value.is_empty()).count();
    if set != 1 {
        let [(first, _), (second, _)] = fields;
        findings.add(at.clone(), format!("Invalid value: exactly one of {first} and {second} must be set"));
    }
}
