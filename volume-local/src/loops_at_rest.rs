//! Event loops that wait inside a request, for space or for room among the known nodes: for FORGETs in both
//! cases. Such a loop reads no requests, and so no FORGETs. So half of the loops never wait.

use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub(crate) struct LoopsAtRest {
    most: usize,
    now: AtomicUsize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct AtRest<'a>(&'a LoopsAtRest);

impl LoopsAtRest {
    pub(crate) fn new(event_loops: usize) -> Self {
        Self { most: event_loops / 2, now: AtomicUsize::new(0) }
    }

    /// `None` if the calling loop must go on.
    pub(crate) fn rest(&self) -> Option<AtRest<'_>> {
        let one_more = |now: usize| (now < self.most).then_some(now + 1);
        self.now.try_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok().map(|_| AtRest(self))
    }
}

impl Drop for AtRest<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::AcqRel);
    }
}
