//! The tables of `get`: which columns, and a row for each object.

use serde_json::Value;

use super::rows::{Tabular, or_none};
use super::{Error, age, kinds};
use crate::objects::{
    ConfigMap, CsiDriver, Event, Kind, PersistentVolume, PersistentVolumeClaim, Pod, Secret, StorageClass,
    Time, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent,
};

/// What a table shows beside the columns of its kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style<'a> {
    pub(super) wide: bool,
    pub(super) has_namespaces: bool,
    /// Names as `pod/web`.
    pub(super) has_kinds: bool,
    pub(super) label_columns: &'a [String],
    pub(super) has_labels: bool,
}

pub(super) fn head(kind: Kind, style: Style<'_>) -> Vec<String> {
    let (narrow, more) = columns(kind);
    let namespace = style.has_namespaces && kind.is_namespaced();
    let columns = narrow.iter().chain(if style.wide { more } else { &[] }).map(|name| (*name).to_owned());
    let labels = style.label_columns.iter().map(|key| key.rsplit('/').next().unwrap_or(key).to_uppercase());
    let namespace = namespace.then(|| "NAMESPACE".to_owned());
    let all_labels = style.has_labels.then(|| "LABELS".to_owned());
    namespace.into_iter().chain(columns).chain(labels).chain(all_labels).collect()
}

/// A row with the columns of `head`.
pub(super) fn row(kind: Kind, object: &Value, style: Style<'_>, now: Time) -> Result<Vec<String>, Error> {
    let mut row = cells(kind, object, now)?;
    let (narrow, _) = columns(kind);
    if !style.wide {
        row.truncate(narrow.len());
    }
    let name = narrow.iter().position(|name| *name == "NAME");
    if let Some(name) = name.filter(|_| style.has_kinds) {
        row[name].insert_str(0, &format!("{}/", kinds::resource(kind)));
    }
    if style.has_namespaces && kind.is_namespaced() {
        row.insert(0, object["metadata"]["namespace"].as_str().unwrap_or_default().to_owned());
    }
    let labels = &object["metadata"]["labels"];
    row.extend(style.label_columns.iter().map(|key| labels[key].as_str().unwrap_or_default().to_owned()));
    if style.has_labels {
        row.push(all_labels(labels));
    }
    Ok(row)
}

fn all_labels(labels: &Value) -> String {
    let labels: Vec<String> = labels
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    if labels.is_empty() { "<none>".to_owned() } else { labels.join(",") }
}

/// The columns of each kind; the second list is for `-o wide` only.
fn columns(kind: Kind) -> (&'static [&'static str], &'static [&'static str]) {
    match kind {
        Kind::Pod => Pod::head(),
        Kind::PersistentVolumeClaim => PersistentVolumeClaim::head(),
        Kind::PersistentVolume => PersistentVolume::head(),
        Kind::StorageClass => StorageClass::head(),
        Kind::CsiDriver => CsiDriver::head(),
        Kind::VolumeSnapshot => VolumeSnapshot::head(),
        Kind::VolumeSnapshotClass => VolumeSnapshotClass::head(),
        Kind::VolumeSnapshotContent => VolumeSnapshotContent::head(),
        Kind::ConfigMap => ConfigMap::head(),
        Kind::Secret => Secret::head(),
        Kind::Event => Event::head(),
        Kind::Node => (&["NAME", "STATUS", "ROLES", "AGE", "VERSION"], &["INTERNAL-IP", "KERNEL-VERSION"]),
    }
}

fn cells(kind: Kind, object: &Value, now: Time) -> Result<Vec<String>, Error> {
    match kind {
        Kind::Pod => typed::<Pod>(object, now),
        Kind::PersistentVolumeClaim => typed::<PersistentVolumeClaim>(object, now),
        Kind::PersistentVolume => typed::<PersistentVolume>(object, now),
        Kind::StorageClass => typed::<StorageClass>(object, now),
        Kind::CsiDriver => typed::<CsiDriver>(object, now),
        Kind::VolumeSnapshot => typed::<VolumeSnapshot>(object, now),
        Kind::VolumeSnapshotClass => typed::<VolumeSnapshotClass>(object, now),
        Kind::VolumeSnapshotContent => typed::<VolumeSnapshotContent>(object, now),
        Kind::ConfigMap => typed::<ConfigMap>(object, now),
        Kind::Secret => typed::<Secret>(object, now),
        Kind::Event => typed::<Event>(object, now),
        Kind::Node => Ok(node_cells(object, now)),
    }
}

fn node_cells(node: &Value, now: Time) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let status = &node["status"];
    // Ready is the first condition.
    let is_ready = status["conditions"][0]["status"] == "True";
    let created = node["metadata"]["creationTimestamp"].as_str().and_then(|time| time.parse().ok());
    let mut addresses = status["addresses"].as_array().into_iter().flatten();
    let internal = addresses.find(|address| address["type"] == "InternalIP");
    vec![
        text(&node["metadata"]["name"]),
        if is_ready { "Ready" } else { "NotReady" }.to_owned(),
        "<none>".to_owned(),
        age::since(created, now),
        text(&status["nodeInfo"]["kubeletVersion"]),
        or_none(&internal.map(|address| text(&address["address"])).unwrap_or_default()),
        or_unknown(text(&status["nodeInfo"]["kernelVersion"])),
    ]
}

/// kubectl's word for what a node does not report.
fn or_unknown(text: String) -> String {
    if text.is_empty() { "<unknown>".to_owned() } else { text }
}

fn typed<T: Tabular>(object: &Value, now: Time) -> Result<Vec<String>, Error> {
    Ok(T::deserialize(object).map_err(Error::Answer)?.row(now))
}
