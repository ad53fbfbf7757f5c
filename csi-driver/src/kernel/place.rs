//! A mount point: a name in a directory that is held open.
//!
//! A pod may change a parent directory of a path, for example in its emptyDir, and put a link or
//! another directory there between two uses. So [`crate::kernel::host_path::HostPaths::place`]
//! walks a path once, and everything done there uses the directory's descriptor and this one name.
//!
//! Invariant: no call here resolves more than the last name, and none follows it.
//!
//! Unmounting and removing also use the directory and the name: a descriptor of the mount would
//! keep it busy, and unlinkat(2) takes none. A pod that can write to the directory may exchange two
//! names in it meanwhile. Then another mount or empty directory in the same directory is removed
//! instead.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use linux::mount::UnmountMode;
use linux::mountinfo::{self, MountEntry};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::{Error, Result, Step};

#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Name of the path in messages.
    field: &'static str,
    path: PathBuf,
    /// O_PATH.
    parent: Arc<OwnedFd>,
    /// Id of the mount that `parent` is on; the descriptor keeps that mount.
    parent_mount_id: u64,
    name: OsString,
}

impl Place {
    pub(crate) fn new(
        field: &'static str,
        parent: OwnedFd,
        name: OsString,
        path: PathBuf,
    ) -> linux::Result<Self> {
        let parent_mount_id = linux::mount::id_of(&parent)?;
        Ok(Self { field, path, parent: Arc::new(parent), parent_mount_id, name })
    }

    pub(crate) fn field(&self) -> &'static str {
        self.field
    }

    /// The path as it was walked, for messages and for the journal.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The top mount at this place. Sends no request to a file system: its daemon may be stuck.
    pub(crate) fn mount(&self) -> linux::Result<Option<MountEntry>> {
        let Some(root) = self.open_root()? else { return Ok(None) };
        match linux::mount::id_of(&root)? {
            id if id == self.parent_mount_id => Ok(None),
            id => mountinfo::of_id(id),
        }
    }

    /// Opens what is on top at this place; `None` if the name does not exist.
    fn open_root(&self) -> linux::Result<Option<OwnedFd>> {
        match self.open(OFlags::PATH) {
            Ok(root) => Ok(Some(root)),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(linux::Error::at("open", &self.path, e)),
        }
    }

    /// Attaches a detached mount. Afterwards it is visible here, from the directory and by its
    /// path; after an error it is mounted nowhere.
    pub(crate) fn attach(&self, tree: &OwnedFd, step: &'static str) -> Result<()> {
        let point = self.open(OFlags::PATH | OFlags::DIRECTORY);
        let point = point.map_err(|e| linux::Error::at("open", &self.path, e)).step(step)?;
        linux::rootfs::attach(tree, &point, &self.path).step(step)?;
        let cause = match self.is_seen(tree).step(step) {
            Ok(true) => return Ok(()),
            Ok(false) => Error::changed(self.field, &self.path, "the mount came to another place"),
            Err(cause) => cause,
        };
        Err(self.detached(tree, cause))
    }

    /// Undoes [`Self::attach`] after `cause`.
    pub(crate) fn detached(&self, tree: &OwnedFd, cause: Error) -> Error {
        let detached = linux::mount::detach(tree, &self.path);
        Error::rolled_back(cause, detached.step("take mount back"))
    }

    /// Whether `tree` is the top mount here, and this place is still at its path.
    fn is_seen(&self, tree: &OwnedFd) -> linux::Result<bool> {
        let Some(root) = self.open_root()? else { return Ok(false) };
        let is_here = linux::mount::id_of(&root)? == linux::mount::id_of(tree)?;
        Ok(is_here && linux::mount::path_of(&root)? == self.path)
    }

    /// Unmounts the top mount at this place.
    pub(crate) fn unmount(&self, mode: UnmountMode) -> linux::Result<()> {
        linux::mount::unmount_in(&self.parent, &self.name, &self.path, mode)
    }

    pub(crate) fn make_dir(&self, mode: Mode) -> rustix::io::Result<()> {
        rustix::fs::mkdirat(&self.parent, &self.name, mode)
    }

    pub(crate) fn remove_dir(&self) -> rustix::io::Result<()> {
        rustix::fs::unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR)
    }

    pub(crate) fn stat(&self) -> rustix::io::Result<Stat> {
        rustix::fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Opens the directory at this place, to read and change it.
    pub(crate) fn open_dir(&self) -> rustix::io::Result<File> {
        self.open(OFlags::RDONLY | OFlags::DIRECTORY).map(File::from)
    }

    fn open(&self, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.parent.as_fd(), &self.name, flags, Mode::empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_whose_directory_was_renamed_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| scope.spawn(|| attach_in_a_renamed_directory(dir.path())).join()).unwrap();
    }

    /// On a thread of its own, which ends with its mount namespace.
    fn attach_in_a_renamed_directory(dir: &Path) {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        linux::mount::make_slave(Path::new("/")).unwrap();
        let path = dir.canonicalize().unwrap().join("parent/name");
        let parent = path.parent().unwrap();
        std::fs::create_dir_all(&path).unwrap();
        let opened = rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let place = Place::new("target_path", opened, "name".into(), path.clone()).unwrap();
        let attach = || {
            let tree = linux::rootfs::new_fs("tmpfs", &[]).unwrap();
            place.attach(&tree, "publish volume")
        };
        let aside = parent.with_file_name("aside");
        std::fs::rename(parent, &aside).unwrap();
        // The old path leads to what is not to be mounted on.
        std::fs::create_dir_all(&path).unwrap();
        let error = attach().unwrap_err();
        assert!(matches!(error, Error::PathChanged { .. }), "{error}");
        let below = |mount: &MountEntry| mount.mount_point.starts_with(aside.parent().unwrap());
        assert!(!mountinfo::read().unwrap().iter().any(below));

        std::fs::remove_dir_all(parent).unwrap();
        std::fs::rename(&aside, parent).unwrap();
        attach().unwrap();
        assert_eq!(place.mount().unwrap().unwrap().mount_point, path);
        place.unmount(UnmountMode::Plain).unwrap();
        assert_eq!(place.mount().unwrap(), None);
        place.remove_dir().unwrap();
        assert_eq!(place.mount().unwrap(), None);
    }
}
