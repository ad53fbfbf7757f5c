//! Removed files that the kernel has not forgotten. Their space is about to be freed, so a request
//! that finds none waits for that instead of failing: on other file systems, space is free when
//! unlink(2) returns.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::errno::Result;
use crate::loops_at_rest::{LoopsAtRest, WaitsFor};

/// How long after a removal, or after the close of a removed file, its FORGET may arrive.
pub(super) const FORGET_IS_DUE: Duration = Duration::from_secs(1);

/// While a removed file is open, another event loop may have read its close before the request that
/// finds no space, without having handled it yet.
const CLOSE_IS_DUE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Removals {
    state: Mutex<State>,
    /// FORGETs of removed nodes.
    forgets: AtomicU64,
    forgotten: Condvar,
    at_rest: Arc<LoopsAtRest>,
}

#[derive(Debug, Default)]
struct State {
    /// Removed nodes that the kernel has not forgotten.
    known: usize,
    last: Option<Instant>,
    /// Requests that wait for a FORGET.
    waiting: usize,
}

impl Removals {
    pub(super) fn new(event_loops: usize) -> Self {
        Self {
            state: Mutex::default(),
            forgets: AtomicU64::new(0),
            forgotten: Condvar::new(),
            at_rest: Arc::new(LoopsAtRest::new(event_loops)),
        }
    }

    pub(super) fn loops_at_rest(&self) -> Arc<LoopsAtRest> {
        Arc::clone(&self.at_rest)
    }

    /// A node that the kernel knows lost its last name.
    pub(super) fn removed(&self) {
        let mut state = self.state();
        state.known += 1;
        state.last = Some(Instant::now());
    }

    /// A node that was removed while an earlier daemon served the volume.
    pub(super) fn restored(&self) {
        self.state().known += 1;
    }

    /// A removed file was closed.
    pub(super) fn closed(&self) {
        self.state().last = Some(Instant::now());
    }

    /// The kernel has forgotten a removed node, whose space is free.
    pub(super) fn forgotten(&self) {
        let mut state = self.state();
        state.known = state.known.saturating_sub(1);
        self.forgets.fetch_add(1, Ordering::Release);
        // A notification is a system call, also without anyone who waits.
        if state.waiting > 0 {
            self.forgotten.notify_all();
        }
    }

    /// Repeats `attempt` while it fails for lack of space and space is about to be freed, but not
    /// forever if other requests take it.
    pub(super) fn retrying<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        let mut deadline = None;
        loop {
            let seen = self.forgets.load(Ordering::Acquire);
            match attempt() {
                Err(Errno::NOSPC) => {
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + FORGET_IS_DUE);
                    if !self.wait_for_a_forget(seen, deadline) {
                        return Err(Errno::NOSPC);
                    }
                }
                other => return other,
            }
        }
    }

    /// Whether a removed file was forgotten since `seen`.
    fn wait_for_a_forget(&self, seen: u64, deadline: Instant) -> bool {
        let is_over = |_: &mut State| self.forgets.load(Ordering::Acquire) != seen;
        let mut state = self.state();
        if is_over(&mut state) {
            return Instant::now() < deadline;
        }
        if state.known == 0 {
            return false;
        }
        let Some(_resting) = self.at_rest.rest(WaitsFor::Space) else { return false };
        let due = state.last.map_or(Duration::ZERO, |last| FORGET_IS_DUE.saturating_sub(last.elapsed()));
        let left = due.max(CLOSE_IS_DUE).min(deadline.saturating_duration_since(Instant::now()));
        state.waiting += 1;
        let waited = self.forgotten.wait_timeout_while(state, left, |now| !is_over(now));
        let (mut state, _timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        is_over(&mut state)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
