//! A directory for unused trees. A tree is moved here at once, by a rename, and removed in the
//! background: millions of files take minutes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use crate::{Error, Result};

#[derive(Debug)]
pub struct Trash {
    dir: PathBuf,
    next: AtomicU64,
}

impl Trash {
    /// The prefix of every name that [`Self::take`] gives.
    pub const PREFIX: &str = "left-";

    /// `dir` must exist, on the file system of the trees that will be moved into it.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, next: AtomicU64::new(0) }
    }

    /// Moves `path` to an unused name, and returns that path. `None` if there is nothing to remove
    /// (any more), as with [`set_aside`].
    pub fn take(&self, path: &Path) -> Result<Option<PathBuf>> {
        self.take_or(path, super::remove)
    }

    /// As [`Self::take`]; `remove` removes what cannot be moved.
    pub fn take_or(&self, path: &Path, remove: impl FnOnce(&Path) -> Result<()>) -> Result<Option<PathBuf>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let moment = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let taken = self.dir.join(format!("{}{moment}-{number}", Self::PREFIX));
        Ok(set_aside(path, &taken, remove)?.then_some(taken))
    }
}

/// Moves `path` to `trash`, which must not exist. Returns false if there is nothing to move: `path`
/// does not exist, or was removed in place, by `remove`. The latter happens on a full Btrfs, whose metadata
/// have no space for a rename, while removals free space.
pub fn set_aside(path: &Path, trash: &Path, remove: impl FnOnce(&Path) -> Result<()>) -> Result<bool> {
    match std::fs::rename(path, trash) {
        Ok(()) => Ok(true),
        // Unless the directory of `trash` is missing, without which nothing can be moved.
        Err(e) if e.kind() == ErrorKind::NotFound && is_absent(path) => Ok(false),
        Err(e) if e.kind() == ErrorKind::StorageFull => remove(path).map(|()| false),
        Err(e) => Err(Error::at("move to trash", path, e)),
    }
}

fn is_absent(path: &Path) -> bool {
    matches!(std::fs::symlink_metadata(path), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// Removes trees of [`Trash::take`] one after the other on a separate thread. Calls `failed` for
/// each tree that stays, or once if no thread can be started.
pub fn remove_in_background(trees: Vec<PathBuf>, failed: fn(Error)) {
    if trees.is_empty() {
        return;
    }
    let first = trees.first().cloned().unwrap_or_default();
    let remove = move || trees.iter().filter_map(|tree| super::remove(tree).err()).for_each(failed);
    if let Err(e) = std::thread::Builder::new().name("trash".to_owned()).spawn(remove) {
        failed(Error::at("start a thread that removes", &first, e));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_moved_is_no_absence() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        let trash = Trash::new(root.path().join("trash"));
        assert_eq!(trash.take(&tree).unwrap_err().errno(), nix::errno::Errno::ENOENT);
        std::fs::create_dir(root.path().join("trash")).unwrap();
        let taken = trash.take(&tree).unwrap().expect("it is there");
        assert!(taken.is_dir() && !tree.exists());
        assert_eq!(trash.take(&tree).unwrap(), None);
    }
}
