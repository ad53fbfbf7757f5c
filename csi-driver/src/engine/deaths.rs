//! How often the daemons of a volume have died at once, one after the other, and what the last one that
//! served has executed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::daemon::launcher::program::Program;
use crate::model::ids::VolumeId;
use crate::model::launch::ProcessId;

/// After this many daemons in a row that died at once, the connection is aborted.
pub(crate) const MOST_DEATHS: u32 = 8;
/// A daemon that lives no longer than this has died at once.
const AT_ONCE: Duration = Duration::from_millis(20);

/// More daemons in a row than this that died soon are too many: a request may kill each of them, some
/// time after it has begun to serve.
const MOST_SOON: u32 = 600;
/// A daemon that lives no longer than this has died soon.
const SOON: Duration = Duration::from_secs(1);
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
    /// Daemons in a row that died soon, or never served.
    soon_in_a_row: u32,
    /// The last death that was counted, if no start has followed yet: whose, and when.
    counted: Option<(ProcessId, Instant)>,
    hung: u32,
    last_hung: Option<Instant>,
    dead: Option<Dead>,
}

/// A death, or a failed start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    /// How many there were in a row.
    pub(crate) in_a_row: u32,
    pub(crate) at: Instant,
    /// It was not counted before.
    pub(crate) is_new: bool,
}

/// The daemon that has served last, and has ended.
#[derive(Debug)]
struct Dead {
    daemon: ProcessId,
    /// What it executed, if that can be started again and is not what the driver is configured with.
    program: Option<Arc<Program>>,
    /// How many daemons were to follow it.
    followers: u32,
}

impl Death {
    fn count(&mut self) {
        let lived = self.served_since.take().map(|since| since.elapsed());
        let in_a_row =
            |count: u32, limit| if lived.is_some_and(|lived| lived > limit) { 1 } else { count + 1 };
        self.in_a_row = in_a_row(self.in_a_row, AT_ONCE);
        self.soon_in_a_row = in_a_row(self.soon_in_a_row, SOON);
    }
}

impl Deaths {
    /// Counts the death of `dead`, or a failed start after it. Once until [`Self::starts`]: a pause before the
    /// next start is no part of a life.
    pub(crate) fn count(&self, volume_id: &VolumeId, dead: ProcessId) -> Counted {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let death = all.entry(volume_id.clone()).or_default();
        let known = death.counted.filter(|(daemon, _)| *daemon == dead);
        let (_, at) = known.unwrap_or_else(|| (dead, Instant::now()));
        if known.is_none() {
            death.counted = Some((dead, at));
            death.count();
        }
        let in_a_row = if death.soon_in_a_row > MOST_SOON { MOST_DEATHS + 1 } else { death.in_a_row };
        Counted { in_a_row, at, is_new: known.is_none() }
    }

    /// A daemon is started after the death that was counted last.
    pub(crate) fn starts(&self, volume_id: &VolumeId) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(volume_id.clone()).or_default().counted = None;
    }

    /// What the next daemon after `dead` executes; `None`: what the driver is configured with. Where the
    /// first one has not served, every second one executes what `dead` has executed, which `program` finds
    /// before there is a first one. The volume's lock is held.
    pub(crate) fn next_program<E>(
        &self,
        volume_id: &VolumeId,
        dead: ProcessId,
        program: impl FnOnce() -> Result<Option<Program>, E>,
    ) -> Result<Option<Arc<Program>>, E> {
        // It may ask a disk: not under the lock.
        let known = match self.take_dead(volume_id, dead) {
            Some(known) => known,
            None => Dead { daemon: dead, program: program()?.map(Arc::new), followers: 0 },
        };
        let followers = known.followers + 1;
        let earlier = known.program.clone().filter(|_| followers.is_multiple_of(2));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(volume_id.clone()).or_default().dead = Some(Dead { followers, ..known });
        Ok(earlier)
    }

    /// The start that followed the death that was counted last has failed, and not by a daemon.
    pub(crate) fn take_back(&self, volume_id: &VolumeId) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(death) = all.get_mut(volume_id) {
            death.in_a_row = death.in_a_row.saturating_sub(1);
            death.soon_in_a_row = death.soon_in_a_row.saturating_sub(1);
        }
    }

    fn take_dead(&self, volume_id: &VolumeId, daemon: ProcessId) -> Option<Dead> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get_mut(volume_id)?.dead.take().filter(|known| known.daemon == daemon)
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
    use std::convert::Infallible;

    use super::*;

    const DEAD: ProcessId = ProcessId { pid: 1, start_time: 1 };

    /// Counts a death that a start follows.
    fn count(deaths: &Deaths, id: &VolumeId) -> u32 {
        let counted = deaths.count(id, DEAD);
        deaths.starts(id);
        counted.in_a_row
    }

    #[test]
    fn starts_that_fail_without_a_daemons_fault_count_as_no_death() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        deaths.served(&id);
        for _ in 0..=MOST_SOON {
            assert_eq!(count(&deaths, &id), 1);
            deaths.take_back(&id);
        }
        // One that a daemon has caused.
        assert_eq!((count(&deaths, &id), count(&deaths, &id)), (1, 2));
    }

    #[test]
    fn a_death_is_counted_once_and_the_pause_after_it_is_no_part_of_a_life() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        assert_eq!(count(&deaths, &id), 1);
        deaths.served(&id);
        let first = deaths.count(&id, DEAD);
        assert_eq!((first.in_a_row, first.is_new), (2, true), "it died at once");
        while first.at.elapsed() < 2 * AT_ONCE {
            std::thread::yield_now();
        }
        assert_eq!(deaths.count(&id, DEAD), Counted { is_new: false, ..first });
        deaths.starts(&id);
        assert_eq!(deaths.count(&id, DEAD).in_a_row, 3, "the start has failed");
        let other = deaths.count(&id, ProcessId { pid: 2, ..DEAD });
        assert_eq!((other.in_a_row, other.is_new), (4, true), "the death of one that was staged meanwhile");
    }

    #[test]
    fn only_daemons_that_died_at_once_are_in_a_row() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        assert_eq!(count(&deaths, &id), 1);
        assert_eq!(count(&deaths, &id), 2, "it never served");
        deaths.served(&id);
        assert_eq!(count(&deaths, &id), 3, "it died at once");
        deaths.0.lock().unwrap().get_mut(&id).unwrap().served_since = Instant::now().checked_sub(2 * AT_ONCE);
        assert_eq!(count(&deaths, &id), 1, "it lived");
        deaths.forget(&id);
        assert_eq!(count(&deaths, &id), 1);
    }

    #[test]
    fn every_second_follower_executes_what_the_last_one_that_served_has_executed() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        let daemon = |pid| ProcessId { pid, start_time: 1 };
        let next = |pid, image: Option<&str>| {
            let earlier = || Ok::<_, Infallible>(image.map(|i| Program::Image(i.to_owned())));
            let Ok(program) = deaths.next_program(&id, daemon(pid), earlier);
            program.map(|program| program.to_string())
        };
        assert_eq!(next(1, Some("i:1")), None);
        // By now, the launch is that of a daemon that never served.
        assert_eq!(next(1, Some("i:2")).as_deref(), Some("i:1"));
        assert_eq!(next(1, Some("i:2")), None);
        assert_eq!(next(1, Some("i:2")).as_deref(), Some("i:1"));
        assert_eq!(next(2, Some("i:2")), None, "another one has served");
        assert_eq!(next(2, None).as_deref(), Some("i:2"));
        assert_eq!((next(3, None), next(3, None)), (None, None), "it is not known");
    }

    /// However long that takes: within a minute there may be fewer.
    #[test]
    fn many_daemons_in_a_row_that_died_soon_are_too_many() {
        let (deaths, id) = (Deaths::default(), VolumeId::from_key(&"a".repeat(32)).unwrap());
        let died_after = |lived: Duration| {
            deaths.served(&id);
            deaths.0.lock().unwrap().get_mut(&id).unwrap().served_since = Instant::now().checked_sub(lived);
            count(&deaths, &id)
        };
        for _ in 0..2 {
            assert!((1..MOST_SOON).all(|_| died_after(SOON / 2) == 1));
            assert_eq!(died_after(2 * SOON), 1, "a new row");
        }
        assert!((1..MOST_SOON).all(|_| died_after(SOON / 2) == 1));
        assert!(died_after(SOON / 2) > MOST_DEATHS);
    }
}
