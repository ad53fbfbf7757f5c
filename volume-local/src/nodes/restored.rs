//! Nodes of an earlier daemon: how they are restored, and how their counts of lookups become right.
//!
//! A daemon that was killed may have counted lookups that it did not answer, and may have read
//! FORGETs that it did not carry out. So a restored count may be too high. [`crate::sweeper`] asks
//! the kernel which inodes it knows. The kernel forgets an inode with its whole count: what is left
//! after that is checked too.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};

use super::{Left, Node, Nodes, Table, stat};
use crate::attributes::ROOT;
use crate::place::Place;
use crate::state_table::{NodeRecord, RecordId};

/// Whether a node's count of lookups is the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Count {
    #[default]
    Exact,
    /// An earlier daemon's, which may be too high.
    Restored,
    /// [`Self::Restored`], and looked up since.
    Mixed,
}

impl Count {
    pub(super) fn another_lookup(&mut self) {
        if *self == Self::Restored {
            *self = Self::Mixed;
        }
    }
}

impl Nodes {
    /// Takes over the nodes of an earlier daemon. They are opened when they are needed.
    pub(crate) fn restore(&self, nodes: Vec<(RecordId, NodeRecord)>) {
        let mut table = self.table();
        for (record, NodeRecord { id, lookups, place, removed_by }) in nodes {
            if let Some(uid) = removed_by {
                table.nameless.add(id, uid);
            }
            let (count, round) = (Count::Restored, table.round);
            let node =
                Node { lookups, place, record: Some(record), count, touched: round, ..Node::default() };
            table.nodes.insert(id, node);
            table.ring_add(id);
        }
        let places: Vec<(u64, u64)> =
            table.nodes.iter().filter_map(|(id, node)| Some((*id, node.place.as_ref()?.directory))).collect();
        for (id, directory) in places {
            match table.nodes.get_mut(&directory) {
                Some(directory) => directory.children += 1,
                None => {
                    if let Some(node) = table.nodes.get_mut(&id) {
                        node.place = None;
                    }
                }
            }
        }
        let is_unplaced =
            |id: u64, node: &Node| id != ROOT && node.place.is_none() && table.nameless.owner(id).is_none();
        let unplaced: Vec<u64> =
            table.nodes.iter().filter(|(id, node)| is_unplaced(**id, node)).map(|(id, _)| *id).collect();
        unplaced.into_iter().for_each(|id| table.unplaced.add(id));
        // A directory may have stayed for the sake of a node that is gone.
        let unused: Vec<u64> =
            table.nodes.iter().filter(|(_, n)| n.lookups == 0).map(|(id, _)| *id).collect();
        let mut left = Left::default();
        for id in unused {
            left.extend(table.drop_unused(id));
        }
        table.peak = table.nodes.len();
        self.release(table, left);
    }

    /// Takes over what the keeper holds of nodes without a place: descriptors, by node. Returns the
    /// others, and those that are not of their node: an attacker may have controlled the earlier daemon.
    pub(crate) fn restore_kept(&self, kept: Vec<(u64, OwnedFd)>) -> Vec<(u64, OwnedFd)> {
        let mut others = Vec::new();
        for (id, fd) in kept {
            let is_its = stat(&fd).is_ok_and(|seen| self.origin.node_id(&seen) == Ok(id));
            let mut table = self.table();
            match table.nodes.get_mut(&id) {
                Some(node) if is_its && node.place.is_none() && id != ROOT => {
                    node.kept = true;
                    let left = table.keep_open(id, Arc::new(fd), self.limit);
                    self.release(table, left);
                }
                _ => others.push((id, fd)),
            }
        }
        others
    }

    /// Removed files that the kernel knows, with their descriptors.
    pub(crate) fn removed_files(&self) -> Vec<(u64, Arc<OwnedFd>)> {
        let table = self.table();
        let removed = table.nodes.iter().filter(|(id, _)| table.nameless.owner(**id).is_some());
        removed.filter_map(|(id, node)| Some((*id, Arc::clone(node.fd.as_ref()?)))).collect()
    }

    /// The file at `place` lost that name, or got another one, by a request of an earlier daemon.
    pub(crate) fn lost_place(&self, id: u64, place: &Place, removed_by: Option<u32>) {
        let mut table = self.table();
        if table.nodes.get(&id).is_none_or(|node| node.place.as_ref() != Some(place)) {
            return;
        }
        if let Some(uid) = removed_by {
            table.nameless.add(id, uid);
        }
        let left = table.take_place(id);
        self.release(table, left);
    }

    /// Whether the node's place is this one.
    pub(crate) fn is_at(&self, id: u64, place: &Place) -> bool {
        self.table().nodes.get(&id).is_some_and(|node| node.place.as_ref() == Some(place))
    }

    /// All nodes with a count of an earlier daemon.
    pub(crate) fn restored(&self) -> Vec<u64> {
        let table = self.table();
        table.nodes.iter().filter(|(_, node)| node.count == Count::Restored).map(|(id, _)| *id).collect()
    }

    /// The kernel does not know the node, and has not for a while: drops it, if it was not looked up
    /// meanwhile.
    pub(crate) fn drop_unknown(&self, id: u64) {
        let mut table = self.table();
        match table.nodes.get_mut(&id) {
            Some(node) if node.count == Count::Restored => node.lookups = 0,
            _ => return,
        }
        self.drop_counted(table, id);
    }

    /// As [`Self::drop_unknown`], for a node that had this count before the kernel was asked.
    pub(crate) fn drop_doubtful(&self, id: u64, lookups: u64) {
        let mut table = self.table();
        match table.nodes.get_mut(&id) {
            Some(node) if node.lookups == lookups && node.count != Count::Exact => node.lookups = 0,
            _ => return,
        }
        self.drop_counted(table, id);
    }

    fn drop_counted(&self, mut table: std::sync::MutexGuard<'_, Table>, id: u64) {
        table.write_lookups(id);
        let left = table.drop_unused(id);
        self.went(&mut table);
        self.release(table, left);
    }

    /// Waits until a count is doubtful. Returns all such nodes with their counts.
    pub(crate) fn wait_for_doubtful(&self) -> Vec<(u64, u64)> {
        let table = self.table();
        let waited = self.doubted.wait_while(table, |table| table.doubtful.is_empty());
        let mut table = waited.unwrap_or_else(PoisonError::into_inner);
        let doubtful = std::mem::take(&mut table.doubtful);
        doubtful.into_iter().filter_map(|id| Some((id, table.nodes.get(&id)?.lookups))).collect()
    }
}
