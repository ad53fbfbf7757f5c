//! Removes what volumes, snapshots and killed calls have in the pool. A new driver moves all that is to go
//! to the trash, and then listens: millions of files take minutes, and it answers calls meanwhile.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use linux::tree::Trash;

use super::{Place, Pool, is_absent};
use crate::backend::VolumeBackend as _;
use crate::error::{Result, Step, chain};
use crate::model::ids::{SnapshotId, VolumeId};

/// When a call waits until the removal is on disk. That takes time, so a cut, which clears its place first, does
/// not wait for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IsOnDisk {
    IfItWasThere,
    Always,
}

impl Pool {
    /// Removes everything at a place. Its name disappears first and at once; if the driver is
    /// killed after that, a repeated call removes the rest.
    pub(super) fn clear(&self, place: Place<'_>) -> linux::Result<()> {
        self.clear_at(place, IsOnDisk::IfItWasThere)
    }

    fn clear_at(&self, place: Place<'_>, removal: IsOnDisk) -> linux::Result<()> {
        if self.is_starting() {
            return self.clear_later(place);
        }
        let (live, trash) = (place.path(), self.trash.join(place.name));
        let was_there = !is_absent(&live);
        self.remover.remove(&self.incoming.join(place.name))?;
        // Left by a killed deletion; the rename would fail on it.
        self.remover.remove(&trash)?;
        let is_aside = linux::tree::set_aside(&live, &trash, |path| self.remover.remove(path))?;
        if was_there || removal == IsOnDisk::Always {
            sync_removal(place);
        }
        if is_aside { self.remover.remove(&trash) } else { Ok(()) }
    }

    /// [`Self::clear`] for a caller that forgets the place then: in a pool that has just gone away, everything is absent.
    /// What a killed call removed before may not be gone on disk.
    pub(super) fn delete_at(&self, place: Place<'_>, what: &'static str) -> Result<()> {
        self.check_present()?;
        self.clear_at(place, IsOnDisk::Always).step(what)?;
        self.check_present()
    }

    pub(super) fn is_starting(&self) -> bool {
        self.is_starting.load(Ordering::Relaxed)
    }

    /// [`Pool::clear`] for a driver that does not listen yet.
    fn clear_later(&self, place: Place<'_>) -> linux::Result<()> {
        let places = [self.incoming.join(place.name), self.trash.join(place.name), place.path()];
        let mut taken = Vec::new();
        for path in &places {
            taken.extend(self.take(path)?);
        }
        sync_removal(place);
        self.remove_in_background(taken);
        Ok(())
    }

    /// [`Pool::sweep`] for a driver that does not listen yet.
    pub(super) fn sweep_later(&self) -> linux::Result<()> {
        let mut taken = Vec::new();
        for path in leftovers_in(&self.incoming)?.into_iter().chain(leftovers_in(&self.trash)?) {
            match path.file_name().and_then(|name| name.to_str()) {
                Some(name) if name.starts_with(Trash::PREFIX) => taken.push(path),
                _ => match self.take(&path) {
                    Ok(new) => taken.extend(new),
                    Err(error) => {
                        tracing::error!(path = %path.display(), error = chain(&error), "a leftover stays in the pool");
                    }
                },
            }
        }
        self.remove_in_background(taken);
        Ok(())
    }

    fn take(&self, path: &Path) -> linux::Result<Option<PathBuf>> {
        self.leaving.take_or(path, |path| self.remover.remove(path))
    }

    fn remove_in_background(&self, trees: Vec<PathBuf>) {
        if !trees.is_empty() {
            tracing::info!(trees = trees.len(), "removing an earlier driver's leftovers in the pool");
        }
        self.remover.remove_in_background(trees);
    }
}

/// A name that is gone from its directory may be back after a power cut, and the journal does not know it then. On a
/// full disk it goes nevertheless.
fn sync_removal(place: Place<'_>) {
    if let Err(error) = linux::atomic_file::sync_dir(place.live) {
        tracing::warn!(error = chain(&error), "a removal may not be on disk yet");
    }
}

/// The trees in `dir`, which is `incoming` or `trash`.
pub(super) fn leftovers_in(dir: &Path) -> linux::Result<Vec<PathBuf>> {
    let listed = |e| linux::Error::at("list", dir, e);
    let is_tree = |name: &str| {
        name.starts_with(Trash::PREFIX)
            || VolumeId::parse(name).is_some()
            || SnapshotId::parse(name).is_some()
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(listed)? {
        let entry = entry.map_err(listed)?;
        found.extend(entry.file_name().to_str().is_some_and(is_tree).then(|| entry.path()));
    }
    Ok(found)
}
