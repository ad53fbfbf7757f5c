//! One volume on this node: its staging state and the pods that use it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use runtime::Locks;

/// kubelet's unique volume name: driver and handle.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DeviceKey {
    pub(crate) driver: String,
    pub(crate) volume_handle: String,
}

/// The state of the volume's staging directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nothing is mounted there.
    No,
    Done,
    /// A failed call may have left a mount, the daemon may be dead, or this kubelet has just
    /// started: Stage (idempotent) before use, and Unstage at the end.
    Uncertain,
}

/// The state of a pod's use of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The pod waits for the volume.
    Wanted,
    /// The volume is, or may be, mounted for the pod.
    Mounted,
}

/// Each operation on a device holds `stage`'s lock, so a volume has one call at a time. `users` has
/// its own lock: a pod is added before it waits for `stage`, so that its later teardown waits
/// behind it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) key: DeviceKey,
    pub(crate) stage: tokio::sync::Mutex<Stage>,
    /// NodeStageVolume is running.
    staging: AtomicBool,
    /// By the pod's uid.
    users: Mutex<BTreeMap<String, Use>>,
    /// By the pod's uid. Lock it before `stage`.
    turns: Locks<String, Turn>,
    /// Locked while a pod's fsGroup is given to the volume, without `stage`.
    pub(crate) group_turn: Turn,
}

/// Guards no data.
pub(crate) type Turn = tokio::sync::Mutex<()>;

impl Device {
    pub(crate) fn is_staging(&self) -> bool {
        self.staging.load(Ordering::Relaxed)
    }

    pub(crate) fn set_staging(&self, staging: bool) {
        self.staging.store(staging, Ordering::Relaxed);
    }

    /// Locked while the volume is mounted for the pod, from the call until its files have the pod's group, and
    /// while it is unmounted.
    pub(crate) fn turn_of(&self, pod_uid: &str) -> Arc<Turn> {
        self.turns.of(pod_uid)
    }

    /// Adds a pod that wants the volume; no change if it has the volume already.
    pub(crate) fn add_user(&self, pod_uid: &str) {
        self.lock_users().entry(pod_uid.to_owned()).or_insert(Use::Wanted);
    }

    /// Adds a pod for which the volume is, or may be, mounted.
    pub(crate) fn add_mounted(&self, pod_uid: &str) {
        self.lock_users().insert(pod_uid.to_owned(), Use::Mounted);
    }

    /// Whether the volume is, or may be, mounted for another pod.
    pub(crate) fn is_mounted_for_other(&self, pod_uid: &str) -> bool {
        self.lock_users().iter().any(|(uid, state)| uid != pod_uid && *state == Use::Mounted)
    }

    /// Removes a pod; returns whether no users remain.
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

/// All devices of this kubelet. Entries are never removed: two tasks with the same key must get the
/// same lock.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    by_key: Mutex<HashMap<DeviceKey, Arc<Device>>>,
}

impl Devices {
    /// Returns the device; a new one gets the state `first`.
    pub(crate) fn get(&self, key: &DeviceKey, first: Stage) -> Arc<Device> {
        let mut devices = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let stage = tokio::sync::Mutex::new(first);
            let (staging, users) = (AtomicBool::new(false), Mutex::default());
            let (turns, group_turn) = (Locks::default(), Turn::default());
            Arc::new(Device { key: key.clone(), stage, staging, users, turns, group_turn })
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
    fn a_waiting_pod_is_a_user_without_a_mount() {
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
