//! `describe` for snapshots, their classes and contents.

use super::Describe;
use super::report::Report;
use crate::cli::snapshot_rows::{bytes, ready};
use crate::objects::{SnapshotError, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent};

impl Describe for VolumeSnapshot {
    fn describe(&self, report: &mut Report) {
        let (source, status) = (&self.spec.source, &self.status);
        report.field(0, "Source PVC", &source.persistent_volume_claim_name);
        report.field(0, "Source Content", &source.volume_snapshot_content_name);
        report.field(0, "Class", self.spec.volume_snapshot_class_name.as_deref().unwrap_or_default());
        report.field(0, "Content", &status.bound_volume_snapshot_content_name);
        report.field(0, "Ready To Use", &ready(status.ready_to_use));
        report.field(
            0,
            "Restore Size",
            &status.restore_size.as_ref().map(ToString::to_string).unwrap_or_default(),
        );
        report.field(0, "Creation Time", &super::report::moment(status.creation_time));
        describe_error(status.error.as_ref(), report);
    }
}

impl Describe for VolumeSnapshotClass {
    fn describe(&self, report: &mut Report) {
        report.field(0, "Driver", &self.driver);
        report.field(0, "Deletion Policy", &format!("{:?}", self.deletion_policy));
        report.map(0, "Parameters", &self.parameters, "=");
    }
}

impl Describe for VolumeSnapshotContent {
    fn describe(&self, report: &mut Report) {
        let (spec, status) = (&self.spec, &self.status);
        let snapshot = &spec.volume_snapshot_ref;
        report.field(0, "Driver", &spec.driver);
        report.field(0, "Deletion Policy", &format!("{:?}", spec.deletion_policy));
        report.field(0, "Snapshot", &format!("{}/{}", snapshot.namespace, snapshot.name));
        report.field(0, "VolumeHandle", &spec.source.volume_handle);
        report.field(0, "SnapshotHandle", &status.snapshot_handle);
        report.field(0, "Ready To Use", &ready(status.ready_to_use));
        report.field(0, "Restore Size", &bytes(status.restore_size));
        describe_error(status.error.as_ref(), report);
    }
}

fn describe_error(error: Option<&SnapshotError>, report: &mut Report) {
    if let Some(error) = error {
        report.field(0, "Error", &error.message);
    }
}
