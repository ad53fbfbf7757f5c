//! The directory's files, read and parsed once each time they change.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::manifest::{self, Manifest};

/// As kubelet's: nobody writes this much by hand.
const LARGEST_FILE: u64 = 10 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error("the manifest directory {} cannot be read: {cause}", path.display())]
    Missing { path: PathBuf, cause: io::Error },
    #[error(
        "the manifest directory {} is another one than before, and empty (unmounted? replaced?)",
        path.display()
    )]
    ReplacedByEmpty { path: PathBuf },
}

/// Which directory it is, wherever its name points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    device: u64,
    inode: u64,
}

/// Tells one version of a file from another without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fingerprint {
    identity: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// A file as it was read.
#[derive(Debug, Clone)]
pub(super) struct SeenFile {
    fingerprint: Fingerprint,
    pub(super) manifests: Arc<Vec<Manifest>>,
    /// Each with its place; not empty: the file says less than it should.
    pub(super) mistakes: Vec<String>,
    /// Not read before in this form.
    pub(super) is_new: bool,
}

/// Every manifest file, by path.
#[derive(Debug, Default)]
pub(super) struct Files(BTreeMap<PathBuf, SeenFile>);

impl Files {
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, &SeenFile)> {
        self.0.iter().map(|(path, file)| (path.as_path(), file))
    }

    pub(super) fn has_mistakes(&self, path: &Path) -> bool {
        self.0.get(path).is_some_and(|file| !file.mistakes.is_empty())
    }

    pub(super) fn is_good(&self, path: &Path) -> bool {
        self.0.get(path).is_some_and(|file| file.mistakes.is_empty())
    }

    pub(super) fn mistakes(&self, path: &Path) -> Vec<String> {
        self.0.get(path).map(|file| file.mistakes.clone()).unwrap_or_default()
    }

    pub(super) fn fingerprint(&self, path: &Path) -> Option<Fingerprint> {
        self.0.get(path).map(|file| file.fingerprint.clone())
    }
}

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    state_file: PathBuf,
    identity: Option<Identity>,
    known: Files,
}

impl Directory {
    /// Which directory it was comes from the state file of an earlier run; a
    /// missing or damaged one means that nothing is known, not that all is well.
    pub(super) fn open(path: PathBuf, state_file: PathBuf) -> Self {
        let identity = fs::read(&state_file).ok().and_then(|content| serde_json::from_slice(&content).ok());
        Self { path, state_file, identity, known: Files::default() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Every file as it is now. `expects_some`: objects came from here, so that
    /// an empty directory which is not the one before is no answer.
    pub(super) fn list(&mut self, expects_some: bool) -> Result<Files, Unreadable> {
        let missing = |cause| Unreadable::Missing { path: self.path.clone(), cause };
        let identity = identity(&fs::metadata(&self.path).map_err(missing)?);
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.path).map_err(missing)? {
            let path = entry.map_err(missing)?.path();
            if !is_hidden(&path)
                && let Some(file) = self.look_at(&path)
            {
                files.insert(path, file);
            }
        }
        if self.identity != Some(identity) {
            if files.is_empty() && expects_some {
                return Err(Unreadable::ReplacedByEmpty { path: self.path.clone() });
            }
            self.adopt(identity);
        }
        Ok(Files(files))
    }

    /// What was listed is the base of the next comparison.
    pub(super) fn remember(&mut self, mut files: Files) {
        for file in files.0.values_mut() {
            file.is_new = false;
        }
        self.known = files;
    }

    fn adopt(&mut self, identity: Identity) {
        self.identity = Some(identity);
        let content = serde_json::to_vec(&identity).expect("two numbers");
        if let Err(error) = linux::atomic_file::write(&self.state_file, &content, 0o600) {
            // Only the protection of the next start against a lost mount is weaker.
            tracing::warn!(error = %trace::error_chain(&error), "the manifest directory is not remembered");
        }
    }

    /// `None` for what is no file, or is gone by now.
    fn look_at(&self, path: &Path) -> Option<SeenFile> {
        let metadata = match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => metadata,
            Ok(_) => return None,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return None,
            Err(cause) => return Some(SeenFile::broken(Fingerprint::none(), path, &cause.to_string())),
        };
        let fingerprint = Fingerprint::of(&metadata);
        match self.known.0.get(path) {
            Some(known) if known.fingerprint == fingerprint => Some(known.clone()),
            _ => SeenFile::read(path, fingerprint, metadata.len()),
        }
    }
}

impl SeenFile {
    /// `None` when the file is gone by now.
    fn read(path: &Path, fingerprint: Fingerprint, size: u64) -> Option<Self> {
        if size > LARGEST_FILE {
            let message = format!("{size} bytes: a manifest may have {LARGEST_FILE} at most");
            return Some(Self::broken(fingerprint, path, &message));
        }
        let text = match read_text(path) {
            Ok(text) => text,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return None,
            Err(cause) => return Some(Self::broken(fingerprint, path, &cause.to_string())),
        };
        if text.is_empty() {
            // Cut off before it is written anew, most likely; it takes nothing back.
            return Some(Self::broken(
                fingerprint,
                path,
                "the file is empty: remove it to remove its objects",
            ));
        }
        let parsed = manifest::parse(&text, &path.display().to_string());
        let mistakes = parsed.errors.iter().map(ToString::to_string).collect();
        Some(Self { fingerprint, manifests: Arc::new(parsed.manifests), mistakes, is_new: true })
    }

    fn broken(fingerprint: Fingerprint, path: &Path, reason: &str) -> Self {
        let mistakes = vec![format!("{}: {reason}", path.display())];
        Self { fingerprint, manifests: Arc::default(), mistakes, is_new: true }
    }
}

impl Fingerprint {
    fn of(file: &Metadata) -> Self {
        Self {
            identity: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    /// Of what cannot even be looked at.
    fn none() -> Self {
        Self { identity: (0, 0), size: 0, modified: (0, 0), changed: (0, 0) }
    }
}

/// Reads no more than allowed, even of a file that grows meanwhile.
fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(LARGEST_FILE).read_to_string(&mut text)?;
    Ok(text)
}

fn identity(directory: &Metadata) -> Identity {
    Identity { device: directory.dev(), inode: directory.ino() }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}
