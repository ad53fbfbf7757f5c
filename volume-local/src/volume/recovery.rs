//! Continues where an earlier daemon was killed, before the first request is served.

use std::os::fd::AsFd;
use std::sync::Arc;

use keeper::daemon::Removed;

use super::Volume;
use crate::nodes::stat;
use crate::place::Place;
use crate::quota::charge;
use crate::state_table::requests::Effect;
use crate::state_table::{Opened, Recovered};

impl Volume {
    /// Restores nodes and handles, and finds out which of the requests in progress had their effect.
    pub(super) fn recover(&self, recovered: Recovered, keeper: &Removed) -> volume_fs::Result<()> {
        let Recovered { nodes, handles } = recovered;
        let (known, open) = (nodes.len(), handles.len());
        self.nodes.restore(nodes);
        let (files, directories): (Vec<_>, Vec<_>) =
            handles.into_iter().partition(|(_, handle)| handle.kind == Opened::File);
        self.files.restore(files);
        self.directories.restore(directories);
        if let Some(table) = self.table.clone() {
            table.requests.settle(|effect| self.is_done(effect));
        }
        match keeper.list_removed() {
            Ok(kept) => self.nodes.restore_kept(kept),
            // Their users get ESTALE; everything else is served.
            Err(error) => {
                tracing::error!(error = linux::chain(&error), "the keeper does not list the removed files");
            }
        }
        self.charge_removed();
        tracing::info!(known, open, "continues the connection of an earlier daemon");
        Ok(())
    }

    /// Whether the effect was made. If so, the nodes follow it.
    fn is_done(&self, effect: &Effect) -> bool {
        match effect {
            Effect::Make { at, found } => found.is_none() && self.node_now_at(at).is_some(),
            Effect::Remove { at, found: Some(id), removed_by } => {
                let is_done = self.node_now_at(at) != Some(*id);
                if is_done {
                    self.nodes.lost_place(*id, at, *removed_by);
                }
                is_done
            }
            Effect::Rename { from, moving: Some(id), to, in_the_way, exchange, removed_by } => {
                if *in_the_way == Some(*id) {
                    // Two names of one file: rename(2) does nothing.
                    return false;
                }
                let (now_from, now_to) = (self.node_now_at(from), self.node_now_at(to));
                let left = if *exchange { now_from == *in_the_way } else { now_from != Some(*id) };
                let is_done = left && now_to == Some(*id);
                if is_done {
                    match in_the_way {
                        Some(other) if *exchange => self.nodes.moved(*other, to, from.clone()),
                        Some(other) => self.nodes.lost_place(*other, to, *removed_by),
                        None => {}
                    }
                    self.nodes.moved(*id, from, to.clone());
                }
                is_done
            }
            Effect::Attribute { at, had, sets } => {
                let node = self.nodes.descriptor(at.directory);
                let has = node.is_ok_and(|node| self.descriptors.xattr_size(node.as_fd(), &at.name).is_ok());
                *had != *sets && has == *sets
            }
            Effect::Remove { found: None, .. } | Effect::Rename { moving: None, .. } | Effect::Lookup => {
                false
            }
        }
    }

    fn node_now_at(&self, place: &Place) -> Option<u64> {
        let parent = self.nodes.descriptor(place.directory).ok()?;
        self.node_at(&parent, place).ok().flatten()
    }

    /// Removed files are in no directory, so the count of the tree does not find them.
    fn charge_removed(&self) {
        let Some(quota) = &self.quota else { return };
        for (id, fd) in self.nodes.removed_files() {
            if let Ok(seen) = stat(Arc::as_ref(&fd))
                && seen.stx_nlink == 0
            {
                quota.add_removed(id, charge(&seen, 0));
            }
        }
    }
}
