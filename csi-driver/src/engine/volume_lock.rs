//! One operation a volume at a time. A second one is not queued but refused
//! (ABORTED): the caller retries, and knows best whether it still wants to.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Clone, Default)]
pub(crate) struct VolumeLocks {
    held: Arc<Mutex<HashSet<String>>>,
}

/// Held until dropped; it moves into the thread that does the work, so that an
/// operation whose caller went away keeps its volume locked.
#[derive(Debug)]
pub(crate) struct VolumeGuard {
    held: Arc<Mutex<HashSet<String>>>,
    key: String,
}

impl VolumeLocks {
    /// `None` while another operation holds `key`.
    pub(crate) fn try_lock(&self, key: &str) -> Option<VolumeGuard> {
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
        let locks = VolumeLocks::default();
        let guard = locks.try_lock("a").unwrap();
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        drop(guard);
        assert!(locks.try_lock("a").is_some());
    }
}
