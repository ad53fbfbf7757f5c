//! How far a suite has come on a ground, for the person at the terminal.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use xtask::progress::say;

/// Between two lines.
const BETWEEN_LINES: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(super) struct Progress {
    title: String,
    /// What is counted, as `scripts`.
    unit: &'static str,
    total: usize,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    done: usize,
    last: Instant,
    line: Instant,
}

impl Progress {
    pub(super) fn new(title: String, unit: &'static str, total: usize) -> Self {
        let now = Instant::now();
        Self { title, unit, total, started: now, state: Mutex::new(State { done: 0, last: now, line: now }) }
    }

    /// So many more are done. Prints a line if the last one is old enough.
    pub(super) fn add(&self, done: usize) {
        let now = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += done;
        state.last = now;
        if now.duration_since(state.line) >= BETWEEN_LINES && state.done < self.total {
            state.line = now;
            say(&self.line(state.done, now.duration_since(self.started)));
        }
    }

    /// Since one was done, or since the start.
    pub(super) fn since_the_last(&self) -> Duration {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).last.elapsed()
    }

    fn line(&self, done: usize, elapsed: Duration) -> String {
        let Self { title, unit, total, .. } = self;
        format!("{title}: {done} of {total} {unit} after {} s", elapsed.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_much_is_done_of_how_much() {
        let progress = Progress::new("fsx on xfs".to_owned(), "runs", 2);
        assert_eq!(progress.line(1, Duration::from_millis(61_900)), "fsx on xfs: 1 of 2 runs after 61 s");
    }

    #[test]
    fn what_is_done_begins_a_new_wait() {
        let progress = Progress::new(String::new(), "", 2);
        let before = Instant::now();
        progress.add(1);
        assert!(progress.since_the_last() <= before.elapsed());
    }
}
