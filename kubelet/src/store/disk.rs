//! The store's files: `<dir>/<Kind>/<namespace>_<name>.json`, one object each. A long name is cut and
//! followed by a digest: `<namespace>_<begin of the name>_<digest>.json`.
//!
//! `manifest` has checked that names are DNS subdomains, so they contain neither `/` nor `_`.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use runtime::while_others_go_on;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::entries::{Entries, Entry, Key, PodEntries, PodEntry};
use super::{Error, Stored, full_disk};
use crate::objects::{Kind, now};

/// Manifests may contain secrets.
const DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// The longest file name without its extension. The names of temporary, deleted and unreadable files are
/// longer, and a file system takes 255 bytes.
const LONGEST_STEM: usize = 200;

const KEPT: [Kind; 10] = [
    Kind::Pod,
    Kind::PersistentVolume,
    Kind::PersistentVolumeClaim,
    Kind::StorageClass,
    Kind::CsiDriver,
    Kind::VolumeSnapshot,
    Kind::VolumeSnapshotClass,
    Kind::VolumeSnapshotContent,
    Kind::ConfigMap,
    Kind::Secret,
];

#[derive(Debug)]
pub(super) struct Disk {
    dir: PathBuf,
}

/// Which failures a written object survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    /// `kill -9` of the kubelet.
    ProcessDeath,
    /// Also a crash of the machine, but a power cut may restore the previous version.
    PowerLossOrBefore,
    /// Also a power cut: waits for the disk.
    PowerLoss,
}

/// An object whose file could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SetAside {
    pub(super) kind: Kind,
    /// From the file's name.
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
                .map_err(|source| Error::Read { path, source })?;
        }
        Ok(Self { dir: dir.to_owned() })
    }

    /// Loads the objects of a kind. An unreadable record is set aside, so that the rest can start.
    pub(super) fn load<T: Stored>(&self, set_aside: &mut Vec<SetAside>) -> Result<Entries<T>, Error> {
        let mut entries = Vec::new();
        for (path, mut entry) in self.read_all::<Entry<T>>(T::KIND, set_aside)? {
            if full_disk::is_deleted_path(&path) {
                let metadata = std::sync::Arc::make_mut(&mut entry.object).metadata_mut();
                metadata.deletion_timestamp.get_or_insert_with(now);
            }
            let key = Key::of(&*entry.object);
            self.rename_long(T::KIND, &key, &path)?;
            entries.push((key, entry));
        }
        Ok(entries.into_iter().collect())
    }

    pub(super) fn load_pods(&self, set_aside: &mut Vec<SetAside>) -> Result<PodEntries, Error> {
        let mut entries = Vec::new();
        for (path, mut entry) in self.read_all::<PodEntry>(Kind::Pod, set_aside)? {
            entry.begin_generations();
            if full_disk::is_deleted_path(&path) {
                entry.successor = None;
                entry.mark_deleted(None, now());
            }
            let key = Key::of(&*entry.current.object);
            self.rename_long(Kind::Pod, &key, &path)?;
            entries.push((key, entry));
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
        let stem = full_disk::original_path(path).with_extension("");
        let stem = stem.file_name().unwrap_or_default().to_string_lossy();
        let (namespace, name) = stem.split_once('_').unwrap_or_default();
        let kept = self.keep(&format!("{kind}_{file}"), |place| fs::rename(path, place));
        let message = format!("{}: this {kind} is not loaded; {kept}", linux::chain(cause));
        tracing::error!(message);
        SetAside { kind, key: Key::new(namespace, name), message }
    }

    /// Moves or links an unreadable file to the directory for such files with `put`. Returns a
    /// description of the outcome. A later file of the same name replaces an earlier one.
    pub(super) fn keep(&self, name: &str, put: impl FnOnce(&Path) -> std::io::Result<()>) -> String {
        let dir = self.dir.with_file_name("unreadable");
        let place = dir.join(name);
        let kept =
            fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(&dir).and_then(|()| put(&place));
        match kept {
            Ok(()) => format!("the file is kept as {}", place.display()),
            Err(error) => format!("the file cannot be kept as {}: {error}", place.display()),
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
        // A deletion mark from a full disk is older than this version.
        .and_then(|()| linux::atomic_file::discard(&full_disk::deleted_path(&path)))
        .map_err(|source| keep_error(kind, Path::new(&key.name), source))
    }

    /// Like [`Disk::write`], for an object that is marked deleted. On a full disk the mark is made
    /// by a rename, or else only in memory; neither is an error.
    pub(super) fn write_deleted(
        &self,
        kind: Kind,
        key: &Key,
        entry: &impl Serialize,
        durability: Durability,
    ) -> Result<(), Error> {
        match self.write(kind, key, entry, durability) {
            Err(Error::Keep { source, .. }) if full_disk::is_cause(&source) => {
                let path = self.path(kind, key);
                if let Err(error) = full_disk::mark_deleted(&path)
                    && !full_disk::deleted_path(&path).exists()
                {
                    tracing::warn!(%kind, name = key.name, error = linux::chain(&error),
                        "the disk is full: the kubelet forgets this deletion when it exits");
                }
                Ok(())
            }
            written => written,
        }
    }

    pub(super) fn remove(&self, kind: Kind, key: &Key) -> Result<(), Error> {
        let path = self.path(kind, key);
        linux::atomic_file::discard(&full_disk::deleted_path(&path))
            .and_then(|()| while_others_go_on(|| linux::atomic_file::remove(&path)))
            .map_err(|source| keep_error(kind, Path::new(&key.name), source))
    }

    fn path(&self, kind: Kind, key: &Key) -> PathBuf {
        self.dir.join(kind.as_str()).join(format!("{}.json", stem(key)))
    }

    /// Earlier versions did not cut names. Only records of long names are renamed.
    fn rename_long(&self, kind: Kind, key: &Key, found: &Path) -> Result<(), Error> {
        let path = self.path(kind, key);
        let is_long = key.namespace.len() + 1 + key.name.len() > LONGEST_STEM;
        if !is_long || full_disk::original_path(found) == path {
            return Ok(());
        }
        let path = if full_disk::is_deleted_path(found) {
            full_disk::deleted_path(&path)
        } else {
            // It is older, and no mark of the renamed record.
            let _may_be_too_long = linux::atomic_file::discard(&full_disk::deleted_path(found));
            path
        };
        fs::rename(found, &path).map_err(|source| Error::Read { path: found.to_owned(), source })
    }

    /// The files of a kind, in order. Names of unfinished files begin with a dot.
    fn files(&self, kind: Kind) -> Result<Vec<PathBuf>, Error> {
        let dir = self.dir.join(kind.as_str());
        let unreadable = |source| Error::Read { path: dir.clone(), source };
        let mut paths = Vec::new();
        for entry in fs::read_dir(&dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            if !entry.file_name().as_encoded_bytes().starts_with(b".") {
                paths.push(entry.path());
            }
        }
        paths.sort();
        let newer: Vec<PathBuf> = paths.clone();
        paths.retain(|path| {
            !full_disk::is_deleted_path(path) || !newer.contains(&full_disk::original_path(path))
        });
        Ok(paths)
    }
}

/// The name of an object's file without its extension.
pub(super) fn stem(key: &Key) -> String {
    let whole = format!("{}_{}", key.namespace, key.name);
    if whole.len() <= LONGEST_STEM {
        return whole;
    }
    let digest = base16ct::lower::encode_string(&Sha256::digest(whole.as_bytes()));
    let begin = whole.floor_char_boundary(LONGEST_STEM - 1 - digest.len());
    format!("{}_{digest}", &whole[..begin])
}

/// Removes the temporary files of interrupted writes in `dir`.
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
    let content = fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&content).map_err(|source| Error::Corrupt { path: path.to_owned(), source })
}

/// Replaces a file atomically for readers, without an fsync.
fn write_fast(path: &Path, content: &[u8]) -> linux::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temp = path.with_file_name(format!(".{name}.tmp"));
    let created = OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(&temp);
    created.and_then(|mut file| file.write_all(content)).map_err(|e| {
        let _may_be_gone = fs::remove_file(&temp);
        linux::Error::at("write", &temp, e)
    })?;
    fs::rename(&temp, path).map_err(|e| linux::Error::at("rename to", path, e))
}

fn keep_error(kind: Kind, name: &Path, source: linux::Error) -> Error {
    Error::Keep { kind, name: name.display().to_string(), source }
}
