//! A directory of mount points, on a mount of its own.
//!
//! For each bind mount, and for each layer of an overlay, the kernel looks at all mounts directly
//! below the source's mount (fs/namespace.c, `copy_tree` and `has_locked_children`). A container
//! starts with about ten of these, whose sources are on the file system of the root directory.
//! Beside 300 pods with two mounts each, it started 2 ms later for that.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

use linux::mount::{self, UnmountMode};
use linux::rootfs::{Attributes, Propagation, set_attributes};

use crate::error::{Error, Result, chain};
use crate::record;

#[derive(Debug)]
pub(crate) struct MountDir {
    path: PathBuf,
    /// Whether the directory is a mount. Read-locked while entries are mounted, so that it does not
    /// change meanwhile.
    is_mount: RwLock<bool>,
}

impl MountDir {
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        record::ensure_dir(&path)?;
        let is_mount = mount::type_at(&path)?.is_some();
        Ok(Self { path, is_mount: RwLock::new(is_mount) })
    }

    pub(crate) fn entry(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.path.join(name.as_ref())
    }

    /// Does `work`, which mounts entries.
    pub(crate) fn use_for<T>(&self, work: impl FnOnce() -> T) -> T {
        let mut is_mount = self.is_mount.read().unwrap_or_else(PoisonError::into_inner);
        if !*is_mount {
            drop(is_mount);
            self.mount();
            is_mount = self.is_mount.read().unwrap_or_else(PoisonError::into_inner);
        }
        let done = work();
        drop(is_mount);
        done
    }

    /// Mounts the directory on itself if it is empty: a new mount would hide the entries, which an
    /// earlier version may have mounted. Without the mount all works, but slower.
    fn mount(&self) {
        let mut is_mount = self.is_mount.write().unwrap_or_else(PoisonError::into_inner);
        if *is_mount {
            return;
        }
        match mount_on_itself_if_empty(&self.path) {
            Ok(mounted) => *is_mount = mounted,
            Err(error) => {
                tracing::warn!(directory = %self.path.display(), error = %chain(&error), "mount on itself");
            }
        }
    }

    /// Unmounts the directory if no entry is mounted; called after an entry was removed.
    pub(crate) fn unmount_if_unused(&self) {
        let mut is_mount = self.is_mount.write().unwrap_or_else(PoisonError::into_inner);
        if *is_mount && mount::unmount(&self.path, UnmountMode::Plain).is_ok() {
            // EBUSY: other entries are mounted.
            *is_mount = false;
        }
    }
}

/// Returns whether it did.
fn mount_on_itself_if_empty(dir: &Path) -> Result<bool> {
    let mut entries = std::fs::read_dir(dir).map_err(|e| Error::io("read directory", dir, e))?;
    if entries.next().is_some() {
        return Ok(false);
    }
    let tree = mount::open_tree_clone(dir)?;
    // Out of the peer group of the file system's mount, which would get each entry's mount too.
    // If that mount is shared, attaching makes this one shared with its own copies elsewhere.
    set_attributes(&tree, Attributes { propagation: Some(Propagation::Private), ..Attributes::default() })?;
    mount::move_mount(tree, dir)?;
    Ok(true)
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
        let dir = MountDir::open(place.dir()).unwrap();
        assert_eq!(mounts_at(&place.dir()), 0);
        for name in ["a", "b"] {
            dir.use_for(|| mount_tmpfs(&dir.entry(name)));
            assert_eq!(mounts_at(&place.dir()), 1);
        }
        remove(&dir, "a");
        assert_eq!((mounts_at(&place.dir()), mounts_at(&dir.entry("b"))), (1, 1));
        // As after a kill.
        let dir = MountDir::open(place.dir()).unwrap();
        dir.use_for(|| mount_tmpfs(&dir.entry("c")));
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
        let dir = MountDir::open(place.dir()).unwrap();
        dir.use_for(|| mount_tmpfs(&dir.entry("a")));
        assert_eq!(mounts_at(&place.dir()), 0);
        std::fs::write(former.join("file"), "x").unwrap();
        remove(&dir, "a");
        remove(&dir, "former");
        dir.use_for(|| mount_tmpfs(&dir.entry("b")));
        assert_eq!(mounts_at(&place.dir()), 1);
    }

    /// systemd makes every mount shared.
    #[test]
    fn below_a_shared_mount_each_entry_is_one_mount() {
        let place = Place::new();
        make_shared(place.0.path()).unwrap();
        let dir = MountDir::open(place.dir()).unwrap();
        dir.use_for(|| mount_tmpfs(&dir.entry("a")));
        assert_eq!((mounts_at(&place.dir()), mounts_at(&dir.entry("a"))), (1, 1));
        remove(&dir, "a");
        assert_eq!((mounts_at(&place.dir()), mounts_at(&place.dir().join("a"))), (0, 0));
    }
}
