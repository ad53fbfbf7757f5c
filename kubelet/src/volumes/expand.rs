//! NodeExpandVolume: the file system of a mounted volume grows to the volume's new size.

use std::sync::Arc;

use proto::csi::{CapacityRange, NodeExpandVolumeRequest};

use super::device::{DeviceKey, Stage};
use super::{Error, Volumes, capability, layout};
use crate::csi_secrets::Secrets;
use crate::objects::{EventType, Object, PersistentVolume, PersistentVolumeClaim, Quantity};

/// The condition of a claim whose volume has grown, and whose file system has not.
pub(crate) const FILE_SYSTEM_PENDING: &str = "FileSystemResizePending";

impl Volumes {
    /// Whether the volume is, or may be, mounted for a pod.
    pub(crate) fn is_mounted(&self, driver: &str, volume_handle: &str) -> bool {
        let key = DeviceKey { driver: driver.to_owned(), volume_handle: volume_handle.to_owned() };
        self.shared.devices.all().iter().any(|device| device.key == key && device.is_mounted_for_other(""))
    }

    /// Expands the file system and updates the claim. `false` if the volume is not published.
    pub(crate) async fn expand_file_system(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
    ) -> Result<bool, Error> {
        let Some(csi) = &volume.spec.csi else { return Ok(false) };
        let key = DeviceKey { driver: csi.driver.clone(), volume_handle: csi.volume_handle.clone() };
        let device = self.shared.devices.get(&key, Stage::No);
        let stage = device.stage.lock().await;
        let target = device.users().iter().find_map(|uid| self.target_of(&device, uid));
        let (true, Some(target)) = (*stage != Stage::No, target) else { return Ok(false) };
        let driver = self.shared.plugins.driver(&csi.driver);
        let driver = driver.ok_or_else(|| Error::DriverMissing { driver: csi.driver.clone() })?;
        let can = driver.node_capabilities().await?;
        if can.expand {
            let secrets = Secrets::read(&self.shared.store, csi.node_expand_secret_ref.as_ref())?;
            let bytes = volume.spec.capacity.get("storage").map_or(0, Quantity::value);
            let staging = layout::globalmount(&self.shared.layout.stage_dir(&key.driver, &key.volume_handle));
            driver
                .node_expand_volume(NodeExpandVolumeRequest {
                    volume_id: csi.volume_handle.clone(),
                    volume_path: target.to_string_lossy().into_owned(),
                    capacity_range: Some(CapacityRange {
                        required_bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
                        limit_bytes: 0,
                    }),
                    staging_target_path: staging.to_string_lossy().into_owned(),
                    volume_capability: Some(capability::of_volume(volume, can, None)?),
                    secrets: secrets.into_map(),
                })
                .await?;
        }
        drop(stage);
        let metadata = &claim.metadata;
        if let Some(current) = self.shared.store.claim(&metadata.namespace, &metadata.name) {
            let mut claim = (*current).clone();
            claim.status.conditions.clear();
            claim.status.capacity.clone_from(&volume.spec.capacity);
            self.shared.store.put_bound_claim(claim).map_err(Error::Store)?;
        }
        let message = format!("NodeExpandVolume succeeded for volume \"{}\"", volume.metadata.name);
        self.shared.sinks.record(
            &claim.reference(),
            EventType::Normal,
            "FileSystemResizeSuccessful",
            &message,
        );
        Ok(true)
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
