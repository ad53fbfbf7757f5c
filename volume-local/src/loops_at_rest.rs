//! Event loops that wait inside a request, for space or for room among the known nodes: for FORGETs in both
//! cases. Such a loop reads no requests, and so no FORGETs. So at most half of the loops wait for one of the two, and
//! one never waits.

use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Clone, Copy)]
pub(crate) enum WaitsFor {
    Space,
    Nodes,
}

#[derive(Debug)]
pub(crate) struct LoopsAtRest {
    most_for_one: usize,
    most: usize,
    /// By [`WaitsFor`].
    now: Mutex<[usize; 2]>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct AtRest<'a> {
    of: &'a LoopsAtRest,
    reason: WaitsFor,
}

impl LoopsAtRest {
    pub(crate) fn new(event_loops: usize) -> Self {
        Self { most_for_one: event_loops / 2, most: event_loops.saturating_sub(1), now: Mutex::default() }
    }

    /// `None` if the calling loop must go on.
    pub(crate) fn rest(&self, reason: WaitsFor) -> Option<AtRest<'_>> {
        let mut now = self.now();
        if now.iter().sum::<usize>() >= self.most || now[reason as usize] >= self.most_for_one {
            return None;
        }
        now[reason as usize] += 1;
        Some(AtRest { of: self, reason })
    }

    fn now(&self) -> MutexGuard<'_, [usize; 2]> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AtRest<'_> {
    fn drop(&mut self) {
        self.of.now()[self.reason as usize] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_loops_may_wait_for_one_reason_and_one_loop_never_waits() {
        for (loops, of_nodes, of_space) in [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 1), (4, 2, 1), (8, 4, 3)]
        {
            let resting = LoopsAtRest::new(loops);
            let rest = |reason| (0..8).map_while(|_| resting.rest(reason)).collect::<Vec<_>>();
            let nodes = rest(WaitsFor::Nodes);
            assert_eq!((nodes.len(), rest(WaitsFor::Space).len()), (of_nodes, of_space), "{loops} loops");
        }
    }
}
