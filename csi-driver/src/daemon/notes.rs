//! What the driver knows of volumes whose daemons are slow to answer, and its own requests to them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::model::ids::VolumeId;

#[derive(Debug, Default)]
pub(crate) struct Hangs {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    asking: HashMap<VolumeId, u64>,
    held_back: HashSet<VolumeId>,
    examined: HashSet<VolumeId>,
    findings: HashMap<VolumeId, Finding>,
    leaving: HashMap<VolumeId, BTreeSet<PathBuf>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The daemon waits for the pool's disk, and its users for the daemon.
    DiskStalls,
    /// It answered no request and was killed.
    Ended,
}

/// The kinds of notes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Note {
    Asking,
    HeldBack,
    Examined,
}

/// A note that holds until this is dropped.
#[derive(Debug)]
pub(crate) struct Noted {
    hangs: Arc<Hangs>,
    volume_id: VolumeId,
    note: Note,
}

impl Hangs {
    /// Counts one of the driver's own requests, until the result is dropped.
    pub(crate) fn asking(self: &Arc<Self>, volume_id: &VolumeId) -> Noted {
        *self.locked().asking.entry(volume_id.clone()).or_default() += 1;
        self.noted(volume_id, Note::Asking)
    }

    /// Number of the driver's own requests that wait for the volume's daemon.
    pub(crate) fn own_requests(&self, volume_id: &VolumeId) -> u64 {
        self.locked().asking.get(volume_id).copied().unwrap_or_default()
    }

    /// Notes that the driver holds the volume's writers back, until the result is dropped.
    pub(crate) fn holding_back(self: &Arc<Self>, volume_id: &VolumeId) -> Noted {
        self.locked().held_back.insert(volume_id.clone());
        self.noted(volume_id, Note::HeldBack)
    }

    pub(crate) fn is_held_back(&self, volume_id: &VolumeId) -> bool {
        self.locked().held_back.contains(volume_id)
    }

    /// `None` if the volume's daemon is being examined already.
    pub(crate) fn examining(self: &Arc<Self>, volume_id: &VolumeId) -> Option<Noted> {
        let is_first = self.locked().examined.insert(volume_id.clone());
        is_first.then(|| self.noted(volume_id, Note::Examined))
    }

    /// Notes that an Unpublish found this target busy and will be repeated.
    pub(crate) fn leaving(&self, volume_id: &VolumeId, target: &Path) {
        self.locked().leaving.entry(volume_id.clone()).or_default().insert(target.to_owned());
    }

    /// Forgets that: the target is unpublished, or published again.
    pub(crate) fn left_or_stays(&self, volume_id: &VolumeId, target: &Path) {
        let mut state = self.locked();
        if let Some(targets) = state.leaving.get_mut(volume_id) {
            targets.remove(target);
            if targets.is_empty() {
                state.leaving.remove(volume_id);
            }
        }
    }

    /// The targets that an Unpublish found busy.
    pub(crate) fn leaving_targets(&self, volume_id: &VolumeId) -> BTreeSet<PathBuf> {
        self.locked().leaving.get(volume_id).cloned().unwrap_or_default()
    }

    pub(crate) fn finding(&self, volume_id: &VolumeId) -> Option<Finding> {
        self.locked().findings.get(volume_id).copied()
    }

    /// `None`: the daemon answers again, or another one has replaced it.
    pub(crate) fn found(&self, volume_id: &VolumeId, finding: Option<Finding>) {
        let mut state = self.locked();
        match finding {
            Some(finding) => drop(state.findings.insert(volume_id.clone(), finding)),
            None => drop(state.findings.remove(volume_id)),
        }
    }

    fn noted(self: &Arc<Self>, volume_id: &VolumeId, note: Note) -> Noted {
        Noted { hangs: self.clone(), volume_id: volume_id.clone(), note }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let mut state = self.hangs.locked();
        match self.note {
            Note::Asking => {
                if let Some(count) = state.asking.get_mut(&self.volume_id) {
                    *count -= 1;
                    if *count == 0 {
                        state.asking.remove(&self.volume_id);
                    }
                }
            }
            Note::HeldBack => drop(state.held_back.remove(&self.volume_id)),
            Note::Examined => drop(state.examined.remove(&self.volume_id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_leaves_until_it_is_unpublished_or_published_again() {
        let hangs = Hangs::default();
        let id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        for target in ["/a", "/b", "/b"] {
            hangs.leaving(&id, Path::new(target));
        }
        hangs.left_or_stays(&id, Path::new("/b"));
        assert_eq!(hangs.leaving_targets(&id), BTreeSet::from([PathBuf::from("/a")]));
        hangs.left_or_stays(&id, Path::new("/a"));
        assert!(hangs.locked().leaving.is_empty());
    }

    #[test]
    fn notes_last_as_long_as_what_they_are_of() {
        let hangs = Arc::new(Hangs::default());
        let id = VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap();
        let asked = [hangs.asking(&id), hangs.asking(&id)];
        let examined = hangs.examining(&id).unwrap();
        assert!(hangs.examining(&id).is_none());
        assert_eq!((hangs.own_requests(&id), hangs.is_held_back(&id)), (2, false));
        drop((asked, examined));
        let held = hangs.holding_back(&id);
        assert!(hangs.examining(&id).is_some() && hangs.is_held_back(&id));
        drop(held);
        assert_eq!((hangs.own_requests(&id), hangs.is_held_back(&id)), (0, false));
    }
}
