//! The store's memory: objects by name, each with its source.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Source;
use crate::objects::{Document, Object, Pod, Time};

/// A name within a kind, in the order of tables.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    /// Empty for kinds without a namespace.
    pub(super) namespace: String,
    pub(super) name: String,
}

impl Key {
    pub(super) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub(super) fn of(object: &impl Object) -> Self {
        Self::new(&object.metadata().namespace, &object.metadata().name)
    }
}

/// An object with its source; also the record on disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(bound = "T: Object")]
pub(super) struct Entry<T> {
    pub(super) source: Source,
    /// Digest of the manifest: detects an edit.
    pub(super) digest: String,
    #[serde(with = "shared")]
    pub(super) object: Arc<T>,
    /// The document of `object`. Absent for objects that the kubelet made, and in records of older
    /// builds until the object is applied again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) document: Option<Document>,
}

/// Serializes an `Arc` as its content.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(value: &Arc<T>, s: S) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(s)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        d: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(d).map(Arc::new)
    }
}

#[derive(Debug)]
pub(super) struct Entries<T>(BTreeMap<Key, Entry<T>>);

impl<T> Entries<T> {
    pub(super) fn objects(&self) -> Vec<Arc<T>> {
        self.0.values().map(|entry| Arc::clone(&entry.object)).collect()
    }

    pub(super) fn object(&self, namespace: &str, name: &str) -> Option<Arc<T>> {
        self.0.get(&Key::new(namespace, name)).map(|entry| Arc::clone(&entry.object))
    }
}

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> FromIterator<(Key, Entry<T>)> for Entries<T> {
    fn from_iter<I: IntoIterator<Item = (Key, Entry<T>)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl<T> Deref for Entries<T> {
    type Target = BTreeMap<Key, Entry<T>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<T> DerefMut for Entries<T> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

/// The pod of a name, and its successor after the teardown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PodEntry {
    pub(super) current: Entry<Pod>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) successor: Option<Box<Entry<Pod>>>,
}

impl PodEntry {
    /// The latest description: the successor's, if any.
    pub(super) fn wanted(&self) -> Option<&Entry<Pod>> {
        match &self.successor {
            Some(successor) => Some(successor),
            None if self.current.object.metadata.is_deleted() => None,
            None => Some(&self.current),
        }
    }

    /// Like [`PodEntry::wanted`], for a pod that is wanted.
    pub(super) fn wanted_mut(&mut self) -> &mut Entry<Pod> {
        self.successor.as_deref_mut().unwrap_or(&mut self.current)
    }

    pub(super) fn is_of_a_file(&self) -> bool {
        matches!(self.current.source, Source::File(_))
    }

    /// A deletion is irreversible; the grace period can only get shorter.
    pub(super) fn mark_deleted(&mut self, grace_seconds: Option<u64>, now: Time) {
        let pod = Arc::make_mut(&mut self.current.object);
        let asked = grace_seconds.unwrap_or(pod.spec.termination_grace_period_seconds);
        let meta = &mut pod.metadata;
        let grace = meta.deletion_grace_period_seconds.map_or(asked, |before| before.min(asked));
        meta.deletion_grace_period_seconds = Some(grace);
        meta.generation += u64::from(!meta.is_deleted());
        meta.deletion_timestamp.get_or_insert(now);
    }

    /// Counts from 1 what an earlier version has not counted.
    pub(super) fn begin_generations(&mut self) {
        for entry in [&mut self.current].into_iter().chain(self.successor.as_deref_mut()) {
            if entry.object.metadata.generation == 0 {
                Arc::make_mut(&mut entry.object).metadata.generation = 1;
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct PodEntries {
    by_key: BTreeMap<Key, PodEntry>,
    /// By the uid of `current`.
    key_of: HashMap<String, Key>,
}

impl PodEntries {
    /// Inserts `entry` and keeps a status written since it was read. A pod that follows a deleted
    /// one starts without a status, even if its unchanged file gives it the same uid.
    pub(super) fn replace(&mut self, key: &Key, mut entry: PodEntry) {
        let is_next =
            |before: &Pod| before.metadata.is_deleted() && !entry.current.object.metadata.is_deleted();
        if let Some(before) = self.by_key.get(key).map(|before| &before.current.object)
            && before.metadata.uid == entry.current.object.metadata.uid
            && !is_next(before)
        {
            Arc::make_mut(&mut entry.current.object).status = before.status.clone();
        }
        self.insert(key.clone(), entry);
    }

    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(removed) = self.by_key.remove(key) {
            self.forget_uid(key, &removed);
        }
    }

    pub(super) fn find_uid(&self, uid: &str) -> Option<&PodEntry> {
        self.by_key.get(self.key_of.get(uid)?)
    }

    pub(super) fn find_uid_mut(&mut self, uid: &str) -> Option<&mut PodEntry> {
        self.by_key.get_mut(self.key_of.get(uid)?)
    }

    pub(super) fn find_uid_entry(&self, uid: &str) -> Option<(Key, PodEntry)> {
        self.by_key.get_key_value(self.key_of.get(uid)?).map(|(key, entry)| (key.clone(), entry.clone()))
    }

    fn insert(&mut self, key: Key, entry: PodEntry) {
        let uid = entry.current.object.metadata.uid.clone();
        if let Some(before) = self.by_key.insert(key.clone(), entry) {
            self.forget_uid(&key, &before);
        }
        self.key_of.insert(uid, key);
    }

    fn forget_uid(&mut self, key: &Key, entry: &PodEntry) {
        let uid = &entry.current.object.metadata.uid;
        if self.key_of.get(uid) == Some(key) {
            self.key_of.remove(uid);
        }
    }
}

impl FromIterator<(Key, PodEntry)> for PodEntries {
    fn from_iter<I: IntoIterator<Item = (Key, PodEntry)>>(entries: I) -> Self {
        let mut all = Self::default();
        entries.into_iter().for_each(|(key, entry)| all.insert(key, entry));
        all
    }
}

impl Deref for PodEntries {
    type Target = BTreeMap<Key, PodEntry>;

    fn deref(&self) -> &Self::Target {
        &self.by_key
    }
}
