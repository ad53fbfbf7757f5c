//! The use of a volume's capacity, and whether more fits. [`crate::charge`] says what a file takes.
//!
//! Invariant: `used` is the sum of every file's last charge and of the reservations of running
//! requests. A file without names stays charged until the kernel has forgotten it: until then it
//! may be open.
//!
//! A file's charge is remembered as long as another measurement may differ: while it is known and
//! was changed. A backing file system also allocates and frees blocks long after a write, so the
//! charge is remembered until it is [lasting](Charged::lasting) or the file is gone. Otherwise a
//! file could be freed for more than it was charged, again and again.
//!
//! Every change of the charges is written into the state table, if there is one, at the moment it is
//! made here, so a successor continues from the same charges. Reservations are not: they end with
//! the process, and a file that was being changed is measured by the successor. While the use is not
//! known, nothing is written.
//!
//! Lock order: a shard of the charges, then the state table's.

mod removals;
mod reserved;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use volume_fs::figures::{Counted, Limits, Shrinks, UsageNow};

use self::removals::Removals;
pub(crate) use self::reserved::{Change, InodeReservation, Reservation};
use crate::charge::Charged;
use crate::errno::Result;
use crate::loops_at_rest::LoopsAtRest;
use crate::state_table::charges::{ChargeState, Charges, Posting, Sum};
use crate::state_table::requests::Slot;
use crate::state_table::{self, RecordId, StateTable};

/// More than all event loops together can have in flight (64 writes of 1 MiB): while this much is
/// free, a write may reserve more than it needs.
const AMPLE_BYTES: u64 = 64 << 20;

const SHARDS: usize = 16;

/// The use of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Use {
    pub(crate) counted: Counted,
    /// Node ids of files whose charge is not lasting, and their bytes in `counted`.
    pub(crate) unsettled: Vec<(u64, u64)>,
}

#[derive(Debug)]
pub(crate) struct Quota {
    limit_bytes: AtomicU64,
    limit_inodes: AtomicU64,
    used_bytes: AtomicU64,
    used_inodes: AtomicU64,
    counting: AtomicBool,
    /// The count has failed.
    uncounted: AtomicBool,
    /// While counting: the use that was found so far.
    found_bytes: AtomicU64,
    found_inodes: AtomicU64,
    charges: [Mutex<HashMap<u64, Charge>>; SHARDS],
    removals: Removals,
    /// Where a successor finds the charges; `None` if none can follow.
    table: Option<Arc<StateTable>>,
}

/// A node that was changed since the kernel knows it, or whose charge is not lasting.
#[derive(Debug, Clone, Copy)]
struct Charge {
    charged: Charged,
    /// It has no name left.
    removed: bool,
    /// The number of changes in progress.
    changes: u32,
    /// In the state table.
    record: Option<RecordId>,
}

impl Quota {
    /// The use is unknown until [`Self::set_counted`] or [`Self::restore`]: nothing may change before.
    ///
    /// `event_loops`: half of them never wait for space.
    pub(crate) fn new(limits: Limits, event_loops: usize, table: Option<Arc<StateTable>>) -> Self {
        Self {
            limit_bytes: AtomicU64::new(limits.bytes),
            limit_inodes: AtomicU64::new(limits.inodes),
            used_bytes: AtomicU64::new(0),
            used_inodes: AtomicU64::new(0),
            counting: AtomicBool::new(true),
            uncounted: AtomicBool::new(false),
            found_bytes: AtomicU64::new(0),
            found_inodes: AtomicU64::new(0),
            charges: std::array::from_fn(|_| Mutex::new(HashMap::new())),
            removals: Removals::new(event_loops),
            table,
        }
    }

    /// The event loops that wait for space, and others that wait for FORGETs.
    pub(crate) fn loops_at_rest(&self) -> Arc<LoopsAtRest> {
        self.removals.loops_at_rest()
    }

    /// Shows the use that was found so far.
    pub(crate) fn has_found(&self, so_far: Counted) {
        self.found_bytes.store(so_far.bytes, Ordering::Relaxed);
        self.found_inodes.store(so_far.inodes, Ordering::Relaxed);
    }

    pub(crate) fn set_counted(&self, found: Use) {
        let Use { counted, unsettled } = found;
        let mut others = Sum::of(counted);
        for (id, bytes) in unsettled {
            let charged = Charged { bytes, lasting: false, attribute_blocks: None };
            others.bytes = others.bytes.wrapping_sub(bytes.cast_signed());
            self.shard(id).insert(id, Charge::of(charged));
        }
        self.post(None, |posting| posting.add(others));
        let mut has_all = true;
        // Also removed files of an earlier daemon, which are charged already.
        for shard in &self.charges {
            for (id, charge) in shard.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
                charge.record = self.post(None, |posting| {
                    posting.add(Sum { bytes: 0, inodes: i64::from(charge.removed) });
                    posting.enter(*id, charge.state())
                });
                has_all &= charge.record.is_some();
            }
        }
        match &self.table {
            Some(table) if has_all => table.set_use_known(),
            Some(_) => state_table::charges::warn_full(),
            None => {}
        }
        self.start(counted);
    }

    /// The volume cannot be counted. It counts as full, so that its limit holds; removing files frees
    /// no space either.
    pub(crate) fn set_uncounted(&self) {
        self.uncounted.store(true, Ordering::Release);
        self.start(Counted { bytes: u64::MAX, inodes: u64::MAX });
    }

    /// Continues from an earlier daemon's charges.
    pub(crate) fn restore(&self, charges: &Charges) {
        let Charges { sum, records } = charges;
        let (mut bytes, inodes) = (i128::from(sum.bytes), i128::from(sum.inodes));
        for (record, id, ChargeState { charged, removed, is_changing: _ }) in records.iter().copied() {
            let charge = Charge { removed, record: Some(record), ..Charge::of(charged) };
            let other = self.shard(id).insert(id, charge);
            bytes += i128::from(charged.bytes) - other.map_or(0, |other| i128::from(other.charged.bytes));
            if removed {
                self.removals.restored();
            }
        }
        // Below zero after changes behind the mount, see `change`.
        let missing = |total: i128| i64::try_from(total.min(0).unsigned_abs()).unwrap_or(i64::MAX);
        let missing = Sum { bytes: missing(bytes), inodes: missing(inodes) };
        if missing != Sum::default() {
            self.post(None, |posting| posting.add(missing));
        }
        let used = |total: i128| u64::try_from(total.max(0)).unwrap_or(u64::MAX);
        self.start(Counted { bytes: used(bytes), inodes: used(inodes) });
    }

    fn start(&self, used: Counted) {
        change(&self.used_bytes, used.bytes, 0);
        change(&self.used_inodes, used.inodes, 0);
        self.counting.store(false, Ordering::Release);
    }

    /// Changes what a successor finds, all at once. `slot`: the note of the request that causes it.
    fn post<T: Default>(&self, slot: Option<Slot>, change: impl FnOnce(&mut Posting<'_>) -> T) -> T {
        let Some(table) = &self.table else { return T::default() };
        let mut posting = table.post(slot);
        let done = change(&mut posting);
        posting.commit();
        done
    }

    /// Called after a request has changed nothing, or what its effect changes is written.
    pub(crate) fn no_change(&self, slot: Option<Slot>) {
        if slot.is_some() {
            self.post(slot, |_nothing| ());
        }
    }

    /// A record for a file that is charged without one so far.
    fn enter(&self, slot: Option<Slot>, id: u64, charge: Charge) -> Charge {
        if self.counting.load(Ordering::Acquire) {
            return charge;
        }
        let record = self.post(slot, |posting| {
            posting.add(Sum { bytes: charge.charged.bytes.cast_signed().wrapping_neg(), inodes: 0 });
            posting.enter(id, charge.state())
        });
        Charge { record, ..charge }
    }

    fn write(&self, charge: &Charge) {
        if let (Some(table), Some(record)) = (&self.table, charge.record) {
            table.set_charge(record, charge.state());
        }
    }

    pub(crate) fn usage(&self) -> UsageNow {
        // Read before the use: `set_counted` stores the use first.
        let counting = self.counting.load(Ordering::Acquire);
        let (bytes, inodes) = match counting {
            true => (&self.found_bytes, &self.found_inodes),
            false => (&self.used_bytes, &self.used_inodes),
        };
        UsageNow {
            limits: Limits {
                bytes: self.limit_bytes.load(Ordering::Acquire),
                inodes: self.limit_inodes.load(Ordering::Acquire),
            },
            used: Counted { bytes: bytes.load(Ordering::Acquire), inodes: inodes.load(Ordering::Acquire) },
            counting,
        }
    }

    /// Sets both limits or none; unchanged limits are a success.
    pub(crate) fn set_limits(&self, wanted: Limits) -> std::result::Result<(), Shrinks> {
        self.usage().limits.check_growth(wanted)?;
        self.limit_bytes.store(wanted.bytes, Ordering::Release);
        self.limit_inodes.store(wanted.inodes, Ordering::Release);
        Ok(())
    }

    /// Reserves `bytes` if they fit.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<Reservation<'_>> {
        self.reserve_leaving(bytes, 0)
    }

    /// Reserves `bytes` if enough is free that reserving too much does no harm.
    pub(crate) fn reserve_amply(&self, bytes: u64) -> Result<Reservation<'_>> {
        self.reserve_leaving(bytes, AMPLE_BYTES)
    }

    fn reserve_leaving(&self, bytes: u64, left: u64) -> Result<Reservation<'_>> {
        // A request that needs no space succeeds even in a volume above its limit.
        if bytes == 0 {
            return Ok(Reservation { quota: self, bytes });
        }
        let limit = unlimited(self.limit_bytes.load(Ordering::Acquire));
        add_within(&self.used_bytes, bytes, limit.saturating_sub(left))?;
        Ok(Reservation { quota: self, bytes })
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let limit = unlimited(self.limit_bytes.load(Ordering::Acquire));
        limit.saturating_sub(self.used_bytes.load(Ordering::Acquire))
    }

    /// Whether a name may be added to a directory, or an attribute to a file. That may need another
    /// block, which is not known before: the volume may exceed its limit by it, and then accepts no
    /// further name.
    pub(crate) fn admit_block(&self) -> Result<()> {
        self.retrying(|| {
            let limit = unlimited(self.limit_bytes.load(Ordering::Acquire));
            if self.used_bytes.load(Ordering::Acquire) <= limit { Ok(()) } else { Err(Errno::NOSPC) }
        })
    }

    pub(crate) fn reserve_inode(&self) -> Result<InodeReservation<'_>> {
        self.retrying(|| {
            let limit = unlimited(self.limit_inodes.load(Ordering::Acquire));
            add_within(&self.used_inodes, 1, limit)?;
            Ok(InodeReservation { quota: self })
        })
    }

    /// Takes an inode of a file that exists, also beyond the limit.
    pub(crate) fn take_inode(&self) {
        change(&self.used_inodes, 1, 0);
    }

    /// Repeats `attempt` while it fails for lack of space and space is about to be freed, but not
    /// forever if other requests take it.
    pub(crate) fn retrying<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        self.removals.retrying(attempt)
    }

    /// Called before a change: records the file's current charge. `measure` is called for a file
    /// that is not remembered.
    pub(crate) fn begin_change(
        &self,
        id: u64,
        measure: impl FnOnce() -> Result<Charged>,
    ) -> Result<Change<'_>> {
        let mut shard = self.shard(id);
        let before = match shard.get_mut(&id) {
            Some(charge) => {
                charge.changes += 1;
                if charge.changes == 1 {
                    self.write(charge);
                }
                charge.charged
            }
            None => {
                let charged = measure()?;
                let charge = Charge { changes: 1, ..Charge::of(charged) };
                shard.insert(id, self.enter(None, id, charge));
                charged
            }
        };
        Ok(Change { quota: self, id, before, reserved: None, is_settled: false })
    }

    /// Calls `act` if the caller's change of the file is the only one in progress. No other one begins
    /// before it returns.
    pub(crate) fn if_sole_change<T>(&self, id: u64, act: impl FnOnce() -> T) -> Option<T> {
        let shard = self.shard(id);
        shard.get(&id).is_some_and(|charge| charge.changes == 1).then(act)
    }

    /// Called after the file system may have changed the blocks: `measure` gets the charge so far and
    /// returns the new one. The charge stays for an unchanged file with a lasting charge, and for a
    /// file that cannot be measured.
    ///
    /// Measures under the lock: of two requests, the later one sees both changes. While the volume is counted,
    /// only removed files are measured: the use does not yet contain the others. Their charges stay not lasting, and are
    /// measured later.
    pub(crate) fn settle(&self, id: u64, measure: impl FnOnce(Charged) -> Result<Charged>) {
        let mut shard = self.shard(id);
        if let Some(charge) = shard.get_mut(&id)
            && (charge.removed || !self.counting.load(Ordering::Acquire))
        {
            self.settle_charge(charge, None, measure);
        }
    }

    fn settle_charge(
        &self,
        charge: &mut Charge,
        reserved: Option<Reservation<'_>>,
        measure: impl FnOnce(Charged) -> Result<Charged>,
    ) {
        let Ok(now) = measure(charge.charged) else { return };
        let before = std::mem::replace(&mut charge.charged, now);
        self.write(charge);
        let reserved = reserved.map_or(0, Reservation::take);
        change(&self.used_bytes, now.bytes, before.bytes.saturating_add(reserved));
    }

    /// Whether measuring an unchanged file may give another result.
    pub(crate) fn is_unsettled(&self, id: u64) -> bool {
        self.shard(id).get(&id).is_some_and(|charge| !charge.removed && !charge.charged.lasting)
    }

    /// Charges a new file for which no space was reserved, but its inode.
    pub(crate) fn add(&self, id: u64, charged: Charged, slot: Option<Slot>) {
        self.add_and_remember(id, charged, !charged.lasting, slot);
    }

    /// As [`Self::add`], for an open file. It is remembered, so that its first write need not measure it.
    pub(crate) fn add_open(&self, id: u64, charged: Charged, slot: Option<Slot>) {
        self.add_and_remember(id, charged, true, slot);
    }

    fn add_and_remember(&self, id: u64, charged: Charged, is_remembered: bool, slot: Option<Slot>) {
        let mut shard = self.shard(id);
        // An earlier file with this number is gone: it was removed behind the mount, or an earlier
        // daemon was killed before it carried out a FORGET.
        let earlier = shard.remove(&id);
        let charge = Charge::of(charged);
        let record = self.post(slot, |posting| {
            posting.add(Sum { bytes: 0, inodes: if earlier.is_some() { 0 } else { 1 } });
            earlier.and_then(|earlier| earlier.record).into_iter().for_each(|record| posting.leave(record));
            if is_remembered {
                posting.enter(id, charge.state())
            } else {
                posting.add(Sum { bytes: charged.bytes.cast_signed(), inodes: 0 });
                None
            }
        });
        if is_remembered {
            shard.insert(id, Charge { record, ..charge });
        }
        drop(shard);
        change(&self.used_bytes, charged.bytes, 0);
        if let Some(Charge { charged, removed, .. }) = earlier {
            self.give_back(charged);
            if removed {
                self.removals.forgotten();
            }
        }
    }

    /// A further name of a file takes the inode that was reserved for it.
    pub(crate) fn add_name(&self, slot: Option<Slot>) {
        self.post(slot, |posting| posting.add(Sum { bytes: 0, inodes: 1 }));
    }

    /// A name that took an inode is gone, and its file has others.
    pub(crate) fn free_name(&self, slot: Option<Slot>) {
        self.post(slot, |posting| posting.add(Sum { bytes: 0, inodes: -1 }));
        self.free_inode();
    }

    /// A node that the kernel knows lost its last name. It `takes` this much if it was not changed.
    pub(crate) fn removed(&self, id: u64, takes: Charged, slot: Option<Slot>) {
        let mut shard = self.shard(id);
        match shard.get_mut(&id) {
            Some(charge) => {
                let was_removed = std::mem::replace(&mut charge.removed, true);
                self.write(charge);
                self.no_change(slot);
                if was_removed {
                    return;
                }
            }
            None => {
                let charge = Charge { removed: true, ..Charge::of(takes) };
                shard.insert(id, self.enter(slot, id, charge));
            }
        }
        drop(shard);
        self.removals.removed();
    }

    /// Charges a removed file that the kernel knows since an earlier daemon, and that a count will not
    /// find.
    pub(crate) fn add_removed(&self, id: u64, takes: Charged) {
        change(&self.used_bytes, takes.bytes, 0);
        self.take_inode();
        self.removed(id, takes, None);
    }

    /// A file was closed: if it has no name left, it may be gone.
    pub(crate) fn closed(&self, id: u64) {
        if self.shard(id).get(&id).is_some_and(|charge| charge.removed) {
            self.removals.closed();
        }
    }

    /// A file that the kernel does not know lost its last name. It `takes` this much if it was not
    /// changed.
    pub(crate) fn free(&self, id: u64, takes: Charged, slot: Option<Slot>) {
        let mut shard = self.shard(id);
        let charge = shard.remove(&id);
        self.post(slot, |posting| {
            let others = if charge.is_some() { 0 } else { takes.bytes.cast_signed() };
            posting.add(Sum { bytes: others.wrapping_neg(), inodes: -1 });
            charge.and_then(|charge| charge.record).into_iter().for_each(|record| posting.leave(record));
        });
        drop(shard);
        self.give_back(charge.map_or(takes, |charge| charge.charged));
    }

    /// Releases one reserved inode.
    fn free_inode(&self) {
        change(&self.used_inodes, 0, 1);
    }

    fn give_back(&self, charged: Charged) {
        change(&self.used_bytes, 0, charged.bytes);
        self.free_inode();
    }

    /// The kernel has forgotten the node.
    pub(crate) fn forget(&self, id: u64) {
        let mut shard = self.shard(id);
        let Some(Charge { charged, removed, record, .. }) = shard.get(&id).copied() else { return };
        if removed || charged.lasting {
            shard.remove(&id);
            if let Some(record) = record {
                self.post(None, |posting| {
                    let bytes = charged.bytes.cast_signed();
                    posting.add(if removed {
                        Sum { bytes: 0, inodes: -1 }
                    } else {
                        Sum { bytes, inodes: 0 }
                    });
                    posting.leave(record);
                });
            }
        }
        drop(shard);
        if !removed {
            return;
        }
        self.give_back(charged);
        self.removals.forgotten();
    }

    /// Forgets what the kernel does not know: an earlier daemon may have been killed in between.
    pub(crate) fn forget_unknown(&self, is_known: impl Fn(u64) -> bool) {
        let all: Vec<u64> = self.charges.iter().flat_map(ids).collect();
        all.into_iter().filter(|id| !is_known(*id)).for_each(|id| self.forget(id));
    }

    /// The use after everything is closed: the kernel sends no FORGETs at an unmount. `None` if it is
    /// not known.
    pub(crate) fn at_the_end(&self) -> Option<Use> {
        let UsageNow { used: mut counted, counting, .. } = self.usage();
        if counting || self.uncounted.load(Ordering::Acquire) {
            return None;
        }
        let mut unsettled = Vec::new();
        for shard in &self.charges {
            for (id, charge) in shard.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                if charge.removed {
                    counted.bytes = counted.bytes.saturating_sub(charge.charged.bytes);
                    counted.inodes = counted.inodes.saturating_sub(1);
                } else if !charge.charged.lasting {
                    unsettled.push((*id, charge.charged.bytes));
                }
            }
        }
        Some(Use { counted, unsettled })
    }

    /// Returns what charges that are not remembered any more have taken.
    pub(crate) fn shrink(&self) {
        for shard in &self.charges {
            shard.lock().unwrap_or_else(PoisonError::into_inner).shrink_to_fit();
        }
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, HashMap<u64, Charge>> {
        let number = usize::try_from(id % SHARDS as u64).unwrap_or_default();
        self.charges[number].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Charge {
    fn of(charged: Charged) -> Self {
        Self { charged, removed: false, changes: 0, record: None }
    }

    fn state(&self) -> ChargeState {
        let Self { charged, removed, .. } = *self;
        ChargeState { charged, removed, is_changing: self.changes > 0 }
    }
}

fn ids(shard: &Mutex<HashMap<u64, Charge>>) -> Vec<u64> {
    shard.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
}

fn unlimited(limit: u64) -> u64 {
    if limit == 0 { u64::MAX } else { limit }
}

fn add_within(counter: &AtomicU64, more: u64, limit: u64) -> Result<()> {
    counter
        .try_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            now.checked_add(more).filter(|sum| *sum <= limit)
        })
        .map(drop)
        .map_err(|_too_much| Errno::NOSPC)
}

/// Never below zero: a tree that was changed behind the mount must not make the volume look full
/// forever.
fn change(counter: &AtomicU64, more: u64, less: u64) {
    counter.update(Ordering::AcqRel, Ordering::Acquire, |now| now.saturating_add(more).saturating_sub(less));
}

#[cfg(test)]
mod tests;
