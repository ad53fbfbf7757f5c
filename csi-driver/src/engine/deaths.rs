//! How often the daemons of a volume have died at once, one after the other.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::model::ids::VolumeId;

/// After this many daemons in a row that died at once, the connection is aborted.
pub(crate) const MOST_DEATHS: u32 = 8;
/// A daemon that lives no longer than this has died at once.
const AT_ONCE: Duration = Duration::from_millis(20);

/// More deaths than this within the window are too many, however long each daemon lived.
const MOST_IN_WINDOW: usize = 600;
const WINDOW: Duration = Duration::from_secs(60);
/// After this many daemons in a row that were hung, the connection is aborted.
pub(crate) const MOST_HUNG: u32 = 2;
/// A daemon that is found hung later than this after the last one begins a new row.
const HUNG_AGAIN: Duration = Duration::from_secs(3600);

/// How volumes' daemons have died lately.
#[derive(Debug, Default)]
pub(crate) struct Deaths(Mutex<HashMap<VolumeId, Death>>);

#[derive(Debug, Default)]
struct Death {
    /// When the last successor began to serve.
    served_since: Option<Instant>,
    /// Daemons in a row that died at once, or never served.
    in_a_row: u32,
    /// Deaths within [`WINDOW`].
    recent: VecDeque<Instant>,
    hung: u32,
    last_hung: Option<Instant>,
}

impl Deaths {
    /// Counts a death, or a failed start. Returns how many there were in a row.
    pub(crate) fn count(&self, volume_id: &VolumeId) -> u32 {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let death = all.entry(volume_id.clone()).or_default();
        if death.served_since.take().is_some_and(|since| since.elapsed() > AT_ONCE) {
            death.in_a_row = 0;
        }
        death.in_a_row += 1;
        let now = Instant::now();
        death.recent.push_back(now);
        death.recent.retain(|at| now.duration_since(*at) < WINDOW);
        if death.recent.len() > MOST_IN_WINDOW { MOST_DEATHS + 1 } else { death.in_a_row }
    }

    /// Counts a daemon that was hung. Returns how many there were, without a pause of [`HUNG_AGAIN`].
    pub(crate) fn hung(&self, volume_id: &VolumeId) -> u32 {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let death = all.entry(volume_id.clone()).or_default();
        if death.last_hung.replace(Instant::now()).is_some_and(|last| last.elapsed() > HUNG_AGAIN) {
            death.hung = 0;
        }
        death.hung += 1;
        death.hung
    }

    pub(crate) fn served(&self, volume_id: &VolumeId) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(volume_id.clone()).or_default().served_since = Some(Instant::now());
    }

    pub(crate) fn forget(&self, volume_id: &VolumeId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(volume_id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_daemons_that_died_at_once_are_in_a_row() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        assert_eq!(deaths.count(&id), 1);
        assert_eq!(deaths.count(&id), 2, "it never served");
        deaths.served(&id);
        assert_eq!(deaths.count(&id), 3, "it died at once");
        deaths.0.lock().unwrap().get_mut(&id).unwrap().served_since = Instant::now().checked_sub(2 * AT_ONCE);
        assert_eq!(deaths.count(&id), 1, "it lived");
        deaths.forget(&id);
        assert_eq!(deaths.count(&id), 1);
    }
}
