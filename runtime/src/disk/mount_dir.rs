//! A directory of mount points, on a mount of its own.
//!
//! For each bind mount, and for each layer of an overlay, the kernel looks at all mounts directly
//! below the source's mount (fs/namespace.c, `copy_tree` and `has_locked_children`). A container
//! starts with about ten of these, whose sources are on the file system of the root directory.
//! Beside 300 pods with two mounts each, it started 2 ms later for that.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard, TryLockError};

use linux::mount::{self, UnmountMode};
use linux::rootfs::{Attributes, Propagation, set_attributes};

use crate::disk::record;
use crate::error::{Error, Result, chain};

#[derive(Debug)]
pub(crate) struct MountDir {
    path: PathBuf,
    /// Whether the directory is a mount. Read-locked while entries are mounted, so that it does not
    /// change meanwhile.
    is_mount: RwLock<bool>,
    /// Whether entries may be mounted in the directory itself: a new mount would hide them.
    has_plain_entries: AtomicBool,
    /// An administrator's mount, which stays.
    is_foreign: bool,
}

impl MountDir {
    /// Without the mount all works, but slower; so a failure is only logged.
    pub(crate) fn open(path: PathBuf) -> Self {
        let found = look(&path).unwrap_or_else(|error| {
            tracing::warn!(directory = %path.display(), error = %chain(&error), "look for mounts");
            Found { is_mount: false, is_foreign: false, has_plain_entries: true }
        });
        Self {
            path,
            is_mount: RwLock::new(found.is_mount),
            has_plain_entries: AtomicBool::new(found.has_plain_entries),
            is_foreign: found.is_foreign,
        }
    }

    pub(crate) fn entry(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.path.join(name.as_ref())
    }

    /// Does `work`, which mounts entries.
    pub(crate) fn use_for<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let read = || self.is_mount.read().unwrap_or_else(PoisonError::into_inner);
        let mut is_mount = read();
        if !*is_mount {
            drop(is_mount);
            record::ensure_dir(&self.path)?;
            self.mount();
            is_mount = read();
            if !*is_mount {
                self.has_plain_entries.store(true, Ordering::Release);
            }
        }
        let done = work();
        drop(is_mount);
        done
    }

    /// Mounts the directory on itself, unless that would hide mounted entries: those of an earlier
    /// version, or of a moment at which this was not possible.
    fn mount(&self) {
        // If it is locked, it is mounted just now, or entries are mounted in it.
        let Some(mut is_mount) = self.try_write() else { return };
        let mounted = if *is_mount { Ok(true) } else { self.mount_unless_it_hides() };
        match mounted {
            Ok(mounted) => *is_mount = mounted,
            Err(error) => {
                tracing::warn!(directory = %self.path.display(), error = %chain(&error), "mount on itself");
            }
        }
    }

    fn mount_unless_it_hides(&self) -> Result<bool> {
        if self.has_plain_entries.load(Ordering::Acquire) {
            let mut entries =
                std::fs::read_dir(&self.path).map_err(|e| Error::io("read directory", &self.path, e))?;
            if entries.next().is_some() {
                return Ok(false);
            }
        }
        let tree = mount::open_tree_clone(&self.path)?;
        // Out of the peer group of the file system's mount, which would get each entry's mount too.
        // If that mount is shared, attaching makes this one shared with its own copies elsewhere.
        let private = Attributes { propagation: Some(Propagation::Private), ..Attributes::default() };
        set_attributes(&tree, private)?;
        mount::move_mount(tree, &self.path)?;
        self.has_plain_entries.store(false, Ordering::Release);
        Ok(true)
    }

    /// Unmounts the directory if no entry is mounted; called after an entry was removed.
    pub(crate) fn unmount_if_unused(&self) {
        if self.is_foreign {
            return;
        }
        // If it is locked, entries are mounted in it.
        let Some(mut is_mount) = self.try_write() else { return };
        if *is_mount && mount::unmount(&self.path, UnmountMode::Plain).is_ok() {
            // EBUSY: other entries are mounted.
            *is_mount = false;
        }
    }

    fn try_write(&self) -> Option<RwLockWriteGuard<'_, bool>> {
        match self.is_mount.try_write() {
            Ok(is_mount) => Some(is_mount),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

struct Found {
    is_mount: bool,
    is_foreign: bool,
    has_plain_entries: bool,
}

fn look(path: &Path) -> Result<Found> {
    record::ensure_dir(path)?;
    let device = |path: &Path| {
        let found = std::fs::metadata(path).map_err(|e| Error::io("stat", path, e))?;
        Ok::<u64, Error>(found.dev())
    };
    if mount::type_at(path)?.is_some() {
        let is_foreign = device(path)? != device(&path.join(".."))?;
        return Ok(Found { is_mount: true, is_foreign, has_plain_entries: false });
    }
    let is_below = |point: &Path| point != path && point.starts_with(path);
    let has_plain_entries = linux::mountinfo::read()?.iter().any(|mount| is_below(&mount.mount_point));
    Ok(Found { is_mount: false, is_foreign: false, has_plain_entries })
}

#[cfg(test)]
mod tests {
    use linux::mount::{MountFlags, make_private, make_shared, mount_fs, unmount_if_mounted};

    use super::*;

    /// A directory on a mount of its own, which goes with it.
    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            mount_tmpfs(place.0.path());
            make_private(place.0.path()).unwrap();
            place
        }

        fn dir(&self) -> PathBuf {
            self.0.path().join("mounts")
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            unmount_if_mounted(self.0.path()).unwrap();
        }
    }

    fn mount_tmpfs(at: &Path) {
        std::fs::create_dir_all(at).unwrap();
        mount_fs("tmpfs", "test", at, MountFlags::default(), "").unwrap();
    }

    fn mount_in(dir: &MountDir, name: &str) {
        dir.use_for(|| {
            mount_tmpfs(&dir.entry(name));
            Ok(())
        })
        .unwrap();
    }

    fn remove(dir: &MountDir, name: &str) {
        unmount_if_mounted(&dir.entry(name)).unwrap();
        std::fs::remove_dir(dir.entry(name)).unwrap();
        dir.unmount_if_unused();
    }

    /// How many mounts there are at a path.
    fn mounts_at(path: &Path) -> usize {
        linux::mountinfo::read().unwrap().iter().filter(|mount| mount.mount_point == path).count()
    }

    #[test]
    fn the_directory_is_a_mount_as_long_as_an_entry_is() {
        let place = Place::new();
        let dir = MountDir::open(place.dir());
        assert_eq!(mounts_at(&place.dir()), 0);
        for name in ["a", "b"] {
            mount_in(&dir, name);
            assert_eq!(mounts_at(&place.dir()), 1);
        }
        remove(&dir, "a");
        assert_eq!((mounts_at(&place.dir()), mounts_at(&dir.entry("b"))), (1, 1));
        // As after a kill.
        let dir = MountDir::open(place.dir());
        mount_in(&dir, "c");
        assert_eq!(mounts_at(&place.dir()), 1);
        remove(&dir, "b");
        remove(&dir, "c");
        assert_eq!(mounts_at(&place.dir()), 0);
    }

    #[test]
    fn entries_that_were_mounted_before_are_not_hidden() {
        let place = Place::new();
        let former = place.dir().join("former");
        mount_tmpfs(&former);
        let dir = MountDir::open(place.dir());
        mount_in(&dir, "a");
        assert_eq!(mounts_at(&place.dir()), 0);
        std::fs::write(former.join("file"), "x").unwrap();
        remove(&dir, "a");
        remove(&dir, "former");
        mount_in(&dir, "b");
        assert_eq!(mounts_at(&place.dir()), 1);
    }

    /// systemd makes every mount shared.
    #[test]
    fn below_a_shared_mount_each_entry_is_one_mount() {
        let place = Place::new();
        make_shared(place.0.path()).unwrap();
        let dir = MountDir::open(place.dir());
        mount_in(&dir, "a");
        assert_eq!((mounts_at(&place.dir()), mounts_at(&dir.entry("a"))), (1, 1));
        remove(&dir, "a");
        assert_eq!((mounts_at(&place.dir()), mounts_at(&place.dir().join("a"))), (0, 0));
    }

    /// After a reboot the entries are there, and nothing is mounted.
    #[test]
    fn entries_without_a_mount_do_not_matter() {
        let place = Place::new();
        std::fs::create_dir_all(place.dir().join("of-an-earlier-boot")).unwrap();
        let dir = MountDir::open(place.dir());
        mount_in(&dir, "a");
        assert_eq!(mounts_at(&place.dir()), 1);
        std::fs::remove_dir(dir.entry("of-an-earlier-boot")).unwrap();
        remove(&dir, "a");
        assert_eq!(mounts_at(&place.dir()), 0);
    }

    #[test]
    fn what_an_administrator_mounted_stays() {
        let place = Place::new();
        mount_tmpfs(&place.dir());
        let dir = MountDir::open(place.dir());
        mount_in(&dir, "a");
        remove(&dir, "a");
        assert_eq!(mounts_at(&place.dir()), 1);
        unmount_if_mounted(&place.dir()).unwrap();
    }
}
