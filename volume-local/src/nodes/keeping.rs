//! What the keeper holds for a successor: descriptors of nodes that cannot be opened by name.
//!
//! The keeper may die, and another one takes its place ([`Nodes::replace_keeper`]). Requests that
//! remove names are served meanwhile.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use keeper::daemon::Removed;

use super::{Nodes, stat};
use crate::attributes::ROOT;

impl Nodes {
    /// Called before a node loses its place: gives the keeper a descriptor for a successor.
    pub(crate) fn let_keeper_hold(&self, id: u64, held: &OwnedFd) {
        let Some(keeper) = &self.keeper else { return };
        {
            let mut table = self.table();
            match table.nodes.get_mut(&id) {
                Some(node) if !node.kept => node.kept = true,
                _ => return,
            }
        }
        if let Err(error) = keeper.now().put_removed(id, held.as_fd()) {
            // The next keeper gets it.
            tracing::debug!(error = linux::chain(&error), "the keeper does not hold a removed file");
        } else if !self.is_kept(id) {
            // It was found by another name before it was put.
            self.let_keeper_drop(id);
        }
    }

    pub(crate) fn let_keeper_drop(&self, id: u64) {
        let Some(keeper) = &self.keeper else { return };
        if let Err(error) = keeper.now().drop_removed(id) {
            tracing::debug!(error = linux::chain(&error), "the keeper still holds a removed file");
        }
    }

    /// The node has kept its name: the keeper need not hold it.
    pub(crate) fn let_keeper_release(&self, id: u64) {
        if self.keeper.is_none() {
            return;
        }
        let was_kept = self
            .table()
            .nodes
            .get_mut(&id)
            .is_some_and(|node| node.place.is_some() && std::mem::take(&mut node.kept));
        if was_kept {
            self.let_keeper_drop(id);
        }
    }

    /// Whether the node is to be reached by its descriptor alone, which the keeper does not hold.
    pub(crate) fn lacks_keeper(&self, id: u64) -> bool {
        if self.keeper.is_none() {
            return false;
        }
        let table = self.table();
        table.nodes.get(&id).is_some_and(|node| node.place.is_none() && !node.kept && id != ROOT)
    }

    /// Gives another keeper all that the earlier one was given, and uses it from now on. Returns how
    /// many nodes it was given.
    pub(crate) fn replace_keeper(&self, keeper: Removed) -> Result<usize, String> {
        let Some(socket) = &self.keeper else {
            return Err("no other daemon can continue this one's connection".to_owned());
        };
        let keeper = Arc::new(keeper);
        // A keeper may have inherited what its predecessor was not told to drop.
        let inherited: HashMap<u64, OwnedFd> = match keeper.list_removed() {
            Ok(listed) => listed.into_iter().collect(),
            Err(error) => {
                tracing::warn!(
                    error = linux::chain(&error),
                    "the keeper does not list what it has inherited"
                );
                HashMap::new()
            }
        };
        // First: a node that is marked later goes to this keeper, and one that is marked already is
        // found below.
        socket.replace(Arc::clone(&keeper));
        let failed = |error: keeper::Error| linux::chain(&error);
        let mut given = 0;
        for id in self.kept() {
            let Ok(held) = self.descriptor(id) else {
                // It is losing its name just now. The request looks again when that is done.
                self.unmark(id);
                continue;
            };
            // A service manager that stores it stores only so many in a second.
            if !inherited.get(&id).is_some_and(|file| is_same_file(file, &*held)) {
                keeper.put_removed(id, held.as_fd()).map_err(failed)?;
            }
            given += 1;
            // It may have been dropped before it was put. As long as `held` is open, no other file has
            // its number.
            if !self.is_kept(id) {
                keeper.drop_removed(id).map_err(failed)?;
            }
        }
        for id in inherited.into_keys() {
            if self.is_kept(id) {
                continue;
            }
            keeper.drop_removed(id).map_err(failed)?;
            // It may have been put just before it was dropped.
            if self.is_kept(id)
                && let Ok(held) = self.descriptor(id)
            {
                keeper.put_removed(id, held.as_fd()).map_err(failed)?;
            }
        }
        Ok(given)
    }

    fn kept(&self) -> Vec<u64> {
        self.table().nodes.iter().filter(|(_, node)| node.kept).map(|(id, _)| *id).collect()
    }

    /// Whether the keeper holds the node's descriptor, or is about to.
    pub(crate) fn is_kept(&self, id: u64) -> bool {
        self.table().nodes.get(&id).is_some_and(|node| node.kept)
    }

    fn unmark(&self, id: u64) {
        if let Some(node) = self.table().nodes.get_mut(&id) {
            node.kept = false;
        }
    }
}

fn is_same_file(one: impl AsFd, other: impl AsFd) -> bool {
    let identity = |file: BorrowedFd<'_>| {
        stat(file).ok().map(|found| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
    };
    let one = identity(one.as_fd());
    one.is_some() && one == identity(other.as_fd())
}
