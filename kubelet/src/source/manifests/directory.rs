//! The directory's files, read and parsed once per change.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::reader::{self, Outcome, Readers};
use super::seen::{Fingerprint, SeenFile};

/// How long one scan waits for files that are being read. A slower file counts in a later scan and
/// does not delay others.
const TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("the manifest directory {} cannot be read: {cause}", path.display())]
    Missing { path: PathBuf, cause: io::Error },
    #[error(
        "the manifest directory {} is empty and not the one before (unmounted? replaced?)",
        path.display()
    )]
    ReplacedByEmpty { path: PathBuf },
}

/// Identifies the directory, independent of its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
}

/// All manifest files.
#[derive(Debug, Default)]
pub(super) struct Files {
    by_path: BTreeMap<PathBuf, SeenFile>,
    /// Files that are still being read; `by_path` has their earlier content.
    unread: BTreeSet<PathBuf>,
    /// Every file of the last listing was read then, is there now and is unchanged.
    pub(super) keeps_known: bool,
}

impl Files {
    /// One file that is still being read.
    #[cfg(test)]
    pub(super) fn reading(path: &str) -> Self {
        Self { unread: BTreeSet::from([PathBuf::from(path)]), ..Self::default() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, &SeenFile)> {
        self.by_path.iter().map(|(path, file)| (path.as_path(), file))
    }

    /// Whether the file has mistakes, so that it may describe objects that `by_path` lacks.
    pub(super) fn is_broken(&self, path: &Path) -> bool {
        self.by_path.get(path).is_some_and(|file| !file.mistakes.is_empty())
    }

    /// Whether some file is still being read: it may describe any object.
    pub(super) fn is_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    pub(super) fn is_valid(&self, path: &Path) -> bool {
        self.by_path.get(path).is_some_and(|file| file.mistakes.is_empty())
    }

    pub(super) fn mistakes(&self, path: &Path) -> Vec<String> {
        self.by_path.get(path).map(|file| file.mistakes.clone()).unwrap_or_default()
    }

    pub(super) fn fingerprint(&self, path: &Path) -> Option<Fingerprint> {
        self.by_path.get(path).map(|file| file.fingerprint.clone())
    }
}

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    state_file: PathBuf,
    identity: Option<Identity>,
    known: Files,
    readers: Readers,
}

impl Directory {
    /// Loads the directory's identity from the state file of an earlier run. If the file is missing
    /// or damaged, the identity is unknown.
    pub(super) fn open(path: PathBuf, state_file: PathBuf) -> Self {
        let identity = fs::read(&state_file).ok().and_then(|content| serde_json::from_slice(&content).ok());
        Self { path, state_file, identity, known: Files::default(), readers: Readers::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Lists all current files. `expects_some`: objects came from here, so an empty directory with
    /// another identity is an error.
    pub(super) fn list(&mut self, expects_some: bool) -> Result<Files, Unreadable> {
        let missing = |cause| Unreadable::Missing { path: self.path.clone(), cause };
        let identity = identity(&fs::metadata(&self.path).map_err(missing)?);
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(missing)? {
            let path = entry.map_err(missing)?.path();
            if !is_hidden(&path) {
                paths.push(path);
            }
        }
        let files = self.read(paths);
        if self.identity != Some(identity) {
            if files.by_path.is_empty() && files.unread.is_empty() && expects_some {
                return Err(Unreadable::ReplacedByEmpty { path: self.path.clone() });
            }
            self.adopt(identity);
        }
        Ok(files)
    }

    /// Saves the listing for the next comparison.
    pub(super) fn remember(&mut self, mut files: Files) {
        for file in files.by_path.values_mut() {
            file.is_new = false;
        }
        self.known = files;
    }

    fn adopt(&mut self, identity: Identity) {
        self.identity = Some(identity);
        let content = serde_json::to_vec(&identity).expect("two numbers");
        if let Err(error) = linux::atomic_file::write(&self.state_file, &content, 0o600) {
            // Only the next start's protection against a lost mount is weaker.
            tracing::warn!(error = %linux::chain(&error), "cannot save the manifest directory's identity");
        }
    }

    /// Reuses unchanged files and reads the others; leaves slow ones to the next scan.
    fn read(&mut self, paths: Vec<PathBuf>) -> Files {
        let mut files = Files::default();
        let mut wanted = Vec::new();
        let mut unchanged = 0;
        for path in paths {
            let known = self.known.by_path.get(&path);
            let fingerprint = reader::plain_fingerprint(&path);
            match known.filter(|known| fingerprint.as_ref() == Some(&known.fingerprint)) {
                Some(known) => {
                    unchanged += 1;
                    files.by_path.insert(path, known.clone());
                }
                None => wanted.push((path, known.map(|known| known.fingerprint.clone()))),
            }
        }
        let mut finished = self.readers.read(&wanted, Instant::now() + TIMEOUT);
        for (path, _) in wanted {
            let known = || self.known.by_path.get(&path).cloned();
            let read = finished.remove(&path);
            let is_late = read.as_ref().is_some_and(|read| read.is_late);
            if is_late {
                files.unread.insert(path.clone());
            }
            let file = match read.map(|read| read.outcome) {
                Some(Outcome::NoFile) => None,
                Some(Outcome::Unchanged) => {
                    unchanged += usize::from(!is_late);
                    known()
                }
                Some(Outcome::Read(file)) => Some(file),
                None if self.readers.is_overdue(&path) => {
                    Some(SeenFile::broken(Fingerprint::none(), &path, "its file system does not answer"))
                }
                None => {
                    files.unread.insert(path.clone());
                    known()
                }
            };
            if let Some(file) = file {
                files.by_path.insert(path, file);
            }
        }
        files.keeps_known = unchanged == self.known.by_path.len() && self.known.unread.is_empty();
        files
    }
}

fn identity(directory: &Metadata) -> Identity {
    Identity { device: directory.dev(), inode: directory.ino() }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}
