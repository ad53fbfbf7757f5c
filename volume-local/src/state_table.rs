//! What a successor of this daemon needs, written down while it changes: nodes, open files and
//! directories, the requests in progress ([`requests`]), and the use of the volume ([`charges`]).
//!
//! | words | |
//! |---|---|
//! | 0, 1 | the next numbers of file and of directory handles |
//! | 2 | the largest number of a backing file |
//! | 8 to 13 | the use of the volume |
//! | from [`requests::AT`] | one slot for each request in progress |
//! | from [`RECORDS_AT`] | records, in chunks of four words |
//!
//! A record's first word has its kind, its length in chunks and, last to be stored, makes it valid.
//! The chunks of a released record keep that word, so that a reader finds the next record. A word of
//! zero ends the records.
//!
//! Invariant: this process may be killed between any two stores, and its successor then finds either
//! the old state, or the new one, or both records of a node that changes its place: the one with the
//! later sequence number counts.
//!
//! A table of version 1 has no use of the volume: its words are zero, and there are no records of
//! charges. Everything else is the same, so a daemon that reads version 2 reads version 1 too, and then
//! writes neither: a table keeps its version.
//!
//! Lock order: the table of nodes, then the charges of the quota, then the space of records.

pub(crate) mod charges;
pub(crate) mod requests;

use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use volume_fs::state::{Region, load_bytes, store_bytes};

use self::charges::Charges;
use self::requests::Requests;
use crate::place::{MOST_NAME_BYTES, Place, is_name};

const NEXT_FILE: usize = 0;
const NEXT_DIRECTORY: usize = 1;
const LAST_BACKING: usize = 2;

/// Behind the slots of requests, at the start of a page.
const RECORDS_AT: usize = 41 * 512;
const CHUNK_WORDS: usize = 4;
/// The node of a registration that is to end.
const NO_NODE: u64 = 0;
/// Of event loops, and more.
const MOST_LOOPS: usize = 64;
/// A node with the longest name.
const MOST_CHUNKS: usize = 1 + MOST_NAME_BYTES.div_ceil(8 * CHUNK_WORDS);

/// With this many released chunks, their memory is returned.
const WORTH_RETURNING: usize = 16 * 1024;

/// Neighbours are merged once one record was released for so many that are free.
const RELEASED_PER_MERGE: usize = 64;

/// Kinds of records.
const RELEASED: u64 = 1;
/// Released chunks, counted by the second word.
const RUN: u64 = 2;
const NODE: u64 = 3;
const FILE: u64 = 4;
const DIRECTORY: u64 = 5;
const CHARGE: u64 = 6;
/// Only on a connection with FUSE_PASSTHROUGH, which a daemon that does not know it refuses to continue.
const BACKING: u64 = 7;

/// Flags of nodes.
const HAS_PLACE: u64 = 1;
const WAS_REMOVED: u64 = 2;

/// The number of a record's first chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RecordId(u32);

/// A node as a successor finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeRecord {
    pub(crate) id: u64,
    pub(crate) lookups: u64,
    pub(crate) place: Option<Place>,
    /// The user that removed its last name.
    pub(crate) removed_by: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opened {
    File,
    Directory,
}

/// An open file or directory as a successor finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandleRecord {
    pub(crate) kind: Opened,
    pub(crate) handle: u64,
    pub(crate) node: u64,
    /// open(2) flags of the backing file. Of a directory, the user that opened it; earlier
    /// releases record 0.
    pub(crate) flags: u32,
    /// The request that opened it.
    pub(crate) request: u64,
}

/// A file that the kernel reads and writes for the node's handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackingRecord {
    pub(crate) node: u64,
    pub(crate) number: u32,
}

/// All that an earlier daemon has recorded.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub(crate) nodes: Vec<(RecordId, NodeRecord)>,
    pub(crate) handles: Vec<(RecordId, HandleRecord)>,
    pub(crate) backings: Vec<(RecordId, BackingRecord)>,
    /// `None` if the use is not known: the volume must be counted.
    pub(crate) charges: Option<Charges>,
}

/// A state table that cannot be an earlier daemon's.
#[derive(Debug, thiserror::Error)]
#[error("state table: chunk {chunk}: {reason}")]
pub(crate) struct Damaged {
    chunk: usize,
    reason: &'static str,
}

#[derive(Debug)]
pub(crate) struct StateTable {
    region: Region,
    space: Mutex<Space>,
    pub(crate) requests: Requests,
}

/// The chunks that no record uses.
#[derive(Debug)]
struct Space {
    /// Released chunks, by the length of their records.
    released: [Vec<u32>; MOST_CHUNKS + 1],
    /// Longer rows of chunks, each with its length.
    runs: Vec<(u32, u32)>,
    /// Chunks of all runs.
    in_runs: usize,
    /// Records released since the last merge of neighbours.
    unmerged: usize,
    has_warned: bool,
    /// This chunk and all behind it were never used.
    fresh: u32,
    most: u32,
    /// Of the last record of a node.
    sequence: u64,
}

impl StateTable {
    /// For a new connection: the region is zero.
    pub(crate) fn new(region: Region) -> Self {
        for next in [NEXT_FILE, NEXT_DIRECTORY] {
            region[next].store(1, Ordering::Relaxed);
        }
        let space = Mutex::new(Space::new(&region));
        Self { requests: Requests::new(region.clone()), region, space }
    }

    /// Reads what an earlier daemon has recorded. Its requests wait in [`Self::requests`] until the
    /// kernel sends them again.
    pub(crate) fn recover(region: Region) -> Result<(Self, Recovered), Damaged> {
        let space = Mutex::new(Space::new(&region));
        let table = Self { requests: Requests::new(region.clone()), space, region };
        table.requests.recover(table.postings());
        let mut recovered = table.scan()?;
        match &mut recovered.charges {
            Some(charges) => charges.sum = table.sum(),
            None => table.reset_sum(),
        }
        Ok((table, recovered))
    }

    /// The number for the next handle.
    pub(crate) fn next_handle(&self, kind: Opened) -> u64 {
        let at = match kind {
            Opened::File => NEXT_FILE,
            Opened::Directory => NEXT_DIRECTORY,
        };
        self.region[at].fetch_add(1, Ordering::Relaxed)
    }

    /// Writes a node that replaces `earlier`. `None` if the table is full, or if its name is too long: then a
    /// successor does not find the node.
    pub(crate) fn put_node(&self, earlier: Option<RecordId>, node: &NodeView<'_>) -> Option<RecordId> {
        let name = node.place.map(|place| place.name.as_bytes()).unwrap_or_default();
        let chunks = 1 + name.len().div_ceil(8 * CHUNK_WORDS);
        let mut space = self.space();
        let new = if name.len() <= MOST_NAME_BYTES { space.take(&self.region, chunks) } else { None };
        if let Some(RecordId(at)) = new {
            space.sequence += 1;
            let has_place = if node.place.is_some() { HAS_PLACE } else { 0 };
            let was_removed = if node.removed_by.is_some() { WAS_REMOVED } else { 0 };
            let flags = has_place | was_removed;
            let head = NODE
                | (chunks as u64) << 8
                | (name.len() as u64) << 16
                | flags << 32
                | (space.sequence & 0xff_ffff) << 40;
            let words = self.chunk(at);
            words[1].store(node.id, Ordering::Relaxed);
            words[2].store(node.lookups, Ordering::Relaxed);
            let directory = node.place.map_or(node.removed_by.map_or(0, u64::from), |place| place.directory);
            words[3].store(directory, Ordering::Relaxed);
            store_bytes(&words[CHUNK_WORDS..], name);
            words[0].store(head, Ordering::Release);
        } else if !std::mem::replace(&mut space.has_warned, true) {
            tracing::warn!(
                node = node.id,
                "the state table has no room for a node: a successor does not find it (logged once)"
            );
        }
        if let Some(earlier) = earlier {
            self.release(&mut space, earlier);
        }
        new
    }

    pub(crate) fn set_lookups(&self, node: RecordId, lookups: u64) {
        self.chunk(node.0)[2].store(lookups, Ordering::Release);
    }

    /// Whether each event loop can record another handle.
    pub(crate) fn has_room(&self) -> bool {
        self.space().free() >= MOST_LOOPS
    }

    pub(crate) fn put_handle(&self, handle: &HandleRecord) -> Option<RecordId> {
        let kind = match handle.kind {
            Opened::File => FILE,
            Opened::Directory => DIRECTORY,
        };
        let new = self.space().take(&self.region, 1)?;
        let words = self.chunk(new.0);
        words[1].store(handle.handle, Ordering::Relaxed);
        words[2].store(handle.node, Ordering::Relaxed);
        words[3].store(handle.request, Ordering::Relaxed);
        words[0].store(kind | 1 << 8 | u64::from(handle.flags) << 32, Ordering::Release);
        Some(new)
    }

    pub(crate) fn put_backing(&self, backing: BackingRecord) -> Option<RecordId> {
        let number = u64::from(backing.number);
        let new = self.space().take(&self.region, 1)?;
        let words = self.chunk(new.0);
        words[1].store(backing.node, Ordering::Relaxed);
        words[2].store(number, Ordering::Relaxed);
        words[0].store(BACKING | 1 << 8, Ordering::Release);
        // A successor looks for numbers without a record behind this one.
        self.region[LAST_BACKING].fetch_max(number, Ordering::Release);
        Some(new)
    }

    /// A registration that is to end, and that no open has.
    pub(crate) fn put_ended_backing(&self, number: u32) -> Option<RecordId> {
        self.put_backing(BackingRecord { node: NO_NODE, number })
    }

    /// The registration is to end: a successor ends it, and gives it to no open of the node.
    pub(crate) fn disown_backing(&self, record: RecordId) {
        self.chunk(record.0)[1].store(NO_NODE, Ordering::Release);
    }

    /// The largest number of a backing file that was written down on this connection.
    pub(crate) fn last_backing(&self) -> u32 {
        u32::try_from(self.region[LAST_BACKING].load(Ordering::Relaxed)).unwrap_or(u32::MAX)
    }

    pub(crate) fn remove(&self, record: RecordId) {
        self.release(&mut self.space(), record);
    }

    /// Returns the memory of released records, if there is much.
    pub(crate) fn give_back(&self) {
        self.give_back_from(WORTH_RETURNING);
    }

    /// As [`Self::give_back`], if at least this many chunks are released.
    fn give_back_from(&self, least: usize) {
        let mut space = self.space();
        for (start, chunks) in space.gather(&self.region, least) {
            // The first chunk stays: it says how long the run is.
            let word = |chunk: u32| RECORDS_AT + chunk as usize * CHUNK_WORDS;
            self.region.give_back(word(start + 1)..word(start + chunks));
        }
    }

    fn release(&self, space: &mut Space, RecordId(at): RecordId) {
        let head = &self.chunk(at)[0];
        let chunks = head.load(Ordering::Relaxed) >> 8 & 0xff;
        head.store(RELEASED | chunks << 8, Ordering::Release);
        space.add_released(chunks as usize, at);
    }

    fn scan(&self) -> Result<Recovered, Damaged> {
        let (mut found, mut space) = (Recovered::default(), self.space());
        found.charges = self.is_use_known().then(Charges::default);
        let mut nodes = std::collections::HashMap::new();
        let mut at = 0;
        while at < space.most {
            let damaged = |reason| Damaged { chunk: at as usize, reason };
            let words = self.chunk(at);
            let head = words[0].load(Ordering::Acquire);
            let chunks = match head & 0xff {
                0 => break,
                RUN => u32::try_from(words[1].load(Ordering::Relaxed)).unwrap_or(u32::MAX),
                _ => u32::try_from(head >> 8 & 0xff).unwrap_or_default(),
            };
            if chunks == 0 || chunks > space.most - at {
                return Err(damaged("a length that cannot be"));
            }
            let is_long = chunks as usize > MOST_CHUNKS;
            match head & 0xff {
                RUN => space.add_run(at, chunks),
                _ if is_long => return Err(damaged("a record that is too long")),
                RELEASED => space.add_released(chunks as usize, at),
                NODE => {
                    let record = self.read_node(at, head, chunks).map_err(damaged)?;
                    let sequence = head >> 40;
                    if let Some(other) = nodes.insert(record.id, (sequence, at, record)) {
                        // Killed between the new record and the release of the old one.
                        let dropped = if is_later(sequence, other.0) {
                            other.1
                        } else {
                            nodes.insert(other.2.id, other);
                            at
                        };
                        self.release(&mut space, RecordId(dropped));
                    }
                    space.sequence = space.sequence.max(sequence);
                }
                kind @ (FILE | DIRECTORY) => {
                    let record = HandleRecord {
                        kind: if kind == FILE { Opened::File } else { Opened::Directory },
                        handle: words[1].load(Ordering::Relaxed),
                        node: words[2].load(Ordering::Relaxed),
                        flags: u32::try_from(head >> 32).unwrap_or_default(),
                        request: words[3].load(Ordering::Relaxed),
                    };
                    found.handles.push((RecordId(at), record));
                }
                BACKING => {
                    let number = u32::try_from(words[2].load(Ordering::Relaxed));
                    let number = number.map_err(|_| damaged("a number that no backing file has"))?;
                    let record = BackingRecord { node: words[1].load(Ordering::Relaxed), number };
                    // The earlier daemon may have been killed before it did so.
                    self.region[LAST_BACKING].fetch_max(number.into(), Ordering::Release);
                    found.backings.push((RecordId(at), record));
                }
                CHARGE => match (self.read_charge(at), &mut found.charges) {
                    (Some(record), Some(charges)) => charges.records.push(record),
                    _ => self.release(&mut space, RecordId(at)),
                },
                _ => return Err(damaged("an unknown kind of record")),
            }
            at += chunks;
        }
        space.fresh = at;
        found.nodes = nodes.into_values().map(|(_, at, record)| (RecordId(at), record)).collect();
        Ok(found)
    }

    fn read_node(&self, at: u32, head: u64, chunks: u32) -> Result<NodeRecord, &'static str> {
        let words = self.chunk(at);
        let length = (head >> 16 & 0xffff) as usize;
        if length > (chunks as usize - 1) * CHUNK_WORDS * 8 {
            return Err("a name longer than its record");
        }
        let (flags, directory) = (head >> 32 & 0xff, words[3].load(Ordering::Relaxed));
        let name =
            CString::new(load_bytes(&words[CHUNK_WORDS..], length)).map_err(|_| "a name with a zero")?;
        let has_place = flags & HAS_PLACE != 0;
        if has_place && !is_name(&name) {
            return Err("a path instead of a name");
        }
        Ok(NodeRecord {
            id: words[1].load(Ordering::Relaxed),
            lookups: words[2].load(Ordering::Relaxed),
            place: has_place.then_some(Place { directory, name }),
            removed_by: (flags & WAS_REMOVED != 0).then(|| u32::try_from(directory).unwrap_or_default()),
        })
    }

    fn chunk(&self, at: u32) -> &[AtomicU64] {
        &self.region[RECORDS_AT + at as usize * CHUNK_WORDS..]
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of two sequence numbers of 24 bits that are not far apart.
fn is_later(one: u64, other: u64) -> bool {
    let distance = one.wrapping_sub(other) & 0xff_ffff;
    distance < 0x80_0000
}

/// A node to be written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeView<'a> {
    pub(crate) id: u64,
    pub(crate) lookups: u64,
    pub(crate) place: Option<&'a Place>,
    pub(crate) removed_by: Option<u32>,
}

impl Space {
    fn new(region: &Region) -> Self {
        let chunks = region.len().saturating_sub(RECORDS_AT) / CHUNK_WORDS;
        Self {
            released: std::array::from_fn(|_| Vec::new()),
            runs: Vec::new(),
            in_runs: 0,
            unmerged: 0,
            has_warned: false,
            fresh: 0,
            most: u32::try_from(chunks).unwrap_or(u32::MAX),
            sequence: 0,
        }
    }

    /// So many records of one chunk fit: [`Self::take`] splits longer ones.
    fn free(&self) -> usize {
        let fresh = usize::try_from(self.most - self.fresh).unwrap_or(usize::MAX);
        fresh.saturating_add(self.in_released() + self.in_runs)
    }

    /// Chunks of all records in [`Self::released`].
    fn in_released(&self) -> usize {
        self.released.iter().enumerate().map(|(chunks, all)| chunks * all.len()).sum()
    }

    fn add_released(&mut self, chunks: usize, at: u32) {
        self.released[chunks].push(at);
        self.unmerged += 1;
    }

    fn add_run(&mut self, start: u32, length: u32) {
        self.runs.push((start, length));
        self.in_runs += length as usize;
    }

    fn take_run(&mut self) -> Option<(u32, u32)> {
        let (start, length) = self.runs.pop()?;
        self.in_runs -= length as usize;
        Some((start, length))
    }

    /// Whether a charge may have a record. Any number of files may have charges that stay when the files
    /// are forgotten, so an eighth of the table is for nodes and handles alone.
    fn has_room_for_charges(&self) -> bool {
        self.free() >= self.most as usize / 8
    }

    /// Chunks whose first word has the kind [`RELEASED`] and this length.
    fn take(&mut self, region: &Region, chunks: usize) -> Option<RecordId> {
        let unused = self.take_unused(region, chunks).or_else(|| self.split(region, chunks));
        if unused.is_some() || !self.is_worth_merging() {
            return unused;
        }
        self.gather(region, 1);
        self.take_unused(region, chunks)
    }

    /// A merge goes through all released records. In a full table, it must not do so for each request.
    fn is_worth_merging(&self) -> bool {
        let rows = self.runs.len() + self.released.iter().map(Vec::len).sum::<usize>();
        self.unmerged > 0 && self.unmerged >= rows / RELEASED_PER_MERGE
    }

    /// The end of a longer released record.
    fn split(&mut self, region: &Region, chunks: usize) -> Option<RecordId> {
        let longer = (chunks + 1..=MOST_CHUNKS).find(|longer| !self.released[*longer].is_empty())?;
        let (wanted, left) = (u32::try_from(chunks).ok()?, u32::try_from(longer - chunks).ok()?);
        let start = self.released[longer].pop()?;
        // The end first, so that a reader never finds a record without a length.
        for (at, length) in [(start + left, wanted), (start, left)] {
            let head = &region[RECORDS_AT + at as usize * CHUNK_WORDS];
            head.store(RELEASED | u64::from(length) << 8, Ordering::Release);
        }
        self.released[longer - chunks].push(start);
        Some(RecordId(start + left))
    }

    /// As [`Self::take`], from records of this length, runs, and chunks that were never used.
    fn take_unused(&mut self, region: &Region, chunks: usize) -> Option<RecordId> {
        if let Some(at) = self.released[chunks].pop() {
            return Some(RecordId(at));
        }
        let wanted = u32::try_from(chunks).ok()?;
        let head = |at: u32| &region[RECORDS_AT + at as usize * CHUNK_WORDS..];
        let mark = |at: u32| head(at)[0].store(RELEASED | u64::from(wanted) << 8, Ordering::Release);
        while let Some((start, length)) = self.take_run() {
            if length < wanted {
                // Too short for this one: its chunks serve for records of their length.
                head(start)[0].store(RELEASED | u64::from(length) << 8, Ordering::Release);
                self.released[length as usize].push(start);
                continue;
            }
            let at = start + length - wanted;
            // Taken from the end. The last chunks first, so that the run never leads into them.
            mark(at);
            if at > start {
                head(start)[1].store(u64::from(length - wanted), Ordering::Release);
                self.add_run(start, length - wanted);
            }
            return Some(RecordId(at));
        }
        if self.most - self.fresh < wanted {
            return None;
        }
        let at = self.fresh;
        mark(at);
        self.fresh += wanted;
        Some(RecordId(at))
    }

    /// Rows of neighbouring released chunks. They leave the lists of released ones for [`Self::runs`].
    fn gather(&mut self, region: &Region, least: usize) -> Vec<(u32, u32)> {
        if self.in_released() < least {
            return Vec::new();
        }
        self.unmerged = 0;
        let mut rows: Vec<(u32, u32)> = std::mem::take(&mut self.runs);
        for (chunks, all) in (0..).zip(&mut self.released) {
            rows.extend(std::mem::take(all).into_iter().map(|start| (start, chunks)));
        }
        rows.sort_unstable();
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for (start, chunks) in rows {
            match runs.last_mut() {
                Some((at, length)) if *at + *length == start => *length += chunks,
                _ => runs.push((start, chunks)),
            }
        }
        for (start, chunks) in &runs {
            let words = &region[RECORDS_AT + *start as usize * CHUNK_WORDS..];
            words[1].store(u64::from(*chunks), Ordering::Relaxed);
            words[0].store(RUN, Ordering::Release);
        }
        self.runs.clone_from(&runs);
        self.in_runs = runs.iter().map(|(_start, length)| *length as usize).sum();
        runs
    }
}

#[cfg(test)]
mod tests;
