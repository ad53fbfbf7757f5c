//! Limits the inodes that the kernel may know. Each known inode takes memory here, and a pod that
//! walks a large tree makes the kernel know all of it. Above the limit, [`crate::pruner`] asks the
//! kernel to forget inodes. An inode in use cannot be forgotten, so above twice the limit lookups
//! are refused (`ENFILE`).
//!
//! Invariant: the table has at most twice the limit of nodes, one more for each event loop that
//! creates a file, and [`Nodes::beyond`] more for requests that the pruner waits for.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use volume_fs::figures::KnownNow;

use super::{Nodes, Table};
use crate::attributes::ROOT;
use crate::errno::Result;
use crate::loops_at_rest::WaitsFor;
use crate::place::Place;

/// A lookup without space waits this long for the kernel to forget inodes: if the driver must list
/// mount points first, a round takes some seconds, and two may be needed.
const FORGETS_ARE_DUE: Duration = Duration::from_secs(15);

/// Wait for FORGETs that the kernel has already sent.
const FORGETS_ARE_READ: Duration = Duration::from_millis(200);

/// If the table had this many nodes and has lost three quarters of them, its memory is returned.
const WORTH_GIVING_BACK: usize = 16_384;

/// FORGETs of what the kernel drops together are read within this time, or memory is returned several times.
const FORGETS_COME_AT_ONCE: Duration = Duration::from_secs(10);

/// Ring entries that are examined under one lock of the table.
const AT_ONCE: usize = 512;

/// Whether a new node may be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    IfRoom,
    /// Space was reserved before the file was made.
    Admitted,
}

/// Why the pruner is woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pressure {
    TooManyNodes,
    TooManyUnplaced,
    MuchFreed,
}

/// One turn of the clock over all nodes.
#[derive(Debug)]
pub(crate) struct Turn {
    left: usize,
    /// Nodes used in this round or later stay.
    before: u32,
}

impl Turn {
    pub(crate) fn is_over(&self) -> bool {
        self.left == 0
    }
}

impl Nodes {
    pub(crate) fn known_now(&self) -> KnownNow {
        let table = self.table();
        KnownNow {
            nodes: table.nodes.len(),
            limit: self.bound,
            nameless: table.nameless.len(),
            asked_to_forget: self.asked_to_forget.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    /// Called before a file is made in `directory`: whether the kernel may know one more.
    pub(crate) fn admit(&self, directory: u64) -> Result<()> {
        self.room_for_one(self.table(), directory).map(drop)
    }

    /// Waits for space, unless the last round has found all nodes in use. Half of the event loops
    /// never wait, so that FORGETs are read.
    ///
    /// The kernel has locked `directory` for the request. If the pruner waits for the same lock,
    /// nothing is forgotten until the request is answered: so the request is admitted or refused at
    /// once.
    pub(super) fn room_for_one<'a>(
        &self,
        mut table: MutexGuard<'a, Table>,
        directory: u64,
    ) -> Result<MutexGuard<'a, Table>> {
        let most = self.bound.saturating_mul(2);
        let is_full = |table: &Table| table.nodes.len() >= most;
        let is_waited_for = |table: &Table| table.pruned_directory == Some(directory);
        let takes_all = |table: &Table| table.nodes.len() >= most.saturating_add(self.beyond());
        if is_full(&table) && !table.stuck && !is_waited_for(&table) {
            let goes_on = |table: &Table| is_full(table) && !table.stuck && !is_waited_for(table);
            table = self.wait_for_relief(table, FORGETS_ARE_DUE, goes_on);
        }
        let is_let_in = is_waited_for(&table);
        if is_let_in && takes_all(&table) {
            table = self.wait_for_relief(table, FORGETS_ARE_READ, takes_all);
        }
        if !is_full(&table) || (is_let_in && !takes_all(&table)) {
            return Ok(table);
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        if !std::mem::replace(&mut table.refusing, true) {
            tracing::warn!(
                known = table.nodes.len(),
                limit = self.bound,
                "the volume's users hold more inodes than twice the limit: lookups of others fail with \
                 ENFILE; raise knownInodeLimit, or close files"
            );
        }
        Err(Errno::NFILE)
    }

    /// Waits while `goes_on`, at most `limit`; not at all if too many wait already.
    fn wait_for_relief<'a>(
        &self,
        mut table: MutexGuard<'a, Table>,
        limit: Duration,
        goes_on: impl Fn(&Table) -> bool,
    ) -> MutexGuard<'a, Table> {
        let Some(_resting) = self.at_rest.rest(WaitsFor::Nodes) else { return table };
        table.waiting += 1;
        let waited = self.relief.wait_timeout_while(table, limit, |table| goes_on(table));
        (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.waiting -= 1;
        table
    }

    /// Called after nodes were added.
    pub(super) fn came(&self, table: &mut Table) {
        table.peak = table.peak.max(table.nodes.len());
        if table.nodes.len() > self.bound && std::mem::take(&mut table.pruner_waits) {
            self.pressure.notify_one();
        }
    }

    /// Called after nodes were dropped.
    pub(super) fn went(&self, table: &mut Table) {
        if table.much_freed() && std::mem::take(&mut table.pruner_waits) {
            self.pressure.notify_one();
        }
        if table.waiting > 0 && table.nodes.len() < self.bound.saturating_mul(2).saturating_add(self.beyond())
        {
            self.relief.notify_all();
        }
        if table.nodes.len() <= self.bound {
            table.refusing = false;
            // Some nodes are no longer in use: the pruner's rest ends.
            if std::mem::take(&mut table.stuck) {
                self.pressure.notify_one();
            }
        }
    }

    /// Nodes allowed above twice the limit, for requests in the directory that the pruner waits
    /// for.
    fn beyond(&self) -> usize {
        self.bound / 64 + 1
    }

    /// Runs `prune`, which waits for the kernel's lock of `directory`.
    pub(crate) fn prune_in<T>(&self, directory: u64, prune: impl FnOnce() -> T) -> T {
        let mut table = self.table();
        table.pruned_directory = Some(directory);
        if table.waiting > 0 {
            self.relief.notify_all();
        }
        drop(table);
        let pruned = prune();
        self.table().pruned_directory = None;
        pruned
    }

    /// Called by the pruner: waits until there is something to do.
    pub(crate) fn wait_for_pressure(&self) -> Pressure {
        let mut table = self.table();
        loop {
            if table.nodes.len() > self.bound {
                return Pressure::TooManyNodes;
            }
            if self.has_too_many_unplaced(&table) {
                return Pressure::TooManyUnplaced;
            }
            table.stuck = false;
            if table.much_freed() {
                return Pressure::MuchFreed;
            }
            table.pruner_waits = true;
            table = self.pressure.wait(table).unwrap_or_else(PoisonError::into_inner);
            table.pruner_waits = false;
        }
    }

    /// Called by the pruner after [`Pressure::MuchFreed`]: waits until nothing was forgotten for `quiet`, so
    /// that memory is returned once, but not for long. Then returns what the lists of nodes have taken. False if
    /// there is something else to do first.
    pub(crate) fn give_back(&self, quiet: Duration) -> bool {
        let is_pressed = |table: &Table| table.nodes.len() > self.bound || self.has_too_many_unplaced(table);
        let begun = Instant::now();
        wait_until_none_is_left(quiet, || {
            let table = self.table();
            let is_over = is_pressed(&table) || begun.elapsed() > FORGETS_COME_AT_ONCE;
            // The root stays.
            if is_over { 0 } else { table.nodes.len().saturating_sub(1) }
        });
        let mut table = self.table();
        if is_pressed(&table) {
            return false;
        }
        table.peak = table.nodes.len();
        table.renew_ring();
        table.ring.shrink_to_fit();
        let Table { nodes, clock, .. } = &mut *table;
        clock.retain(|id| nodes.contains_key(id));
        clock.shrink_to_fit();
        true
    }

    /// Begins a round and returns its number. Rounds measure when a node was last used.
    pub(crate) fn begin_round(&self) -> u32 {
        let mut table = self.table();
        table.round = table.round.saturating_add(1);
        table.round
    }

    /// Total of dropped nodes.
    pub(crate) fn dropped(&self) -> u64 {
        self.table().dropped
    }

    /// Whether a round that began at `dropped` freed too little to start another one at once.
    pub(crate) fn is_stuck_since(&self, dropped: u64) -> bool {
        let table = self.table();
        table.nodes.len() > self.bound && (table.dropped - dropped) < (table.nodes.len() / 64) as u64
    }

    /// A turn over the nodes that were last used before round `before` began.
    pub(crate) fn turn(&self, before: u32) -> Turn {
        Turn { left: self.table().ring.len(), before }
    }

    /// Number of nodes above the number that a round leaves.
    pub(crate) fn excess(&self) -> usize {
        self.table().nodes.len().saturating_sub(self.round_leaves())
    }

    fn round_leaves(&self) -> usize {
        self.bound - self.bound / 10
    }

    /// The turn's next nodes, at most `most`, that no other node and no removed file refers to.
    /// Only the kernel knows whether they are in use.
    pub(crate) fn candidates<T>(
        &self,
        turn: &mut Turn,
        most: usize,
        candidate: impl Fn(u64, &Place) -> T,
    ) -> Vec<T> {
        let mut found = Vec::new();
        while found.len() < most && turn.left > 0 {
            let mut table = self.table();
            let looks = turn.left.min(AT_ONCE).min(most - found.len());
            turn.left -= looks;
            for _ in 0..looks {
                let Some(id) = table.ring.pop_front() else {
                    turn.left = 0;
                    break;
                };
                let Some(node) = table.nodes.get(&id) else { continue };
                if node.children == 0
                    && node.touched < turn.before
                    && let Some(place) = &node.place
                {
                    found.push(candidate(id, place));
                }
                table.ring.push_back(id);
            }
        }
        found
    }

    /// Waits until the round's goal is reached, or until nothing was forgotten for `quiet`.
    pub(crate) fn wait_for_forgets(&self, quiet: Duration) {
        wait_until_none_is_left(quiet, || self.excess());
    }

    pub(crate) fn asked_to_forget(&self, count: usize) {
        self.asked_to_forget.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// A round has freed almost nothing: the known inodes are in use. No request waits for space
    /// until `pause` is over, or too many nodes have no place.
    pub(crate) fn rest(&self, pause: Duration) {
        let mut table = self.table();
        table.stuck = true;
        self.relief.notify_all();
        let too_many =
            |table: &mut Table| table.nodes.len() > self.bound && !self.has_too_many_unplaced(table);
        let rested = self.pressure.wait_timeout_while(table, pause, too_many);
        let (mut table, _) = rested.unwrap_or_else(PoisonError::into_inner);
        table.stuck = false;
    }

    /// The names from the root to a node; `None` if it is gone or has no place.
    pub(crate) fn path(&self, place: &Place) -> Option<Vec<CString>> {
        let table = self.table();
        let mut names = vec![place.name.clone()];
        let mut at = place.directory;
        while at != ROOT {
            let place = table.nodes.get(&at)?.place.as_ref()?;
            if names.len() > table.nodes.len() {
                return None;
            }
            names.push(place.name.clone());
            at = place.directory;
        }
        names.reverse();
        Some(names)
    }
}

/// Waits until FORGETs leave none of what is counted, or until there were no more for `quiet`. Returns
/// how many are left.
pub(super) fn wait_until_none_is_left(quiet: Duration, count: impl Fn() -> usize) -> usize {
    let mut seen = (count(), Instant::now());
    while seen.0 > 0 && seen.1.elapsed() < quiet {
        // Waking up for each FORGET would cost too much.
        std::thread::park_timeout(quiet / 10);
        let left = count();
        if left < seen.0 {
            seen = (left, Instant::now());
        }
    }
    seen.0
}

impl Table {
    /// Adds a new node to the ring, which may contain ids of nodes that are gone.
    pub(super) fn ring_add(&mut self, id: u64) {
        self.ring.push_back(id);
        if self.ring.len() > 2 * self.nodes.len() + 1024 {
            self.renew_ring();
        }
    }

    fn renew_ring(&mut self) {
        self.ring.clear();
        self.ring.extend(self.nodes.keys().filter(|id| **id != ROOT));
    }

    pub(super) fn much_freed(&self) -> bool {
        self.peak >= WORTH_GIVING_BACK && self.nodes.len() < self.peak / 4
    }
}

/// Removed files that are still held, each with the uid of the user that removed it.
#[derive(Debug, Default)]
pub(super) struct Nameless {
    owners: HashMap<u64, u32>,
    by_owner: HashMap<u32, usize>,
}

impl Nameless {
    pub(super) fn len(&self) -> usize {
        self.owners.len()
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
