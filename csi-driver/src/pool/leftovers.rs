//! What calls that were killed have left in the pool. A new driver moves it out of the way
//! and listens; the removal goes on beside its calls, since millions of files take minutes.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use super::{Place, Pool};
use crate::error::chain;
use crate::volume::{SnapshotId, VolumeId};

/// In `trash`: no volume and no snapshot is called so.
const PREFIX: &str = "left-";

/// How the pool removes what is large.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    is_starting: AtomicBool,
    next: AtomicU64,
}

impl Pool {
    /// Until `false`, trees are moved away at once and removed in the background.
    pub(crate) fn set_starting(&self, is_starting: bool) {
        self.leaving.is_starting.store(is_starting, Ordering::Relaxed);
    }

    pub(super) fn is_starting(&self) -> bool {
        self.leaving.is_starting.load(Ordering::Relaxed)
    }

    /// [`Pool::clear`] of a driver that does not listen yet.
    pub(super) fn clear_later(&self, place: Place<'_>) -> linux::Result<()> {
        let places = [self.incoming.join(place.name), self.trash.join(place.name), place.path()];
        let taken: linux::Result<Vec<_>> = places.iter().map(|path| self.take(path)).collect();
        remove_in_background(taken?.into_iter().flatten().collect());
        Ok(())
    }

    /// [`Pool::sweep`] of such a driver.
    pub(super) fn sweep_later(&self) -> linux::Result<()> {
        let mut taken = Vec::new();
        for path in leftovers_in(&self.incoming)?.into_iter().chain(leftovers_in(&self.trash)?) {
            match path.file_name().and_then(|name| name.to_str()) {
                Some(name) if name.starts_with(PREFIX) => taken.push(path),
                _ => taken.extend(self.take(&path)?),
            }
        }
        remove_in_background(taken);
        Ok(())
    }

    /// Moves a tree to a name that no call uses; `None` if it is not there.
    fn take(&self, path: &Path) -> linux::Result<Option<PathBuf>> {
        let number = self.leaving.next.fetch_add(1, Ordering::Relaxed);
        let moment = UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let taken = self.trash.join(format!("{PREFIX}{moment}-{number}"));
        match std::fs::rename(path, &taken) {
            Ok(()) => Ok(Some(taken)),
            // And not the trash, which may have gone since the pool was looked at.
            Err(e) if e.kind() == ErrorKind::NotFound && super::is_absent(path) => Ok(None),
            Err(e) => Err(linux::Error::at("move to trash", path, e)),
        }
    }
}

/// Trees in `dir`, which is `incoming` or `trash`.
pub(super) fn leftovers_in(dir: &Path) -> linux::Result<Vec<PathBuf>> {
    let listed = |e| linux::Error::at("list", dir, e);
    let is_tree = |name: &str| {
        name.starts_with(PREFIX) || VolumeId::parse(name).is_some() || SnapshotId::parse(name).is_some()
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(listed)? {
        let entry = entry.map_err(listed)?;
        found.extend(entry.file_name().to_str().is_some_and(is_tree).then(|| entry.path()));
    }
    Ok(found)
}

fn remove_in_background(trees: Vec<PathBuf>) {
    if trees.is_empty() {
        return;
    }
    tracing::info!(trees = trees.len(), "removing what an earlier driver has left in the pool");
    let remove = move || {
        for tree in trees {
            if let Err(error) = linux::tree::remove(&tree) {
                tracing::warn!(error = chain(&error), "a tree stays in the trash until the next start");
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("trash".to_owned()).spawn(remove) {
        tracing::warn!(%error, "the pool's trash stays until the next start");
    }
}
