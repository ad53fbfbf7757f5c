//! Reads the mounts of an earlier kubelet from disk.

use std::ffi::OsStr;
use std::sync::Arc;

use tracing::warn;

use super::device::{Device, DeviceKey, Stage};
use super::mounted::check_nothing_mounted;
use super::{Error, Volumes, csi_unmount, files, resolve};
use crate::backoff::Backoff;
use crate::objects::Pod;

impl Volumes {
    /// Enters every volume on disk as uncertain and returns the uids of the pods with a directory.
    /// A pod that still wants a volume stages and publishes it again (both idempotent).
    ///
    /// All volumes get their users before any pod is torn down, since the last user's teardown
    /// unstages the volume. [`Self::unstage_unused`] unstages volumes without users.
    pub(crate) fn reconstruct(&self) -> Result<Vec<String>, Error> {
        let shared = &self.shared;
        for driver_dir in files::subdirectories(&shared.layout.stage_root())? {
            for dir in files::subdirectories(&driver_dir)? {
                let found = match shared.stage_data(&dir) {
                    Err(error) => {
                        shared.report_unreadable(&error, "left staged until the machine reboots");
                        continue;
                    }
                    Ok(found) => found,
                };
                let Some(data) = found else {
                    // The Stage never started, or the record is from before a power loss.
                    if let Err(error) = files::remove_stage_dir(&dir) {
                        warn!(dir = %dir.display(), error = error.text(), "unknown stage directory not removed");
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
                        shared.devices.get(&key, Stage::Uncertain).add_mounted(uid);
                    }
                    Ok(None) => {}
                    Err(error) => shared.report_unreadable(&error, "unmount it to remove its pod"),
                }
            }
            uids.push(uid.to_owned());
        }
        // These volumes are staged but not published. Their pod may be deleted before it mounts
        // them again, for example because the driver is not registered yet.
        for device in self.unused() {
            self.uids_wanting(&device.key).iter().for_each(|uid| device.add_user(uid));
        }
        shared.reconstructed.set(()).expect("an engine reconstructs its volumes once");
        Ok(uids)
    }

    /// The pods that may mount the volume and name a claim bound to it. An ending pod is a user
    /// already, or has unmounted the volume: an earlier kubelet was killed between Unpublish and
    /// Unstage.
    fn uids_wanting(&self, key: &DeviceKey) -> Vec<String> {
        let store = &self.shared.store;
        let may_mount = |pod: &Pod| !pod.metadata.is_deleted() && !pod.status.phase.has_ended();
        let names_it = |pod: &Pod| {
            let mut claims =
                pod.spec.volumes.iter().filter_map(|volume| volume.claim_name(&pod.metadata.name));
            claims.any(|claim| resolve::claim(store, pod, &claim).is_ok_and(|found| found.key == *key))
        };
        let pods = store.pods().into_iter().filter(|pod| may_mount(pod) && names_it(pod));
        pods.map(|pod| pod.metadata.uid.clone()).collect()
    }

    fn unused(&self) -> impl Iterator<Item = Arc<Device>> {
        self.shared.devices.all().into_iter().filter(|device| device.users().is_empty())
    }

    /// Unstages the unused volumes, each in its own task: an earlier kubelet was killed between
    /// Stage and Publish, or between Unpublish and Unstage.
    pub(crate) fn unstage_unused(&self) {
        for device in self.unused() {
            let this = self.clone();
            tokio::spawn(async move { this.unstage_until_done(&device).await });
        }
    }

    /// Waits until no unused volume is mounted; `progress` receives a line for each. A volume that
    /// is not mounted can wait for its driver until the next start.
    pub(crate) async fn unmount_unused(&self, progress: &mut impl FnMut(String)) {
        let shared = &self.shared;
        shared.reconstructed.wait().await;
        for device in self.unused() {
            let DeviceKey { driver, volume_handle } = &device.key;
            if check_nothing_mounted(&shared.layout.stage_dir(driver, volume_handle)).is_err() {
                progress(format!("unstaging volume {volume_handle}, which needs driver {driver}"));
                self.unstage_until_done(&device).await;
            }
        }
    }

    /// Waits for the driver to register, perhaps forever.
    async fn unstage_until_done(&self, device: &Device) {
        let shared = &self.shared;
        let mut backoff = Backoff::operation();
        loop {
            shared.plugins.wait_for(&device.key.driver).await;
            let mut stage = device.stage.lock().await;
            // If the volume has a user, that pod's teardown unstages it.
            if *stage != Stage::Uncertain || !device.users().is_empty() {
                return;
            }
            match csi_unmount::unstage(&shared.plugins, &shared.layout, device, &mut stage).await {
                // A claim's deletion may wait for it.
                Ok(()) => return shared.released.notify_waiters(),
                Err(error) => {
                    warn!(
                        volume_id = device.key.volume_handle,
                        error = error.text(),
                        "volume not unstaged yet"
                    );
                }
            }
            drop(stage);
            tokio::time::sleep(backoff.step()).await;
        }
    }
}
