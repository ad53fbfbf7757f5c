//! Nodes that have lost the place where they were last seen, of files that have other names.
//!
//! The kernel uses another name that it knows without a lookup, so such a node keeps its descriptor, and
//! the keeper holds one for a successor. If there are many, [`crate::pruner`] makes the kernel drop its
//! unused entries of them: then it forgets the node, or the next use is a lookup, which gives the node a
//! place. What is left is in use.

use std::time::Duration;

use super::bound::wait_until_none_is_left;
use super::owners::Owners;
use super::{Nodes, Table};
use crate::errno::Result;

#[derive(Debug)]
pub(super) struct Unplaced {
    owners: Owners,
    /// What the last round has left; `None`: the kernel cannot be asked.
    in_use: Option<usize>,
}

impl Default for Unplaced {
    fn default() -> Self {
        Self { owners: Owners::default(), in_use: Some(0) }
    }
}

impl Unplaced {
    pub(super) fn add(&mut self, id: u64, uid: u32) {
        self.owners.add(id, uid);
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.owners.remove(id);
    }

    /// Twice what is in use: so the rounds cost little for each file that is removed.
    fn is_above(&self, most: usize) -> bool {
        self.in_use.is_some_and(|in_use| self.owners.len() > most.max(in_use.saturating_mul(2)))
    }
}

impl Nodes {
    /// Called before `uid` removes the name where a node was last seen, if its file has others. `ENOSPC` if that
    /// user has too many of these, and they are in use: those that are not go at the next round.
    pub(crate) fn admit_unplaced(&self, uid: u32) -> Result<()> {
        let unplaced = &self.table().unplaced;
        match unplaced.in_use {
            Some(in_use) if in_use >= self.most_nameless / 4 => {
                unplaced.owners.admit(uid, self.most_nameless)
            }
            Some(_) | None => Ok(()),
        }
    }

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
        table.unplaced.owners.ids().filter(|_| is_due).collect()
    }

    /// The kernel was asked to drop its entries of these: waits until they are forgotten or have a place,
    /// or until none was for `quiet`.
    pub(crate) fn wait_for_unplaced(&self, asked: &[u64], quiet: Duration) {
        let left = || {
            let table = self.table();
            asked.iter().filter(|id| table.unplaced.owners.owner(**id).is_some()).count()
        };
        let in_use = wait_until_none_is_left(quiet, left);
        self.table().unplaced.in_use = Some(in_use);
    }

    /// The kernel cannot be asked.
    pub(crate) fn keep_unplaced(&self) {
        self.table().unplaced.in_use = None;
    }
}
