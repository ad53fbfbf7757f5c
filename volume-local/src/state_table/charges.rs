//! The use of the volume as a successor finds it: a sum, and a record for each file whose charge the
//! quota remembers.
//!
//! | words | |
//! |---|---|
//! | [`IS_KNOWN`] | 1: the use is known, so all of this counts |
//! | [`SEQUENCE`] | the number of the last posting |
//! | [`SUMS`] | two pairs of bytes and inodes: the last bit of the sequence number selects one |
//!
//! The sum has the bytes of all files without a record, and the inodes of all files. So the charge
//! of a file with a record changes by one store. Every other change is a [`Posting`]: it writes the
//! sum that does not count, and into records and notes the number from which on they count or do not.
//! Then the store of that number makes all of it count at once.
//!
//! Invariant: the process may be killed between any two stores. So all stores here are in order
//! (Release), and what an earlier store selects is written before.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use volume_fs::figures::Counted;

use super::requests::Slot;
use super::{CHARGE, CHUNK_WORDS, RecordId, Space, StateTable};
use crate::charge::Charged;

const IS_KNOWN: usize = 8;
const SEQUENCE: usize = 9;
const SUMS: [usize; 2] = [10, 12];

/// Words of a record, after its head.
const NODE: usize = 1;
const CHARGED: usize = 2;
/// Shifted by one bit: the number of the posting from which on the record counts, or does not.
const SINCE: usize = 3;
const LEAVES: u64 = 1;

/// Bits of [`CHARGED`]. The lowest ones are the blocks of attributes, the highest the charge in
/// sectors.
const KNOWS_ATTRIBUTES: u64 = 1 << 8;
const LASTING: u64 = 1 << 9;
const REMOVED: u64 = 1 << 10;
const CHANGING: u64 = 1 << 11;
const SECTORS_SHIFT: u32 = 12;
/// A charge is a multiple of statx(2)'s unit.
const SECTOR_BYTES: u64 = 512;

/// The charge of one file as a successor finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChargeState {
    pub(crate) charged: Charged,
    /// It has no name left.
    pub(crate) removed: bool,
    /// A change is in progress, so the charge may be out of date.
    pub(crate) is_changing: bool,
}

/// All that an earlier daemon has recorded of the use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Charges {
    /// The bytes of all files without a record, and the inodes of all files. Below zero if the tree
    /// was changed behind the mount.
    pub(crate) sum: Sum,
    /// Each with its node.
    pub(crate) records: Vec<(RecordId, u64, ChargeState)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sum {
    pub(crate) bytes: i64,
    pub(crate) inodes: i64,
}

/// Changes of the use that count together, from [`Self::commit`] on.
#[derive(Debug)]
pub(crate) struct Posting<'a> {
    table: &'a StateTable,
    space: MutexGuard<'a, Space>,
    number: u64,
    sum: Sum,
    leaving: Option<RecordId>,
}

impl ChargeState {
    fn word(self) -> u64 {
        let Self { charged: Charged { bytes, lasting, attribute_blocks }, removed, is_changing } = self;
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        bytes.div_ceil(SECTOR_BYTES) << SECTORS_SHIFT
            | flag(is_changing, CHANGING)
            | flag(removed, REMOVED)
            | flag(lasting, LASTING)
            | attribute_blocks.map_or(0, |blocks| KNOWS_ATTRIBUTES | u64::from(blocks))
    }

    fn of_word(word: u64) -> Self {
        let blocks = word.to_le_bytes()[0];
        let charged = Charged {
            bytes: (word >> SECTORS_SHIFT) * SECTOR_BYTES,
            lasting: word & LASTING != 0,
            attribute_blocks: (word & KNOWS_ATTRIBUTES != 0).then_some(blocks),
        };
        Self { charged, removed: word & REMOVED != 0, is_changing: word & CHANGING != 0 }
    }
}

impl Sum {
    pub(crate) fn of(counted: Counted) -> Self {
        Self { bytes: counted.bytes.cast_signed(), inodes: counted.inodes.cast_signed() }
    }
}

impl StateTable {
    /// Begins a posting. `slot`: the note of the request that causes it, if there is one: the use has
    /// followed its effect then.
    pub(crate) fn post(&self, slot: Option<Slot>) -> Posting<'_> {
        let space = self.space();
        // Wrapping: an earlier daemon may have recorded any number.
        let (number, sum) = (self.postings().wrapping_add(1), self.sum());
        if let Some(slot) = slot {
            self.requests.charged(slot, number);
        }
        Posting { table: self, space, number, sum, leaving: None }
    }

    pub(crate) fn set_charge(&self, record: RecordId, state: ChargeState) {
        self.chunk(record.0)[CHARGED].store(state.word(), Ordering::Release);
    }

    /// The use is known from now on.
    pub(crate) fn set_use_known(&self) {
        self.region[IS_KNOWN].store(1, Ordering::Release);
    }

    /// The use is known for no successor any more: it counts anew.
    fn set_use_unknown(&self) {
        if self.region[IS_KNOWN].swap(0, Ordering::Release) != 0 {
            warn_full();
        }
    }

    pub(super) fn is_use_known(&self) -> bool {
        self.region[IS_KNOWN].load(Ordering::Acquire) == 1
    }

    /// The number of the last posting.
    pub(super) fn postings(&self) -> u64 {
        self.region[SEQUENCE].load(Ordering::Acquire)
    }

    pub(super) fn sum(&self) -> Sum {
        let at = SUMS[usize::from(self.postings() % 2 == 1)];
        let word = |at: usize| self.region[at].load(Ordering::Relaxed).cast_signed();
        Sum { bytes: word(at), inodes: word(at + 1) }
    }

    /// For a table whose use is not known: a count follows.
    pub(super) fn reset_sum(&self) {
        for at in SUMS {
            self.region[at].store(0, Ordering::Release);
            self.region[at + 1].store(0, Ordering::Release);
        }
    }

    /// A record of a charge, with its node; `None` if it does not count. It is as it is from now on: the
    /// number of a posting that was not committed is used again.
    pub(super) fn read_charge(&self, at: u32) -> Option<(RecordId, u64, ChargeState)> {
        let words = self.chunk(at);
        let word = |word: usize| words[word].load(Ordering::Relaxed);
        let since = word(SINCE);
        let is_since = since >> 1 <= self.postings();
        let counts = is_since != (since & LEAVES != 0);
        if !counts || !self.is_use_known() {
            return None;
        }
        words[SINCE].store(0, Ordering::Release);
        Some((RecordId(at), word(NODE), ChargeState::of_word(word(CHARGED))))
    }
}

pub(crate) fn warn_full() {
    tracing::warn!("the state table is full: after a takeover, changes wait for a count of the volume");
}

impl Posting<'_> {
    /// Adds to the sum; what is less is negative.
    pub(crate) fn add(&mut self, more: Sum) {
        self.sum.bytes = self.sum.bytes.wrapping_add(more.bytes);
        self.sum.inodes = self.sum.inodes.wrapping_add(more.inodes);
    }

    /// A record for a file whose bytes are not in the sum. `None` if the table has no room for more charges: then
    /// the use is not known.
    pub(crate) fn enter(&mut self, node: u64, state: ChargeState) -> Option<RecordId> {
        let has_room = self.space.has_room_for_charges();
        let Some(record) = has_room.then(|| self.space.take(&self.table.region, 1)).flatten() else {
            self.table.set_use_unknown();
            return None;
        };
        let words = self.table.chunk(record.0);
        words[NODE].store(node, Ordering::Relaxed);
        words[CHARGED].store(state.word(), Ordering::Relaxed);
        words[SINCE].store(self.number << 1, Ordering::Relaxed);
        words[0].store(CHARGE | 1 << 8, Ordering::Release);
        Some(record)
    }

    /// The record does not count any more. At most one in a posting.
    pub(crate) fn leave(&mut self, record: RecordId) {
        debug_assert!(self.leaving.is_none(), "one record in a posting");
        self.table.chunk(record.0)[SINCE].store(self.number << 1 | LEAVES, Ordering::Release);
        self.leaving = Some(record);
    }

    pub(crate) fn commit(mut self) {
        self.write_sum();
        if let Some(record) = self.leaving {
            self.table.release(&mut self.space, record);
        }
    }

    fn write_sum(&self) {
        let region = &self.table.region;
        let at = SUMS[usize::from(self.number % 2 == 1)];
        region[at].store(self.sum.bytes.cast_unsigned(), Ordering::Release);
        region[at + 1].store(self.sum.inodes.cast_unsigned(), Ordering::Release);
        region[SEQUENCE].store(self.number, Ordering::Release);
    }
}

const _: () = assert!(SUMS[1] + 1 < super::requests::AT && SINCE < CHUNK_WORDS);

#[cfg(test)]
mod tests {
    use volume_fs::state::Region;

    use super::*;

    const STATE: ChargeState = ChargeState {
        charged: Charged { bytes: 4096, lasting: true, attribute_blocks: Some(0) },
        removed: false,
        is_changing: false,
    };

    /// Everything but the store that makes a posting count: the daemon is killed before it, or right
    /// after it.
    #[test]
    fn of_a_posting_all_counts_or_nothing() {
        for is_committed in [false, true] {
            let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
            let region = || Region::of_backend(&memfd).unwrap();
            let table = StateTable::new(region());
            let mut first = table.post(None);
            first.add(Sum { bytes: 100, inodes: 10 });
            let record = first.enter(7, STATE).unwrap();
            first.commit();
            table.set_use_known();

            let slot = table.requests.slot(None).unwrap();
            table.requests.note(slot, 55, &super::super::requests::Effect::Lookup);
            let mut killed = table.post(Some(slot));
            killed.add(Sum { bytes: -1, inodes: 1 });
            let entered = killed.enter(8, STATE).unwrap();
            killed.leave(record);
            if is_committed {
                killed.write_sum();
            }
            drop(killed);

            let (successor, recovered) = StateTable::recover(region()).unwrap();
            let charges = recovered.charges.unwrap();
            let (sum, known) = if is_committed {
                (Sum { bytes: 99, inodes: 11 }, (entered, 8, STATE))
            } else {
                (Sum { bytes: 100, inodes: 10 }, (record, 7, STATE))
            };
            assert_eq!((charges.sum, charges.records), (sum, vec![known]));
            successor.requests.settle(|_effect| true);
            assert_eq!(successor.requests.uncharged().len(), usize::from(!is_committed));
            // The other record's place is free.
            let mut next = successor.post(None);
            assert_ne!(next.enter(9, STATE).unwrap(), known.0);
            next.commit();
            assert_eq!(StateTable::recover(region()).unwrap().1.charges.unwrap().records.len(), 2);
        }
    }

    #[test]
    fn charges_have_room_again_after_memory_was_returned() {
        let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = StateTable::new(Region::of_backend(&memfd).unwrap());
        let enter = |_| {
            let mut posting = table.post(None);
            let record = posting.enter(7, STATE);
            posting.commit();
            record
        };
        let mut counts = Vec::new();
        for _ in 0..2 {
            let records: Vec<_> = (0..).map_while(enter).collect();
            counts.push(records.len());
            records.into_iter().for_each(|record| table.remove(record));
            table.give_back_from(1);
        }
        assert!(counts[0] > 1000 && counts[1] == counts[0], "{counts:?}");
    }

    #[test]
    fn each_state_of_a_charge_is_one_word() {
        for bytes in [0, 4096, 512, 1 << 60] {
            for attribute_blocks in [None, Some(0), Some(3), Some(255)] {
                for flags in 0..8 {
                    let [lasting, removed, is_changing] = [1, 2, 4].map(|flag| flags & flag != 0);
                    let charged = Charged { bytes, lasting, attribute_blocks };
                    let state = ChargeState { charged, removed, is_changing };
                    assert_eq!(ChargeState::of_word(state.word()), state);
                }
            }
        }
    }
}
