//! Which open files the kernel reads and writes without this daemon (FUSE_PASSTHROUGH).
//!
//! The kernel wants one way for all opens of a file at the same time: beside an open by another way, or
//! with another backing file, an open fails with EIO (fs/fuse/iomode.c). So the first open of a file
//! decides, and later ones follow until all are closed. The daemon's own way is always possible.
//!
//! The keeper registers the files. What it has registered stays with the connection, whichever daemon
//! and keeper live: so the numbers are in the state table, and a successor continues with them.
//!
//! Files that were closed stay registered for a while, so that the next open needs no keeper: some
//! thousand, none that has lost its last name, and none that the kernel has forgotten.
//!
//! A small file that is opened to be read takes the daemon's way: the kernel then keeps its pages, and no
//! keeper is asked. Never a file that passed through while it was open for reading and writing: a mapping of
//! it may still change what the kernel's pages would have.
//!
//! Invariant: what is registered is an open file, one of these, or in [`State::ended`], but for some that
//! still have a name ([`ENDED_AT_ONCE`]). What is there and unsent waits for the ender, except during a call.
//! A kill may leave more: a successor ends all registrations without a handle.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use keeper::daemon::Removed;
use rustix::fs::OFlags;
use volume_fs::file::BackingId;

use crate::keeper_socket::KeeperSocket;
use crate::rest::rest;
use crate::state_table::{BackingRecord, HandleRecord, RecordId, StateTable};

/// Most that an open waits for the keeper, which answers at once unless it was stopped.
const KEEPER_ANSWERS: Duration = Duration::from_millis(200);
/// How long an answer about a file waits for a registration of another one.
const OTHERS_REGISTER: Duration = Duration::from_millis(5);
/// How long no file is registered after the keeper has failed to: each attempt costs an open its time.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Most that the end of a file waits until the keeper has read earlier ones.
const KEEPER_READS: Duration = Duration::from_millis(50);
/// Closed files that stay registered. A quarter of what the keeper registers of a volume.
const MOST_IDLE: usize = 4096;
/// How many of them end at a time: each packet alone would wake the keeper.
const ENDED_AT_ONCE: usize = 64;
/// How long the end of a small removed file waits for others: a process that removes many files would otherwise
/// wake the keeper for each of them.
const ENDS_TOGETHER: Duration = Duration::from_millis(2);
/// The space of a removed file of this size is to be free at once.
const LARGE_BYTES: u64 = 256 << 10;
/// Most ends of removed files that wait for each other.
const MOST_WAITING: usize = 4 * ENDED_AT_ONCE;
/// How long ends wait for the next attempt if the keeper took none.
const BEHIND: Duration = Duration::from_millis(100);
/// Ends that a keeper has read and that the next one is told too: what ends them may take as long as to delete a file.
const MOST_READ: usize = 1024;
/// Numbers that a predecessor may have got and not written down: it has registered one at a time.
const MOST_UNRECORDED: u32 = 16;

#[derive(Debug)]
pub(crate) struct Backings {
    keeper: Arc<KeeperSocket>,
    table: Arc<StateTable>,
    state: Mutex<State>,
    /// Wakes the ender.
    waits: Condvar,
    /// [`KEEPER_ANSWERS`], but in tests.
    keeper_answers: Duration,
}

#[derive(Debug, Default)]
struct State {
    /// Of every node with an open file, and of those that stay registered.
    ways: HashMap<u64, Way>,
    /// Nodes in the order of their last closes, with [`Way::closes`]. Some were opened since, or ended.
    idle: VecDeque<(u64, u64)>,
    /// Registrations that are to end, until the keeper has certainly read that.
    ended: Vec<Ended>,
    /// Of `ended`, so many were sent to `sent_to`.
    sent: usize,
    /// The last ones that a keeper has read. It ends them later, and may die before.
    read: VecDeque<Ended>,
    sent_to: Option<Arc<Removed>>,
    /// What is not sent waits for the ender.
    is_awaited: bool,
    /// Known nodes that a mapping may change without this daemon, as far as it can know. Only a file that is
    /// open for both reading and writing can be mapped for changes (mm/mmap.c, `do_mmap`).
    may_be_mapped: HashSet<u64>,
    /// Known nodes that passed through open for writing since they last took the daemon's way: what the
    /// kernel has read by the daemon is outdated.
    outdated: HashSet<u64>,
    /// A backing file was opened for writing on this connection, as far as this daemon can know. A mapping
    /// outlives the handle (fs/backing-file.c, `backing_file_mmap`), so the last close does not end the
    /// writes.
    was_written: bool,
    /// Of the last request to the keeper.
    request: u64,
    /// Files take the daemon's way until then.
    pause: Option<Instant>,
    /// The keeper reads slowly: what has ended waits for no room until then.
    no_wait_until: Option<Instant>,
    /// The last number that was written down before one that may have been lost: an earlier daemon's, or
    /// that of an answer that came too late. `None`: none is lost.
    earlier: Option<u32>,
}

#[derive(Debug, Default)]
struct Way {
    opens: usize,
    /// Of `opens`, those for writing.
    writers: usize,
    /// `None`: the daemon's way.
    backing: Option<Backing>,
    /// How often the last handle was closed.
    closes: u64,
    /// The file has lost its last name.
    is_gone: bool,
}

#[derive(Debug)]
struct Ended {
    number: u32,
    /// So that a successor ends it too.
    record: Option<RecordId>,
}

#[derive(Debug, Clone, Copy)]
struct Backing {
    number: u32,
    record: RecordId,
}

/// Which way an open is to take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted<F> {
    /// A first open registers this file, which is open for reading and writing.
    Passing(F),
    /// The way of the file's other opens and of its registration. Without them, the daemon's.
    Same,
    /// The daemon's, unless the file is open and passes through, or that is no longer right
    /// ([`Backings::may_be_read_by_daemon`]).
    Daemon { sizes_follow_writes: bool },
}

impl<F> Wanted<F> {
    pub(crate) fn map<T>(self, change: impl FnOnce(F) -> T) -> Wanted<T> {
        match self {
            Self::Passing(file) => Wanted::Passing(change(file)),
            Self::Same => Wanted::Same,
            Self::Daemon { sizes_follow_writes } => Wanted::Daemon { sizes_follow_writes },
        }
    }
}

/// Which way an open takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entered {
    /// `None`: the daemon's.
    pub(crate) backing: Option<BackingId>,
    /// On the daemon's way: what the kernel has read before is the file's content.
    pub(crate) keeps_pages: bool,
}

/// Whether an open may write.
pub(crate) fn writes(flags: OFlags) -> bool {
    flags.intersects(OFlags::WRONLY | OFlags::RDWR)
}

impl State {
    /// How many of those that have ended the keeper of now was not sent.
    fn unsent(&self) -> usize {
        self.ended.len() - self.sent
    }

    fn may_be_read_by_daemon(&self, node: u64, sizes_follow_writes: bool) -> bool {
        let passes = self.ways.get(&node).is_some_and(|way| way.opens > 0 && way.backing.is_some());
        let is_right = sizes_follow_writes || !self.outdated.contains(&node);
        !passes && is_right && !self.may_be_mapped.contains(&node)
    }

    /// The node has no open file.
    fn end(&mut self, node: u64, table: &StateTable) {
        if let Some(Way { backing: Some(Backing { number, record }), .. }) = self.ways.remove(&node) {
            // The next open of the node may take the daemon's way, and a successor must not think otherwise.
            table.disown_backing(record);
            self.ended.push(Ended { number, record: Some(record) });
        }
    }

    /// The node may also be among the ended ones that wait for others to be sent.
    fn end_at_last_close(&mut self, node: u64, table: &StateTable) {
        let Some(way) = self.ways.get_mut(&node) else { return };
        way.is_gone = true;
        if way.opens == 0 {
            self.end(node, table);
        }
    }
}

impl Backings {
    pub(crate) fn new(keeper: Arc<KeeperSocket>, table: Arc<StateTable>) -> Self {
        let (state, waits) = (Mutex::default(), Condvar::new());
        Self { keeper, table, state, waits, keeper_answers: KEEPER_ANSWERS }
    }

    /// Continues with what an earlier daemon had open and registered. Called before the first request.
    /// `known`: the nodes that the kernel knows.
    pub(crate) fn restore<'a>(
        &self,
        known: impl Iterator<Item = u64>,
        files: impl Iterator<Item = &'a HandleRecord>,
        mut backings: Vec<(RecordId, BackingRecord)>,
    ) {
        let mut state = self.locked();
        // Of two records of one node, the one with the larger number is in use.
        backings.sort_unstable_by_key(|(_, backing)| Reverse(backing.number));
        for file in files {
            let way = state.ways.entry(file.node).or_default();
            way.opens += 1;
            way.writers += usize::from(writes(OFlags::from_bits_retain(file.flags)));
        }
        for (record, BackingRecord { node, number }) in backings {
            match state.ways.get_mut(&node) {
                Some(way) if way.backing.is_none() => {
                    way.backing = Some(Backing { number, record });
                }
                _ => {
                    self.table.disown_backing(record);
                    state.ended.push(Ended { number, record: Some(record) });
                }
            }
        }
        // Files that are closed may be mapped.
        state.may_be_mapped = known.collect();
        state.was_written = true;
        state.earlier = Some(self.table.last_backing());
        self.send_ended(&mut state);
    }

    /// Called for every open of a file, before it is answered.
    pub(crate) fn enter(&self, node: u64, flags: OFlags, wanted: Wanted<BorrowedFd<'_>>) -> Entered {
        let mut state = self.locked();
        match wanted {
            Wanted::Passing(file) if !state.ways.contains_key(&node) => {
                let backing = self.register(&mut state, node, file);
                state.ways.insert(node, Way { backing, ..Way::default() });
            }
            // It may have been mapped or written since the caller looked: then its registration is used.
            Wanted::Daemon { sizes_follow_writes }
                if state.may_be_read_by_daemon(node, sizes_follow_writes)
                    && state.ways.get(&node).is_some_and(|way| way.opens == 0) =>
            {
                state.end(node, &self.table);
                if state.unsent() >= ENDED_AT_ONCE {
                    self.send_ended(&mut state);
                }
            }
            Wanted::Passing(_) | Wanted::Same | Wanted::Daemon { .. } => {}
        }
        let way = state.ways.entry(node).or_default();
        let backing = way.backing.map(|backing| BackingId(backing.number));
        way.opens += 1;
        way.writers += usize::from(writes(flags));
        if backing.is_some() && writes(flags) {
            state.was_written = true;
            state.outdated.insert(node);
            if flags.contains(OFlags::RDWR) {
                state.may_be_mapped.insert(node);
            }
        }
        let keeps_pages = !state.outdated.contains(&node) && !state.may_be_mapped.contains(&node);
        Entered { backing, keeps_pages }
    }

    /// An open file was closed, or the open failed.
    pub(crate) fn leave(&self, node: u64, flags: OFlags) {
        let mut state = self.locked();
        let Some(way) = state.ways.get_mut(&node) else { return };
        let backing = way.backing;
        way.opens = way.opens.saturating_sub(1);
        way.writers = way.writers.saturating_sub(usize::from(writes(flags)));
        if way.opens > 0 {
            return;
        }
        if backing.is_none() {
            state.ways.remove(&node);
            // The kernel has discarded its pages at each of these opens.
            state.outdated.remove(&node);
            return;
        }
        way.closes += 1;
        let (closes, is_gone) = (way.closes, way.is_gone);
        if is_gone {
            state.end(node, &self.table);
            self.send_ended(&mut state);
            return;
        }
        state.idle.push_back((node, closes));
        if state.idle.len() >= MOST_IDLE + ENDED_AT_ONCE {
            for (node, closes) in state.idle.drain(..ENDED_AT_ONCE).collect::<Vec<_>>() {
                if state.ways.get(&node).is_some_and(|way| way.opens == 0 && way.closes == closes) {
                    state.end(node, &self.table);
                }
            }
            self.send_ended(&mut state);
        }
    }

    /// The kernel has forgotten the node, with its mappings and pages, if `is_unknown`. It is asked here, since
    /// another file may get the number meanwhile and be opened.
    pub(crate) fn is_forgotten(&self, node: u64, is_unknown: impl FnOnce() -> bool) {
        let mut state = self.locked();
        if is_unknown() {
            state.may_be_mapped.remove(&node);
            state.outdated.remove(&node);
            state.end_at_last_close(node, &self.table);
            self.leave_to_ender(&mut state);
        }
    }

    /// The node, which takes so many `bytes`, has lost its last name: it does not stay registered, and does not
    /// keep its space for long. Waits for a keeper that has much to read.
    pub(crate) fn is_gone(&self, node: u64, bytes: u64) {
        let mut state = self.locked();
        state.end_at_last_close(node, &self.table);
        if bytes < LARGE_BYTES && state.unsent() < MOST_WAITING {
            self.leave_to_ender(&mut state);
            return;
        }
        if state.no_wait_until.is_some_and(|until| until > Instant::now()) {
            self.send_ended(&mut state);
            return;
        }
        self.send_ended_within(&mut state, KEEPER_READS);
        let is_slow = state.unsent() > 0;
        state.no_wait_until = is_slow.then(|| Instant::now() + AFTER_FAILURE);
    }

    /// Leaves what is not sent to the ender.
    fn leave_to_ender(&self, state: &mut State) {
        if state.unsent() > 0 && !std::mem::replace(&mut state.is_awaited, true) {
            self.waits.notify_one();
        }
    }

    /// Called by the ender. Never returns.
    pub(crate) fn send_what_waits(&self) {
        loop {
            let state = self.locked();
            let state = self.waits.wait_while(state, |state| !state.is_awaited);
            drop(state);
            rest(ENDS_TOGETHER);
            let mut state = self.locked();
            state.is_awaited = false;
            let before = state.unsent();
            self.send_ended(&mut state);
            let took_none = state.is_awaited && state.unsent() >= before;
            drop(state);
            if took_none {
                rest(BEHIND);
            }
        }
    }

    /// Another keeper is there, which was not sent what has ended.
    pub(crate) fn keeper_was_replaced(&self) {
        self.send_ended(&mut self.locked());
    }

    /// Whether a first open of this node would ask the keeper.
    pub(crate) fn would_register(&self, node: u64) -> bool {
        let state = self.locked();
        !state.ways.contains_key(&node) && state.pause.is_none_or(|until| until <= Instant::now())
    }

    /// Whether an open for reading could take the daemon's way, and what is read stay right.
    ///
    /// `sizes_follow_writes`: the kernel knows how large a file has become by writes that passed through. Otherwise an
    /// append by the daemon's way could overwrite them (fs/fuse/passthrough.c, `fuse_passthrough_end_write`).
    pub(crate) fn may_be_read_by_daemon(&self, node: u64, sizes_follow_writes: bool) -> bool {
        self.locked().may_be_read_by_daemon(node, sizes_follow_writes)
    }

    /// Whether files may be written without this daemon.
    pub(crate) fn may_be_written(&self) -> bool {
        self.locked().was_written
    }

    /// Whether the kernel may write the node's file without a request. Answers within some milliseconds, with
    /// `true` while the keeper stands still: attributes of all files depend on this.
    pub(crate) fn is_written(&self, node: u64) -> bool {
        let written =
            |state: &State| state.ways.get(&node).is_some_and(|way| way.backing.is_some() && way.writers > 0);
        let mut begun = None;
        loop {
            match self.state.try_lock() {
                Ok(state) => return written(&state),
                Err(TryLockError::Poisoned(poisoned)) => return written(&poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {
                    if begun.get_or_insert_with(Instant::now).elapsed() >= OTHERS_REGISTER {
                        return true;
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Whether the kernel reads and writes the open node's file itself.
    pub(crate) fn passes(&self, node: u64) -> bool {
        self.locked().ways.get(&node).is_some_and(|way| way.opens > 0 && way.backing.is_some())
    }

    fn register(&self, state: &mut State, node: u64, file: BorrowedFd<'_>) -> Option<Backing> {
        if state.pause.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        state.request += 1;
        let keeper = self.send_ended(state);
        let number = match keeper.register_backing(state.request, file.as_fd(), self.keeper_answers) {
            Ok(number) => number,
            Err(error) => {
                if state.pause.is_none() {
                    let error = linux::chain(&error);
                    tracing::warn!(error, "files are read and written by the daemon for now");
                }
                state.pause = Some(Instant::now() + AFTER_FAILURE);
                // The answer may have come too late, or a keeper has died with it.
                state.earlier.get_or_insert_with(|| self.table.last_backing());
                return None;
            }
        };
        state.pause = None;
        // It answers in order: what was sent before is read.
        let read = std::mem::take(&mut state.sent);
        let State { ended, read: before, .. } = &mut *state;
        before.extend(ended.drain(..read));
        for Ended { record, .. } in before.drain(..before.len().saturating_sub(MOST_READ)) {
            record.into_iter().for_each(|record| self.table.remove(record));
        }
        // The kernel counts up. A number that was got and not written down lies between.
        if let Some(last) = state.earlier.take() {
            let first = last.saturating_add(1).max(number.saturating_sub(MOST_UNRECORDED));
            // Each is written down before the numbers behind it, so that no kill loses one again.
            for number in first..number {
                state.ended.push(Ended { number, record: self.table.put_ended_backing(number) });
            }
        }
        let backing = self.table.put_backing(BackingRecord { node, number });
        if backing.is_none() {
            // A successor would answer the next open with another number.
            state.ended.push(Ended { number, record: None });
        }
        self.leave_to_ender(state);
        backing.map(|record| Backing { number, record })
    }

    /// Sends the keeper of now what has ended, as far as it takes that without a wait, and leaves the rest to the
    /// ender. What an earlier keeper was sent is sent again: it may be lost, and what has ended may be ended twice.
    fn send_ended(&self, state: &mut State) -> Arc<Removed> {
        self.send_ended_within(state, Duration::ZERO)
    }

    /// Waits so long for room.
    fn send_ended_within(&self, state: &mut State, limit: Duration) -> Arc<Removed> {
        let keeper = self.keeper.now();
        if !state.sent_to.as_ref().is_some_and(|sent_to| Arc::ptr_eq(sent_to, &keeper)) {
            (state.sent_to, state.sent) = (Some(Arc::clone(&keeper)), 0);
            let State { ended, read, .. } = &mut *state;
            ended.extend(read.drain(..));
        }
        let begun = Instant::now();
        while state.unsent() > 0 {
            let next = state.ended[state.sent..].iter().take(ENDED_AT_ONCE);
            let numbers: Vec<u32> = next.map(|ended| ended.number).collect();
            match keeper.unregister_backings(&numbers, limit.saturating_sub(begun.elapsed())) {
                Ok(sent) => state.sent += sent,
                Err(error) => {
                    tracing::debug!(error = linux::chain(&error), "the keeper gets this later");
                    break;
                }
            }
        }
        self.leave_to_ender(state);
        keeper
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
