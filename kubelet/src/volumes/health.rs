//! Follows the condition of used volumes in the drivers' answers (`stats.rs`): a daemon outside our pods may die
//! without notice to the kubelet, and another one may continue.
//!
//! The result is used for events and republishing. A dead volume returns errors to its users
//! anyway, and a Stage checks the mount before it trusts it.

use std::path::PathBuf;

use proto::csi::VolumeCondition;

use super::device::Device;
use super::layout::{self, PublishData};
use super::{Volumes, files};
use crate::objects::{EventType, Object};

const ABNORMAL: &str = "VolumeConditionAbnormal";
const NORMAL: &str = "VolumeConditionNormal";

impl Volumes {
    /// The condition that the driver reports for one of the volume's users.
    pub(super) async fn condition(&self, device: &Device) -> Option<VolumeCondition> {
        let driver = self.shared.plugins.driver(&device.key.driver)?;
        if !driver.node_capabilities().await.is_ok_and(|can| can.volume_condition) {
            return None;
        }
        let target = device.users().iter().find_map(|uid| self.target_of(device, uid))?;
        driver.node_volume_stats(&device.key.volume_handle, &target).await.ok()?.volume_condition
    }

    /// `before`: in the last answer about the pod's volume, if there was one.
    pub(super) fn follow_condition(
        &self,
        device: &Device,
        pod_uid: &str,
        before: Option<&VolumeCondition>,
        now: &VolumeCondition,
    ) {
        if now.abnormal && self.shared.republish_is_required(device) {
            self.shared.republish.add(&device.key);
        }
        self.report_change(pod_uid, before, now);
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
