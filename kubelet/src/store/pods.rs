//! Pods, with those that are torn down and the successors that wait for that.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::entries::{Key, PodEntry};
use super::outcome;
use super::{Durability, Error, Store};
use crate::objects::{Kind, PersistentVolumeClaim, Pod, PodStatus, now};

impl Store {
    /// All pods, including those being torn down, by namespace and name.
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.state().pods.values().map(|entry| Arc::clone(&entry.current.object)).collect()
    }

    pub fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        self.state().pods.get(&Key::new(namespace, name)).map(|entry| Arc::clone(&entry.current.object))
    }

    pub(crate) fn has_pod(&self, uid: &str) -> bool {
        self.state().pods.find_uid(uid).is_some()
    }

    /// Sets a pod's status; does nothing for an unknown uid.
    pub fn set_pod_status(&self, uid: &str, status: PodStatus) {
        if let Some(entry) = self.state().pods.find_uid_mut(uid) {
            let before = &mut Arc::make_mut(&mut entry.current.object).status;
            let decided = before.is_decided().then(|| std::mem::take(before));
            *before = status;
            // The worker may not have seen an eviction yet.
            if let Some(PodStatus { phase, reason, message, .. }) = decided {
                *before = PodStatus { phase, reason, message, ..std::mem::take(before) };
            }
        }
        self.inner.statuses.send_replace(());
    }

    pub fn pod_status(&self, uid: &str) -> Option<PodStatus> {
        self.state().pods.find_uid(uid).map(|entry| entry.current.object.status.clone())
    }

    /// Sets a pod's deletion time and drops its successor; `false` for an unknown pod.
    /// `grace_seconds` defaults to the pod's own. A second call can only shorten the grace period.
    pub fn mark_pod_deleted(
        &self,
        namespace: &str,
        name: &str,
        grace_seconds: Option<u64>,
    ) -> Result<bool, Error> {
        let _writing = self.writing();
        let key = Key::new(namespace, name);
        let Some(mut entry) = self.state().pods.get(&key).cloned() else { return Ok(false) };
        entry.successor = None;
        entry.mark_deleted(grace_seconds, now());
        self.keep_pod(key, entry)?;
        Ok(true)
    }

    /// Removes a pod after its teardown; its successor, if any, replaces it. The claims that were made for
    /// the pod are marked deleted before.
    pub fn forget_pod(&self, uid: &str) -> Result<(), Error> {
        let _writing = self.writing();
        let Some((key, entry)) = self.state().pods.find_uid_entry(uid) else { return Ok(()) };
        for claim in self.claims().iter().filter(|claim| claim.has_owner(uid)) {
            let mut claim = PersistentVolumeClaim::clone(claim);
            claim.give_up();
            self.replace(claim, Durability::PowerLoss)?;
        }
        match entry.successor {
            Some(successor) => {
                let entry = PodEntry { current: *successor, successor: None };
                match self.keep_pod(key.clone(), entry.clone()) {
                    // The next start reads the manifest again, so memory suffices.
                    Err(error) if error.is_full_disk() && entry.is_of_a_file() => {
                        self.state().pods.replace(&key, entry);
                        self.announce(Kind::Pod, &key);
                        Ok(())
                    }
                    kept => kept,
                }
            }
            None => {
                self.inner.disk.remove(Kind::Pod, &key)?;
                self.state().pods.remove(&key);
                self.announce(Kind::Pod, &key);
                Ok(())
            }
        }
    }

    /// Ignores all pods applied from now on: pods that end must not start again. Their files and
    /// descriptions stay for the next start.
    pub fn take_no_more_pods(&self) {
        let _writing = self.writing();
        self.inner.refuses_pods.store(true, Ordering::Relaxed);
    }

    /// Like [`Store::keep`]. A pod of a file is read again after a power loss, so starting it does
    /// not wait for the disk.
    pub(super) fn keep_pod(&self, key: Key, entry: PodEntry) -> Result<(), Error> {
        let durability = outcome::durability(&entry);
        let was_deleted_alone = entry.current.object.metadata.is_deleted() && entry.successor.is_none();
        let written = if was_deleted_alone {
            self.inner.disk.write_deleted(Kind::Pod, &key, &entry, durability)
        } else {
            self.inner.disk.write(Kind::Pod, &key, &entry, durability)
        };
        written?;
        self.state().pods.replace(&key, entry);
        self.announce(Kind::Pod, &key);
        Ok(())
    }
}
