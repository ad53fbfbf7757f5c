//! Quiesce and Resume: at most one pause at a time. It belongs to the connection that requested it,
//! and ends with that connection, with its lease, or with Resume.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use proto::control::{Quiesce, Quiesced, Refused, Resumed, reply};
use rustix::event::EventfdFlags;

use crate::backend::{CannotPause, Held, Pausing};
use crate::figures::Counted;

/// Applications wait meanwhile: a caller that needs longer renews the lease.
const LONGEST_LEASE: Duration = Duration::from_secs(60);

/// A connection's number, which is never reused.
pub(crate) type Who = u64;

#[derive(Debug)]
pub(crate) struct Pauses<B> {
    backend: Arc<B>,
    begun: Arc<Outcome>,
    /// The number of the last requested pause.
    number: u64,
    now: Option<Pause>,
    /// The connections whose lease has ended before their Resume, with the lengths of these pauses.
    lost: HashMap<Who, Duration>,
    total: Duration,
}

#[derive(Debug)]
struct Pause {
    who: Who,
    began: Instant,
    /// When changes stopped, and the use at that time. Until then the request is not answered.
    still: Option<(Instant, Counted)>,
    ends: Instant,
}

/// Passes the outcome of a pause, begun or failed, from a backend to the control thread.
#[derive(Debug)]
struct Outcome {
    /// An eventfd, readable when there is an outcome.
    event: OwnedFd,
    /// The number of the pause, and its outcome.
    outcome: Mutex<Option<(u64, Result<Counted, CannotPause>)>>,
}

impl Outcome {
    fn report(&self, number: u64, outcome: Result<Counted, CannotPause>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, outcome));
        // EAGAIN: the counter is full, so the descriptor is readable.
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap_or_default();
    }

    fn take(&self) -> Option<(u64, Result<Counted, CannotPause>)> {
        // EAGAIN: there is no outcome.
        rustix::io::read(&self.event, &mut [0_u8; 8]).unwrap_or_default();
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<B: Pausing> Pauses<B> {
    pub(crate) fn new(backend: Arc<B>) -> rustix::io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let begun = Arc::new(Outcome { event, outcome: Mutex::new(None) });
        Ok(Self { backend, begun, number: 0, now: None, lost: HashMap::new(), total: Duration::ZERO })
    }

    /// Readable when [`Self::take_answer`] may have an answer.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.begun.event.as_fd()
    }

    /// `None`: the answer comes with [`Self::take_answer`] or [`Self::lease_ended`].
    pub(crate) fn quiesce(&mut self, who: Who, wanted: &Quiesce, now: Instant) -> Option<reply::Kind> {
        let Quiesce { lease_ms, passing_may_write } = *wanted;
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
            Some(pause) => {
                pause.ends = now + lease;
                return pause.answer();
            }
            // Changes were made since. The connection takes a new pause for the one that it renews.
            None if self.lost.contains_key(&who) => {
                return Some(refused("the lease of this connection's pause has ended".to_owned()));
            }
            None => {
                self.number += 1;
                self.now = Some(Pause { who, began: now, still: None, ends: now + lease });
                let (begun, number) = (Arc::clone(&self.begun), self.number);
                let held = if passing_may_write { Held::RequestsOnly } else { Held::All };
                self.backend.pause(held, move |outcome| begun.report(number, outcome));
            }
        }
        self.take_answer(now).map(|(_who, answer)| answer)
    }

    /// The pending answer, if the backend has reported the outcome of the pause.
    pub(crate) fn take_answer(&mut self, now: Instant) -> Option<(Who, reply::Kind)> {
        let (number, outcome) = self.begun.take()?;
        // An earlier pause, whose lease has ended.
        let pause = self.now.as_mut().filter(|_| number == self.number)?;
        let who = pause.who;
        match outcome {
            Ok(used) => {
                pause.still = Some((now, used));
                pause.answer().map(|answer| (who, answer))
            }
            Err(cannot) => {
                self.now = None;
                self.backend.resume();
                let cannot = Refused { reason: cannot.to_string(), is_precondition: true };
                Some((who, reply::Kind::Refused(cannot)))
            }
        }
    }

    /// Whether a pause waits for changes under way.
    pub(crate) fn is_awaited(&self) -> bool {
        self.now.as_ref().is_some_and(|pause| pause.still.is_none())
    }

    /// Whether the current pause belongs to this connection.
    pub(crate) fn is_of(&self, who: Who) -> bool {
        self.now.as_ref().is_some_and(|pause| pause.who == who)
    }

    pub(crate) fn ends(&self) -> Option<Instant> {
        self.now.as_ref().map(|pause| pause.ends)
    }

    /// Ends a pause whose lease is over. Returns its answer, if that is still pending.
    pub(crate) fn lease_ended(&mut self, now: Instant) -> Option<(Who, reply::Kind)> {
        let pause = self.now.take_if(|pause| pause.ends <= now)?;
        let paused = self.go_on(&pause, now);
        if pause.still.is_some() {
            self.lost.insert(pause.who, paused);
        }
        tracing::warn!(?paused, "the lease of a pause has ended: changes continue");
        let late = || format!("{} did not end within the lease", self.backend.pause_waits_for());
        pause.still.is_none().then(|| (pause.who, refused(late())))
    }

    pub(crate) fn resume(&mut self, who: Who, now: Instant) -> reply::Kind {
        let resumed = match self.now.take_if(|pause| pause.who == who) {
            Some(pause) => {
                let paused = self.go_on(&pause, now);
                Resumed { held: pause.still.is_some(), paused_us: microseconds(paused) }
            }
            None => {
                let paused_us = self.lost.remove(&who).map_or(0, microseconds);
                Resumed { held: false, paused_us }
            }
        };
        reply::Kind::Resumed(resumed)
    }

    /// The connection was closed.
    pub(crate) fn left(&mut self, who: Who, now: Instant) {
        self.lost.remove(&who);
        if let Some(pause) = self.now.take_if(|pause| pause.who == who) {
            let paused = self.go_on(&pause, now);
            tracing::warn!(?paused, "the connection that paused the volume is closed: resumed");
        }
    }

    /// The length of all pauses that have ended.
    pub(crate) fn total(&self) -> Duration {
        self.total
    }

    fn go_on(&mut self, pause: &Pause, now: Instant) -> Duration {
        self.backend.resume();
        let paused = now.saturating_duration_since(pause.began);
        self.total += paused;
        paused
    }
}

impl Pause {
    /// The answer, once the pause has begun.
    fn answer(&self) -> Option<reply::Kind> {
        let (since, used) = self.still?;
        Some(reply::Kind::Quiesced(Quiesced {
            waited_us: microseconds(since.saturating_duration_since(self.began)),
            used_bytes: used.bytes,
            used_inodes: used.inodes,
        }))
    }
}

pub(super) fn refused(reason: String) -> reply::Kind {
    reply::Kind::Refused(Refused { reason, is_precondition: false })
}

fn microseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Gate;

    const SECOND: Duration = Duration::from_secs(1);

    /// Holds changes back as a backend with a [`Gate`] does.
    struct Gated {
        gate: Arc<Gate>,
        used: Counted,
    }

    impl Pausing for Gated {
        fn pause(&self, _: Held, paused: impl FnOnce(Result<Counted, CannotPause>) + Send + 'static) {
            let used = self.used;
            self.gate.pause(move || paused(Ok(used)));
        }

        fn resume(&self) {
            self.gate.resume();
        }

        fn pause_waits_for(&self) -> &'static str {
            "everything"
        }
    }

    /// A backend that cannot hold writes back.
    struct Writing;

    impl Pausing for Writing {
        fn pause(&self, _: Held, paused: impl FnOnce(Result<Counted, CannotPause>) + Send + 'static) {
            paused(Err(CannotPause("others write to the store".to_owned())));
        }

        fn resume(&self) {}

        fn pause_waits_for(&self) -> &'static str {
            "nothing"
        }
    }

    fn lease(lease_ms: u32) -> Quiesce {
        Quiesce { lease_ms, passing_may_write: false }
    }

    fn scene() -> (Arc<Gate>, Pauses<Gated>) {
        let gate = Arc::new(Gate::new(false));
        let held = Gated { gate: Arc::clone(&gate), used: Counted { bytes: 5, inodes: 6 } };
        (gate, Pauses::new(Arc::new(held)).unwrap())
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
        let (gate, mut pauses) = scene();
        let start = Instant::now();
        let inside = gate.enter().unwrap();
        assert_eq!(pauses.quiesce(1, &lease(2000), start), None);
        assert!(pauses.is_awaited());
        assert_eq!(pauses.take_answer(start), None);
        drop(inside);
        let quiesced = Quiesced { waited_us: 1_000_000, used_bytes: 5, used_inodes: 6 };
        let answer = reply::Kind::Quiesced(quiesced);
        assert_eq!(pauses.take_answer(start + SECOND), Some((1, answer.clone())));
        assert_eq!(pauses.quiesce(1, &lease(2000), start + SECOND), Some(answer));
        assert_eq!(pauses.ends(), Some(start + 3 * SECOND));
        assert_eq!(pauses.resume(1, start + 2 * SECOND), resumed(true, 2_000_000));
        gate.enter().unwrap();
        assert_eq!(pauses.resume(1, start + 3 * SECOND), resumed(false, 0));
        assert_eq!(pauses.total(), 2 * SECOND);
    }

    #[test]
    fn the_end_of_the_lease_reopens_and_resume_reports_it() {
        let (gate, mut pauses) = scene();
        let start = Instant::now();
        pauses.quiesce(1, &lease(1000), start).unwrap();
        assert_eq!(pauses.lease_ended(start), None);
        gate.enter().unwrap_err();
        assert_eq!(pauses.lease_ended(start + SECOND), None);
        gate.enter().unwrap();
        assert_eq!(pauses.resume(1, start + 5 * SECOND), resumed(false, 1_000_000));
    }

    #[test]
    fn a_lease_that_has_ended_is_not_renewed() {
        let (gate, mut pauses) = scene();
        let start = Instant::now();
        pauses.quiesce(1, &lease(1000), start).unwrap();
        assert_eq!(pauses.lease_ended(start + SECOND), None);
        let ended = "the lease of this connection's pause has ended";
        assert_eq!(reason(pauses.quiesce(1, &lease(1000), start + SECOND)), ended);
        gate.enter().unwrap();
        // Another connection's pause does not hide it.
        pauses.quiesce(2, &lease(1000), start + SECOND).unwrap();
        assert_eq!(pauses.resume(2, start + 2 * SECOND), resumed(true, 1_000_000));
        assert_eq!(reason(pauses.quiesce(1, &lease(1000), start + 2 * SECOND)), ended);
        assert_eq!(pauses.resume(1, start + 2 * SECOND), resumed(false, 1_000_000));
        pauses.quiesce(1, &lease(1000), start + 2 * SECOND).unwrap();
        assert_eq!(pauses.resume(1, start + 3 * SECOND), resumed(true, 1_000_000));
    }

    #[test]
    fn changes_that_do_not_end_within_the_lease_make_it_a_refusal() {
        let (gate, mut pauses) = scene();
        let start = Instant::now();
        let _hangs = gate.enter().unwrap();
        assert_eq!(pauses.quiesce(1, &lease(1000), start), None);
        assert_eq!(
            reason(pauses.quiesce(1, &lease(1000), start)),
            "the pause asked for before has not begun"
        );
        let (who, answer) = pauses.lease_ended(start + SECOND).unwrap();
        assert_eq!(who, 1);
        assert_eq!(reason(Some(answer)), "everything did not end within the lease");
        gate.enter().unwrap();
    }

    #[test]
    fn a_pause_is_one_connections_and_ends_with_it() {
        let (gate, mut pauses) = scene();
        let now = Instant::now();
        pauses.quiesce(1, &lease(1000), now).unwrap();
        assert_eq!(reason(pauses.quiesce(2, &lease(1000), now)), "another connection has paused the volume");
        assert_eq!(pauses.resume(2, now), resumed(false, 0));
        pauses.left(2, now);
        gate.enter().unwrap_err();
        pauses.left(1, now);
        gate.enter().unwrap();
    }

    #[test]
    fn the_outcome_of_a_pause_whose_lease_has_ended_begins_no_other() {
        let (gate, mut pauses) = scene();
        let start = Instant::now();
        let inside = gate.enter().unwrap();
        assert_eq!(pauses.quiesce(1, &lease(1000), start), None);
        // The backend has begun the pause just before it is resumed.
        pauses.begun.report(pauses.number, Ok(Counted::default()));
        pauses.lease_ended(start + SECOND).unwrap();
        assert_eq!(pauses.quiesce(2, &lease(1000), start + SECOND), None);
        assert!(pauses.is_awaited());
        drop(inside);
        let (who, _quiesced) = pauses.take_answer(start + SECOND).unwrap();
        assert_eq!(who, 2);
    }

    #[test]
    fn a_backend_that_cannot_hold_writes_back_makes_it_a_refusal() {
        let mut pauses = Pauses::new(Arc::new(Writing)).unwrap();
        let now = Instant::now();
        for who in [1, 2] {
            assert_eq!(reason(pauses.quiesce(who, &lease(1000), now)), "others write to the store");
            assert!(!pauses.is_of(who));
        }
        assert_eq!(pauses.total(), Duration::ZERO);
    }

    #[test]
    fn a_lease_out_of_range_is_named() {
        let (_gate, mut pauses) = scene();
        for lease_ms in [0, 60_001] {
            let refused = reason(pauses.quiesce(1, &lease(lease_ms), Instant::now()));
            assert_eq!(refused, format!("lease_ms: {lease_ms} is not between 1 and 60000"));
        }
    }
}
