//! What the probes have decided, for the next kubelet. Kubelet has the successes from the status in the API server.
//!
//! `pods/<uid>/started-containers`: the next kubelet does not probe their start again. A check that holds only
//! while a program starts would end a container that works.
//!
//! `pods/<uid>/ready-containers`: they are ready until a probe of the next kubelet says otherwise.
//!
//! `pods/<uid>/failed-startup-containers` and `failed-liveness-containers`: they are stopped for that. The next
//! kubelet starts another instance with restartPolicy OnFailure, also after exit code 0.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::objects::ProbeKind;
use crate::pod_state::probe_results::ProbeResults;
use crate::worker::container_ids;

/// All files of a pod.
#[derive(Debug)]
pub(super) struct KeptDecisions {
    pub(super) started: Kept,
    pub(super) ready: Kept,
    pub(super) failed_startup: Kept,
    pub(super) failed_liveness: Kept,
}

impl KeptDecisions {
    /// What an earlier kubelet wrote.
    pub(super) fn read(pod_dir: &Path) -> Self {
        let read = |file| Kept::read(pod_dir, file);
        Self {
            started: read("started-containers"),
            ready: read("ready-containers"),
            failed_startup: read("failed-startup-containers"),
            failed_liveness: read("failed-liveness-containers"),
        }
    }

    pub(super) fn results(&self) -> ProbeResults {
        let mut results = ProbeResults::default();
        for (kept, kind, success) in self.all() {
            for id in kept.ids() {
                results.set(&id, kind, success);
                if !success {
                    results.note_kill(&id);
                }
            }
        }
        results
    }

    /// Drops all other containers.
    pub(super) fn retain(&self, known: &BTreeSet<&str>) {
        self.all().iter().for_each(|(kept, ..)| kept.retain(known));
    }

    /// Each with the probe and the result that it stands for.
    fn all(&self) -> [(&Kept, ProbeKind, bool); 4] {
        [
            (&self.started, ProbeKind::Startup, true),
            (&self.ready, ProbeKind::Readiness, true),
            (&self.failed_startup, ProbeKind::Startup, false),
            (&self.failed_liveness, ProbeKind::Liveness, false),
        ]
    }
}

/// One of the files.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    ids: Mutex<BTreeSet<String>>,
}

impl Kept {
    fn read(pod_dir: &Path, file: &str) -> Self {
        let path = pod_dir.join(file);
        Self { ids: Mutex::new(container_ids::read(&path)), path }
    }

    fn ids(&self) -> BTreeSet<String> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    /// Drops all other containers. The next [`Kept::set`] writes that.
    fn retain(&self, known: &BTreeSet<&str>) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).retain(|id| known.contains(id.as_str()));
    }

    /// Adds or removes a container. Blocks. On a full disk the next kubelet probes again.
    pub(super) fn set(&self, id: &str, holds: bool) {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if holds {
            ids.insert(id.to_owned());
        } else {
            ids.remove(id);
        }
        if let Err(error) = container_ids::write(&self.path, &ids) {
            tracing::debug!(
                error = linux::chain(&error),
                container = id,
                "the decision of its probe is not on the disk"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_kubelet_knows_which_containers_were_stopped_for_a_failed_probe() {
        let dir = tempfile::tempdir().unwrap();
        let first = KeptDecisions::read(dir.path());
        assert_eq!(first.results(), ProbeResults::default());
        first.failed_startup.set("a", true);
        first.failed_liveness.set("b", true);
        first.ready.set("c", true);
        let next = KeptDecisions::read(dir.path()).results();
        assert_eq!(next.failed("a"), Some(ProbeKind::Startup));
        assert_eq!(next.failed("b"), Some(ProbeKind::Liveness));
        assert_eq!(next.failed("c"), None);
        assert_eq!(["a", "b", "c"].map(|id| next.was_killed(id)), [true, true, false]);
    }

    #[test]
    fn the_next_kubelet_knows_which_containers_have_started() {
        let dir = tempfile::tempdir().unwrap();
        let set = |ids: &[&str]| ids.iter().map(|&id| id.to_owned()).collect::<BTreeSet<_>>();
        let next = || Kept::read(dir.path(), "started").ids();
        let started = Kept::read(dir.path(), "started");
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
