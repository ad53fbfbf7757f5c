//! Continues where an earlier daemon was killed, before the first request is served.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;
use volume_fs::file::NodeId;
use volume_fs::service::Succession;

use super::Volume;
use super::charges::Loss;
use crate::charge::{Charged, charge};
use crate::errno::Result;
use crate::keeper_socket::KeeperSocket;
use crate::nodes::stat;
use crate::place::Place;
use crate::quota::Quota;
use crate::state_table::charges::Charges;
use crate::state_table::requests::{Effect, Slot};
use crate::state_table::{Opened, Recovered, StateTable};

/// What this daemon shares with its successor, and what an earlier one has left to it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) table: Arc<StateTable>,
    pub(super) keeper: Arc<KeeperSocket>,
    /// `None` if the connection is new.
    pub(super) earlier: Option<Recovered>,
    /// Of the table.
    version: u64,
}

/// The first version of the state table that has the use of the volume.
const FIRST_WITH_CHARGES: u64 = 2;

impl Shared {
    pub(crate) fn open(succession: Succession) -> volume_fs::Result<Self> {
        let Succession { state, version, removed, continues } = succession;
        let (table, earlier) = if continues {
            let (table, recovered) = StateTable::recover(state)
                .map_err(|damaged| volume_fs::Error::StateTable { reason: damaged.to_string() })?;
            (table, Some(recovered))
        } else {
            (StateTable::new(state), None)
        };
        Ok(Self {
            table: Arc::new(table),
            keeper: Arc::new(KeeperSocket::new(Arc::new(removed))),
            earlier,
            version,
        })
    }

    /// Where the use of the volume is written down. `None`: the table is of a version without it, and a
    /// successor counts anew.
    pub(crate) fn table_of_charges(&self) -> Option<Arc<StateTable>> {
        (self.version >= FIRST_WITH_CHARGES).then(|| Arc::clone(&self.table))
    }

    /// An earlier daemon had the connection.
    pub(crate) fn continues(&self) -> bool {
        self.earlier.is_some()
    }

    /// The use of the volume, if the earlier daemon knew it.
    pub(crate) fn earlier_charges(&self) -> Option<&Charges> {
        self.earlier.as_ref()?.charges.as_ref()
    }
}

impl Volume {
    /// Restores nodes and handles, and finds out which of the requests in progress had their effect.
    pub(super) fn recover(&self, recovered: Recovered, keeper: &KeeperSocket) -> volume_fs::Result<()> {
        let Recovered { nodes, handles, backings, charges } = recovered;
        let (known, open) = (nodes.len(), handles.len());
        let ids: Vec<u64> = nodes.iter().map(|(_, node)| node.id).collect();
        self.nodes.restore(nodes);
        let (files, directories): (Vec<_>, Vec<_>) =
            handles.into_iter().partition(|(_, handle)| handle.kind == Opened::File);
        let opened: Vec<_> = files.iter().map(|(_, handle)| *handle).collect();
        self.files.restore(files);
        self.directories.restore(directories);
        // Their users get ESTALE without it; everything else is served.
        let kept = keeper.now().list_removed().unwrap_or_else(|error| {
            tracing::error!(error = linux::chain(&error), "the keeper does not list the removed files");
            Vec::new()
        });
        // After the listing, which must come first.
        if let Some(passing) = &self.passing {
            passing.restore(ids.into_iter(), opened.iter(), backings);
        }
        self.trust.outdates(NodeId::ROOT.0);
        let kept = self.nodes.restore_kept(kept);
        if let Some(table) = self.table.clone() {
            table.requests.settle(|effect| {
                let is_done = self.is_done(effect);
                if is_done {
                    self.outdate_what_changed(effect);
                }
                is_done
            });
        }
        // Now also those that have lost their place by a request in progress. For the others, the
        // earlier daemon was killed before the name was lost, or after the file was forgotten.
        for (id, _fd) in self.nodes.restore_kept(kept) {
            self.nodes.let_keeper_drop(id);
        }
        if let Some(quota) = &self.quota {
            match charges {
                Some(charges) => self.correct_use(quota, &charges),
                None => self.charge_removed(quota),
            }
        }
        tracing::info!(known, open, "continues the connection of an earlier daemon");
        Ok(())
    }

    /// Whether the effect was made. If so, the nodes follow it.
    fn is_done(&self, effect: &Effect) -> bool {
        match effect {
            Effect::Make { at, found, .. } => found.is_none() && matches!(self.node_now_at(at), Ok(Some(_))),
            Effect::Remove { at, found: Some(id), removed_by, .. } => {
                let is_done = self.node_now_at(at).is_ok_and(|now| now != Some(*id));
                if is_done {
                    self.nodes.lost_place(*id, at, *removed_by);
                }
                is_done
            }
            Effect::Rename { from, moving: Some(id), to, in_the_way, exchange, removed_by, .. } => {
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
                        Some(other) if *exchange => {
                            self.nodes.close(self.nodes.moved(*other, to, from.clone()));
                        }
                        Some(other) => self.nodes.lost_place(*other, to, *removed_by),
                        None => {}
                    }
                    self.nodes.close(self.nodes.moved(*id, from, to.clone()));
                }
                is_done
            }
            Effect::Attribute { at, had, sets } => {
                let node = self.nodes.descriptor(at.directory);
                match node.and_then(|node| self.descriptors.xattrs(node.as_fd()).size(&at.name)) {
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

    /// The earlier daemon may have answered with the attributes from before the effect, and been killed before it
    /// noted that they are old.
    fn outdate_what_changed(&self, effect: &Effect) {
        let nodes = match effect {
            Effect::Make { at, found, .. } | Effect::Remove { at, found, .. } => {
                [Some(at.directory), *found, None, None]
            }
            Effect::Rename { from, moving, to, in_the_way, .. } => {
                [Some(from.directory), Some(to.directory), *moving, *in_the_way]
            }
            Effect::Attribute { at, .. } => [Some(at.directory), None, None, None],
            Effect::Lookup => [None; 4],
        };
        nodes.into_iter().flatten().for_each(|id| self.trust.outdates(id));
    }

    fn node_now_at(&self, place: &Place) -> Result<Option<u64>> {
        let parent = self.nodes.descriptor(place.directory)?;
        self.node_at(&parent, place)
    }

    /// The use that an earlier daemon has left is right, but for the files that it was changing when it
    /// was killed.
    fn correct_use(&self, quota: &Quota, charges: &Charges) {
        if let Some(table) = &self.table {
            for (slot, effect) in table.requests.uncharged() {
                self.charge_effect(quota, slot, &effect);
            }
        }
        for (_record, id, state) in &charges.records {
            if state.is_changing {
                self.charge_after_kill(*id);
            }
        }
        for (id, takes) in self.removed_files() {
            quota.removed(id, takes, None);
        }
        quota.forget_unknown(|id| self.nodes.contains(id));
    }

    /// Charges the effect of a request that the earlier daemon had made and not charged.
    fn charge_effect(&self, quota: &Quota, slot: Slot, effect: &Effect) {
        let lost = |id: u64, bytes: u64, names_left: bool| {
            let takes = Charged { bytes, lasting: true, attribute_blocks: Some(0) };
            self.discharge(Some(slot), id, takes, Loss { names_left, is_known: self.nodes.contains(id) });
        };
        match effect {
            Effect::Make { at, is_new: true, .. } => {
                if let Ok(parent) = self.nodes.descriptor(at.directory) {
                    quota.take_inode();
                    self.charge_at(Some(slot), &parent, &at.name);
                }
            }
            Effect::Make { .. } if self.names_take_inodes => {
                quota.take_inode();
                self.charge_name(Some(slot));
            }
            Effect::Remove { found: Some(id), removed_by, takes, .. }
            | Effect::Rename { in_the_way: Some(id), exchange: false, removed_by, takes, .. } => {
                lost(*id, *takes, removed_by.is_none());
            }
            Effect::Make { .. }
            | Effect::Remove { .. }
            | Effect::Rename { .. }
            | Effect::Attribute { .. }
            | Effect::Lookup => {}
        }
    }

    /// Removed files are in no directory, so the count of the tree does not find them.
    fn charge_removed(&self, quota: &Quota) {
        for (id, takes) in self.removed_files() {
            quota.add_removed(id, takes);
        }
    }

    /// The files without a name that the kernel knows, and what each takes.
    fn removed_files(&self) -> Vec<(u64, Charged)> {
        let removed = self.nodes.removed_files().into_iter();
        let seen = removed.filter_map(|(id, fd)| Some((id, stat(Arc::as_ref(&fd)).ok()?)));
        seen.filter(|(_, seen)| seen.stx_nlink == 0).map(|(id, seen)| (id, charge(&seen, 0))).collect()
    }
}
