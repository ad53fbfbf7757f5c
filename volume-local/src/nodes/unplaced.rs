//! Nodes that have lost the place where they were last seen, of files that have other names.
//!
//! The kernel uses another name that it knows without a lookup, so such a node keeps its descriptor, and
//! the keeper holds one for a successor. If there are many, [`crate::pruner`] makes the kernel drop its
//! unused entries of them: then it forgets the node, or the next use is a lookup, which gives the node a
//! place. What is left is in use.

use std::collections::HashSet;
use std::time::Duration;

use super::bound::wait_until_none_is_left;
use super::{Nodes, Table};

#[derive(Debug, Default)]
pub(super) struct Unplaced {
    ids: HashSet<u64>,
    /// What the last round has left.
    in_use: usize,
}

impl Unplaced {
    pub(super) fn add(&mut self, id: u64) {
        self.ids.insert(id);
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.ids.remove(&id);
    }

    /// Twice what is in use: so the rounds cost little for each file that is removed.
    fn is_above(&self, most: usize) -> bool {
        self.ids.len() > most.max(self.in_use.saturating_mul(2))
    }
}

impl Nodes {
    pub(super) fn has_too_many_unplaced(&self, table: &Table) -> bool {
        table.unplaced.is_above(self.most_unplaced)
    }

    /// Called after a node lost its place.
    pub(super) fn lost_place_of(&self, table: &mut Table) {
        if self.has_too_many_unplaced(table) && (std::mem::take(&mut table.pruner_waits) || table.stuck) {
            self.pressure.notify_one();
        }
    }

    /// All nodes without a place whose files have names, if these are too many.
    pub(crate) fn unplaced_if_too_many(&self) -> Vec<u64> {
        let table = self.table();
        let is_due = self.has_too_many_unplaced(&table);
        table.unplaced.ids.iter().filter(|_| is_due).copied().collect()
    }

    /// The kernel was asked to drop its entries of these: waits until they are forgotten or have a place,
    /// or until none was for `quiet`.
    pub(crate) fn wait_for_unplaced(&self, asked: &[u64], quiet: Duration) {
        let left = || {
            let table = self.table();
            asked.iter().filter(|id| table.unplaced.ids.contains(id)).count()
        };
        let in_use = wait_until_none_is_left(quiet, left);
        self.table().unplaced.in_use = in_use;
    }

    /// The kernel cannot be asked.
    pub(crate) fn keep_unplaced(&self) {
        self.table().unplaced.in_use = usize::MAX;
    }
}
