//! The containers whose startup probe has succeeded, in `pods/<uid>/started-containers`.
//!
//! The next kubelet does not probe their start again: a check that holds only while a program starts would
//! end a container that works. Kubelet has this from the status in the API server.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::container_ids;

const FILE: &str = "started-containers";

#[derive(Debug)]
pub(super) struct Started {
    path: PathBuf,
    ids: Mutex<BTreeSet<String>>,
}

impl Started {
    /// What an earlier kubelet wrote.
    pub(super) fn read(pod_dir: &Path) -> Self {
        let path = pod_dir.join(FILE);
        Self { ids: Mutex::new(container_ids::read(&path)), path }
    }

    pub(super) fn ids(&self) -> BTreeSet<String> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a container, and drops all that are not in `known`. Blocks. On a full disk the next kubelet
    /// probes again.
    pub(super) fn add(&self, id: &str, known: &BTreeSet<String>) {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.retain(|id| known.contains(id));
        ids.insert(id.to_owned());
        if let Err(error) = container_ids::write(&self.path, &ids) {
            tracing::debug!(error = linux::chain(&error), container = id, "its start is not on the disk");
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
        let started = Started::read(dir.path());
        assert_eq!(started.ids(), set(&[]));
        started.add("a", &set(&["a"]));
        started.add("b", &set(&["a", "b"]));
        assert_eq!(Started::read(dir.path()).ids(), set(&["a", "b"]));
        started.add("c", &set(&["b", "c"]));
        assert_eq!(Started::read(dir.path()).ids(), set(&["b", "c"]));
        // The pod is gone.
        std::fs::remove_dir_all(dir.path()).unwrap();
        started.add("d", &set(&["d"]));
        assert!(!dir.path().exists());
    }
}
