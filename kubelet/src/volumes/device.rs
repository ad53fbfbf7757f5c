//! One volume on this node: whether it is staged, and which pods use it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What kubelet calls the unique volume name: driver and handle.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DeviceKey {
    pub(crate) driver: String,
    pub(crate) volume_handle: String,
}

/// What is known of the volume's staging directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing is mounted there.
    No,
    Done,
    /// A call may have left something behind, or its daemon is dead, or this
    /// kubelet has just started: Stage (idempotent) before use, Unstage in the end.
    Uncertain,
}

/// How far a pod's use of a volume has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The pod waits for the volume, or is about to.
    Wanted,
    /// The volume is, or may be, mounted for the pod.
    Mounted,
}

/// Operations on a device take `stage`'s lock for their whole length, so one
/// volume sees one call at a time. The users are outside of it: a pod is on
/// the list before it queues for the lock, so that its teardown, which comes
/// later, queues behind it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) key: DeviceKey,
    pub(crate) stage: tokio::sync::Mutex<Stage>,
    /// NodeStageVolume is under way.
    staging: AtomicBool,
    /// By the pod's uid.
    users: Mutex<BTreeMap<String, Use>>,
}

impl Device {
    pub(crate) fn is_staging(&self) -> bool {
        self.staging.load(Ordering::Relaxed)
    }

    pub(crate) fn set_staging(&self, staging: bool) {
        self.staging.store(staging, Ordering::Relaxed);
    }

    /// A pod that wants the volume; of one that has it nothing changes.
    pub(crate) fn add_user(&self, pod_uid: &str) {
        self.lock_users().entry(pod_uid.to_owned()).or_insert(Use::Wanted);
    }

    /// A pod for which the volume is, or may be, mounted.
    pub(crate) fn add_mounted(&self, pod_uid: &str) {
        self.lock_users().insert(pod_uid.to_owned(), Use::Mounted);
    }

    /// Whether the volume is, or may be, mounted for another pod.
    pub(crate) fn is_mounted_for_other(&self, pod_uid: &str) -> bool {
        self.lock_users().iter().any(|(uid, state)| uid != pod_uid && *state == Use::Mounted)
    }

    /// Whether nobody is left.
    pub(crate) fn remove_user(&self, pod_uid: &str) -> bool {
        let mut users = self.lock_users();
        users.remove(pod_uid);
        users.is_empty()
    }

    pub(crate) fn users(&self) -> BTreeSet<String> {
        self.lock_users().keys().cloned().collect()
    }

    pub(crate) fn is_used_by(&self, pod_uid: &str) -> bool {
        self.lock_users().contains_key(pod_uid)
    }

    fn lock_users(&self) -> MutexGuard<'_, BTreeMap<String, Use>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Every device this kubelet has dealt with. Entries stay: two tasks that look
/// up one key must always find one lock.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    by_key: Mutex<HashMap<DeviceKey, Arc<Device>>>,
}

impl Devices {
    /// A device met for the first time is taken to be in state `first`.
    pub(crate) fn get(&self, key: &DeviceKey, first: Stage) -> Arc<Device> {
        let mut devices = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let stage = tokio::sync::Mutex::new(first);
            let (staging, users) = (AtomicBool::new(false), Mutex::default());
            Arc::new(Device { key: key.clone(), stage, staging, users })
        };
        Arc::clone(devices.entry(key.clone()).or_insert_with(new))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Device>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(crate) fn used_by(&self, pod_uid: &str) -> Vec<Arc<Device>> {
        self.all().into_iter().filter(|d| d.is_used_by(pod_uid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_waits_does_not_have_the_volume_and_one_that_got_it_keeps_it() {
        let key = DeviceKey { driver: "d".to_owned(), volume_handle: "v".to_owned() };
        let device = Devices::default().get(&key, Stage::No);
        device.add_user("a");
        device.add_user("b");
        assert!(!device.is_mounted_for_other("a") && !device.is_mounted_for_other("b"));
        device.add_mounted("a");
        device.add_user("a");
        assert!(device.is_mounted_for_other("b") && !device.is_mounted_for_other("a"));
        device.remove_user("a");
        assert!(!device.is_mounted_for_other("b"));
    }
}
