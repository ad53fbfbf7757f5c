//! The use of a volume's capacity, and whether more fits.
//!
//! A file is charged for its blocks, as du(1) counts them, but not for blocks beyond its end,
//! except those that its extended attributes can take: xfs allocates blocks beyond the end ahead
//! and frees them later.
//!
//! Invariant: `used` is the sum of every file's last charge and of the reservations of running
//! requests. A file without names stays charged until the kernel has forgotten it: until then it
//! may be open.
//!
//! A file's charge is remembered as long as another measurement may differ: while it is known and
//! was changed. A backing file system also allocates and frees blocks long after a write, so the
//! charge is remembered until it is [lasting](Charged::lasting) or the file is gone. Otherwise a
//! file could be freed for more than it was charged, again and again.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, SeekFrom, Statx};
use rustix::io::Errno;
use volume_fs::figures::{Counted, Limits, Shrinks, UsageNow};

use crate::errno::Result;

/// The unit in which space is charged and reserved.
pub(crate) const BLOCK_BYTES: u64 = 4096;

/// More than all event loops together can have in flight (64 writes of 1 MiB): while this much is
/// free, a write may reserve more than it needs.
const AMPLE_BYTES: u64 = 64 << 20;

/// How long after a removal, or after the close of a removed file, its FORGET may arrive. A request
/// for space waits for it instead of failing: on other file systems, space is free when unlink(2)
/// returns.
const FORGET_IS_DUE: Duration = Duration::from_secs(1);

/// While a removed file is open, another event loop may have read its close before the request that
/// finds no space, without having handled it yet.
const CLOSE_IS_DUE: Duration = Duration::from_millis(100);

const SHARDS: usize = 16;

/// The space of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    pub(crate) bytes: u64,
    /// Only a request can change the charge: the backing file system has nothing left to map, trim
    /// or merge during writeback.
    pub(crate) lasting: bool,
    /// Most blocks of its attributes; `None` if they were not read yet.
    pub(crate) attribute_blocks: Option<u8>,
}

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
    charges: [Mutex<HashMap<u64, Charge>>; SHARDS],
    removals: Mutex<Removals>,
    /// FORGETs of removed nodes.
    forgets: AtomicU64,
    forgotten: Condvar,
    most_waiting: usize,
}

/// A node that was changed since the kernel knows it, or whose charge is not lasting.
#[derive(Debug, Clone, Copy)]
struct Charge {
    charged: Charged,
    /// It has no name left.
    removed: bool,
}

/// Removed nodes that the kernel has not forgotten.
#[derive(Debug, Default)]
struct Removals {
    known: usize,
    last: Option<Instant>,
    /// Requests that wait for a FORGET.
    waiting: usize,
}

/// Reserved space. The part that is not settled is released on drop.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    quota: &'a Quota,
    bytes: u64,
}

/// One reserved inode, released on drop unless it is kept.
#[derive(Debug)]
pub(crate) struct InodeReservation<'a> {
    quota: &'a Quota,
}

impl Quota {
    /// Without `found`, the use is unknown until [`Self::set_counted`]: nothing may change before.
    ///
    /// `event_loops`: an event loop that waits for a FORGET reads no requests, and so no FORGET. So
    /// half of them never wait.
    pub(crate) fn new(limits: Limits, found: Option<Use>, event_loops: usize) -> Self {
        let quota = Self {
            limit_bytes: AtomicU64::new(limits.bytes),
            limit_inodes: AtomicU64::new(limits.inodes),
            used_bytes: AtomicU64::new(0),
            used_inodes: AtomicU64::new(0),
            counting: AtomicBool::new(true),
            charges: std::array::from_fn(|_| Mutex::new(HashMap::new())),
            removals: Mutex::new(Removals::default()),
            forgets: AtomicU64::new(0),
            forgotten: Condvar::new(),
            most_waiting: event_loops / 2,
        };
        if let Some(found) = found {
            quota.set_counted(found);
        }
        quota
    }

    pub(crate) fn set_counted(&self, found: Use) {
        for (id, bytes) in found.unsettled {
            let charged = Charged { bytes, lasting: false, attribute_blocks: None };
            let charge = Charge { charged, removed: false };
            self.shard(id).insert(id, charge);
        }
        // Removed files of an earlier daemon are charged already.
        change(&self.used_bytes, found.counted.bytes, 0);
        change(&self.used_inodes, found.counted.inodes, 0);
        self.counting.store(false, Ordering::Release);
    }

    pub(crate) fn usage(&self) -> UsageNow {
        // Read before the use: `set_counted` stores the use first.
        let counting = self.counting.load(Ordering::Acquire);
        UsageNow {
            limits: Limits {
                bytes: self.limit_bytes.load(Ordering::Acquire),
                inodes: self.limit_inodes.load(Ordering::Acquire),
            },
            used: Counted {
                bytes: self.used_bytes.load(Ordering::Acquire),
                inodes: self.used_inodes.load(Ordering::Acquire),
            },
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

    /// Repeats `attempt` while it fails for lack of space and space is about to be freed, but not
    /// forever if other requests take it.
    pub(crate) fn retrying<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        let mut deadline = None;
        loop {
            let seen = self.forgets.load(Ordering::Acquire);
            match attempt() {
                Err(Errno::NOSPC) => {
                    let deadline = *deadline.get_or_insert_with(|| Instant::now() + FORGET_IS_DUE);
                    if !self.wait_for_a_forget(seen, deadline) {
                        return Err(Errno::NOSPC);
                    }
                }
                other => return other,
            }
        }
    }

    /// Whether a removed file was forgotten since `seen`.
    fn wait_for_a_forget(&self, seen: u64, deadline: Instant) -> bool {
        let is_over = |_: &mut Removals| self.forgets.load(Ordering::Acquire) != seen;
        let mut removals = self.removals();
        if is_over(&mut removals) {
            return Instant::now() < deadline;
        }
        if removals.known == 0 || removals.waiting >= self.most_waiting {
            return false;
        }
        let due = removals.last.map_or(Duration::ZERO, |last| FORGET_IS_DUE.saturating_sub(last.elapsed()));
        let left = due.max(CLOSE_IS_DUE).min(deadline.saturating_duration_since(Instant::now()));
        removals.waiting += 1;
        let waited = self.forgotten.wait_timeout_while(removals, left, |now| !is_over(now));
        let (mut removals, _timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        removals.waiting -= 1;
        is_over(&mut removals)
    }

    /// Called before a change: records the file's current charge. `measure` is called for a file
    /// that is not remembered.
    pub(crate) fn before_change(
        &self,
        id: u64,
        measure: impl FnOnce() -> Result<Charged>,
    ) -> Result<Charged> {
        let mut shard = self.shard(id);
        if let Some(charge) = shard.get(&id) {
            return Ok(charge.charged);
        }
        let charged = measure()?;
        shard.insert(id, Charge { charged, removed: false });
        Ok(charged)
    }

    /// Called after a change, or after the file system may have changed the blocks: `measure` gets
    /// the charge so far and returns the new one. The charge stays for an unchanged file with a
    /// lasting charge, and for a file that cannot be measured.
    ///
    /// Measures under the lock: of two requests, the later one sees both changes.
    pub(crate) fn settle(
        &self,
        id: u64,
        reserved: Option<Reservation<'_>>,
        measure: impl FnOnce(Charged) -> Result<Charged>,
    ) {
        let mut shard = self.shard(id);
        let Some(charge) = shard.get_mut(&id) else { return };
        let Ok(now) = measure(charge.charged) else { return };
        let before = std::mem::replace(&mut charge.charged, now);
        let reserved = reserved.map_or(0, Reservation::take);
        change(&self.used_bytes, now.bytes, before.bytes.saturating_add(reserved));
    }

    /// Whether measuring an unchanged file may give another result.
    pub(crate) fn is_unsettled(&self, id: u64) -> bool {
        self.shard(id).get(&id).is_some_and(|charge| !charge.removed && !charge.charged.lasting)
    }

    /// Charges a new file for which no space was reserved.
    pub(crate) fn add(&self, id: u64, charged: Charged) {
        let mut shard = self.shard(id);
        // A file with this number may have been removed behind the mount.
        shard.remove(&id);
        if !charged.lasting {
            shard.insert(id, Charge { charged, removed: false });
        }
        drop(shard);
        change(&self.used_bytes, charged.bytes, 0);
    }

    /// A node that the kernel knows lost its last name. It `takes` this much if it was not changed.
    pub(crate) fn removed(&self, id: u64, takes: Charged) {
        let mut shard = self.shard(id);
        let charge = shard.entry(id).or_insert(Charge { charged: takes, removed: false });
        if std::mem::replace(&mut charge.removed, true) {
            return;
        }
        drop(shard);
        let mut removals = self.removals();
        removals.known += 1;
        removals.last = Some(Instant::now());
    }

    /// Charges a removed file that the kernel knows since an earlier daemon.
    pub(crate) fn add_removed(&self, id: u64, takes: Charged) {
        change(&self.used_bytes, takes.bytes, 0);
        change(&self.used_inodes, 1, 0);
        self.removed(id, takes);
    }

    /// A file was closed: if it has no name left, it may be gone.
    pub(crate) fn closed(&self, id: u64) {
        if self.shard(id).get(&id).is_some_and(|charge| charge.removed) {
            self.removals().last = Some(Instant::now());
        }
    }

    /// A file that the kernel does not know lost its last name. It `takes` this much if it was not
    /// changed.
    pub(crate) fn free(&self, id: u64, takes: Charged) {
        let charged = self.shard(id).remove(&id).map_or(takes, |charge| charge.charged);
        self.give_back(charged);
    }

    /// Releases one inode: of a file, or of one of a file's names if these take inodes.
    pub(crate) fn free_inode(&self) {
        change(&self.used_inodes, 0, 1);
    }

    fn give_back(&self, charged: Charged) {
        change(&self.used_bytes, 0, charged.bytes);
        self.free_inode();
    }

    /// The kernel has forgotten the node.
    pub(crate) fn forget(&self, id: u64) {
        let mut shard = self.shard(id);
        let Some(Charge { charged, removed }) = shard.get(&id).copied() else { return };
        if removed || charged.lasting {
            shard.remove(&id);
        }
        drop(shard);
        if !removed {
            return;
        }
        self.give_back(charged);
        let mut removals = self.removals();
        removals.known = removals.known.saturating_sub(1);
        self.forgets.fetch_add(1, Ordering::Release);
        drop(removals);
        self.forgotten.notify_all();
    }

    /// The use after everything is closed: the kernel sends no FORGETs at an unmount.
    pub(crate) fn at_the_end(&self) -> Use {
        let (mut counted, mut unsettled) = (self.usage().used, Vec::new());
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
        Use { counted, unsettled }
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, HashMap<u64, Charge>> {
        let number = usize::try_from(id % SHARDS as u64).unwrap_or_default();
        self.charges[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn removals(&self) -> MutexGuard<'_, Removals> {
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation<'_> {
    /// Takes the reserved bytes; the caller must release them.
    fn take(mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        change(&self.quota.used_bytes, 0, self.bytes);
    }
}

impl InodeReservation<'_> {
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for InodeReservation<'_> {
    fn drop(&mut self) {
        self.quota.free_inode();
    }
}

/// The space that a file takes in its volume, if its attributes take at most `attribute_blocks`.
///
/// The charge of a file with such blocks is not lasting. So a regular file with content that is not
/// remembered was charged without any.
pub(crate) fn charge(seen: &Statx, attribute_blocks: u8) -> Charged {
    let allocated = seen.stx_blocks.saturating_mul(512);
    let attributes = Some(attribute_blocks);
    let is_file = FileType::from_raw_mode(seen.stx_mode.into()) == FileType::RegularFile;
    match whole_blocks(seen.stx_size) {
        // More blocks: allocated ahead, mapping a fragmented file, or holding attributes. Fewer:
        // there are holes, which must be mapped around.
        whole if is_file && whole > 0 => Charged {
            bytes: allocated.min(whole.saturating_add(attribute_bytes(attribute_blocks))),
            lasting: allocated == whole && attribute_blocks == 0,
            attribute_blocks: attributes,
        },
        // Without content its blocks were not allocated ahead, so they hold attributes.
        _ => Charged { bytes: allocated, lasting: true, attribute_blocks: attributes },
    }
}

/// The bytes of this many blocks of attributes.
pub(crate) fn attribute_bytes(blocks: u8) -> u64 {
    u64::from(blocks) * BLOCK_BYTES
}

/// The most that writing `range` of `file` adds to its charge.
///
/// `left`: what can be added before the whole file up to the range's end is charged. Space that fallocate(2)
/// has reserved looks like a hole, but is charged already.
pub(crate) fn growth(file: impl AsFd, range: &Range<u64>, left: u64) -> Result<u64> {
    let mut sum = 0_u64;
    for hole in (Holes { file, at: floor(range.start), end: whole_blocks(range.end) }) {
        let (from, to) = hole?;
        sum = sum.saturating_add(to - from);
        if sum >= left {
            return Ok(left);
        }
    }
    Ok(sum)
}

/// The end of the longest part of `range`, from its start, that can be written with `free` bytes.
pub(crate) fn longest_fitting(file: impl AsFd, range: &Range<u64>, mut free: u64) -> Result<u64> {
    free -= free % BLOCK_BYTES;
    for hole in (Holes { file, at: floor(range.start), end: whole_blocks(range.end) }) {
        let (from, to) = hole?;
        if to - from > free {
            return Ok((from + free).clamp(range.start, range.end));
        }
        free -= to - from;
    }
    Ok(range.end)
}

/// The holes between `at` and `end`, both multiples of the block size, in whole blocks.
struct Holes<F> {
    file: F,
    at: u64,
    end: u64,
}

impl<F: AsFd> Iterator for Holes<F> {
    type Item = Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.end {
            let start = self.at;
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(start)) {
                Ok(data) => floor(data).min(self.end),
                // There is no data after this point.
                Err(Errno::NXIO) => self.end,
                Err(errno) => {
                    self.at = self.end;
                    return Some(Err(errno));
                }
            };
            self.at = self.end;
            if data < self.end {
                match rustix::fs::seek(&self.file, SeekFrom::Hole(data)) {
                    // At least the block in which the data was found.
                    Ok(hole) => self.at = whole_blocks(hole).max(data + BLOCK_BYTES),
                    // Truncated meanwhile.
                    Err(Errno::NXIO) => {}
                    Err(errno) => return Some(Err(errno)),
                }
            }
            if data > start {
                return Some(Ok((start, data)));
            }
        }
        None
    }
}

pub(crate) fn whole_blocks(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}

fn floor(bytes: u64) -> u64 {
    bytes - bytes % BLOCK_BYTES
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
