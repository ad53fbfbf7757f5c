//! The state table: shared memory that a daemon leaves to its successor. The first page belongs to
//! the FUSE side, the rest to the backend.
//!
//! | word | |
//! |---|---|
//! | 0 | `MAGIC`, written last: the rest of the page is complete |
//! | 1 | `VERSION` |
//! | 2, 3 | bytes of the FUSE_INIT request and of its answer |
//! | 4 | how often the connection was taken over |
//! | 16 | the request |
//! | 48 | the answer |
//!
//! Invariant: a process that writes here may be killed between any two stores. So what a reader
//! needs to trust a record is stored last.

use std::ops::{Deref, Range};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use linux::shared_memory::SharedWords;

use crate::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"HAWSTATE");

/// Of the whole table, with the backend's part. A table keeps its version for the life of its
/// connection: a daemon that continues from one of the version before writes in that version. So a
/// daemon of the release before can continue after it.
const VERSION: u64 = 2;
const OLDEST_VERSION: u64 = VERSION - 1;

const WORD_BYTES: usize = 8;
const REQUEST_AT: usize = 16;
const ANSWER_AT: usize = 48;
/// Most bytes of each message; the kernel's has 104.
const MOST_MESSAGE_BYTES: usize = 32 * WORD_BYTES;
const HEADER_WORDS: usize = 512;

/// The messages that opened the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InitExchange {
    pub(crate) request: Vec<u8>,
    pub(crate) answer: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct StateTable {
    words: Arc<SharedWords>,
}

/// The backend's part of the table. It is zero when the connection is new.
#[derive(Debug, Clone)]
pub struct Region {
    words: Arc<SharedWords>,
}

impl StateTable {
    pub(crate) fn open(memfd: impl AsFd) -> Result<Self> {
        let words =
            SharedWords::map(memfd).map_err(|source| Error::Kernel { step: "state table", source })?;
        if words.len() <= HEADER_WORDS {
            return Err(Error::StateTable { reason: format!("{} words are too few", words.len()) });
        }
        Ok(Self { words: Arc::new(words) })
    }

    /// Whether this daemon can continue from the table. Changes nothing.
    pub(crate) fn check(&self) -> Result<()> {
        if self.words[0].load(Ordering::Acquire) != MAGIC {
            let reason = "the earlier daemon has not answered FUSE_INIT".to_owned();
            return Err(Error::StateTable { reason });
        }
        let found = self.words[1].load(Ordering::Relaxed);
        if !(OLDEST_VERSION..=VERSION).contains(&found) {
            return Err(Error::StateVersion { found, oldest: OLDEST_VERSION, newest: VERSION });
        }
        Ok(())
    }

    /// The exchange that an earlier daemon has recorded, for the daemon that continues now.
    pub(crate) fn take_over(&self) -> Result<InitExchange> {
        let exchange = self.exchange()?;
        self.words[4].fetch_add(1, Ordering::Relaxed);
        Ok(exchange)
    }

    /// The exchange that an earlier daemon has recorded. Changes nothing.
    pub(crate) fn exchange(&self) -> Result<InitExchange> {
        self.check()?;
        let wrong = |reason: String| Error::StateTable { reason };
        let message = |length_at: usize, at: usize| {
            let length = usize::try_from(self.words[length_at].load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            if length > MOST_MESSAGE_BYTES {
                return Err(wrong(format!("a FUSE_INIT message of {length} bytes")));
            }
            Ok(load_bytes(&self.words[at..], length))
        };
        Ok(InitExchange { request: message(2, REQUEST_AT)?, answer: message(3, ANSWER_AT)? })
    }

    /// The version in which this daemon writes: that of the first daemon.
    pub(crate) fn version(&self) -> u64 {
        match self.words[0].load(Ordering::Acquire) {
            MAGIC => self.words[1].load(Ordering::Relaxed),
            // The connection is new: its exchange is not recorded yet.
            _ => VERSION,
        }
    }

    /// Called once, when FUSE_INIT is answered.
    pub(crate) fn record(&self, exchange: &InitExchange) -> Result<()> {
        for (length_at, at, message) in [(2, REQUEST_AT, &exchange.request), (3, ANSWER_AT, &exchange.answer)]
        {
            if message.len() > MOST_MESSAGE_BYTES {
                let reason = format!("a FUSE_INIT message of {} bytes does not fit", message.len());
                return Err(Error::StateTable { reason });
            }
            self.words[length_at].store(message.len() as u64, Ordering::Relaxed);
            store_bytes(&self.words[at..], message);
        }
        self.words[1].store(VERSION, Ordering::Relaxed);
        self.words[0].store(MAGIC, Ordering::Release);
        Ok(())
    }

    pub(crate) fn region(&self) -> Region {
        Region { words: Arc::clone(&self.words) }
    }
}

impl Region {
    /// Maps the backend's part of a table by itself.
    pub fn of_backend(memfd: impl AsFd) -> Result<Self> {
        StateTable::open(memfd).map(|table| table.region())
    }

    /// Returns the memory of these words to the kernel: they read as zero afterwards. Only whole pages
    /// are returned.
    pub fn give_back(&self, words: Range<usize>) {
        let words = words.start + HEADER_WORDS..words.end + HEADER_WORDS;
        if let Err(error) = self.words.give_back(words) {
            tracing::debug!(error = linux::reason(&error.source), "state table: memory is not returned");
        }
    }
}

impl Deref for Region {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.words[HEADER_WORDS..]
    }
}

/// Stores bytes as little-endian words, the rest of the last one zero.
pub fn store_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks(WORD_BYTES)) {
        let mut whole = [0; WORD_BYTES];
        whole[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
    }
}

/// Loads what [`store_bytes`] stored.
pub fn load_bytes(words: &[AtomicU64], length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length.next_multiple_of(WORD_BYTES));
    for word in words.iter().take(length.div_ceil(WORD_BYTES)) {
        bytes.extend(word.load(Ordering::Relaxed).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_reads_what_was_recorded_and_only_that() {
        let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = StateTable::open(&memfd).unwrap();
        assert!(matches!(table.take_over(), Err(Error::StateTable { .. })));
        assert_eq!(table.version(), VERSION, "that of a new connection");
        let exchange = InitExchange { request: (0..104).collect(), answer: vec![7; 80] };
        table.record(&exchange).unwrap();
        table.region()[0].store(9, Ordering::Relaxed);
        let successor = StateTable::open(&memfd).unwrap();
        assert_eq!(successor.exchange().unwrap(), exchange);
        assert_eq!(successor.words[4].load(Ordering::Relaxed), 0, "nothing is changed");
        assert_eq!(successor.take_over().unwrap(), exchange);
        assert_eq!(successor.region()[0].load(Ordering::Relaxed), 9);
        assert_eq!(successor.words[4].load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_table_of_another_version_is_refused_with_both() {
        let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = StateTable::open(&memfd).unwrap();
        table.record(&InitExchange { request: vec![1], answer: vec![2] }).unwrap();
        for (version, refused) in [
            (VERSION + 1, "the earlier daemon wrote version 3, this one reads versions 1 to 2"),
            (OLDEST_VERSION - 1, "the earlier daemon wrote version 0, this one reads versions 1 to 2"),
        ] {
            table.words[1].store(version, Ordering::Relaxed);
            for error in [table.check().unwrap_err(), table.take_over().unwrap_err()] {
                assert!(error.to_string().contains(refused), "{error}");
            }
            assert_eq!(table.words[4].load(Ordering::Relaxed), 0, "nothing is changed");
        }
    }

    /// What a daemon of the version before has recorded: FUSE_INIT of Linux 6.18 and its answer.
    #[test]
    fn a_table_of_the_version_before_is_read_and_keeps_its_version() {
        let memfd = linux::shared_memory::create("test", 192 << 10).unwrap();
        let table = StateTable::open(&memfd).unwrap();
        for line in include_str!("../fixtures/state-table-1.txt").lines() {
            let (at, value) = line.split_once(" 0x").unwrap();
            let value = u64::from_str_radix(value, 16).unwrap();
            table.words[at.parse::<usize>().unwrap()].store(value, Ordering::Relaxed);
        }
        let InitExchange { request, answer } = table.take_over().unwrap();
        assert_eq!((request.len(), answer.len()), (104, 80));
        assert_eq!(
            (&request[..8], &request[40..48]),
            (&[104, 0, 0, 0, 26, 0, 0, 0][..], &[7, 0, 0, 0, 45, 0, 0, 0][..])
        );
        assert_eq!(table.version(), VERSION - 1, "a daemon of the release before can continue");
        assert_eq!(StateTable::open(&memfd).unwrap().take_over().unwrap().request, request);
    }

    #[test]
    fn a_message_that_cannot_be_one_is_refused() {
        let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = StateTable::open(&memfd).unwrap();
        let long = InitExchange { request: vec![0; MOST_MESSAGE_BYTES + 1], answer: vec![] };
        table.record(&long).unwrap_err();
        table.record(&InitExchange { request: vec![1], answer: vec![2] }).unwrap();
        table.words[3].store(u64::MAX, Ordering::Relaxed);
        table.take_over().unwrap_err();
    }
}
