//! What an earlier kubelet left mounted, read back from disk.

use std::ffi::OsStr;

use tracing::warn;

use super::device::{DeviceKey, Stage};
use super::{Error, Volumes, csi_unmount, files, resolve};
use crate::objects::{Pod, PodPhase, VolumeSource};

impl Volumes {
    /// Enters every volume on disk as uncertain: a pod that still wants it
    /// stages and publishes it again (both idempotent), the rest goes. Returns
    /// the uids of the pods that have a directory.
    pub(crate) fn reconstruct(&self) -> Result<Vec<String>, Error> {
        let shared = &self.shared;
        for driver_dir in files::subdirectories(&shared.layout.stage_root())? {
            for dir in files::subdirectories(&driver_dir)? {
                let found = match shared.stage_data(&dir) {
                    Err(error) => {
                        shared.report_unreadable(&error, "left staged; it ends with the machine");
                        continue;
                    }
                    Ok(found) => found,
                };
                let Some(data) = found else {
                    // Of a Stage that never began, or from before a power loss.
                    if let Err(error) = files::remove_stage_dir(&dir) {
                        warn!(dir = %dir.display(), error = error.text(), "unknown stage directory stays");
                    }
                    continue;
                };
                let key = DeviceKey { driver: data.driver_name, volume_handle: data.volume_handle };
                shared.devices.get(&key, Stage::Uncertain);
            }
        }
        let mut uids = Vec::new();
        for pod_dir in files::subdirectories(&shared.layout.pods_dir())? {
            let Some(uid) = pod_dir.file_name().and_then(OsStr::to_str) else { continue };
            for dir in files::subdirectories(&shared.layout.csi_volumes_dir(uid))? {
                match shared.publish_data(&dir) {
                    Ok(Some(data)) => {
                        let key = DeviceKey { driver: data.driver_name, volume_handle: data.volume_handle };
                        shared.devices.get(&key, Stage::Uncertain).add_user(uid);
                    }
                    Ok(None) => {}
                    Err(error) => shared.report_unreadable(&error, "unmount it to remove its pod"),
                }
            }
            uids.push(uid.to_owned());
        }
        Ok(uids)
    }

    /// Whether a pod that may mount it names a claim that is bound to this volume. A pod
    /// that ends is among its users, or has unmounted it already: an earlier kubelet was
    /// killed between Unpublish and Unstage.
    fn is_wanted(&self, key: &DeviceKey) -> bool {
        let store = &self.shared.store;
        let may_mount = |pod: &Pod| {
            !pod.metadata.is_deleted() && !matches!(pod.status.phase, PodPhase::Succeeded | PodPhase::Failed)
        };
        store.pods().iter().filter(|pod| may_mount(pod)).any(|pod| {
            pod.spec.volumes.iter().any(|volume| match volume.source() {
                Some(VolumeSource::Claim(source)) => {
                    resolve::claim(store, pod, &source.claim_name).is_ok_and(|found| found.key == *key)
                }
                _ => false,
            })
        })
    }

    /// Unstages what an earlier kubelet staged and no pod uses: it died between
    /// Stage and Publish, or between Unpublish and Unstage. Waits for each
    /// driver to register, so this may take for ever.
    pub(crate) fn unstage_unused(&self) {
        for device in self.shared.devices.all().into_iter().filter(|d| !self.is_wanted(&d.key)) {
            let this = self.clone();
            tokio::spawn(async move {
                let mut backoff = crate::backoff::Backoff::operation();
                loop {
                    this.shared.plugins.wait_for(&device.key.driver).await;
                    let mut stage = device.stage.lock().await;
                    if *stage != Stage::Uncertain || !device.users().is_empty() {
                        return;
                    }
                    let shared = &this.shared;
                    match csi_unmount::unstage(&shared.plugins, &shared.layout, &device, &mut stage).await {
                        Ok(()) => return,
                        Err(error) => {
                            warn!(
                                volume_id = device.key.volume_handle,
                                error = error.text(),
                                "not unstaged yet"
                            );
                        }
                    }
                    drop(stage);
                    tokio::time::sleep(backoff.step()).await;
                }
            });
        }
    }
}
