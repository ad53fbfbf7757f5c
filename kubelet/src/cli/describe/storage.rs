//! `describe` for claims, volumes, classes and drivers.

use super::Describe;
use super::report::Report;
use crate::cli::rows::{access_modes, storage};
use crate::objects::{CsiDriver, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass};

impl Describe for PersistentVolumeClaim {
    fn describe(&self, report: &mut Report) {
        report.field(0, "StorageClass", self.spec.storage_class_name.as_deref().unwrap_or_default());
        report.field(0, "Status", &format!("{:?}", self.status.phase));
        report.field(0, "Volume", &self.spec.volume_name);
        report.field(0, "Capacity", &storage(&self.status.capacity));
        report.field(0, "Access Modes", &access_modes(&self.spec.access_modes));
        report.field(0, "VolumeMode", &format!("{:?}", self.spec.volume_mode));
    }
}

/// The pods that mount the claim, one in each line.
pub(super) fn describe_users(claim: &PersistentVolumeClaim, pods: &[Pod], report: &mut Report) {
    let claim = &claim.metadata;
    let uses = |pod: &Pod| {
        let mut names = pod.spec.volumes.iter().filter_map(|volume| volume.claim_name(&pod.metadata.name));
        pod.metadata.namespace == claim.namespace && names.any(|name| name == claim.name)
    };
    let users: Vec<&str> =
        pods.iter().filter(|pod| uses(pod)).map(|pod| pod.metadata.name.as_str()).collect();
    report.field(0, "Used By", &users.join("\n"));
}

impl Describe for PersistentVolume {
    fn describe(&self, report: &mut Report) {
        let spec = &self.spec;
        report.field(0, "StorageClass", &spec.storage_class_name);
        report.field(0, "Status", &format!("{:?}", self.status.phase));
        let claim = spec.claim_ref.as_ref();
        report.field(
            0,
            "Claim",
            &claim.map(|claim| format!("{}/{}", claim.namespace, claim.name)).unwrap_or_default(),
        );
        report.field(0, "Reclaim Policy", &format!("{:?}", spec.persistent_volume_reclaim_policy));
        report.field(0, "Access Modes", &access_modes(&spec.access_modes));
        report.field(0, "VolumeMode", &format!("{:?}", spec.volume_mode));
        report.field(0, "Capacity", &storage(&spec.capacity));
        report.field(0, "Message", &self.status.message);
        let Some(csi) = &spec.csi else { return };
        report.title(0, "Source");
        report.field(1, "Type", "CSI (a Container Storage Interface (CSI) volume source)");
        report.field(1, "Driver", &csi.driver);
        report.field(1, "FSType", &csi.fs_type);
        report.field(1, "VolumeHandle", &csi.volume_handle);
        report.field(1, "ReadOnly", &csi.read_only.to_string());
        report.map(1, "VolumeAttributes", &csi.volume_attributes, "=");
    }
}

impl Describe for StorageClass {
    fn describe(&self, report: &mut Report) {
        report.field(0, "IsDefaultClass", if self.is_default() { "Yes" } else { "No" });
        report.field(0, "Provisioner", &self.provisioner);
        report.map(0, "Parameters", &self.parameters, "=");
        report.field(0, "AllowVolumeExpansion", &self.allow_volume_expansion.to_string());
        report.field(0, "MountOptions", &self.mount_options.join(", "));
        report.field(0, "ReclaimPolicy", &format!("{:?}", self.reclaim_policy));
        report.field(0, "VolumeBindingMode", &format!("{:?}", self.volume_binding_mode));
    }
}

impl Describe for CsiDriver {
    fn describe(&self, report: &mut Report) {
        report.field(0, "Attach Required", &self.spec.attach_required.to_string());
        report.field(0, "Pod Info On Mount", &self.spec.pod_info_on_mount.to_string());
        report.field(0, "Fs Group Policy", &format!("{:?}", self.spec.fs_group_policy));
        let modes: Vec<String> =
            self.spec.volume_lifecycle_modes.iter().map(|mode| format!("{mode:?}")).collect();
        report.field(0, "Lifecycle Modes", &modes.join(", "));
    }
}
