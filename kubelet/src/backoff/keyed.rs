//! Back-off per key, counted from events: restarts of a container, pulls of an image (kubernetes,
//! client-go util/flowcontrol).

use std::collections::HashMap;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::objects::Time;

#[derive(Debug, Default)]
pub(crate) struct KeyedBackoff {
    entries: HashMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    backoff: Backoff,
    pause: Duration,
    last_update: Time,
}

impl KeyedBackoff {
    /// The remaining pause after `event`; `None` if it is over, or if the clock was set back meanwhile, so that
    /// its end is not known.
    pub(crate) fn remaining(&self, key: &str, event: Time, now: Time) -> Option<Duration> {
        let entry = self.entries.get(key).filter(|e| !e.is_forgotten(event))?;
        entry.remaining(event, now)
    }

    /// The remaining pause after the last [`KeyedBackoff::step`].
    pub(crate) fn remaining_since_step(&self, key: &str, now: Time) -> Option<Duration> {
        let entry = self.entries.get(key).filter(|e| !e.is_forgotten(now))?;
        entry.remaining(entry.last_update, now)
    }

    /// Starts an attempt after `event`, and lengthens the next pause. A key is reset after twice
    /// the longest pause without a step.
    pub(crate) fn step(&mut self, key: &str, event: Time, now: Time) -> Duration {
        let fresh = || Entry { backoff: Backoff::restart(), pause: Duration::ZERO, last_update: now };
        let entry = self.entries.entry(key.to_owned()).or_insert_with(fresh);
        if entry.is_forgotten(event) {
            entry.backoff.reset();
        }
        entry.pause = entry.backoff.step();
        entry.last_update = now;
        entry.pause
    }

    /// The next attempt is at once, and the pauses start over.
    pub(crate) fn forget(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// The current pause.
    pub(crate) fn pause(&self, key: &str) -> Duration {
        self.entries.get(key).map_or(Duration::ZERO, |e| e.pause)
    }
}

impl Entry {
    fn remaining(&self, event: Time, now: Time) -> Option<Duration> {
        let left = self.pause.checked_sub(since(event, now))?;
        let was_set_back = since(now, event) >= Duration::from_secs(1);
        (!was_set_back && !left.is_zero()).then_some(left)
    }

    fn is_forgotten(&self, event: Time) -> bool {
        since(self.last_update, event) > self.backoff.max() * 2
    }
}

/// Zero when `to` is earlier.
fn since(from: Time, to: Time) -> Duration {
    to.duration_since(from).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Time {
        Time::from_second(1_000_000 + second).unwrap()
    }

    #[test]
    fn the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() {
        let mut backoff = KeyedBackoff::default();
        assert_eq!(backoff.remaining("c", at(0), at(0)), None);
        backoff.step("c", at(0), at(0));
        assert_eq!(backoff.remaining("c", at(1), at(1)), Some(Duration::from_secs(10)));
        assert_eq!(backoff.remaining("c", at(1), at(8)), Some(Duration::from_secs(3)));
        assert_eq!(backoff.remaining("c", at(1), at(11)), None);
        backoff.step("c", at(1), at(11));
        assert_eq!(backoff.remaining("c", at(12), at(12)), Some(Duration::from_secs(20)));
    }

    #[test]
    fn nothing_waits_for_a_time_that_the_clock_left_when_it_was_set_back() {
        let mut backoff = KeyedBackoff::default();
        backoff.step("c", at(7200), at(7200));
        assert_eq!(backoff.remaining("c", at(7201), at(10)), None);
        assert_eq!(backoff.remaining_since_step("c", at(10)), None);
        assert_eq!(backoff.remaining_since_step("c", at(7200)), Some(Duration::from_secs(10)));
    }

    #[test]
    fn a_container_that_ran_long_starts_over() {
        let mut backoff = KeyedBackoff::default();
        backoff.step("c", at(0), at(0));
        backoff.step("c", at(1), at(20));
        assert_eq!(backoff.remaining("c", at(700), at(700)), None);
        assert_eq!(backoff.step("c", at(700), at(700)), Duration::from_secs(10));
    }
}
