//! Requests in progress that must not be repeated blindly: what each is about to do, and what it
//! found before.
//!
//! A daemon notes a request before its effect, and drops the note after the answer. After its death
//! the kernel sends unanswered requests again. The kernel holds the parent directory's lock until
//! the answer, so no other request has changed these names since: if the name is no longer as the
//! note says that it was found, the effect was made. If a process was killed meanwhile, the kernel
//! does not send its request again, and the lock is gone. Other requests may then change the names. So if the first
//! successor finds that an effect was not made, it notes that for all later ones.
//!
//! Notes of requests that were answered in the last moment may remain. The kernel sends all
//! unanswered requests before any new one, so such notes are dropped some time later.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use volume_fs::state::{Region, load_bytes, store_bytes};

use crate::place::{Place, is_name};

/// The first word of the slots.
pub(super) const AT: usize = 64;
const SLOTS: usize = 256;
const SLOT_WORDS: usize = 80;

/// Words of a slot. The request's number makes the note valid.
const NUMBER: usize = 0;
/// Bits 0 to 7: the kind; 16 to 31 and 32 to 47: lengths of the names.
const HEAD: usize = 1;
const DIRECTORY: usize = 2;
const FOUND: usize = 3;
const OTHER_DIRECTORY: usize = 4;
const OTHER_FOUND: usize = 5;
/// Bits 0 to 31: a user; bit 32: there is one.
const REMOVED_BY: usize = 6;
const HAS_USER: u64 = 1 << 32;
/// The node for which this request has counted a lookup.
const COUNTED: usize = 7;
/// The number of the posting by which the use has followed the effect.
const CHARGED: usize = 8;
/// The charge of a file that loses a name, if the quota does not remember another one.
const TAKES: usize = 9;
const NAME: usize = 16;
const OTHER_NAME: usize = 48;
const MOST_NAME_BYTES: usize = 32 * 8;

/// After this time, every request that the kernel sends again has been read.
const RESENT_IS_READ: Duration = Duration::from_secs(10);

/// What a request is about to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Gives a file a name, at which there was this one (`None`: none). It is a new file, or one that
    /// gets a further name.
    Make { at: Place, found: Option<u64>, is_new: bool },
    /// Takes the name from this file, if there is one. `removed_by`: the user, if it is the last name.
    /// `takes`: the bytes that the file is charged for, unless the quota remembers others.
    Remove { at: Place, found: Option<u64>, removed_by: Option<u32>, takes: u64 },
    /// Moves a file, or exchanges two. `removed_by` and `takes`: as for [`Self::Remove`], of the file
    /// in the way.
    Rename {
        from: Place,
        moving: Option<u64>,
        to: Place,
        in_the_way: Option<u64>,
        exchange: bool,
        removed_by: Option<u32>,
        takes: u64,
    },
    /// Sets or removes an attribute (`at.name`) of a node (`at.directory`), which had it or not.
    Attribute { at: Place, had: bool, sets: bool },
    /// Only counts a lookup.
    Lookup,
}

impl Effect {
    /// Whether no name leads out of the volume.
    fn is_of_names(&self) -> bool {
        match self {
            Self::Make { at, .. } | Self::Remove { at, .. } => is_name(&at.name),
            Self::Rename { from, to, .. } => is_name(&from.name) && is_name(&to.name),
            Self::Attribute { .. } | Self::Lookup => true,
        }
    }
}

const MAKE: u64 = 1;
const REMOVE: u64 = 2;
const RENAME: u64 = 3;
const EXCHANGE: u64 = 4;
const SET_ATTRIBUTE: u64 = 5;
const REMOVE_ATTRIBUTE: u64 = 6;
const LOOKUP: u64 = 7;
const LINK: u64 = 8;

/// A note of an earlier daemon.
#[derive(Debug)]
pub(crate) struct Note {
    pub(crate) effect: Effect,
    /// The request has counted a lookup of this node.
    pub(crate) counted: Option<u64>,
    /// The effect was made. Set by the successor before it serves.
    pub(crate) is_done: bool,
    /// The use of the volume has followed the effect.
    is_charged: bool,
    slot: Slot,
}

/// The number of a slot in use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot(usize);

#[derive(Debug)]
pub(crate) struct Requests {
    region: Region,
    free: Mutex<Vec<usize>>,
    earlier: Mutex<Earlier>,
    has_earlier: AtomicBool,
}

#[derive(Debug)]
struct Earlier {
    notes: HashMap<u64, Note>,
    /// The first new request: those that the kernel sends again are read before.
    since: Option<Instant>,
}

impl Requests {
    pub(super) fn new(region: Region) -> Self {
        let earlier = Mutex::new(Earlier { notes: HashMap::new(), since: None });
        let free = Mutex::new((0..SLOTS).rev().collect());
        Self { region, free, earlier, has_earlier: AtomicBool::new(false) }
    }

    /// Reads the notes of an earlier daemon. `postings`: the number of its last posting.
    pub(super) fn recover(&self, postings: u64) {
        let mut notes = HashMap::new();
        self.free().retain(|slot| match self.read(Slot(*slot), postings) {
            Some((number, note)) => {
                notes.insert(number, note);
                false
            }
            None => true,
        });
        self.has_earlier.store(!notes.is_empty(), Ordering::Release);
        self.earlier().notes = notes;
    }

    /// Decides for each note of the earlier daemon whether its effect was made. First of moves, until
    /// none is found any more: the directories of the others may have moved.
    pub(crate) fn settle(&self, mut is_done: impl FnMut(&Effect) -> bool) {
        let mut earlier = self.earlier();
        let is_move = |note: &&mut Note| matches!(note.effect, Effect::Rename { .. });
        loop {
            let mut found = false;
            for note in earlier.notes.values_mut().filter(is_move).filter(|note| !note.is_done) {
                note.is_done = is_done(&note.effect);
                found |= note.is_done;
            }
            if !found {
                break;
            }
        }
        for note in earlier.notes.values_mut().filter(|note| !is_move(note)) {
            note.is_done = is_done(&note.effect);
        }
        // A later daemon would find the effects of others. If the request comes again, it writes its own note.
        for note in earlier.notes.values().filter(|note| !note.is_done) {
            self.words(note.slot)[HEAD].store(LOOKUP, Ordering::Release);
        }
    }

    /// The effects that were made, and that the use of the volume has not followed.
    pub(crate) fn uncharged(&self) -> Vec<(Slot, Effect)> {
        let earlier = self.earlier();
        let uncharged = earlier.notes.values().filter(|note| note.is_done && !note.is_charged);
        uncharged.map(|note| (note.slot, note.effect.clone())).collect()
    }

    /// The earlier daemon's note of a request that the kernel has sent again.
    pub(crate) fn take_note(&self, number: u64) -> Option<Note> {
        if !self.has_earlier.load(Ordering::Acquire) {
            return None;
        }
        self.earlier().notes.remove(&number)
    }

    /// Called for a new request: drops the notes of answered requests, once there can be no others.
    pub(crate) fn new_request(&self) {
        if !self.has_earlier.load(Ordering::Relaxed) {
            return;
        }
        let mut earlier = self.earlier();
        if earlier.since.get_or_insert_with(Instant::now).elapsed() < RESENT_IS_READ {
            return;
        }
        self.has_earlier.store(false, Ordering::Release);
        for (_number, note) in earlier.notes.drain() {
            self.drop_note(note.slot);
        }
    }

    /// A slot for the note of a request: that of the earlier daemon, if there is one. `None` if too
    /// many requests are in progress.
    pub(crate) fn slot(&self, earlier: Option<&Note>) -> Option<Slot> {
        earlier.map(|note| note.slot).or_else(|| self.free().pop().map(Slot))
    }

    /// Notes what the request is about to do.
    pub(crate) fn note(&self, slot: Slot, number: u64, effect: &Effect) {
        let words = self.words(slot);
        // A reader must not see a mixture of two notes.
        words[NUMBER].store(0, Ordering::Release);
        let mut head = 0;
        let put = |place: &Place, at: usize, length_shift: u32, directory: usize| {
            let name = place.name.as_bytes();
            let name = &name[..name.len().min(MOST_NAME_BYTES)];
            store_bytes(&words[at..], name);
            words[directory].store(place.directory, Ordering::Relaxed);
            (name.len() as u64) << length_shift
        };
        let mut takes_bytes = 0;
        let (found, other_found, removed_by) = match effect {
            Effect::Make { at, found, is_new } => {
                head |= if *is_new { MAKE } else { LINK };
                head |= put(at, NAME, 16, DIRECTORY);
                (*found, None, None)
            }
            Effect::Remove { at, found, removed_by, takes } => {
                head |= REMOVE | put(at, NAME, 16, DIRECTORY);
                takes_bytes = *takes;
                (*found, None, *removed_by)
            }
            Effect::Rename { from, moving, to, in_the_way, exchange, removed_by, takes } => {
                head |= if *exchange { EXCHANGE } else { RENAME };
                head |= put(from, NAME, 16, DIRECTORY);
                head |= put(to, OTHER_NAME, 32, OTHER_DIRECTORY);
                takes_bytes = *takes;
                (*moving, *in_the_way, *removed_by)
            }
            Effect::Attribute { at, had, sets } => {
                head |= if *sets { SET_ATTRIBUTE } else { REMOVE_ATTRIBUTE };
                head |= put(at, NAME, 16, DIRECTORY);
                (had.then_some(1), None, None)
            }
            Effect::Lookup => {
                head |= LOOKUP;
                (None, None, None)
            }
        };
        words[FOUND].store(found.unwrap_or_default(), Ordering::Relaxed);
        words[OTHER_FOUND].store(other_found.unwrap_or_default(), Ordering::Relaxed);
        let user = removed_by.map_or(0, |uid| HAS_USER | u64::from(uid));
        words[REMOVED_BY].store(user, Ordering::Relaxed);
        words[COUNTED].store(0, Ordering::Relaxed);
        words[CHARGED].store(0, Ordering::Relaxed);
        words[TAKES].store(takes_bytes, Ordering::Relaxed);
        words[HEAD].store(head, Ordering::Relaxed);
        words[NUMBER].store(number, Ordering::Release);
    }

    /// The request has counted a lookup of `node`.
    pub(crate) fn counted(&self, slot: Slot, node: u64) {
        self.words(slot)[COUNTED].store(node, Ordering::Release);
    }

    /// The use of the volume follows the effect by the posting with this number.
    pub(super) fn charged(&self, slot: Slot, posting: u64) {
        self.words(slot)[CHARGED].store(posting, Ordering::Release);
    }

    /// The request is answered.
    pub(crate) fn drop_note(&self, slot: Slot) {
        self.words(slot)[NUMBER].store(0, Ordering::Release);
        self.free().push(slot.0);
    }

    fn read(&self, slot: Slot, postings: u64) -> Option<(u64, Note)> {
        let words = self.words(slot);
        let number = words[NUMBER].load(Ordering::Acquire);
        if number == 0 {
            return None;
        }
        let word = |at: usize| words[at].load(Ordering::Relaxed);
        let head = word(HEAD);
        let place = |name: usize, shift: u32, directory: usize| {
            let length = usize::try_from(head >> shift & 0xffff).unwrap_or_default().min(MOST_NAME_BYTES);
            let name = CString::new(load_bytes(&words[name..], length)).unwrap_or_default();
            Place { directory: word(directory), name }
        };
        let id = |at: usize| Some(word(at)).filter(|id| *id != 0);
        let at = place(NAME, 16, DIRECTORY);
        let user = Some(word(REMOVED_BY)).filter(|user| user & HAS_USER != 0);
        let removed_by = user.and_then(|user| u32::try_from(user & !HAS_USER).ok());
        let effect = match head & 0xff {
            kind @ (MAKE | LINK) => Effect::Make { at, found: id(FOUND), is_new: kind == MAKE },
            REMOVE => Effect::Remove { at, found: id(FOUND), removed_by, takes: word(TAKES) },
            kind @ (RENAME | EXCHANGE) => Effect::Rename {
                from: at,
                moving: id(FOUND),
                to: place(OTHER_NAME, 32, OTHER_DIRECTORY),
                in_the_way: id(OTHER_FOUND),
                exchange: kind == EXCHANGE,
                removed_by,
                takes: word(TAKES),
            },
            kind @ (SET_ATTRIBUTE | REMOVE_ATTRIBUTE) => {
                Effect::Attribute { at, had: id(FOUND).is_some(), sets: kind == SET_ATTRIBUTE }
            }
            _ => Effect::Lookup,
        };
        let effect = if effect.is_of_names() { effect } else { Effect::Lookup };
        let is_charged = (1..=postings).contains(&word(CHARGED));
        if !is_charged {
            // The number of a posting that was not committed is used again.
            words[CHARGED].store(0, Ordering::Release);
        }
        Some((number, Note { effect, counted: id(COUNTED), is_done: false, is_charged, slot }))
    }

    fn words(&self, Slot(number): Slot) -> &[std::sync::atomic::AtomicU64] {
        &self.region[AT + number * SLOT_WORDS..][..SLOT_WORDS]
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn earlier(&self) -> MutexGuard<'_, Earlier> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const _: () = assert!(AT + SLOTS * SLOT_WORDS <= super::RECORDS_AT);
