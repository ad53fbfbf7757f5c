//! One directory of entries: each is a file that is replaced as a whole, and all are kept in
//! memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result, Step};
use crate::model::capacity;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::name::VolumeName;
use crate::model::records::{SnapshotRecord, VolumeRecord};

const EXTENSION: &str = "json";
pub(super) const FILE_MODE: u32 = 0o600;
/// The deletion mark in an entry, before and after deletion has begun. No name can contain this
/// text: JSON escapes its quotes.
const DELETING: [&str; 2] = ["\"deleting\": false", "\"deleting\": true "];

/// The key of an entry.
pub(crate) trait Key: Clone + Ord {
    fn parse(text: &str) -> Option<Self>;
    fn under(&self, dir: &Path) -> PathBuf;
    fn unknown(&self) -> Error;
    /// The only valid key of an object with this name.
    fn for_name(name: &VolumeName) -> Self;
}

/// The content of an entry.
pub(crate) trait Record: Clone + Serialize + DeserializeOwned {
    /// The field with its part of the pool; also read from a torn entry.
    const BYTES_FIELD: &'static str;
    /// The bytes of the pool that it claims.
    fn committed_bytes(&self) -> u64;
    /// The inodes of the pool that it claims; a volume has one for each `bytes_each`.
    fn committed_inodes(&self, bytes_each: u64) -> u64;
    fn name(&self) -> &VolumeName;
}

impl Key for VolumeId {
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn under(&self, dir: &Path) -> PathBuf {
        self.under(dir)
    }

    fn unknown(&self) -> Error {
        Error::UnknownVolume { volume_id: self.to_string() }
    }

    fn for_name(name: &VolumeName) -> Self {
        Self::for_name(name)
    }
}

impl Key for SnapshotId {
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }

    fn under(&self, dir: &Path) -> PathBuf {
        self.under(dir)
    }

    fn unknown(&self) -> Error {
        Error::UnknownSnapshot { snapshot_id: self.to_string() }
    }

    fn for_name(name: &VolumeName) -> Self {
        Self::for_name(name)
    }
}

impl Record for VolumeRecord {
    const BYTES_FIELD: &'static str = "capacity_bytes";

    fn name(&self) -> &VolumeName {
        &self.name
    }

    fn committed_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn committed_inodes(&self, bytes_each: u64) -> u64 {
        capacity::inode_limit(self.capacity_bytes, bytes_each).saturating_add(capacity::OWN_INODES)
    }
}

impl Record for SnapshotRecord {
    const BYTES_FIELD: &'static str = "used_bytes";

    fn name(&self) -> &VolumeName {
        &self.name
    }

    fn committed_bytes(&self) -> u64 {
        if self.is_only_an_entry() {
            return 0;
        }
        // An earlier version trusted its count of a compromised daemon's volume.
        self.used_bytes.min(self.source_capacity_bytes)
    }

    fn committed_inodes(&self, bytes_each: u64) -> u64 {
        if self.is_only_an_entry() {
            return 0;
        }
        // An earlier version did not count inodes.
        let used = if self.used_inodes == 0 { u64::MAX } else { self.used_inodes };
        let most = capacity::inode_limit(self.source_capacity_bytes, bytes_each);
        used.min(most).saturating_add(capacity::OWN_INODES)
    }
}

#[derive(Debug)]
pub(crate) struct Store<I, R> {
    dir: PathBuf,
    /// The entries on disk. Lock order: the object's lock first, then this; never held while
    /// waiting.
    entries: Mutex<BTreeMap<I, Entry<R>>>,
}

#[derive(Debug)]
enum Entry<R> {
    Readable(Box<R>),
    /// Every operation on the object fails with this error; the content is not guessed.
    Unreadable {
        path: PathBuf,
        reason: String,
        /// As far as the torn file shows it, so that the space is not claimed twice.
        committed_bytes: u64,
    },
}

impl<R: Record> Entry<R> {
    fn committed_bytes(&self) -> u64 {
        match self {
            Self::Readable(record) => record.committed_bytes(),
            Self::Unreadable { committed_bytes, .. } => *committed_bytes,
        }
    }

    fn committed_inodes(&self, bytes_each: u64) -> u64 {
        match self {
            Self::Readable(record) => record.committed_inodes(bytes_each),
            Self::Unreadable { committed_bytes, .. } => capacity::inode_limit(*committed_bytes, bytes_each),
        }
    }

    fn get(&self) -> Result<&R> {
        match self {
            Self::Readable(record) => Ok(record),
            Self::Unreadable { path, reason, .. } => {
                Err(Error::JournalUnreadable { path: path.clone(), reason: reason.clone() })
            }
        }
    }
}

/// Whether to remove a killed writer's leftovers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leftovers {
    Remove,
    Keep,
}

impl<I: Key, R: Record> Store<I, R> {
    /// Reads `dir`, which must exist.
    pub(super) fn open(dir: &Path, leftovers: Leftovers) -> Result<Self> {
        let mut entries = BTreeMap::new();
        let io = |op, e| Error::Kernel { step: "open journal", source: linux::Error::at(op, dir, e) };
        for item in std::fs::read_dir(dir).map_err(|e| io("list", e))? {
            let path = item.map_err(|e| io("list", e))?.path();
            if let Some(id) = key_of(&path, EXTENSION) {
                let entry = read(&id, &path);
                // A driver that runs at the same time has just removed it.
                let is_gone = || leftovers == Leftovers::Keep && !path.exists();
                if matches!(entry, Entry::Readable(_)) || !is_gone() {
                    entries.insert(id, entry);
                }
            } else if path.extension().is_none_or(|e| e != "tmp") {
                tracing::warn!(path = %path.display(), "not a journal entry");
            } else if leftovers == Leftovers::Remove {
                linux::atomic_file::remove(&path).step("remove temporary file")?;
            }
        }
        Ok(Self { dir: dir.to_owned(), entries: Mutex::new(entries) })
    }

    /// `None` if the object does not exist.
    pub(crate) fn find(&self, id: &I) -> Result<Option<R>> {
        self.locked().get(id).map(|entry| entry.get().cloned()).transpose()
    }

    pub(crate) fn get(&self, id: &I) -> Result<R> {
        self.find(id)?.ok_or_else(|| id.unknown())
    }

    /// Every readable entry, by id.
    pub(crate) fn list(&self) -> Vec<(I, R)> {
        let readable = |(id, entry): (&I, &Entry<R>)| Some((id.clone(), entry.get().ok()?.clone()));
        self.locked().iter().filter_map(readable).collect()
    }

    /// Every entry by id; `Err` is the reason why one is unreadable.
    pub(crate) fn entries(&self) -> Vec<(I, Result<R>)> {
        self.locked().iter().map(|(id, entry)| (id.clone(), entry.get().cloned())).collect()
    }

    /// Every id, readable or not: data without an id in this list belongs to no object.
    pub(crate) fn ids(&self) -> Vec<I> {
        self.locked().keys().cloned().collect()
    }

    /// Writes the entry; it is on disk when this returns. The caller holds the object's lock.
    pub(crate) fn put(&self, id: &I, record: &R) -> Result<()> {
        self.write(id, record).inspect_err(|_| self.restore(id))?;
        self.remember(id, record);
        Ok(())
    }

    /// [`Self::put`] of a result that each start finds again: if the disk does not take it, it is kept in
    /// memory only.
    pub(crate) fn put_finding(&self, id: &I, record: &R) {
        if let Err(error) = self.put(id, record) {
            let (path, error) = (self.path(id), crate::error::chain(&error));
            tracing::warn!(path = %path.display(), error, "the journal could not record a result: only this driver has it");
            self.remember(id, record);
        }
    }

    /// [`Self::put`] of an entry whose deletion begins. On a full disk, only [`DELETING`] in the
    /// entry's file is overwritten: deletion needs no free space. Results that only memory has
    /// ([`Self::put_finding`]) are deleted with the entry.
    ///
    /// Btrfs copies on write and refuses this too. Then the mark is in memory only, and a driver
    /// that is killed before it removes the entry leaves one without data. The next start reports a
    /// snapshot as lost; a repeated creation makes such a volume anew; a repeated deletion removes
    /// either.
    pub(crate) fn put_deleting(&self, id: &I, record: &R) -> Result<()> {
        match self.put(id, record) {
            Err(error) if is_disk_full(&error) => {}
            outcome => return outcome,
        }
        match self.overwrite(id, record) {
            Err(error) if is_disk_full(&error) => {
                let (path, error) = (self.path(id), crate::error::chain(&error));
                tracing::warn!(path = %path.display(), error, "the journal could not mark the deletion: it continues");
                self.remember(id, record);
                Ok(())
            }
            outcome => outcome,
        }
    }

    pub(super) fn overwrite(&self, id: &I, record: &R) -> Result<()> {
        let path = self.path(id);
        let unusable = |reason: String| Error::JournalUnreadable { path: path.clone(), reason };
        let text = linux::atomic_file::read(&path).map_err(|e| unusable(e.to_string()))?;
        let [kept, deleting] = DELETING;
        let found = text.windows(kept.len()).rposition(|part| part == kept.as_bytes());
        let at = found.ok_or_else(|| unusable(format!("it has no {kept}")))?;
        let mut changed = text;
        changed[at..at + kept.len()].copy_from_slice(deleting.as_bytes());
        let _readable: R = serde_json::from_slice(&changed).map_err(|e| unusable(e.to_string()))?;
        linux::atomic_file::overwrite(&path, at as u64, deleting.as_bytes()).step("write journal entry")?;
        self.remember(id, record);
        Ok(())
    }

    /// Changes the entry in memory only.
    pub(super) fn remember(&self, id: &I, record: &R) {
        self.locked().insert(id.clone(), Entry::Readable(Box::new(record.clone())));
    }

    /// Marks the object unreadable because another file of it is.
    pub(super) fn mark_unreadable(&self, id: &I, path: PathBuf, reason: String) {
        let committed_bytes = self.committed_by(id);
        self.locked().insert(id.clone(), unreadable(path, reason, committed_bytes));
    }

    pub(crate) fn remove(&self, id: &I) -> Result<()> {
        linux::atomic_file::remove(&self.path(id)).step("remove journal entry")?;
        self.locked().remove(id);
        Ok(())
    }

    /// The bytes that all entries claim.
    pub(super) fn committed_bytes(&self) -> u64 {
        self.locked().values().map(Entry::committed_bytes).fold(0, u64::saturating_add)
    }

    /// The inodes that all entries claim.
    pub(super) fn committed_inodes(&self, bytes_each: u64) -> u64 {
        self.locked().values().map(|entry| entry.committed_inodes(bytes_each)).fold(0, u64::saturating_add)
    }

    pub(super) fn committed_inodes_by(&self, id: &I, bytes_each: u64) -> u64 {
        self.locked().get(id).map_or(0, |entry| entry.committed_inodes(bytes_each))
    }

    pub(super) fn committed_by(&self, id: &I) -> u64 {
        self.locked().get(id).map_or(0, Entry::committed_bytes)
    }

    /// Changes the entry in memory only, so that it counts from now on. Returns the previous one.
    pub(super) fn claim(&self, id: &I, record: &R) -> Claimed<R> {
        Claimed(self.locked().insert(id.clone(), Entry::Readable(Box::new(record.clone()))))
    }

    /// Writes a claim of [`Self::claim`] to disk, or undoes it.
    pub(super) fn persist(&self, id: &I, record: &R, before: Claimed<R>) -> Result<()> {
        self.write(id, record).inspect_err(|_| {
            let mut entries = self.locked();
            match before.0 {
                Some(entry) => drop(entries.insert(id.clone(), entry)),
                None => drop(entries.remove(id)),
            }
            drop(entries);
            self.restore(id);
        })
    }

    /// Restores the file after a failed write, which may have succeeded in part: a later driver
    /// must not find an entry that this one refused.
    fn restore(&self, id: &I) {
        let path = self.path(id);
        let restore = match self.locked().get(id) {
            None => linux::atomic_file::discard(&path),
            Some(Entry::Readable(record)) => match text_of(record) {
                Ok(text) if linux::atomic_file::read(&path).is_ok_and(|found| found == text) => Ok(()),
                Ok(text) => linux::atomic_file::replace(&path, &text, FILE_MODE),
                Err(_never_was_on_disk) => Ok(()),
            },
            Some(Entry::Unreadable { .. }) => Ok(()),
        };
        if let Err(error) = restore {
            let error = crate::error::chain(&error);
            tracing::error!(path = %path.display(), error, "could not undo a refused change of the journal");
        }
    }

    fn write(&self, id: &I, record: &R) -> Result<()> {
        let path = self.path(id);
        let text =
            text_of(record).map_err(|reason| Error::JournalUnreadable { path: path.clone(), reason })?;
        linux::atomic_file::write(&path, &text, FILE_MODE).step("write journal entry")
    }

    fn path(&self, id: &I) -> PathBuf {
        file_of(id, &self.dir)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<I, Entry<R>>> {
        // Every critical section leaves the map consistent at each step.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn is_disk_full(error: &Error) -> bool {
    matches!(error, Error::Kernel { source, .. } if matches!(source.errno(), Errno::ENOSPC | Errno::EDQUOT))
}

/// The entry before [`Store::claim`].
#[derive(Debug)]
pub(super) struct Claimed<R>(Option<Entry<R>>);

fn unreadable<R>(path: PathBuf, reason: String, committed_bytes: u64) -> Entry<R> {
    tracing::error!(path = %path.display(), reason, "unreadable journal entry");
    Entry::Unreadable { path, reason, committed_bytes }
}

/// Reads the entry of `id`. It must belong to an object whose name gives this id: a file that was
/// restored under another name is refused.
fn read<I: Key, R: Record>(id: &I, path: &Path) -> Entry<R> {
    match parse::<R>(path) {
        Ok(record) if I::for_name(record.name()) == *id => Entry::Readable(Box::new(record)),
        Ok(record) => {
            let reason = format!("it is the entry of {:?}, which has another id", record.name().as_str());
            unreadable(path.to_owned(), reason, record.committed_bytes())
        }
        Err(reason) => unreadable(path.to_owned(), reason, bytes_of_torn(path, R::BYTES_FIELD)),
    }
}

/// The number after `field` in a text that is not valid JSON; 0 if there is none.
fn bytes_of_torn(path: &Path, field: &str) -> u64 {
    let text = linux::atomic_file::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let value = text.split(&format!("\"{field}\":")).nth(1).unwrap_or_default().trim_start();
    value
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .and_then(|digits| digits.parse().ok())
        .unwrap_or_default()
}

fn file_of<I: Key>(id: &I, dir: &Path) -> PathBuf {
    id.under(dir).with_extension(EXTENSION)
}

pub(super) fn key_of<I: Key>(path: &Path, extension: &str) -> Option<I> {
    let is_entry = path.extension().is_some_and(|e| e == extension);
    is_entry.then(|| path.file_stem()?.to_str()).flatten().and_then(I::parse)
}

/// The content of a file, or the reason why it is unreadable.
fn parse<R: DeserializeOwned>(path: &Path) -> std::result::Result<R, String> {
    let text = linux::atomic_file::read(path).map_err(|e| e.to_string())?;
    serde_json::from_slice(&text).map_err(|e| e.to_string())
}

fn text_of(record: &impl Serialize) -> std::result::Result<Vec<u8>, String> {
    let mut text = serde_json::to_vec_pretty(record).map_err(|e| e.to_string())?;
    text.push(b'\n');
    Ok(text)
}
