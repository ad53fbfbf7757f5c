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
//! hundred, none that has lost its last name, and none that the kernel has forgotten.
//!
//! Invariant: what is registered is an open file or one of these. A kill may leave more: a successor ends
//! all registrations without a handle.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use volume_fs::file::BackingId;

use crate::keeper_socket::KeeperSocket;
use crate::state_table::{BackingRecord, HandleRecord, RecordId, StateTable};

/// Most that an open waits for the keeper, which answers at once unless it was stopped.
const KEEPER_ANSWERS: Duration = Duration::from_millis(200);
/// How long no file is registered after the keeper has failed to: each attempt costs an open its time.
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// Closed files that stay registered.
const MOST_IDLE: usize = 256;
/// How many of them end at a time: each packet alone would wake the keeper.
const ENDED_AT_ONCE: usize = 64;
/// Numbers that a predecessor may have got and not written down: it has registered one at a time.
const MOST_UNRECORDED: u32 = 16;

#[derive(Debug)]
pub(crate) struct Backings {
    keeper: Arc<KeeperSocket>,
    table: Arc<StateTable>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of every node with an open file, and of those that stay registered.
    ways: HashMap<u64, Way>,
    /// Nodes in the order of their last closes. Some were opened since, or ended.
    idle: VecDeque<u64>,
    /// Opens for writing with a backing file.
    writers: usize,
    /// Of the last request to the keeper.
    request: u64,
    /// Files take the daemon's way until then.
    pause: Option<Instant>,
    /// The last number that an earlier daemon has written down. `None`: nothing of it is left to end.
    earlier: Option<u32>,
}

#[derive(Debug, Default)]
struct Way {
    opens: usize,
    /// Of `opens`, those for writing.
    writers: usize,
    /// `None`: the daemon's way.
    backing: Option<Backing>,
}

#[derive(Debug, Clone, Copy)]
struct Backing {
    number: u32,
    record: RecordId,
}

/// Whether an open may write.
pub(crate) fn writes(flags: OFlags) -> bool {
    flags.intersects(OFlags::WRONLY | OFlags::RDWR)
}

impl Backings {
    pub(crate) fn new(keeper: Arc<KeeperSocket>, table: Arc<StateTable>) -> Self {
        Self { keeper, table, state: Mutex::default() }
    }

    /// Continues with what an earlier daemon had open and registered. Called before the first request.
    pub(crate) fn restore<'a>(
        &self,
        files: impl Iterator<Item = &'a HandleRecord>,
        backings: Vec<(RecordId, BackingRecord)>,
    ) {
        let mut state = self.locked();
        for file in files {
            let way = state.ways.entry(file.node).or_default();
            way.opens += 1;
            way.writers += usize::from(writes(OFlags::from_bits_retain(file.flags)));
        }
        for (record, BackingRecord { node, number }) in backings {
            match state.ways.get_mut(&node) {
                Some(way) if way.backing.is_none() => {
                    way.backing = Some(Backing { number, record });
                    let writers = way.writers;
                    state.writers += writers;
                }
                _ => self.end(Backing { number, record }),
            }
        }
        state.earlier = Some(self.table.last_backing());
    }

    /// Called for every open of a file, before it is answered: which way it takes. `file` is open for
    /// reading and writing; without it, a first open takes the daemon's way.
    pub(crate) fn enter(&self, node: u64, flags: OFlags, file: Option<BorrowedFd<'_>>) -> Option<BackingId> {
        let mut state = self.locked();
        if !state.ways.contains_key(&node) {
            let backing = file.and_then(|file| self.register(&mut state, node, file));
            state.ways.insert(node, Way { backing, ..Way::default() });
        }
        let way = state.ways.get_mut(&node)?;
        let (writer, backing) = (usize::from(writes(flags)), way.backing);
        way.opens += 1;
        way.writers += writer;
        if backing.is_some() {
            state.writers += writer;
        }
        backing.map(|backing| BackingId(backing.number))
    }

    /// An open file was closed, or the open failed.
    pub(crate) fn leave(&self, node: u64, flags: OFlags) {
        let mut state = self.locked();
        let Some(way) = state.ways.get_mut(&node) else { return };
        let (writer, backing) = (usize::from(writes(flags)), way.backing);
        way.opens = way.opens.saturating_sub(1);
        way.writers = way.writers.saturating_sub(writer);
        let is_last = way.opens == 0;
        if backing.is_some() {
            state.writers = state.writers.saturating_sub(writer);
        }
        match backing {
            Some(_) if is_last => {
                state.idle.push_back(node);
                if state.idle.len() >= MOST_IDLE + ENDED_AT_ONCE {
                    let ended: Vec<u64> = state.idle.drain(..ENDED_AT_ONCE).collect();
                    ended.into_iter().for_each(|node| self.end_idle(&mut state, node));
                }
            }
            None if is_last => drop(state.ways.remove(&node)),
            _ => {}
        }
    }

    /// The node has lost its last name, or the kernel has forgotten it: it does not stay registered.
    pub(crate) fn is_gone(&self, node: u64) {
        self.end_idle(&mut self.locked(), node);
    }

    fn end_idle(&self, state: &mut State, node: u64) {
        if state.ways.get(&node).is_some_and(|way| way.opens == 0)
            && let Some(Way { backing: Some(backing), .. }) = state.ways.remove(&node)
        {
            self.end(backing);
        }
    }

    /// Whether a first open of this node would ask the keeper.
    pub(crate) fn would_register(&self, node: u64) -> bool {
        let state = self.locked();
        !state.ways.contains_key(&node) && state.pause.is_none_or(|until| until <= Instant::now())
    }

    /// How many opens can write without this daemon.
    pub(crate) fn writers(&self) -> usize {
        self.locked().writers
    }

    /// Whether the kernel may write the node's file without a request.
    pub(crate) fn is_written(&self, node: u64) -> bool {
        self.locked().ways.get(&node).is_some_and(|way| way.backing.is_some() && way.writers > 0)
    }

    fn register(&self, state: &mut State, node: u64, file: BorrowedFd<'_>) -> Option<Backing> {
        if state.pause.is_some_and(|until| until > Instant::now()) {
            return None;
        }
        state.request += 1;
        let keeper = self.keeper.now();
        let number = match keeper.register_backing(state.request, file.as_fd(), KEEPER_ANSWERS) {
            Ok(number) => number,
            Err(error) => {
                if state.pause.is_none() {
                    let error = linux::chain(&error);
                    tracing::warn!(error, "files are read and written by the daemon for now");
                }
                state.pause = Some(Instant::now() + AFTER_FAILURE);
                return None;
            }
        };
        state.pause = None;
        // The kernel counts up. One that an earlier daemon got and did not write down lies between.
        if let Some(last) = state.earlier.take() {
            let unrecorded = last.saturating_add(1)..number;
            unrecorded.rev().take(MOST_UNRECORDED as usize).for_each(|number| self.unregister(number));
        }
        match self.table.put_backing(BackingRecord { node, number }) {
            Some(record) => Some(Backing { number, record }),
            // A successor would answer the next open with another number.
            None => {
                self.unregister(number);
                None
            }
        }
    }

    /// In this order: what is still written down may be ended twice, and nothing is forgotten.
    fn end(&self, Backing { number, record }: Backing) {
        self.unregister(number);
        self.table.remove(record);
    }

    fn unregister(&self, number: u32) {
        if let Err(error) = self.keeper.now().unregister_backing(number) {
            tracing::debug!(error = linux::chain(&error), number, "a backing file stays registered");
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
