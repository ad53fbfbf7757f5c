//! Nodes that keep a descriptor of the daemon until the kernel forgets them, by the user who caused that.

use std::collections::HashMap;

use rustix::io::Errno;

use crate::errno::Result;

/// Each node with the uid of the user that removed its name.
#[derive(Debug, Default)]
pub(super) struct Owners {
    owners: HashMap<u64, u32>,
    by_owner: HashMap<u32, usize>,
}

impl Owners {
    pub(super) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.owners.keys().copied()
    }

    /// `Err` if there is no space for another one.
    pub(super) fn admit(&self, uid: u32, most: usize) -> Result<()> {
        let of_uid = self.by_owner.get(&uid).copied().unwrap_or_default();
        // One user may take a quarter.
        if self.owners.len() >= most || of_uid >= (most / 4).max(1) { Err(Errno::NOSPC) } else { Ok(()) }
    }

    pub(super) fn add(&mut self, id: u64, uid: u32) {
        if self.owners.insert(id, uid).is_none() {
            *self.by_owner.entry(uid).or_default() += 1;
        }
    }

    pub(super) fn owner(&self, id: u64) -> Option<u32> {
        self.owners.get(&id).copied()
    }

    pub(super) fn remove(&mut self, id: u64) {
        let Some(uid) = self.owners.remove(&id) else { return };
        if let Some(count) = self.by_owner.get_mut(&uid) {
            *count -= 1;
            if *count == 0 {
                self.by_owner.remove(&uid);
            }
        }
    }
}
