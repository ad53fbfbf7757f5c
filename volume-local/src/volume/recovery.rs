//! Continues where an earlier daemon was killed, before the first request is served.

use std::os::fd::AsFd;
use std::sync::Arc;

use keeper::daemon::Removed;
use rustix::io::Errno;

use super::Volume;
use crate::errno::Result;
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
        // Their users get ESTALE without it; everything else is served.
        let kept = keeper.list_removed().unwrap_or_else(|error| {
            tracing::error!(error = linux::chain(&error), "the keeper does not list the removed files");
            Vec::new()
        });
        let kept = self.nodes.restore_kept(kept);
        if let Some(table) = self.table.clone() {
            table.requests.settle(|effect| self.is_done(effect));
        }
        // Now also those that have lost their place by a request in progress. For the others, the
        // earlier daemon was killed before the name was lost, or after the file was forgotten.
        for (id, _fd) in self.nodes.restore_kept(kept) {
            self.nodes.let_keeper_drop(id);
        }
        self.charge_removed();
        tracing::info!(known, open, "continues the connection of an earlier daemon");
        Ok(())
    }

    /// Whether the effect was made. If so, the nodes follow it.
    fn is_done(&self, effect: &Effect) -> bool {
        match effect {
            Effect::Make { at, found } => found.is_none() && matches!(self.node_now_at(at), Ok(Some(_))),
            Effect::Remove { at, found: Some(id), removed_by } => {
                let is_done = self.node_now_at(at).is_ok_and(|now| now != Some(*id));
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
                let (Ok(now_from), Ok(now_to)) = (self.node_now_at(from), self.node_now_at(to)) else {
                    return false;
                };
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
                match node.and_then(|node| self.descriptors.xattr_size(node.as_fd(), &at.name)) {
                    Ok(_) => *sets && !*had,
                    Err(Errno::NODATA) => !*sets && *had,
                    Err(_) => false,
                }
            }
            Effect::Remove { found: None, .. } | Effect::Rename { moving: None, .. } | Effect::Lookup => {
                false
            }
        }
    }

    fn node_now_at(&self, place: &Place) -> Result<Option<u64>> {
        let parent = self.nodes.descriptor(place.directory)?;
        self.node_at(&parent, place)
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
