//! Trees of the runtime that are no longer used (`linux::tree::Trash`).
//!
//! Invariant: trees that a killed runtime left here are removed by the next one, in the background.

use std::path::{Path, PathBuf};

use crate::disk::record;
use crate::error::{Result, chain};

#[derive(Debug)]
pub(crate) struct Trash(linux::tree::Trash);

impl Trash {
    /// `dir` must be on the file system of the trees that will be moved there.
    pub(crate) fn open(dir: PathBuf) -> Result<Self> {
        record::ensure_dir(&dir)?;
        let left: Vec<PathBuf> = record::names(&dir)?.into_iter().map(|name| dir.join(name)).collect();
        if !left.is_empty() {
            tracing::info!(trees = left.len(), "removing leftovers of an earlier runtime");
        }
        remove_in_background(left);
        Ok(Self(linux::tree::Trash::new(dir)))
    }

    /// Moves `path` to the trash. Returns its new path, or `None` if it does not exist.
    pub(crate) fn take(&self, path: &Path) -> Result<Option<PathBuf>> {
        Ok(self.0.take(path)?)
    }

    /// When this returns, `path` is gone; its space is freed later.
    pub(crate) fn remove_later(&self, path: &Path) -> Result<()> {
        remove_in_background(self.take(path)?.into_iter().collect());
        Ok(())
    }
}

/// Removes trees that [`Trash::take`] returned.
pub(crate) fn remove_in_background(trees: Vec<PathBuf>) {
    linux::tree::remove_in_background(trees, |error| {
        tracing::warn!(error = %chain(&error), "a tree stays in the trash until the next start");
    });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::{Duration, Instant};

    use super::*;

    fn wait_until_empty(dir: &Path) {
        let begun = Instant::now();
        while !record::names(dir).unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", record::names(dir));
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_tree_leaves_its_place_at_once_and_the_disk_later() {
        let root = tempfile::tempdir().unwrap();
        let trash = Trash::open(root.path().join("trash")).unwrap();
        for _ in 0..2 {
            let tree = root.path().join("tree");
            fs::create_dir_all(tree.join("a/b")).unwrap();
            trash.remove_later(&tree).unwrap();
            assert!(!tree.exists());
        }
        wait_until_empty(&root.path().join("trash"));
        trash.remove_later(&root.path().join("tree")).unwrap();
    }

    #[test]
    fn what_an_earlier_runtime_has_left_goes_too() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("trash");
        fs::create_dir_all(dir.join("1-0-0/a")).unwrap();
        let trash = Trash::open(dir.clone()).unwrap();
        fs::create_dir(root.path().join("new")).unwrap();
        let taken = trash.take(&root.path().join("new")).unwrap().expect("it is there");
        record::remove_tree(&taken).unwrap();
        wait_until_empty(&dir);
    }
}
