//! How `describe pod` shows what comes from ConfigMaps, Secrets and the pod's fields. It never shows
//! their values.

use super::report::Report;
use crate::objects::{DownwardFile, EnvFromSource, EnvVarSource, KeySelector, VolumeSource};

/// A variable's value.
pub(super) fn value_from(source: &EnvVarSource) -> String {
    let key = |selector: &KeySelector, kind: &str| {
        let KeySelector { name, key, optional } = selector;
        format!("<set to the key '{key}' in {kind} '{name}'>  Optional: {optional}")
    };
    if let Some(field) = &source.field_ref {
        format!(" ({}:{})", field.api_version.as_deref().unwrap_or("v1"), field.field_path)
    } else if let Some(resource) = &source.resource_field_ref {
        format!(" ({})", resource.resource)
    } else if let Some(selector) = &source.config_map_key_ref {
        key(selector, "config map")
    } else if let Some(selector) = &source.secret_key_ref {
        key(selector, "secret")
    } else {
        String::new()
    }
}

pub(super) fn env_from(sources: &[EnvFromSource]) -> Vec<String> {
    let mut lines = Vec::new();
    for source in sources {
        let prefix = match source.prefix.as_str() {
            "" => String::new(),
            prefix => format!(" with prefix '{prefix}'"),
        };
        for (object, kind) in [(&source.config_map_ref, "ConfigMap"), (&source.secret_ref, "Secret")] {
            if let Some(object) = object {
                lines.push(format!("{}  {kind}{prefix}  Optional: {}", object.name, object.optional));
            }
        }
    }
    lines
}

/// Volumes of ConfigMaps, Secrets and fields.
pub(super) fn describe_volume(source: VolumeSource<'_>, report: &mut Report) {
    match source {
        VolumeSource::ConfigMap(source) => {
            report.field(2, "Type", "ConfigMap (a volume populated by a ConfigMap)");
            report.field(2, "Name", &source.name);
            report.field(2, "Optional", &source.optional.to_string());
        }
        VolumeSource::Secret(source) => {
            report.field(2, "Type", "Secret (a volume populated by a Secret)");
            report.field(2, "SecretName", &source.secret_name);
            report.field(2, "Optional", &source.optional.to_string());
        }
        VolumeSource::Downward(source) => {
            report.field(2, "Type", "DownwardAPI (a volume populated by information about the pod)");
            describe_files(&source.items, report);
        }
        VolumeSource::Projected(source) => {
            report.field(2, "Type", "Projected (a volume that contains injected data from multiple sources)");
            for source in &source.sources {
                if let Some(map) = &source.config_map {
                    report.field(2, "ConfigMapName", &map.name);
                }
                if let Some(secret) = &source.secret {
                    report.field(2, "SecretName", &secret.name);
                }
                if let Some(fields) = &source.downward_api {
                    describe_files(&fields.items, report);
                }
            }
        }
        VolumeSource::Ephemeral(source) => {
            let spec = &source.volume_claim_template.spec;
            report.field(
                2,
                "Type",
                "EphemeralVolume (an inline specification for a volume that gets created and deleted with the pod)",
            );
            report.field(2, "StorageClass", spec.storage_class_name.as_deref().unwrap_or_default());
            report.field(2, "Capacity", &crate::cli::rows::storage(&spec.resources.requests));
        }
        VolumeSource::EmptyDir(_) | VolumeSource::HostPath(_) | VolumeSource::Claim(_) => {}
    }
}

fn describe_files(files: &[DownwardFile], report: &mut Report) {
    let line = |file: &DownwardFile| {
        let field = file.field_ref.as_ref().map(|field| field.field_path.as_str());
        let resource = file.resource_field_ref.as_ref().map(|resource| resource.resource.as_str());
        format!("{} -> {}", field.or(resource).unwrap_or_default(), file.path)
    };
    let lines: Vec<String> = files.iter().map(line).collect();
    report.list(2, "Items", &lines);
}
