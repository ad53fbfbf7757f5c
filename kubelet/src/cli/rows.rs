//! The columns of each kind, as kubectl shows them.

use super::age;
use super::pod_words;
use crate::objects::{
    AccessMode, ConfigMap, CsiDriver, Event, Object, PersistentVolume, PersistentVolumeClaim, Pod, Resources,
    Secret, StorageClass, Time,
};

/// A kind that has a table.
pub(super) trait Tabular: Object {
    /// The columns of `get`; the second list is for `-o wide` only.
    fn head() -> (&'static [&'static str], &'static [&'static str]);

    /// One cell for each column.
    fn row(&self, now: Time) -> Vec<String>;
}

impl Tabular for Pod {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (
            &["NAME", "READY", "STATUS", "RESTARTS", "AGE"],
            &["IP", "NODE", "NOMINATED NODE", "READINESS GATES"],
        )
    }

    fn row(&self, now: Time) -> Vec<String> {
        vec![
            self.metadata.name.clone(),
            pod_words::ready(self),
            pod_words::status(self),
            pod_words::restarts(self, now),
            age::since(self.metadata.creation_timestamp, now),
            or_none(&self.status.pod_ip),
            or_none(&self.spec.node_name),
            "<none>".to_owned(),
            pod_words::readiness_gates(self),
        ]
    }
}

impl Tabular for PersistentVolumeClaim {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "STATUS", "VOLUME", "CAPACITY", "ACCESS MODES", "STORAGECLASS", "AGE"], &["VOLUMEMODE"])
    }

    fn row(&self, now: Time) -> Vec<String> {
        let is_deleted = self.metadata.is_deleted();
        let bound = !self.spec.volume_name.is_empty();
        let modes = if bound { access_modes(&self.status.access_modes) } else { String::new() };
        vec![
            self.metadata.name.clone(),
            if is_deleted { "Terminating".to_owned() } else { format!("{:?}", self.status.phase) },
            self.spec.volume_name.clone(),
            storage(&self.status.capacity),
            modes,
            self.spec.storage_class_name.clone().unwrap_or_default(),
            age::since(self.metadata.creation_timestamp, now),
            format!("{:?}", self.spec.volume_mode),
        ]
    }
}

impl Tabular for PersistentVolume {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (
            &[
                "NAME",
                "CAPACITY",
                "ACCESS MODES",
                "RECLAIM POLICY",
                "STATUS",
                "CLAIM",
                "STORAGECLASS",
                "REASON",
                "AGE",
            ],
            &["VOLUMEMODE"],
        )
    }

    fn row(&self, now: Time) -> Vec<String> {
        let claim = self.spec.claim_ref.as_ref();
        let is_deleted = self.metadata.is_deleted();
        vec![
            self.metadata.name.clone(),
            storage(&self.spec.capacity),
            access_modes(&self.spec.access_modes),
            format!("{:?}", self.spec.persistent_volume_reclaim_policy),
            if is_deleted { "Terminating".to_owned() } else { format!("{:?}", self.status.phase) },
            claim.map(|claim| format!("{}/{}", claim.namespace, claim.name)).unwrap_or_default(),
            self.spec.storage_class_name.clone(),
            self.status.reason.clone(),
            age::since(self.metadata.creation_timestamp, now),
            format!("{:?}", self.spec.volume_mode),
        ]
    }
}

impl Tabular for StorageClass {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "PROVISIONER", "RECLAIMPOLICY", "VOLUMEBINDINGMODE", "ALLOWVOLUMEEXPANSION", "AGE"], &[])
    }

    fn row(&self, now: Time) -> Vec<String> {
        let default = if self.is_default() { " (default)" } else { "" };
        vec![
            format!("{}{default}", self.metadata.name),
            self.provisioner.clone(),
            format!("{:?}", self.reclaim_policy),
            format!("{:?}", self.volume_binding_mode),
            self.allow_volume_expansion.to_string(),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for CsiDriver {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "ATTACHREQUIRED", "PODINFOONMOUNT", "STORAGECAPACITY", "MODES", "AGE"], &[])
    }

    fn row(&self, now: Time) -> Vec<String> {
        let modes: Vec<String> =
            self.spec.volume_lifecycle_modes.iter().map(|mode| format!("{mode:?}")).collect();
        vec![
            self.metadata.name.clone(),
            self.spec.attach_required.to_string(),
            self.spec.pod_info_on_mount.to_string(),
            self.spec.storage_capacity.to_string(),
            modes.join(","),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for ConfigMap {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "DATA", "AGE"], &[])
    }

    fn row(&self, now: Time) -> Vec<String> {
        vec![
            self.metadata.name.clone(),
            (self.data.len() + self.binary_data.len()).to_string(),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for Secret {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "TYPE", "DATA", "AGE"], &[])
    }

    fn row(&self, now: Time) -> Vec<String> {
        vec![
            self.metadata.name.clone(),
            self.secret_type.clone(),
            self.data.len().to_string(),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for Event {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"], &["SOURCE", "FIRST SEEN", "COUNT", "NAME"])
    }

    fn row(&self, now: Time) -> Vec<String> {
        vec![
            age::since(Some(self.last_timestamp), now),
            self.event_type.as_str().to_owned(),
            self.reason.clone(),
            format!("{}/{}", self.involved_object.kind.to_lowercase(), self.involved_object.name),
            self.message.trim().replace('\n', " "),
            format!("{}, {}", self.source.component, self.source.host),
            age::since(Some(self.first_timestamp), now),
            self.count.to_string(),
            self.metadata.name.clone(),
        ]
    }
}

pub(super) fn access_modes(modes: &[AccessMode]) -> String {
    modes.iter().map(|mode| mode.short()).collect::<Vec<_>>().join(",")
}

pub(super) fn storage(amounts: &Resources) -> String {
    amounts.get("storage").map(ToString::to_string).unwrap_or_default()
}

pub(super) fn or_none(text: &str) -> String {
    if text.is_empty() { "<none>".to_owned() } else { text.to_owned() }
}
