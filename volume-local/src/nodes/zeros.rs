//! Which parts of a file the kernel may have as pages of zeros.
//!
//! Without the writeback cache, the kernel's page of a file differs from the file only by stores through a
//! shared mapping. A page over a hole was read before it was stored to, and that answer was all zeros. So
//! outside of what is recorded here, a hole of the file is a hole for its users too.

use std::collections::HashMap;
use std::ops::Range;

use super::Nodes;
use super::restored::Count;

/// By node: from the first page of zeros that was read to the end of the last one. A node leaves with the
/// kernel's pages of it, when it is forgotten.
#[derive(Debug, Default)]
pub(super) struct Zeros(pub(super) HashMap<u64, Range<u64>>);

impl Zeros {
    fn add(&mut self, id: u64, part: &Range<u64>) {
        let all = self.0.entry(id).or_insert_with(|| part.clone());
        *all = all.start.min(part.start)..all.end.max(part.end);
    }

    pub(super) fn remove(&mut self, id: u64) {
        if !self.0.is_empty() {
            self.0.remove(&id);
        }
    }
}

impl Nodes {
    /// Called before the answer: pages of zeros of this file were read.
    pub(crate) fn zeros_were_read(&self, id: u64, part: &Range<u64>) {
        let mut table = self.table();
        if table.nodes.contains_key(&id) {
            table.zeros.add(id, part);
        }
    }

    /// The part of a file in which the kernel may have pages of zeros: all of it, if an earlier daemon may
    /// have answered with zeros. `None`: the kernel does not know the file.
    pub(crate) fn zeros_of(&self, id: u64) -> Option<Range<u64>> {
        let table = self.table();
        match table.nodes.get(&id)?.count {
            Count::Exact => Some(table.zeros.0.get(&id).cloned().unwrap_or(0..0)),
            Count::Restored | Count::Mixed => Some(0..u64::MAX),
        }
    }
}
