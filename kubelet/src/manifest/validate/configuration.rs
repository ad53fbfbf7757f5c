//! Rules for ConfigMaps and Secrets.

use std::collections::BTreeMap;

use super::super::path::FieldPath;
use super::{Findings, names};
use crate::objects::{Bytes, ConfigMap, MAX_CONFIGURATION_BYTES, Secret};

pub(super) fn check_config_map(map: &ConfigMap, findings: &mut Findings) {
    let (data, binary) = (FieldPath::root().key("data"), FieldPath::root().key("binaryData"));
    check_keys(&data, map.data.keys(), findings);
    check_keys(&binary, map.binary_data.keys(), findings);
    for key in map.data.keys().filter(|key| map.binary_data.contains_key(*key)) {
        findings.invalid(data.key(key), key, "duplicate of key present in binaryData");
    }
    let bytes = map.data.values().map(String::len).sum::<usize>() + size(&map.binary_data);
    // Both fields count together; the object's name is in the title of the error.
    findings.length(data, bytes, MAX_CONFIGURATION_BYTES);
}

/// `stringData` is in `data` already.
pub(super) fn check_secret(secret: &Secret, findings: &mut Findings) {
    let data = FieldPath::root().key("data");
    check_keys(&data, secret.data.keys(), findings);
    findings.length(data.clone(), size(&secret.data), MAX_CONFIGURATION_BYTES);
    for key in required_keys(&secret.secret_type) {
        if !secret.data.contains_key(*key) {
            findings.required(data.key(key));
        }
    }
}

fn check_keys<'a>(at: &FieldPath, keys: impl Iterator<Item = &'a String>, findings: &mut Findings) {
    for key in keys {
        if let Err(broken) = names::configuration_key(key) {
            findings.invalid(at.clone(), key, &broken);
        }
    }
}

/// The keys without which a Secret of this type is invalid (kubernetes, `ValidateSecret`).
fn required_keys(secret_type: &str) -> &'static [&'static str] {
    match secret_type {
        "kubernetes.io/dockercfg" => &[".dockercfg"],
        "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
        "kubernetes.io/ssh-auth" => &["ssh-privatekey"],
        "kubernetes.io/tls" => &["tls.crt", "tls.key"],
        _ => &[],
    }
}

fn size(data: &BTreeMap<String, Bytes>) -> usize {
    data.values().map(|bytes| bytes.0.len()).sum()
}
