//! Tears down a pod's volumes: unpublishes them, unstages those without other users, and removes
//! the pod's directory.

use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinSet;

use super::device::{Device, DeviceKey, Stage};
use super::mounted::check_nothing_mounted;
use super::{Error, Shared, Volumes, csi_unmount, files};
use crate::backoff::Backoff;
use crate::objects::{EventType, ObjectRef};

impl Volumes {
    /// Unmounts every volume of a pod and retries until all succeed; events on `pod` report
    /// failures.
    pub(crate) async fn unmount_pod(&self, pod: &ObjectRef) {
        let mut backoff = Backoff::operation();
        let mut drivers = self.shared.plugins.changes();
        self.shared.begin_stopping(&pod.uid);
        let survivor_unmounts = self.shared.survivor_unmounts().remove(&pod.uid);
        if let Some(survivor_unmounts) = survivor_unmounts {
            // Wait, so that it does not affect the next pod with this uid. A panic has logged
            // itself.
            drop(survivor_unmounts.await);
        }
        loop {
            drivers.mark_unchanged();
            let Err(error) = self.try_unmount_pod(&pod.uid).await else { break };
            self.shared.sinks.record(pod, EventType::Warning, "FailedUnmount", &error.text());
            tokio::select! {
                () = tokio::time::sleep(backoff.step()) => {}
                Ok(()) = drivers.changed() => backoff.reset(),
            }
        }
        self.shared.end_stopping(&pod.uid);
    }

    /// Tries once, in the background, to unmount the volumes of a pod whose containers survived
    /// SIGKILL. Their processes may wait for a volume's daemon that does not answer; the volume's
    /// last unmount ends the daemon. They never return to user space. [`Self::unmount_pod`]
    /// follows.
    pub(crate) fn unmount_from_survivors(&self, pod: &ObjectRef) {
        let mut survivor_unmounts = self.shared.survivor_unmounts();
        if survivor_unmounts.get(&pod.uid).is_some_and(|earlier| !earlier.is_finished()) {
            return;
        }
        // [`Self::unmount_pod`] resets this.
        self.shared.begin_stopping(&pod.uid);
        let (volumes, uid, pod) = (self.clone(), pod.uid.clone(), pod.clone());
        let attempt = async move {
            if let Err(error) = volumes.try_unmount_pod(&pod.uid).await {
                volumes.shared.sinks.record(&pod, EventType::Warning, "FailedUnmount", &error.text());
            }
        };
        survivor_unmounts.insert(uid, tokio::spawn(attempt));
    }

    /// Removes the pod's directory after its volumes and containers are gone.
    pub(crate) async fn remove_pod_dir(&self, uid: &str) -> Result<(), Error> {
        let dir = self.shared.layout.pod_dir(uid);
        check_nothing_mounted(&dir)?;
        let removed = tokio::task::spawn_blocking(move || linux::tree::remove(&dir).map_err(Error::Kernel));
        removed.await.unwrap_or(Err(Error::Interrupted { what: "the removal" }))
    }

    /// On failure, the remains are removed with the pod's directory.
    async fn remove_empty_dirs(&self, uid: &str) {
        let dir = self.shared.layout.empty_dirs(uid);
        if let Err(error) = check_nothing_mounted(&dir) {
            return tracing::warn!(error = error.text(), "emptyDirs of an ended pod not removed");
        }
        let removed = tokio::task::spawn_blocking(move || linux::tree::remove(&dir)).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(error = linux::chain(&error), uid, "emptyDirs of an ended pod not removed");
        }
    }

    /// Unmounts all volumes concurrently, so that a driver that does not answer cannot keep
    /// emptyDirs from being freed. Returns the first error.
    async fn try_unmount_pod(&self, uid: &str) -> Result<(), Error> {
        self.shared.unmount_sub_paths(uid).await?;
        self.shared.configuration.unmount_all(&self.shared.layout, uid).await?;
        self.shared.empty_dirs.unmount_all(self.shared.layout.empty_dirs(uid)).await?;
        let mut operations = JoinSet::new();
        for device in self.devices_of(uid)? {
            let (shared, uid) = (Arc::clone(&self.shared), uid.to_owned());
            operations.spawn(async move { shared.unmount_device(&uid, &device).await });
        }
        self.remove_empty_dirs(uid).await;
        let mut outcome = Ok(());
        while let Some(finished) = operations.join_next().await {
            let finished = finished.unwrap_or(Err(Error::Interrupted { what: "the unmount" }));
            outcome = outcome.and(finished);
        }
        outcome
    }

    /// The devices in memory, and those that are only on disk.
    fn devices_of(&self, uid: &str) -> Result<Vec<Arc<Device>>, Error> {
        for dir in files::subdirectories(&self.shared.layout.csi_volumes_dir(uid))? {
            match self.shared.publish_data(&dir)? {
                Some(data) => {
                    let key = DeviceKey { driver: data.driver_name, volume_handle: data.volume_handle };
                    self.shared.devices.get(&key, Stage::Uncertain).add_mounted(uid);
                }
                // Created for a publish that never started.
                None => files::remove_volume_dir(&dir)?,
            }
        }
        Ok(self.shared.devices.used_by(uid))
    }
}

impl Shared {
    async fn unmount_device(&self, uid: &str, device: &Device) -> Result<(), Error> {
        // Wait for the pod's own walk, which has ended or ends now: it holds a descriptor of the volume.
        let turn = device.turn_of(uid);
        let _turn = turn.lock().await;
        let mut stage = device.stage.lock().await;
        for dir in files::subdirectories(&self.layout.csi_volumes_dir(uid))? {
            self.unpublish_if_of(device, &dir).await?;
        }
        let others = device.users().iter().any(|user| user != uid);
        if !others {
            csi_unmount::unstage(&self.plugins, &self.layout, device, &mut stage).await?;
        }
        // Remove the pod last: until here, a retry must find it among the users.
        device.remove_user(uid);
        self.released.notify_waiters();
        Ok(())
    }

    async fn unpublish_if_of(&self, device: &Device, dir: &Path) -> Result<(), Error> {
        match self.publish_data(dir)? {
            Some(data)
                if data.driver_name == device.key.driver
                    && data.volume_handle == device.key.volume_handle =>
            {
                csi_unmount::unpublish(&self.plugins, dir, &data).await
            }
            _ => Ok(()),
        }
    }
}
