//! NodeStageVolume and NodePublishVolume of one PV for one pod, and the files on disk around them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proto::csi::{NodePublishVolumeRequest, NodeStageVolumeRequest, VolumeCapability};
use tracing::{info, warn};

use super::dead_mount::is_dead;
use super::device::{Device, Stage};
use super::layout::{self, Layout, PublishData, StageData};
use super::ownership::{GroupChange, Stop};
use super::{capability, error::Error, files};
use crate::clients::csi::Driver;
use crate::clients::csi_secrets::Secrets;
use crate::objects::{
    AccessMode, CsiDriver, CsiVolumeSource, FsGroupPolicy, PersistentVolume, Pod, SecretReference,
};
use crate::store::Store;

/// The inputs of one mount; owned, since it runs in its own task.
#[derive(Debug)]
pub(super) struct CsiMount {
    pub(super) layout: Layout,
    pub(super) node_name: String,
    pub(super) driver: Driver,
    pub(super) device: Arc<Device>,
    pub(super) pod: Arc<Pod>,
    pub(super) volume: Arc<PersistentVolume>,
    /// The CSIDriver object, if there is one.
    pub(super) driver_object: Option<Arc<CsiDriver>>,
    /// spec.volumes[].persistentVolumeClaim.readOnly.
    pub(super) read_only: bool,
    /// Has the Secrets of the calls.
    pub(super) store: Store,
    /// Set when the pod ends.
    pub(super) stop: Arc<Stop>,
}

/// A volume that the driver has published.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) target: PathBuf,
    /// What the kubelet has to do before the pod may use the volume.
    pub(super) change: Option<GroupChange>,
}

impl CsiMount {
    /// Stages the volume if necessary and publishes it. The caller holds the device's lock; `stage` is
    /// its state.
    pub(super) async fn run(&self, stage: &mut Stage) -> Result<Published, Error> {
        self.take_for_pod()?;
        self.check_no_attachment()?;
        let can = self.driver.node_capabilities().await?;
        let fs_group = self.pod.spec.security_context.fs_group;
        let capability = capability::of_volume(&self.volume, can, fs_group)?;
        let staging_path = self.ensure_staged(stage, &capability, can.stage).await?;
        let target = self.publish(&staging_path, capability).await?;
        let group = fs_group.filter(|_| !can.mount_group && self.kubelet_owns_group());
        let change = group.map(|group| {
            let marker = self.layout.csi_ready(&self.pod.metadata.uid, &self.volume.metadata.name);
            let policy = self.pod.spec.security_context.fs_group_change_policy.unwrap_or_default();
            let volume = self.layout.stage_dir(&self.device.key.driver, &self.device.key.volume_handle);
            let (root, stop) = (target.clone(), Arc::clone(&self.stop));
            GroupChange { root, volume, group, policy, marker, stop }
        });
        Ok(Published { target, change })
    }

    /// Calls NodePublishVolume again for a published volume. The kubelet's own files stay
    /// unchanged, whatever the outcome. The caller holds the device's lock.
    pub(super) async fn run_again(&self, stage: &mut Stage) -> Result<(), Error> {
        let can = self.driver.node_capabilities().await?;
        let fs_group = self.pod.spec.security_context.fs_group;
        let capability = capability::of_volume(&self.volume, can, fs_group)?;
        let staging_path = self.ensure_staged(stage, &capability, can.stage).await?;
        let dir = self.layout.csi_volume_dir(&self.pod.metadata.uid, &self.volume.metadata.name);
        let request = self.publish_request(&staging_path, &layout::target(&dir), capability)?;
        Ok(self.driver.node_publish_volume(request).await?)
    }

    /// A ReadWriteOncePod volume belongs to the first pod that gets here; waiting pods do not
    /// exclude each other.
    fn take_for_pod(&self) -> Result<(), Error> {
        let uid = &self.pod.metadata.uid;
        let single = self.volume.spec.access_modes == [AccessMode::ReadWriteOncePod];
        if single && self.device.is_mounted_for_other(uid) {
            return Err(Error::InUseByOtherPod);
        }
        self.device.add_mounted(uid);
        Ok(())
    }

    /// This kubelet never calls ControllerPublishVolume, so a driver that requires it would fail.
    fn check_no_attachment(&self) -> Result<(), Error> {
        match &self.driver_object {
            Some(object) if object.spec.attach_required => {
                Err(Error::AttachRequired { driver: self.device.key.driver.clone() })
            }
            _ => Ok(()),
        }
    }

    async fn ensure_staged(
        &self,
        stage: &mut Stage,
        capability: &VolumeCapability,
        driver_stages: bool,
    ) -> Result<PathBuf, Error> {
        let stage_dir = self.layout.stage_dir(&self.device.key.driver, &self.device.key.volume_handle);
        let globalmount = layout::globalmount(&stage_dir);
        if *stage == Stage::Done && driver_stages && is_dead(&globalmount).await {
            warn!(volume_id = self.device.key.volume_handle, "staged mount is dead, staging it again");
            *stage = Stage::Uncertain;
        }
        if *stage == Stage::Done {
            return Ok(globalmount);
        }
        let secrets = if driver_stages {
            self.secrets(|csi| csi.node_stage_secret_ref.as_ref())?
        } else {
            Secrets::default()
        };
        files::make_dir(&stage_dir, 0o750)?;
        files::make_mount_point(&globalmount, 0o750)?;
        let data = StageData {
            volume_handle: self.device.key.volume_handle.clone(),
            driver_name: self.device.key.driver.clone(),
        };
        layout::write_vol_data(&stage_dir, &data)?;
        if driver_stages {
            let request = self.stage_request(&globalmount, capability, secrets);
            let was = std::mem::replace(stage, Stage::Uncertain);
            self.stage(request, &stage_dir, was, stage).await?;
        }
        *stage = Stage::Done;
        Ok(globalmount)
    }

    fn stage_request(
        &self,
        globalmount: &Path,
        capability: &VolumeCapability,
        secrets: Secrets,
    ) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: self.device.key.volume_handle.clone(),
            publish_context: HashMap::new(),
            staging_target_path: text(globalmount),
            volume_capability: Some(capability.clone()),
            secrets: secrets.into_map(),
            volume_context: self.volume_attributes(),
        }
    }

    async fn stage(
        &self,
        request: NodeStageVolumeRequest,
        stage_dir: &Path,
        was: Stage,
        stage: &mut Stage,
    ) -> Result<(), Error> {
        self.device.set_staging(true);
        let staged = self.driver.node_stage_volume(request).await;
        self.device.set_staging(false);
        let Err(error) = staged else { return Ok(()) };
        // After a final error the driver has left nothing, so remove our record: no Unstage
        // follows. But if other pods hold the volume, it still needs an Unstage, whatever the
        // outcome of staging it again.
        let others = self.device.users().iter().any(|user| *user != self.pod.metadata.uid);
        if error.is_final() && was == Stage::No && !others {
            let removed = files::remove_stage_dir(stage_dir);
            if removed.is_ok() {
                *stage = Stage::No;
            }
            log_remains(stage_dir, removed);
        }
        Err(error.into())
    }

    async fn publish(&self, globalmount: &Path, capability: VolumeCapability) -> Result<PathBuf, Error> {
        let pod = &self.pod.metadata;
        let key = &self.device.key;
        let dir = self.layout.csi_volume_dir(&pod.uid, &self.volume.metadata.name);
        let target = layout::target(&dir);
        // It may fail for want of a Secret: before anything is on disk.
        let request = self.publish_request(globalmount, &target, capability)?;
        files::make_dir(&dir, 0o750)?;
        layout::write_vol_data(
            &dir,
            &PublishData {
                spec_vol_id: self.volume.metadata.name.clone(),
                volume_handle: key.volume_handle.clone(),
                driver_name: key.driver.clone(),
                node_name: self.node_name.clone(),
                attachment_id: layout::attachment_id(&key.volume_handle, &key.driver, &self.node_name),
                volume_lifecycle_mode: "Persistent".to_owned(),
            },
        )?;
        match self.driver.node_publish_volume(request).await {
            Ok(()) => {
                info!(pod = pod.name, volume = self.volume.metadata.name, "volume mounted");
                Ok(target)
            }
            Err(error) => {
                if error.is_final() {
                    log_remains(&dir, files::remove_volume_dir(&dir));
                }
                Err(error.into())
            }
        }
    }

    fn publish_request(
        &self,
        globalmount: &Path,
        target: &Path,
        capability: VolumeCapability,
    ) -> Result<NodePublishVolumeRequest, Error> {
        let mut volume_context = self.volume_attributes();
        if self.driver_object.as_ref().is_some_and(|d| d.spec.pod_info_on_mount) {
            volume_context.extend(pod_info(&self.pod));
        }
        Ok(NodePublishVolumeRequest {
            volume_id: self.device.key.volume_handle.clone(),
            publish_context: HashMap::new(),
            staging_target_path: text(globalmount),
            target_path: text(target),
            volume_capability: Some(capability),
            readonly: self.is_read_only(),
            secrets: self.secrets(|csi| csi.node_publish_secret_ref.as_ref())?.into_map(),
            volume_context,
        })
    }

    /// Of the Secret that the volume names for a call.
    fn secrets(
        &self,
        reference: impl FnOnce(&CsiVolumeSource) -> Option<&SecretReference>,
    ) -> Result<Secrets, Error> {
        let reference = self.volume.spec.csi.as_ref().and_then(reference);
        Ok(Secrets::read(&self.store, reference)?)
    }

    fn is_read_only(&self) -> bool {
        self.read_only || self.volume.spec.csi.as_ref().is_some_and(|c| c.read_only)
    }

    fn volume_attributes(&self) -> HashMap<String, String> {
        let csi = self.volume.spec.csi.iter();
        csi.flat_map(|c| c.volume_attributes.clone()).collect()
    }

    /// CSIDriver.spec.fsGroupPolicy.
    fn kubelet_owns_group(&self) -> bool {
        let policy =
            self.driver_object.as_ref().map_or_else(FsGroupPolicy::default, |d| d.spec.fs_group_policy);
        let modes = &self.volume.spec.access_modes;
        let once =
            modes.iter().any(|m| matches!(m, AccessMode::ReadWriteOnce | AccessMode::ReadWriteOncePod));
        let has_fs_type = self.volume.spec.csi.as_ref().is_some_and(|c| !c.fs_type.is_empty());
        match policy {
            FsGroupPolicy::File => !self.is_read_only(),
            FsGroupPolicy::ReadWriteOnceWithFSType => !self.is_read_only() && once && has_fs_type,
            FsGroupPolicy::None => false,
        }
    }
}

/// The pod's event has the driver's error, which may be why the directory cannot be removed: an earlier
/// call has mounted the volume there. The next call, or the teardown, uses what is left.
fn log_remains(dir: &Path, removed: Result<(), Error>) {
    if let Err(error) = removed {
        warn!(dir = %dir.display(), error = error.text(), "the directory of a failed mount is not removed");
    }
}

/// CSIDriver.spec.podInfoOnMount.
fn pod_info(pod: &Pod) -> [(String, String); 5] {
    let key = |name: &str| format!("csi.storage.k8s.io/{name}");
    [
        (key("pod.name"), pod.metadata.name.clone()),
        (key("pod.namespace"), pod.metadata.namespace.clone()),
        (key("pod.uid"), pod.metadata.uid.clone()),
        (key("serviceAccount.name"), "default".to_owned()),
        (key("ephemeral"), "false".to_owned()),
    ]
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::super::device::{DeviceKey, Devices};
    use super::*;
    use crate::clients::csi::NodeCapabilities;

    fn mount(root: &Path, read_only: bool) -> CsiMount {
        let key = DeviceKey { driver: "d".to_owned(), volume_handle: "shelf".to_owned() };
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "v"},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "mountOptions": ["noatime"],
                "csi": {
                    "driver": "d", "volumeHandle": "shelf", "fsType": "ext4", "readOnly": read_only,
                    "volumeAttributes": {"zone": "near"},
                },
            },
        });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "shop", "uid": "u"},
            "spec": {"containers": []},
        });
        let driver_object = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": "d"},
            "spec": {"attachRequired": false, "podInfoOnMount": true},
        });
        CsiMount {
            layout: Layout::new(root),
            node_name: "here".to_owned(),
            driver: Driver::new("d", Path::new("/nonexistent/csi.sock")),
            device: Devices::default().get(&key, Stage::No),
            pod: Arc::new(from_value(pod).unwrap()),
            volume: Arc::new(from_value(volume).unwrap()),
            driver_object: Some(Arc::new(from_value(driver_object).unwrap())),
            read_only: false,
            store: Store::open(root, "here").unwrap(),
            stop: Arc::default(),
        }
    }

    #[tokio::test]
    async fn the_driver_gets_what_a_volume_says() {
        let root = tempfile::tempdir().unwrap();
        let shelf = mount(root.path(), true);
        let capability = capability::of_volume(&shelf.volume, NodeCapabilities::default(), None).unwrap();
        let Some(proto::csi::volume_capability::AccessType::Mount(options)) = &capability.access_type else {
            panic!("volumes are file systems: {capability:?}")
        };
        assert_eq!(
            (options.fs_type.as_str(), &options.mount_flags[..]),
            ("ext4", &["noatime".to_owned()][..])
        );
        let request =
            shelf.publish_request(Path::new("/stage"), Path::new("/target"), capability.clone()).unwrap();
        assert_eq!((request.volume_id.as_str(), request.readonly), ("shelf", true));
        for (key, value) in [("zone", "near"), ("csi.storage.k8s.io/pod.name", "web")] {
            assert_eq!(request.volume_context[key], value);
        }
        // Either the volume or the claim's reference in the pod may say so.
        assert!(!mount(root.path(), false).is_read_only());
        assert!(CsiMount { read_only: true, ..mount(root.path(), false) }.is_read_only());
    }
}
