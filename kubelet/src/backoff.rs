//! Exponential back-off as plain data; the caller sleeps.

pub(crate) mod keyed;

use std::time::Duration;

/// Doubles from `initial` to `max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Backoff {
    initial: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) const fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max, next: initial }
    }

    /// For volume operations and plugin registration: 500 ms to 2 min 2 s (kubernetes,
    /// exponential_backoff.go).
    pub(crate) const fn operation() -> Self {
        Self::new(Duration::from_millis(500), Duration::from_secs(122))
    }

    /// For crashing containers and failing image pulls: 10 s to 5 min.
    pub(crate) const fn restart() -> Self {
        Self::new(Duration::from_secs(10), Duration::from_secs(300))
    }

    /// Returns the pause before the next try and lengthens the one after it.
    pub(crate) fn step(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.max);
        now
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.initial;
    }

    pub(crate) fn max(&self) -> Duration {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_its_maximum_and_starts_over_after_a_reset() {
        let mut backoff = Backoff::restart();
        let steps: Vec<u64> = (0..7).map(|_| backoff.step().as_secs()).collect();
        assert_eq!(steps, [10, 20, 40, 80, 160, 300, 300]);
        backoff.reset();
        assert_eq!(backoff.step().as_secs(), 10);
    }
}
