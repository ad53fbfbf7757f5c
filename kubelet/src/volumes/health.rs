//! Polls the condition of used volumes: a daemon outside our pods may die without notice to the
//! kubelet.
//!
//! The result is used for events and republishing. A dead volume returns errors to its users
//! anyway, and a Stage checks the mount before it trusts it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tracing::debug;

use super::device::{Device, Stage};
use super::layout::{self, PublishData};
use super::{Volumes, files};
use crate::objects::{EventType, Object};

/// kubelet polls about once a minute, for statistics.
const PERIOD: Duration = Duration::from_secs(10);
const ABNORMAL: &str = "VolumeConditionAbnormal";
const NORMAL: &str = "VolumeConditionNormal";

/// The last reported message for a pod's volume, by target path.
type Reported = BTreeMap<PathBuf, String>;

impl Volumes {
    /// Never ends.
    pub(crate) async fn watch_health(self) {
        let mut reported = Reported::new();
        loop {
            tokio::time::sleep(PERIOD).await;
            let mut found = Reported::new();
            for device in self.shared.devices.all() {
                self.check_health(&device, &reported, &mut found).await;
            }
            reported = found;
        }
    }

    async fn check_health(&self, device: &Device, reported: &Reported, found: &mut Reported) {
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
            let before = reported.get(&target);
            match condition.filter(|c| c.abnormal) {
                Some(condition) => {
                    if self.shared.republish_is_required(device) {
                        self.shared.republish.add(&device.key);
                    }
                    if before != Some(&condition.message) {
                        self.record_for_pod(&uid, EventType::Warning, ABNORMAL, &condition.message);
                    }
                    found.insert(target, condition.message);
                }
                None if before.is_some() => {
                    self.record_for_pod(&uid, EventType::Normal, NORMAL, "the volume is healthy again");
                }
                None => {}
            }
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
