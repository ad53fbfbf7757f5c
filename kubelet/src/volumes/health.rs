//! Polls the condition of used volumes: a daemon outside our pods may die without notice to the
//! kubelet, and another one may continue.
//!
//! The result is used for events and republishing. A dead volume returns errors to its users
//! anyway, and a Stage checks the mount before it trusts it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use proto::csi::VolumeCondition;
use tracing::debug;

use super::device::{Device, Stage};
use super::layout::{self, PublishData};
use super::{Volumes, files};
use crate::objects::{EventType, Object};

/// kubelet polls about once a minute, for statistics.
const PERIOD: Duration = Duration::from_secs(10);
const ABNORMAL: &str = "VolumeConditionAbnormal";
const NORMAL: &str = "VolumeConditionNormal";

/// The last condition of a pod's volume, by target path.
type Found = BTreeMap<PathBuf, VolumeCondition>;

impl Volumes {
    /// Never ends.
    pub(crate) async fn watch_health(self) {
        let mut before = Found::new();
        loop {
            // A daemon's end is looked into at once.
            let _due_or_not = tokio::time::timeout(PERIOD, self.shared.health_due.notified()).await;
            let mut found = Found::new();
            for device in self.shared.devices.all() {
                self.check_health(&device, &before, &mut found).await;
            }
            before = found;
        }
    }

    /// The condition that the driver reports for one of the volume's users.
    pub(super) async fn condition(&self, device: &Device) -> Option<VolumeCondition> {
        let driver = self.shared.plugins.driver(&device.key.driver)?;
        if !driver.node_capabilities().await.is_ok_and(|can| can.volume_condition) {
            return None;
        }
        let target = device.users().iter().find_map(|uid| self.target_of(device, uid))?;
        driver.node_volume_condition(&device.key.volume_handle, &target).await.ok().flatten()
    }

    async fn check_health(&self, device: &Device, before: &Found, found: &mut Found) {
        let Some(driver) = self.shared.plugins.driver(&device.key.driver) else { return };
        // Skip a volume with a running operation.
        let staged = device.stage.try_lock().is_ok_and(|stage| *stage != Stage::No);
        if !staged || !driver.node_capabilities().await.is_ok_and(|can| can.volume_condition) {
            return;
        }
        for uid in device.users() {
            let Some(target) = self.target_of(device, &uid) else { continue };
            let condition = match driver.node_volume_condition(&device.key.volume_handle, &target).await {
                Ok(condition) => condition,
                Err(error) => {
                    debug!(%error, "cannot get the volume's condition");
                    continue;
                }
            };
            let Some(condition) = condition else { continue };
            if condition.abnormal && self.shared.republish_is_required(device) {
                self.shared.republish.add(&device.key);
            }
            self.report_change(&uid, before.get(&target), &condition);
            found.insert(target, condition);
        }
    }

    /// A volume is taken to be well at first.
    fn report_change(&self, uid: &str, before: Option<&VolumeCondition>, now: &VolumeCondition) {
        let message = &now.message;
        match before {
            Some(before) if before == now => {}
            _ if now.abnormal => self.record_for_pod(uid, EventType::Warning, ABNORMAL, message),
            Some(before) if before.abnormal => {
                let message = format!("the volume is healthy again: {message}");
                self.record_for_pod(uid, EventType::Normal, NORMAL, &message);
            }
            Some(_) => self.record_for_pod(uid, EventType::Normal, NORMAL, message),
            None => {}
        }
    }

    pub(super) fn target_of(&self, device: &Device, uid: &str) -> Option<PathBuf> {
        let dirs = files::subdirectories(&self.shared.layout.csi_volumes_dir(uid)).ok()?;
        let is_of = |dir: &PathBuf| {
            layout::read_vol_data::<PublishData>(dir).ok().flatten().is_some_and(|data| {
                data.driver_name == device.key.driver && data.volume_handle == device.key.volume_handle
            })
        };
        dirs.into_iter().find(is_of).map(|dir| layout::target(&dir))
    }

    fn record_for_pod(&self, uid: &str, event_type: EventType, reason: &str, message: &str) {
        let pods = self.shared.store.pods();
        if let Some(pod) = pods.iter().find(|p| p.metadata.uid == uid) {
            self.shared.sinks.record(&pod.reference(), event_type, reason, message);
        }
    }
}
