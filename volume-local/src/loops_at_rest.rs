//! Event loops that wait inside a request, for space or for room among the known nodes: for FORGETs in both
//! cases. Such a loop reads no requests, and so no FORGETs. So half of the loops never wait, and where more than
//! one may wait, none of the two reasons takes all of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Clone, Copy)]
pub(crate) enum WaitsFor {
    Space,
    Nodes,
}

#[derive(Debug)]
pub(crate) struct LoopsAtRest {
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
        Self { most: event_loops / 2, now: Mutex::default() }
    }

    /// `None` if the calling loop must go on.
    pub(crate) fn rest(&self, reason: WaitsFor) -> Option<AtRest<'_>> {
        let mut now = self.now();
        let most_for_one = self.most.saturating_sub(1).max(1);
        if now.iter().sum::<usize>() >= self.most || now[reason as usize] >= most_for_one {
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
    fn half_of_the_loops_never_wait_and_each_reason_has_its_part() {
        for loops in [0, 1] {
            assert!(LoopsAtRest::new(loops).rest(WaitsFor::Space).is_none(), "{loops}");
        }
        let three = LoopsAtRest::new(3);
        let one = three.rest(WaitsFor::Nodes);
        assert!(one.is_some() && three.rest(WaitsFor::Space).is_none());
        drop(one);
        let eight = LoopsAtRest::new(8);
        let of_nodes: Vec<_> = (0..8).map_while(|_| eight.rest(WaitsFor::Nodes)).collect();
        let of_space: Vec<_> = (0..8).map_while(|_| eight.rest(WaitsFor::Space)).collect();
        assert_eq!((of_nodes.len(), of_space.len()), (3, 1));
    }
}
