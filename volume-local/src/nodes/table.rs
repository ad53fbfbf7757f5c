//! The table of known nodes: where each was last seen, which of them are open, and what leaves it.
//!
//! Invariants: `open` is the number of nodes with a descriptor, except the root. A node is in the
//! table while the kernel has more lookups than forgets of it, or while another node's place names
//! it as directory. Every change is written into the state table, if there is one.
//!
//! No function here makes a system call or closes a descriptor, since the table is locked meanwhile.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::bound::Nameless;
use super::restored::Count;
use super::unplaced::Unplaced;
use super::zeros::Zeros;
use crate::attributes::ROOT;
use crate::errno::Result;
use crate::place::Place;
use crate::state_table::{NodeView, RecordId, StateTable};

#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) state: Option<Arc<StateTable>>,
    pub(super) nodes: HashMap<u64, Node>,
    /// Candidates for closing, by second chance: a node used since its last turn goes to the end.
    /// May name nodes that are gone or closed.
    pub(super) clock: VecDeque<u64>,
    pub(super) open: usize,
    /// All nodes except the root, oldest first. May name nodes that are gone.
    pub(super) ring: VecDeque<u64>,
    /// Counts the pruner's rounds.
    pub(super) round: u32,
    /// The most nodes since memory was last returned.
    pub(super) peak: usize,
    /// Requests that wait for space or for FORGETs.
    pub(super) waiting: usize,
    /// The directory in which the pruner invalidates an entry now.
    pub(super) pruned_directory: Option<u64>,
    pub(super) pruner_waits: bool,
    /// Total of dropped nodes.
    pub(super) dropped: u64,
    /// The last round freed too few nodes to wait for.
    pub(super) stuck: bool,
    /// A lookup was refused, and the limit is still exceeded.
    pub(super) refusing: bool,
    pub(super) nameless: Nameless,
    pub(super) unplaced: Unplaced,
    pub(super) zeros: Zeros,
    /// Nodes whose count an earlier daemon may have left too high, for the sweeper.
    pub(super) doubtful: Vec<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) lookups: u64,
    /// Nodes whose place is in this directory.
    pub(super) children: usize,
    pub(super) place: Option<Place>,
    pub(super) fd: Option<Arc<OwnedFd>>,
    /// The pruner's round in which it was last used.
    pub(super) touched: u32,
    pub(super) used: bool,
    /// A directory without a default ACL: seen, and changed by no request since.
    pub(super) lacks_default_acl: bool,
    /// A file without security.capability, which no request can set.
    pub(super) lacks_capability: bool,
    pub(super) in_clock: bool,
    /// In the state table; `None` without one.
    pub(super) record: Option<RecordId>,
    /// The keeper holds a descriptor.
    pub(super) kept: bool,
    pub(super) count: Count,
}

/// Nodes that left the table. Their descriptors are closed outside the lock, since that takes time.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub(super) descriptors: Vec<Arc<OwnedFd>>,
    pub(super) forgotten: Vec<u64>,
    /// Nodes whose descriptors the keeper need not hold any more.
    pub(super) unkept: Vec<u64>,
}

/// The nodes and names on a path, the deepest first.
pub(super) type WayDown = Vec<(u64, CString)>;

impl Left {
    pub(super) fn extend(&mut self, more: Self) {
        self.descriptors.extend(more.descriptors);
        self.forgotten.extend(more.forgotten);
        self.unkept.extend(more.unkept);
    }
}

impl Table {
    /// From `id` up to the next open directory: its descriptor, and the names back down, last one
    /// first.
    pub(super) fn way_to(&mut self, id: u64) -> Result<(Arc<OwnedFd>, WayDown)> {
        let mut way_down = Vec::new();
        let mut at = id;
        let longest = self.nodes.len();
        loop {
            let node = self.nodes.get_mut(&at).ok_or(Errno::STALE)?;
            (node.used, node.touched) = (true, self.round);
            if let Some(fd) = &node.fd {
                return Ok((Arc::clone(fd), way_down));
            }
            let place = node.place.as_ref().ok_or(Errno::STALE)?;
            // A cycle of places can only come from changes behind the mount.
            if way_down.len() > longest {
                return Err(Errno::STALE);
            }
            let (child, parent) = (at, place.directory);
            way_down.push((child, place.name.clone()));
            at = parent;
        }
    }

    /// Gives the node its place, which keeps the directory in the table.
    pub(super) fn put(&mut self, id: u64, place: Place) -> Left {
        if self.nodes.get(&id).is_none_or(|node| node.place.as_ref() == Some(&place)) {
            return Left::default();
        }
        if let Some(directory) = self.nodes.get_mut(&place.directory) {
            directory.children += 1;
        } else {
            return Left::default();
        }
        let mut left = self.detach(id);
        // It was not removed, or another file has its number: then an earlier daemon was killed before
        // it carried out a FORGET.
        self.nameless.remove(id);
        self.unplaced.remove(id);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.place = Some(place);
            if node.fd.is_some() && !node.in_clock {
                node.in_clock = true;
                self.clock.push_back(id);
            }
            if std::mem::take(&mut node.kept) {
                left.unkept.push(id);
            }
        }
        self.write(id);
        left
    }

    /// A removed file must be among `nameless` before.
    pub(super) fn take_place(&mut self, id: u64) -> Left {
        let left = self.detach(id);
        match self.nameless.owner(id) {
            Some(_uid) => self.unplaced.remove(id),
            None => self.unplaced.add(id),
        }
        self.write(id);
        left
    }

    pub(super) fn detach(&mut self, id: u64) -> Left {
        let Some(place) = self.nodes.get_mut(&id).and_then(|node| node.place.take()) else {
            return Left::default();
        };
        if let Some(directory) = self.nodes.get_mut(&place.directory) {
            directory.children -= 1;
        }
        self.drop_unused(place.directory)
    }

    /// Removes the node if it is unused, and then its directory if that is unused too.
    pub(super) fn drop_unused(&mut self, id: u64) -> Left {
        let mut left = Left::default();
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let unused = self.nodes.get(&id).is_some_and(|node| node.lookups == 0 && node.children == 0);
            if !unused || id == ROOT {
                break;
            }
            let Some(node) = self.nodes.remove(&id) else { break };
            self.dropped += 1;
            left.forgotten.push(id);
            self.zeros.remove(id);
            if let (Some(state), Some(record)) = (&self.state, node.record) {
                state.remove(record);
            }
            if node.kept {
                left.unkept.push(id);
            }
            if let Some(fd) = node.fd {
                self.open -= 1;
                left.descriptors.push(fd);
            }
            if node.place.is_none() {
                self.nameless.remove(id);
                self.unplaced.remove(id);
            }
            if let Some(place) = node.place {
                if let Some(directory) = self.nodes.get_mut(&place.directory) {
                    directory.children -= 1;
                }
                next = Some(place.directory);
            }
        }
        shrink(&mut self.nodes);
        shrink(&mut self.zeros.0);
        left
    }

    /// Writes the node into the state table.
    pub(super) fn write(&mut self, id: u64) {
        let Some(state) = &self.state else { return };
        if id == ROOT {
            return;
        }
        let removed_by = self.nameless.owner(id);
        if let Some(node) = self.nodes.get_mut(&id) {
            let view = NodeView { id, lookups: node.lookups, place: node.place.as_ref(), removed_by };
            node.record = state.put_node(node.record, &view);
        }
    }

    pub(super) fn write_lookups(&mut self, id: u64) {
        let Some(state) = &self.state else { return };
        match self.nodes.get(&id) {
            Some(Node { record: Some(record), lookups, .. }) => state.set_lookups(*record, *lookups),
            Some(_) => self.write(id),
            None => {}
        }
    }

    pub(super) fn keep_open(&mut self, id: u64, fd: Arc<OwnedFd>, limit: usize) -> Left {
        let unwanted = |fd| Left { descriptors: vec![fd], ..Left::default() };
        let Some(node) = self.nodes.get_mut(&id) else { return unwanted(fd) };
        if node.fd.is_some() {
            return unwanted(fd);
        }
        node.fd = Some(fd);
        node.used = true;
        self.open += 1;
        if node.place.is_some() && !node.in_clock {
            node.in_clock = true;
            self.clock.push_back(id);
        }
        self.close_until(limit)
    }

    /// Closes the least recently used descriptors that can be reopened, until at most `limit` are
    /// left.
    pub(super) fn close_until(&mut self, limit: usize) -> Left {
        let mut left = Left::default();
        // Two rounds: the first uses up the second chances, the second closes.
        let mut turns = 2 * self.clock.len();
        while self.open > limit && turns > 0 {
            turns -= 1;
            let Some(id) = self.clock.pop_front() else { break };
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            if node.fd.is_none() || node.place.is_none() {
                node.in_clock = false;
            } else if node.used {
                node.used = false;
                self.clock.push_back(id);
            } else {
                node.in_clock = false;
                left.descriptors.extend(node.fd.take());
                self.open -= 1;
            }
        }
        self.tidy_clock();
        left
    }

    /// Removes forgotten nodes from the clock, once there are more of them than nodes.
    pub(super) fn tidy_clock(&mut self) {
        if self.clock.len() <= 2 * self.open + 1024 {
            return;
        }
        self.clock.clear();
        for (id, node) in &mut self.nodes {
            node.in_clock = node.fd.is_some() && node.place.is_some();
            if node.in_clock {
                self.clock.push_back(*id);
            }
        }
    }
}

/// Returns the memory of a walk over a large tree.
fn shrink<T>(by_node: &mut HashMap<u64, T>) {
    if by_node.capacity() > 4096 && by_node.len() < by_node.capacity() / 8 {
        by_node.shrink_to(by_node.len() * 2);
    }
}
