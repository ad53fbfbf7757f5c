//! Rules for what a pod takes from ConfigMaps, Secrets and its own fields: variables of the
//! environment, and the files of volumes.

use std::collections::BTreeSet;

use super::super::path::FieldPath;
use super::{Findings, MAX_PATH_BYTES, names};
use crate::objects::{
    DownwardFile, EnvFromSource, EnvVar, EnvVarSource, KeySelector, KeyToPath, ObjectFieldSelector,
    ProjectedVolume, Quantity, ResourceFieldSelector, Volume, VolumeSource,
};

/// What a pod may take from its fields for variables; labels and annotations with a key.
const VARIABLE_FIELDS: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
/// The same for files.
const FILE_FIELDS: &[&str] =
    &["metadata.annotations", "metadata.labels", "metadata.name", "metadata.namespace", "metadata.uid"];
const RESOURCES: &[&str] = &[
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];
const CPU_DIVISORS: &[&str] = &["1", "1m"];
const BYTE_DIVISORS: &[&str] =
    &["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];
const MOST_MODE: u32 = 0o777;

pub(super) fn check_env(at: &FieldPath, env: &[EnvVar], findings: &mut Findings) {
    for (index, variable) in env.iter().enumerate() {
        let at = at.index(index);
        findings.name(at.key("name"), &variable.name, names::variable);
        let Some(from) = &variable.value_from else { continue };
        let at = at.key("valueFrom");
        if !variable.value.is_empty() {
            findings.invalid(at.clone(), "", "may not be specified when `value` is not empty");
        }
        check_value_from(&at, from, findings);
    }
}

fn check_value_from(at: &FieldPath, from: &EnvVarSource, findings: &mut Findings) {
    let EnvVarSource { field_ref, resource_field_ref, config_map_key_ref, secret_key_ref } = from;
    let given = [
        field_ref.is_some(),
        resource_field_ref.is_some(),
        config_map_key_ref.is_some(),
        secret_key_ref.is_some(),
    ];
    match given.iter().filter(|given| **given).count() {
        0 => {
            let rule =
                "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`";
            findings.invalid(at.clone(), "", rule);
        }
        1 => {}
        _ => findings.invalid(at.clone(), "", "may not have more than one field specified at a time"),
    }
    if let Some(field) = field_ref {
        check_field(&at.key("fieldRef"), field, VARIABLE_FIELDS, findings);
    }
    if let Some(resource) = resource_field_ref {
        check_resource(&at.key("resourceFieldRef"), resource, findings);
    }
    for (name, key) in [("configMapKeyRef", config_map_key_ref), ("secretKeyRef", secret_key_ref)] {
        let Some(KeySelector { name: object, key, .. }) = key else { continue };
        let at = at.key(name);
        findings.name(at.key("name"), object, names::subdomain);
        findings.name(at.key("key"), key, names::configuration_key);
    }
}

pub(super) fn check_env_from(at: &FieldPath, sources: &[EnvFromSource], findings: &mut Findings) {
    for (index, source) in sources.iter().enumerate() {
        let at = at.index(index);
        if !source.prefix.is_empty() {
            findings.name(at.key("prefix"), &source.prefix, names::variable);
        }
        let objects = [("configMapRef", &source.config_map_ref), ("secretRef", &source.secret_ref)];
        match objects.iter().filter(|(_, object)| object.is_some()).count() {
            0 => findings.invalid(at.clone(), "", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => findings.invalid(at.clone(), "", "may not have more than one field specified at a time"),
        }
        for (name, object) in objects {
            if let Some(object) = object {
                findings.name(at.key(name).key("name"), &object.name, names::subdomain);
            }
        }
    }
}

/// Volumes of ConfigMaps, Secrets and fields; leaves others alone.
pub(super) fn check_volume(at: &FieldPath, volume: &Volume, findings: &mut Findings) {
    match volume.source() {
        Some(VolumeSource::ConfigMap(source)) => {
            let at = at.key("configMap");
            findings.name(at.key("name"), &source.name, names::subdomain);
            check_mode(at.key("defaultMode"), source.default_mode, findings);
            check_items(&at.key("items"), &source.items, findings);
        }
        Some(VolumeSource::Secret(source)) => {
            let at = at.key("secret");
            findings.name(at.key("secretName"), &source.secret_name, names::subdomain);
            check_mode(at.key("defaultMode"), source.default_mode, findings);
            check_items(&at.key("items"), &source.items, findings);
        }
        Some(VolumeSource::Downward(source)) => {
            let at = at.key("downwardAPI");
            check_mode(at.key("defaultMode"), source.default_mode, findings);
            check_files(&at.key("items"), &source.items, findings);
        }
        Some(VolumeSource::Projected(source)) => check_projected(&at.key("projected"), source, findings),
        _ => {}
    }
}

fn check_projected(at: &FieldPath, volume: &ProjectedVolume, findings: &mut Findings) {
    check_mode(at.key("defaultMode"), volume.default_mode, findings);
    let mut paths = BTreeSet::new();
    for (index, source) in volume.sources.iter().enumerate() {
        let at = at.key("sources").index(index);
        let given = [source.config_map.is_some(), source.secret.is_some(), source.downward_api.is_some()];
        match given.iter().filter(|given| **given).count() {
            0 => findings.required(at.clone()),
            1 => {}
            _ => findings.add(at.clone(), "Forbidden: may not specify more than 1 volume type per source"),
        }
        let mut written = Vec::new();
        for (name, keys) in [("configMap", &source.config_map), ("secret", &source.secret)] {
            let Some(keys) = keys else { continue };
            let at = at.key(name);
            findings.name(at.key("name"), &keys.name, names::subdomain);
            check_items(&at.key("items"), &keys.items, findings);
            written.extend(keys.items.iter().map(|item| item.path.as_str()));
        }
        if let Some(fields) = &source.downward_api {
            check_files(&at.key("downwardAPI").key("items"), &fields.items, findings);
            written.extend(fields.items.iter().map(|item| item.path.as_str()));
        }
        for path in written {
            if !paths.insert(path) {
                findings.invalid(at.clone(), path, "conflicting duplicate paths");
            }
        }
    }
}

fn check_items(at: &FieldPath, items: &[KeyToPath], findings: &mut Findings) {
    for (index, item) in items.iter().enumerate() {
        let at = at.index(index);
        if item.key.is_empty() {
            findings.required(at.key("key"));
        }
        check_path(at.key("path"), &item.path, findings);
        check_mode(at.key("mode"), item.mode, findings);
    }
}

fn check_files(at: &FieldPath, files: &[DownwardFile], findings: &mut Findings) {
    for (index, file) in files.iter().enumerate() {
        let at = at.index(index);
        check_path(at.key("path"), &file.path, findings);
        check_mode(at.key("mode"), file.mode, findings);
        match (&file.field_ref, &file.resource_field_ref) {
            (Some(_), Some(_)) => {
                findings.invalid(
                    at.clone(),
                    "",
                    "fieldRef and resourceFieldRef can not be specified simultaneously",
                );
            }
            (None, None) => {
                findings.add(at.clone(), "Required value: one of fieldRef and resourceFieldRef is required");
            }
            (Some(field), None) => check_field(&at.key("fieldRef"), field, FILE_FIELDS, findings),
            (None, Some(resource)) => {
                let at = at.key("resourceFieldRef");
                if resource.container_name.is_empty() {
                    findings.required(at.key("containerName"));
                }
                check_resource(&at, resource, findings);
            }
        }
    }
}

fn check_field(at: &FieldPath, field: &ObjectFieldSelector, known: &[&str], findings: &mut Findings) {
    let path = field.field_path.as_str();
    let keyed =
        |map: &str| path.strip_prefix(map).is_some_and(|key| key.starts_with("['") && key.ends_with("']"));
    match field.api_version.as_deref() {
        None | Some("" | "v1") => {}
        Some(other) => findings.invalid(at.key("apiVersion"), other, "must be v1"),
    }
    if path.is_empty() {
        findings.required(at.key("fieldPath"));
    } else if !known.contains(&path) && !keyed("metadata.labels") && !keyed("metadata.annotations") {
        let message = format!("Unsupported value: {path:?}: supported values: {}", known.join(", "));
        findings.add(at.key("fieldPath"), message);
    }
}

fn check_resource(at: &FieldPath, selector: &ResourceFieldSelector, findings: &mut Findings) {
    let resource = selector.resource.as_str();
    let is_huge = resource.starts_with("limits.hugepages-") || resource.starts_with("requests.hugepages-");
    if resource.is_empty() {
        return findings.required(at.key("resource"));
    }
    if !RESOURCES.contains(&resource) && !is_huge {
        let message = format!("Unsupported value: {resource:?}: supported values: {}", RESOURCES.join(", "));
        return findings.add(at.key("resource"), message);
    }
    let divisors = if resource.ends_with(".cpu") { CPU_DIVISORS } else { BYTE_DIVISORS };
    let is_known = |divisor: &Quantity| {
        let mut known = divisors.iter().filter_map(|known| known.parse::<Quantity>().ok());
        (divisor.value() == 0 && !divisor.is_negative()) || known.any(|known| known == *divisor)
    };
    if let Some(divisor) = selector.divisor.as_ref().filter(|divisor| !is_known(divisor)) {
        let rule = format!("only divisor's values {} are supported with {resource}", divisors.join(", "));
        findings.invalid(at.key("divisor"), &divisor.to_string(), &rule);
    }
}

/// A path below the volume's root, whose names do not look like the kubelet's own (`..data`).
fn check_path(at: FieldPath, path: &str, findings: &mut Findings) {
    findings.length(at.clone(), path.len(), MAX_PATH_BYTES);
    if path.is_empty() {
        findings.required(at);
    } else if path.starts_with('/') {
        findings.invalid(at, path, "must be a relative path");
    } else if path.split('/').any(|part| part == "..") {
        findings.invalid(at, path, "must not contain '..'");
    } else if path.starts_with("..") {
        findings.invalid(at, path, "must not start with '..'");
    } else if path.split('/').any(|part| part.is_empty() || part == "." || part.len() > 255) {
        findings.invalid(at, path, "must consist of file names of at most 255 bytes, without '.'");
    } else if path.contains('\0') {
        findings.invalid(at, path, "must not contain a NUL byte");
    }
}

fn check_mode(at: FieldPath, mode: Option<u32>, findings: &mut Findings) {
    if let Some(mode) = mode.filter(|mode| *mode > MOST_MODE) {
        let rule = "must be a number between 0 and 0777 (octal), both inclusive";
        findings.invalid(at, &mode.to_string(), rule);
    }
}
