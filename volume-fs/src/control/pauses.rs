//! Quiesce and Resume: at most one pause at a time, which belongs to the
//! connection that asked for it and ends with it, with its lease, or when told.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::control::{Quiesced, Refused, Resumed, reply};

use crate::gate::{Gate, Reason};
use crate::quota::{Quota, UsageNow};

/// Applications stand still meanwhile: whoever needs longer renews.
const LONGEST_LEASE: Duration = Duration::from_secs(60);

/// A connection, by a number that is never used twice.
pub(crate) type Who = u64;

#[derive(Debug)]
pub(crate) struct Pauses {
    gate: Arc<Gate>,
    quota: Arc<Quota>,
    now: Option<Pause>,
    /// Whose lease has ended, and how long that pause was.
    ended: Option<(Who, Duration)>,
    total: Duration,
}

#[derive(Debug)]
struct Pause {
    who: Who,
    began: Instant,
    /// Since when nothing changes and the use is known; before that the question is not answered.
    still: Option<Instant>,
    ends: Instant,
}

impl Pauses {
    pub(crate) fn new(gate: Arc<Gate>, quota: Arc<Quota>) -> Self {
        Self { gate, quota, now: None, ended: None, total: Duration::ZERO }
    }

    /// `None`: the answer comes with [`Self::became_still`] or [`Self::lease_ended`].
    pub(crate) fn quiesce(&mut self, who: Who, lease_ms: u32, now: Instant) -> Option<reply::Kind> {
        let lease = Duration::from_millis(lease_ms.into());
        if lease.is_zero() || lease > LONGEST_LEASE {
            let most = LONGEST_LEASE.as_millis();
            return Some(refused(format!("lease_ms: {lease_ms} is not between 1 and {most}")));
        }
        match &mut self.now {
            Some(pause) if pause.who != who => {
                return Some(refused("another connection has paused the volume".to_owned()));
            }
            Some(Pause { still: None, .. }) => {
                return Some(refused("the pause asked for before has not begun".to_owned()));
            }
            Some(pause) => pause.ends = now + lease,
            None => {
                self.ended = None;
                self.now = Some(Pause { who, began: now, still: None, ends: now + lease });
                self.gate.shut(Reason::Pause);
            }
        }
        self.became_still(now).map(|(_who, answer)| answer)
    }

    /// The answer that is owed, if nothing changes any more and the use is known.
    pub(crate) fn became_still(&mut self, now: Instant) -> Option<(Who, reply::Kind)> {
        self.gate.clear_still();
        let UsageNow { used, counting, .. } = self.quota.usage();
        let pause = self.now.as_mut().filter(|_| self.gate.is_still() && !counting)?;
        let still = *pause.still.get_or_insert(now);
        let quiesced = Quiesced {
            waited_us: microseconds(still - pause.began),
            used_bytes: used.bytes,
            used_inodes: used.inodes,
        };
        Some((pause.who, reply::Kind::Quiesced(quiesced)))
    }

    /// Whether a pause waits for changes under way.
    pub(crate) fn is_awaited(&self) -> bool {
        self.now.as_ref().is_some_and(|pause| pause.still.is_none())
    }

    /// Whether the pause of now belongs to this connection.
    pub(crate) fn is_of(&self, who: Who) -> bool {
        self.now.as_ref().is_some_and(|pause| pause.who == who)
    }

    pub(crate) fn ends(&self) -> Option<Instant> {
        self.now.as_ref().map(|pause| pause.ends)
    }

    /// Ends a pause whose lease is over. Returns the answer that is still owed.
    pub(crate) fn lease_ended(&mut self, now: Instant) -> Option<(Who, reply::Kind)> {
        let pause = self.now.take_if(|pause| pause.ends <= now)?;
        let paused = self.go_on(&pause, now);
        self.ended = Some((pause.who, paused));
        tracing::warn!(?paused, "the lease of a pause has ended: going on");
        let late = if self.quota.usage().counting { "the count of its use" } else { "changes under way" };
        let reason = format!("{late} did not end within the lease");
        pause.still.is_none().then(|| (pause.who, refused(reason)))
    }

    pub(crate) fn resume(&mut self, who: Who, now: Instant) -> reply::Kind {
        let resumed = match self.now.take_if(|pause| pause.who == who) {
            Some(pause) => {
                let paused = self.go_on(&pause, now);
                Resumed { held: pause.still.is_some(), paused_us: microseconds(paused) }
            }
            None => {
                let ended = self.ended.take_if(|(whose, _)| *whose == who);
                let paused_us = ended.map_or(0, |(_who, paused)| microseconds(paused));
                Resumed { held: false, paused_us }
            }
        };
        reply::Kind::Resumed(resumed)
    }

    /// The connection is gone.
    pub(crate) fn left(&mut self, who: Who, now: Instant) {
        if let Some(pause) = self.now.take_if(|pause| pause.who == who) {
            let paused = self.go_on(&pause, now);
            tracing::warn!(?paused, "the connection that paused the volume is closed: resumed");
        }
    }

    /// Of all pauses that have ended.
    pub(crate) fn total(&self) -> Duration {
        self.total
    }

    fn go_on(&mut self, pause: &Pause, now: Instant) -> Duration {
        self.gate.open(Reason::Pause);
        let paused = now.saturating_duration_since(pause.began);
        self.total += paused;
        paused
    }
}

pub(super) fn refused(reason: String) -> reply::Kind {
    reply::Kind::Refused(Refused { reason })
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::{Counted, Limits, Use};

    const SECOND: Duration = Duration::from_secs(1);

    fn scene(counted: Option<Counted>) -> (Arc<Gate>, Pauses) {
        let gate = Arc::new(Gate::new(false).unwrap());
        let found = counted.map(|counted| Use { counted, unsettled: Vec::new() });
        let quota = Arc::new(Quota::new(Limits::default(), found, 4));
        (Arc::clone(&gate), Pauses::new(gate, quota))
    }

    fn reason(kind: Option<reply::Kind>) -> String {
        match kind {
            Some(reply::Kind::Refused(refused)) => refused.reason,
            other => panic!("{other:?}"),
        }
    }

    fn resumed(held: bool, paused_us: u64) -> reply::Kind {
        reply::Kind::Resumed(Resumed { held, paused_us })
    }

    #[test]
    fn a_pause_begins_when_changes_under_way_have_ended_and_is_renewed_and_resumed() {
        let (gate, mut pauses) = scene(Some(Counted { bytes: 5, inodes: 6 }));
        let start = Instant::now();
        let inside = gate.enter().unwrap();
        assert_eq!(pauses.quiesce(1, 2000, start), None);
        assert!(pauses.is_awaited());
        assert_eq!(pauses.became_still(start), None);
        drop(inside);
        let quiesced = Quiesced { waited_us: 1_000_000, used_bytes: 5, used_inodes: 6 };
        let answer = reply::Kind::Quiesced(quiesced);
        assert_eq!(pauses.became_still(start + SECOND), Some((1, answer.clone())));
        assert_eq!(pauses.quiesce(1, 2000, start + SECOND), Some(answer));
        assert_eq!(pauses.ends(), Some(start + 3 * SECOND));
        assert_eq!(pauses.resume(1, start + 2 * SECOND), resumed(true, 2_000_000));
        gate.enter().unwrap();
        assert_eq!(pauses.resume(1, start + 3 * SECOND), resumed(false, 0));
        assert_eq!(pauses.total(), 2 * SECOND);
    }

    #[test]
    fn the_end_of_the_lease_goes_on_and_is_told_by_resume() {
        let (gate, mut pauses) = scene(Some(Counted::default()));
        let start = Instant::now();
        pauses.quiesce(1, 1000, start).unwrap();
        assert_eq!(pauses.lease_ended(start), None);
        gate.enter().unwrap_err();
        assert_eq!(pauses.lease_ended(start + SECOND), None);
        gate.enter().unwrap();
        assert_eq!(pauses.resume(1, start + 5 * SECOND), resumed(false, 1_000_000));
    }

    #[test]
    fn changes_that_do_not_end_within_the_lease_make_it_a_refusal() {
        let (gate, mut pauses) = scene(Some(Counted::default()));
        let start = Instant::now();
        let _hangs = gate.enter().unwrap();
        assert_eq!(pauses.quiesce(1, 1000, start), None);
        assert_eq!(reason(pauses.quiesce(1, 1000, start)), "the pause asked for before has not begun");
        let (who, answer) = pauses.lease_ended(start + SECOND).unwrap();
        assert_eq!(who, 1);
        assert_eq!(reason(Some(answer)), "changes under way did not end within the lease");
        gate.enter().unwrap();
    }

    #[test]
    fn a_pause_is_one_connections_and_ends_with_it() {
        let (gate, mut pauses) = scene(Some(Counted::default()));
        let now = Instant::now();
        pauses.quiesce(1, 1000, now).unwrap();
        assert_eq!(reason(pauses.quiesce(2, 1000, now)), "another connection has paused the volume");
        assert_eq!(pauses.resume(2, now), resumed(false, 0));
        pauses.left(2, now);
        gate.enter().unwrap_err();
        pauses.left(1, now);
        gate.enter().unwrap();
    }

    #[test]
    fn a_pause_waits_for_the_count_of_the_use() {
        let gate = Arc::new(Gate::new(true).unwrap());
        let quota = Arc::new(Quota::new(Limits::default(), None, 4));
        let mut pauses = Pauses::new(Arc::clone(&gate), Arc::clone(&quota));
        let now = Instant::now();
        assert_eq!(pauses.quiesce(1, 1000, now), None);
        assert_eq!(pauses.became_still(now), None);
        quota.set_counted(Use { counted: Counted { bytes: 5, inodes: 6 }, unsettled: Vec::new() });
        gate.open(Reason::Counting);
        let quiesced = Quiesced { waited_us: 0, used_bytes: 5, used_inodes: 6 };
        assert_eq!(pauses.became_still(now), Some((1, reply::Kind::Quiesced(quiesced))));

        let (_gate, mut pauses) = scene(None);
        assert_eq!(pauses.quiesce(1, 1000, now), None);
        let refused = reason(pauses.lease_ended(now + SECOND).map(|(_who, answer)| answer));
        assert_eq!(refused, "the count of its use did not end within the lease");
    }

    #[test]
    fn a_lease_out_of_range_is_named() {
        let (_gate, mut pauses) = scene(Some(Counted::default()));
        for lease in [0, 60_001] {
            let refused = reason(pauses.quiesce(1, lease, Instant::now()));
            assert_eq!(refused, format!("lease_ms: {lease} is not between 1 and 60000"));
        }
    }
}
