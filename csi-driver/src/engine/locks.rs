//! Allows one operation on a volume at a time. A second one is not queued but refused with ABORTED:
//! the caller decides whether to retry.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::jobs::Jobs;
use crate::error::{Error, Result};
use crate::model::ids::VolumeId;

#[derive(Debug, Clone)]
pub(crate) struct Locks {
    held: Arc<Mutex<HashSet<String>>>,
    /// Copies hold no lock of their source; operations that conflict with a copy look here.
    jobs: Jobs,
}

/// What an operation excludes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lock<'a> {
    /// All other changes of this volume.
    Volume(&'a str),
    /// All other changes of this snapshot.
    Snapshot(&'a str),
    /// Nothing: the operation only reads this volume.
    Nothing(&'a str),
}

impl Lock<'_> {
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Volume(id) | Self::Snapshot(id) | Self::Nothing(id) => id,
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Volume(id) | Self::Nothing(id) => format!("volume {id}"),
            Self::Snapshot(id) => format!("snapshot {id}"),
        }
    }
}

/// Held until dropped. It moves into the thread that does the work, so the volume stays locked even
/// after the caller has gone.
#[derive(Debug)]
pub(crate) struct VolumeGuard {
    held: Arc<Mutex<HashSet<String>>>,
    key: String,
}

impl Locks {
    pub(crate) fn new(jobs: Jobs) -> Self {
        Self { held: Arc::default(), jobs }
    }

    /// Locks a second object for an operation, until the guard is dropped. ABORTED if another
    /// operation holds it.
    pub(crate) fn hold(&self, lock: Lock<'_>) -> Result<VolumeGuard> {
        let key = lock.what();
        self.try_lock(&key).ok_or_else(|| match self.jobs.copying(lock.id()) {
            Some(job) => job.under_way(key),
            None => Error::Pending { what: key },
        })
    }

    /// ABORTED, with the progress, while the volume is being copied.
    pub(crate) fn check_not_copied(&self, volume_id: &VolumeId) -> Result<()> {
        match self.jobs.copying(volume_id.as_str()) {
            Some(job) => Err(job.under_way(format!("volume {volume_id}"))),
            None => Ok(()),
        }
    }

    /// `None` if another operation holds `key`.
    fn try_lock(&self, key: &str) -> Option<VolumeGuard> {
        let is_new = self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
        is_new.then(|| VolumeGuard { held: self.held.clone(), key: key.to_owned() })
    }
}

impl Drop for VolumeGuard {
    fn drop(&mut self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_volume_is_refused_and_others_are_not() {
        let locks = Locks::new(Jobs::default());
        let guard = locks.try_lock("a").unwrap();
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        drop(guard);
        assert!(locks.try_lock("a").is_some());
    }
}
