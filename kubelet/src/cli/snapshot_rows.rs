//! The columns of snapshots, as their CustomResourceDefinitions name them for kubectl.

use super::age;
use super::rows::Tabular;
use crate::objects::{Time, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};

impl Tabular for VolumeSnapshot {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (
            &[
                "NAME",
                "READYTOUSE",
                "SOURCEPVC",
                "SOURCESNAPSHOTCONTENT",
                "RESTORESIZE",
                "SNAPSHOTCLASS",
                "SNAPSHOTCONTENT",
                "CREATIONTIME",
                "AGE",
            ],
            &[],
        )
    }

    fn row(&self, now: Time) -> Vec<String> {
        let (source, status) = (&self.spec.source, &self.status);
        let since = |time: Option<Time>| time.map(|time| age::since(Some(time), now)).unwrap_or_default();
        vec![
            self.metadata.name.clone(),
            ready(status.ready_to_use),
            source.persistent_volume_claim_name.clone(),
            source.volume_snapshot_content_name.clone(),
            status.restore_size.as_ref().map(ToString::to_string).unwrap_or_default(),
            self.spec.volume_snapshot_class_name.clone().unwrap_or_default(),
            status.bound_volume_snapshot_content_name.clone(),
            since(status.creation_time),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for VolumeSnapshotClass {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (&["NAME", "DRIVER", "DELETIONPOLICY", "AGE"], &[])
    }

    fn row(&self, now: Time) -> Vec<String> {
        vec![
            self.metadata.name.clone(),
            self.driver.clone(),
            format!("{:?}", self.deletion_policy),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

impl Tabular for VolumeSnapshotContent {
    fn head() -> (&'static [&'static str], &'static [&'static str]) {
        (
            &[
                "NAME",
                "READYTOUSE",
                "RESTORESIZE",
                "DELETIONPOLICY",
                "DRIVER",
                "VOLUMESNAPSHOTCLASS",
                "VOLUMESNAPSHOT",
                "VOLUMESNAPSHOTNAMESPACE",
                "AGE",
            ],
            &[],
        )
    }

    fn row(&self, now: Time) -> Vec<String> {
        let spec = &self.spec;
        vec![
            self.metadata.name.clone(),
            ready(self.status.ready_to_use),
            bytes(self.status.restore_size),
            format!("{:?}", spec.deletion_policy),
            spec.driver.clone(),
            spec.volume_snapshot_class_name.clone().unwrap_or_default(),
            spec.volume_snapshot_ref.name.clone(),
            spec.volume_snapshot_ref.namespace.clone(),
            age::since(self.metadata.creation_timestamp, now),
        ]
    }
}

/// Empty while it is not known.
pub(super) fn ready(is_ready: Option<bool>) -> String {
    is_ready.map(|is_ready| is_ready.to_string()).unwrap_or_default()
}

pub(super) fn bytes(bytes: Option<i64>) -> String {
    bytes.map(|bytes| bytes.to_string()).unwrap_or_default()
}
