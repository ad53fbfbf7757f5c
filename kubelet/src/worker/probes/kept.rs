//! The containers whose probe has succeeded, for the next kubelet. Kubelet has this from the status in the API
//! server.
//!
//! `pods/<uid>/started-containers`: the next kubelet does not probe their start again. A check that holds only
//! while a program starts would end a container that works.
//!
//! `pods/<uid>/ready-containers`: they are ready until a probe of the next kubelet says otherwise.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::worker::container_ids;

pub(super) const STARTED: &str = "started-containers";
pub(super) const READY: &str = "ready-containers";

/// One of the files.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    ids: Mutex<BTreeSet<String>>,
}

impl Kept {
    /// What an earlier kubelet wrote.
    pub(super) fn read(pod_dir: &Path, file: &str) -> Self {
        let path = pod_dir.join(file);
        Self { ids: Mutex::new(container_ids::read(&path)), path }
    }

    pub(super) fn ids(&self) -> BTreeSet<String> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    /// Drops all other containers. The next [`Kept::set`] writes that.
    pub(super) fn retain(&self, known: &BTreeSet<&str>) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).retain(|id| known.contains(id.as_str()));
    }

    /// Adds or removes a container. Blocks. On a full disk the next kubelet probes again.
    pub(super) fn set(&self, id: &str, success: bool) {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if success {
            ids.insert(id.to_owned());
        } else {
            ids.remove(id);
        }
        if let Err(error) = container_ids::write(&self.path, &ids) {
            tracing::debug!(
                error = linux::chain(&error),
                container = id,
                "its probe's success is not on the disk"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_kubelet_knows_which_containers_have_started() {
        let dir = tempfile::tempdir().unwrap();
        let set = |ids: &[&str]| ids.iter().map(|&id| id.to_owned()).collect::<BTreeSet<_>>();
        let next = || Kept::read(dir.path(), STARTED).ids();
        let started = Kept::read(dir.path(), STARTED);
        assert_eq!(started.ids(), set(&[]));
        started.set("a", true);
        started.set("b", true);
        assert_eq!(next(), set(&["a", "b"]));
        started.retain(&BTreeSet::from(["b"]));
        started.set("c", true);
        assert_eq!(next(), set(&["b", "c"]));
        started.set("b", false);
        assert!(started.has("c") && !started.has("b"));
        assert_eq!(next(), set(&["c"]));
        // The pod is gone.
        std::fs::remove_dir_all(dir.path()).unwrap();
        started.set("d", true);
        assert!(!dir.path().exists());
    }
}
