//! The store's files: `<dir>/<Kind>/<namespace>_<name>.json`, one object each.
//!
//! Names are DNS labels by the time they come here (`manifest` checks), so they
//! hold neither `/` nor `_`.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use runtime::while_others_go_on;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::shelf::{Entry, Key, PodEntry, PodShelf, Shelf};
use super::{Error, Shelved, full_disk};
use crate::objects::{Kind, now};

/// Manifests may hold what is nobody else's business.
const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

const KEPT: [Kind; 5] =
    [Kind::Pod, Kind::PersistentVolume, Kind::PersistentVolumeClaim, Kind::StorageClass, Kind::CsiDriver];

#[derive(Debug)]
pub(super) struct Disk {
    dir: PathBuf,
}

/// What a written object must outlive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    /// `kill -9` of the kubelet.
    ProcessDeath,
    /// The machine as well, but a power cut may leave what was there before.
    PowerLossOrBefore,
    /// The machine as well: waits for the disk.
    PowerLoss,
}

/// An object whose file could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    pub(super) kind: Kind,
    /// By the file's name.
    pub(super) key: Key,
    pub(super) message: String,
}

impl Disk {
    pub(super) fn open(dir: &Path) -> Result<Self, Error> {
        for kind in KEPT {
            let path = dir.join(kind.as_str());
            fs::DirBuilder::new()
                .recursive(true)
                .mode(DIR_MODE)
                .create(&path)
                .and_then(|()| remove_unfinished(&path))
                .map_err(|cause| Error::Read { path, cause })?;
        }
        Ok(Self { dir: dir.to_owned() })
    }

    /// The objects of a kind. What cannot be read is set aside: it keeps nothing else
    /// from starting.
    pub(super) fn load<T: Shelved>(&self, set_aside: &mut Vec<SetAside>) -> Result<Shelf<T>, Error> {
        let mut entries = Vec::new();
        for (path, mut entry) in self.read_all::<Entry<T>>(T::KIND, set_aside)? {
            if full_disk::is_grave(&path) {
                let metadata = std::sync::Arc::make_mut(&mut entry.object).metadata_mut();
                metadata.deletion_timestamp.get_or_insert_with(now);
            }
            entries.push((Key::of(&*entry.object), entry));
        }
        Ok(entries.into_iter().collect())
    }

    pub(super) fn load_pods(&self, set_aside: &mut Vec<SetAside>) -> Result<PodShelf, Error> {
        let mut entries = Vec::new();
        for (path, mut entry) in self.read_all::<PodEntry>(Kind::Pod, set_aside)? {
            if full_disk::is_grave(&path) {
                entry.successor = None;
                entry.mark_deleted(None, now());
            }
            entries.push((Key::of(&*entry.current.object), entry));
        }
        Ok(entries.into_iter().collect())
    }

    fn read_all<T: DeserializeOwned>(
        &self,
        kind: Kind,
        set_aside: &mut Vec<SetAside>,
    ) -> Result<Vec<(PathBuf, T)>, Error> {
        let mut entries = Vec::new();
        for path in self.files(kind)? {
            match read(&path) {
                Ok(entry) => entries.push((path, entry)),
                Err(cause) => set_aside.push(self.set_aside(kind, &path, &cause)),
            }
        }
        Ok(entries)
    }

    fn set_aside(&self, kind: Kind, path: &Path, cause: &Error) -> SetAside {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let stem = full_disk::unburied(path).with_extension("");
        let stem = stem.file_name().unwrap_or_default().to_string_lossy();
        let (namespace, name) = stem.split_once('_').unwrap_or_default();
        let kept = self.keep(&format!("{kind}_{file}"), |place| fs::rename(path, place));
        let message =
            format!("{}: the {kind} starts without what it held; {kept}", trace::error_chain(cause));
        tracing::error!(message);
        SetAside { kind, key: Key::new(namespace, name), message }
    }

    /// Lets `put` bring a file that cannot be read to where such files are kept; in words.
    /// Of several with one name the last is kept.
    pub(super) fn keep(&self, name: &str, put: impl FnOnce(&Path) -> std::io::Result<()>) -> String {
        let dir = self.dir.with_file_name("unreadable");
        let place = dir.join(name);
        let kept =
            fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(&dir).and_then(|()| put(&place));
        match kept {
            Ok(()) => format!("the file is kept as {}", place.display()),
            Err(error) => format!("and cannot be kept as {}: {error}", place.display()),
        }
    }

    pub(super) fn write(
        &self,
        kind: Kind,
        key: &Key,
        entry: &impl Serialize,
        durability: Durability,
    ) -> Result<(), Error> {
        let path = self.path(kind, key);
        let content = serde_json::to_vec_pretty(entry).expect("objects have string keys only");
        match durability {
            Durability::PowerLoss => {
                while_others_go_on(|| linux::atomic_file::write(&path, &content, FILE_MODE))
            }
            Durability::PowerLossOrBefore => {
                while_others_go_on(|| linux::atomic_file::write_whole(&path, &content, FILE_MODE))
            }
            Durability::ProcessDeath => write_fast(&path, &content),
        }
        // What a full disk left of an earlier deletion is older than this.
        .and_then(|()| linux::atomic_file::discard(&full_disk::grave_of(&path)))
        .map_err(|cause| keep_error(kind, Path::new(&key.name), cause))
    }

    /// [`Disk::write`] of an object that is marked deleted. A full disk is no
    /// error: the mark is made by a rename, or else stands in memory alone.
    pub(super) fn write_deleted(
        &self,
        kind: Kind,
        key: &Key,
        entry: &impl Serialize,
        durability: Durability,
    ) -> Result<(), Error> {
        match self.write(kind, key, entry, durability) {
            Err(Error::Keep { cause, .. }) if full_disk::is_cause(&cause) => {
                let path = self.path(kind, key);
                if let Err(error) = full_disk::bury(&path)
                    && !full_disk::grave_of(&path).exists()
                {
                    tracing::warn!(%kind, name = key.name, error = trace::error_chain(&error),
                        "the disk is full: a deletion is known only until the kubelet ends");
                }
                Ok(())
            }
            written => written,
        }
    }

    pub(super) fn remove(&self, kind: Kind, key: &Key) -> Result<(), Error> {
        let path = self.path(kind, key);
        linux::atomic_file::discard(&full_disk::grave_of(&path))
            .and_then(|()| while_others_go_on(|| linux::atomic_file::remove(&path)))
            .map_err(|cause| keep_error(kind, Path::new(&key.name), cause))
    }

    fn path(&self, kind: Kind, key: &Key) -> PathBuf {
        self.dir.join(kind.as_str()).join(format!("{}_{}.json", key.namespace, key.name))
    }

    /// The files of a kind, in order; leftovers of interrupted writes begin with a dot.
    fn files(&self, kind: Kind) -> Result<Vec<PathBuf>, Error> {
        let dir = self.dir.join(kind.as_str());
        let unreadable = |cause| Error::Read { path: dir.clone(), cause };
        let mut paths = Vec::new();
        for entry in fs::read_dir(&dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            if !entry.file_name().as_encoded_bytes().starts_with(b".") {
                paths.push(entry.path());
            }
        }
        paths.sort();
        let newer: Vec<PathBuf> = paths.clone();
        paths.retain(|path| !full_disk::is_grave(path) || !newer.contains(&full_disk::unburied(path)));
        Ok(paths)
    }
}

/// What a kill in the middle of a write left in `dir`.
fn remove_unfinished(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let content = fs::read(path).map_err(|cause| Error::Read { path: path.to_owned(), cause })?;
    serde_json::from_slice(&content).map_err(|cause| Error::Corrupt { path: path.to_owned(), cause })
}

/// Whole or not at all for every reader, without an fsync.
fn write_fast(path: &Path, content: &[u8]) -> linux::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temp = path.with_file_name(format!(".{name}.tmp"));
    fs::write(&temp, content).map_err(|e| {
        drop(fs::remove_file(&temp));
        linux::Error::at("write", &temp, e)
    })?;
    fs::rename(&temp, path).map_err(|e| linux::Error::at("rename to", path, e))
}

fn keep_error(kind: Kind, name: &Path, cause: linux::Error) -> Error {
    Error::Keep { kind, name: name.display().to_string(), cause }
}
