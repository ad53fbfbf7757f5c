//! NodeExpandVolume: the file system of a mounted volume grows to the volume's new size.

use std::collections::BTreeSet;
use std::sync::Arc;

use proto::csi::{CapacityRange, NodeExpandVolumeRequest};

use super::device::{Device, DeviceKey, Stage};
use super::{Error, Volumes, capability, layout};
use crate::clients::csi::NodeCapabilities;
use crate::clients::csi_secrets::Secrets;
use crate::objects::{
    CsiVolumeSource, EventType, Object, PersistentVolume, PersistentVolumeClaim, Pod, Quantity, VolumeSource,
};

/// The condition of a claim whose volume has grown, and whose file system has not.
pub(crate) const FILE_SYSTEM_PENDING: &str = "FileSystemResizePending";

impl Volumes {
    /// Whether the claim's volume is, or may be, mounted for a pod that may write to it.
    pub(crate) fn has_writable(&self, claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
        let Some(csi) = volume.spec.csi.as_ref().filter(|csi| !csi.read_only) else { return false };
        let key = DeviceKey { driver: csi.driver.clone(), volume_handle: csi.volume_handle.clone() };
        let device = self.shared.devices.all().into_iter().find(|device| device.key == key);
        device
            .is_some_and(|device| device.is_mounted_for_other("") && !self.writers(&device, claim).is_empty())
    }

    /// The uids of the volume's pods without those that have it read-only: kubelet expands no file
    /// system through those.
    fn writers(&self, device: &Device, claim: &PersistentVolumeClaim) -> BTreeSet<String> {
        let reads_only = |pod: &Pod| {
            pod.spec.volumes.iter().any(|volume| {
                matches!(volume.source(), Some(VolumeSource::Claim(source))
                    if source.read_only && source.claim_name == claim.metadata.name)
            })
        };
        let mut users = device.users();
        for pod in self.shared.store.pods().iter().filter(|pod| reads_only(pod)) {
            users.remove(&pod.metadata.uid);
        }
        users
    }

    /// Expands the file system and updates the claim, if it still waits for that. `false` if the
    /// volume is not published, or only read-only.
    pub(crate) async fn expand_file_system(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
    ) -> Result<bool, Error> {
        let Some(csi) = &volume.spec.csi else { return Ok(false) };
        let key = DeviceKey { driver: csi.driver.clone(), volume_handle: csi.volume_handle.clone() };
        let device = self.shared.devices.get(&key, Stage::No);
        let stage = device.stage.lock().await;
        // Another mount may have expanded it, or the volume may have grown, during the wait.
        let metadata = &claim.metadata;
        let current = self.shared.store.claim(&metadata.namespace, &metadata.name);
        let is_waiting = |current: &Arc<PersistentVolumeClaim>| {
            current.metadata.uid == metadata.uid && current.has_condition(FILE_SYSTEM_PENDING)
        };
        let Some(claim) = current.filter(is_waiting) else { return Ok(true) };
        let Some(volume) = self.shared.store.volume(&volume.metadata.name) else { return Ok(true) };
        let Some(csi) = volume.spec.csi.as_ref().filter(|csi| !csi.read_only) else { return Ok(false) };
        let target = self.writers(&device, &claim).iter().find_map(|uid| self.target_of(&device, uid));
        let (true, Some(target)) = (*stage != Stage::No, target) else { return Ok(false) };
        let driver = self.shared.plugins.driver(&csi.driver);
        let driver = driver.ok_or_else(|| Error::DriverMissing { driver: csi.driver.clone() })?;
        let can = driver.node_capabilities().await?;
        if can.expand {
            let staging = layout::globalmount(&self.shared.layout.stage_dir(&key.driver, &key.volume_handle));
            let request = NodeExpandVolumeRequest {
                volume_path: target.to_string_lossy().into_owned(),
                staging_target_path: staging.to_string_lossy().into_owned(),
                ..self.expand_request(&volume, csi, can)?
            };
            driver.node_expand_volume(request).await?;
        }
        self.keep_expanded(&claim, &volume)?;
        // Only now: who waits for the lock sees that it is done.
        drop(stage);
        let message = format!("NodeExpandVolume succeeded for volume \"{}\"", volume.metadata.name);
        self.shared.sinks.record(
            &claim.reference(),
            EventType::Normal,
            "FileSystemResizeSuccessful",
            &message,
        );
        Ok(true)
    }

    /// Without its paths.
    fn expand_request(
        &self,
        volume: &PersistentVolume,
        csi: &CsiVolumeSource,
        can: NodeCapabilities,
    ) -> Result<NodeExpandVolumeRequest, Error> {
        let secrets = Secrets::read(&self.shared.store, csi.node_expand_secret_ref.as_ref())?;
        let bytes = volume.spec.capacity.get("storage").map_or(0, Quantity::value);
        Ok(NodeExpandVolumeRequest {
            volume_id: csi.volume_handle.clone(),
            capacity_range: Some(CapacityRange {
                required_bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
                limit_bytes: 0,
            }),
            volume_capability: Some(capability::of_volume(volume, can, None)?),
            secrets: secrets.into_map(),
            ..NodeExpandVolumeRequest::default()
        })
    }

    /// The claim has the capacity of `volume`, whose file system has grown.
    fn keep_expanded(&self, claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Result<(), Error> {
        let store = &self.shared.store;
        let expanded = |claim: &mut PersistentVolumeClaim| {
            claim.status.capacity.clone_from(&volume.spec.capacity);
            // It may have grown again during the call.
            let latest = store.volume(&volume.metadata.name);
            if latest.is_none_or(|latest| latest.spec.capacity == volume.spec.capacity) {
                claim.status.conditions.retain(|c| c.condition_type != FILE_SYSTEM_PENDING);
            }
        };
        store.update_bound_claim(claim, expanded).map_err(Error::Store)?;
        Ok(())
    }

    /// For a volume that has just been mounted: the claim may have waited for it. Runs as a task.
    pub(super) async fn expand_if_pending(&self, volume: &Arc<PersistentVolume>) -> Result<(), Error> {
        let Some(holder) = &volume.spec.claim_ref else { return Ok(()) };
        let claim = self.shared.store.claim(&holder.namespace, &holder.name);
        let is_waiting = |claim: &Arc<PersistentVolumeClaim>| {
            claim.has_condition(FILE_SYSTEM_PENDING) && claim.metadata.uid == holder.uid
        };
        let Some(claim) = claim.filter(is_waiting) else { return Ok(()) };
        let (this, volume) = (self.clone(), Arc::clone(volume));
        let expanded = tokio::spawn(async move { this.expand_file_system(&claim, &volume).await });
        expanded.await.unwrap_or(Err(Error::Interrupted { what: "the expansion" })).map(drop)
    }
}
