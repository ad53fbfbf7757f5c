//! A directory for trees that are not used any more: they leave their place at once, by a
//! rename, and are removed where nothing waits for them. Of millions of files that takes minutes.

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
    /// Of every name that [`Self::take`] gives.
    pub const PREFIX: &str = "left-";

    /// `dir` is there, and on the file system of all that will be put into it.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, next: AtomicU64::new(0) }
    }

    /// Moves `path` to a name that nothing has had before; where to, or `None` if there is
    /// nothing (more) to remove, as of [`set_aside`].
    pub fn take(&self, path: &Path) -> Result<Option<PathBuf>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let moment = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let taken = self.dir.join(format!("{}{moment}-{number}", Self::PREFIX));
        Ok(set_aside(path, &taken)?.then_some(taken))
    }
}

/// Moves `path`, which is to be removed, to `trash`, which does not exist; whether it is
/// there now. It is not where `path` does not exist, nor on a full Btrfs, whose metadata take
/// no rename, but removals, which give back: there the tree is removed in its place.
pub fn set_aside(path: &Path, trash: &Path) -> Result<bool> {
    match std::fs::rename(path, trash) {
        Ok(()) => Ok(true),
        // And not the directory of `trash`, without which nothing can be moved.
        Err(e) if e.kind() == ErrorKind::NotFound && is_absent(path) => Ok(false),
        Err(e) if e.kind() == ErrorKind::StorageFull => super::remove(path).map(|()| false),
        Err(e) => Err(Error::at("move to trash", path, e)),
    }
}

fn is_absent(path: &Path) -> bool {
    matches!(std::fs::symlink_metadata(path), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// Removes trees that were taken, one after the other, on a thread of its own. `failed` is told
/// of those that stay, or of all together where no thread can be started.
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
