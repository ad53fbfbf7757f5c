//! Parts of volumes (subPath): each is mounted at a place of the kubelet's own, which the runtime then
//! gets as any other host path.
//!
//! The users of a volume can change it while a part is looked for. So the kernel resolves the path
//! below the volume's root in one call ([`linux::beneath`]), and what it found is mounted by its
//! descriptor. The path that the runtime gets, `pods/<uid>/volume-subpaths/<volume>/<container>/<number>`
//! (kubelet's), lies outside all volumes.
//!
//! Invariants:
//! - A volume that does not answer delays its own pod only: see [`HostPaths`].
//! - Once [`Shared::unmount_sub_paths`] of a pod has started, nothing is mounted for it.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use linux::mount::{self, UnmountMode};
use linux::rootfs::MountsBelow;
use linux::{beneath, rootfs};
use nix::errno::Errno;
use runtime::Locks;
use rustix::fs::{Mode, OFlags};

use super::error::Error;
use super::{Mounted, Shared, Volumes, files, mounted};
use crate::objects::Pod;

const INTERRUPTED: Error = Error::Interrupted { what: "the mount of a subPath" };

/// Locks by pod uid; locked during each mount.
pub(super) type Mounting = Locks<String, Mutex<()>>;

/// A part of a volume for one container.
#[derive(Debug, Clone)]
pub(crate) struct SubPath {
    /// The volume's name in the pod.
    pub(crate) volume: String,
    pub(crate) container: String,
    /// The index of the volumeMount.
    pub(crate) number: usize,
    /// Below the volume's root, with variables replaced; not empty.
    pub(crate) path: String,
}

impl Volumes {
    /// Mounts the part, in the place of an earlier mount, and returns its path on the host.
    pub(crate) async fn mount_sub_path(
        &self,
        pod: &Pod,
        volume: &Mounted,
        part: SubPath,
    ) -> Result<PathBuf, Error> {
        check(&part.path)?;
        let shared = &self.shared;
        let uid = pod.metadata.uid.clone();
        let paths = shared.paths_of(pod);
        let (root, path) = (volume.host_path.clone(), part.path.clone());
        let find: fn(&Path, &Path) -> Result<Option<OwnedFd>, Error> =
            if volume.is_configuration { find_existing } else { find_or_make };
        let found = paths
            .in_own_thread(&uid, &volume.host_path, "find subPath", move || find(&root, Path::new(&path)))
            .await?;
        let place = shared.layout.sub_path(&uid, &part.volume, &part.container, part.number);
        let wanted = Arc::new(());
        let (shared, is_wanted) = (Arc::clone(shared), Arc::downgrade(&wanted));
        let mounted = tokio::task::spawn_blocking(move || {
            let mounting = shared.sub_paths.of(uid.as_str());
            let _mounting = lock(&mounting);
            // The caller is gone and may have unmounted everything.
            is_wanted.upgrade().ok_or(INTERRUPTED)?;
            attach(found.as_ref(), &place)?;
            Ok(place)
        });
        mounted.await.unwrap_or(Err(INTERRUPTED))
    }
}

impl Shared {
    /// Unmounts and removes all parts of a pod's volumes, those of an earlier kubelet included.
    pub(super) async fn unmount_sub_paths(self: &Arc<Self>, uid: &str) -> Result<(), Error> {
        let (shared, uid) = (Arc::clone(self), uid.to_owned());
        let unmounted = tokio::task::spawn_blocking(move || {
            let mounting = shared.sub_paths.of(uid.as_str());
            let _mounting = lock(&mounting);
            let dir = shared.layout.sub_paths(&uid);
            // The last one first: it may lie on another one.
            for place in mounted::mounts_below(&dir)?.iter().rev() {
                mount::unmount(place, UnmountMode::Plain).map_err(Error::Kernel)?;
            }
            mounted::check_nothing_mounted(&dir)?;
            linux::tree::remove(&dir).map_err(Error::Kernel)
        });
        unmounted.await.unwrap_or(Err(INTERRUPTED))
    }
}

/// A relative path without `..`; `manifest` checks only paths without variables.
fn check(path: &str) -> Result<(), Error> {
    let is_plain = |component| matches!(component, Component::Normal(_) | Component::CurDir);
    if !path.is_empty() && Path::new(path).components().all(is_plain) {
        return Ok(());
    }
    Err(Error::SubPath { path: path.to_owned() })
}

/// A detached mount of the part. Missing directories are made with the permissions of the volume's
/// root, as with kubelet. Always `Some`.
fn find_or_make(root: &Path, path: &Path) -> Result<Option<OwnedFd>, Error> {
    let root = open_root(root)?;
    let mode = rustix::fs::fstat(&root).map_err(|e| Error::io("stat", path, e.into()))?.st_mode;
    let found = beneath::ensure(&root, path, mode & 0o777).map_err(Error::Kernel)?;
    clone(&found).map(Some)
}

/// The same, but nothing is made in the kubelet's own files: `None` if the part does not exist. The
/// container then gets an empty directory.
fn find_existing(root: &Path, path: &Path) -> Result<Option<OwnedFd>, Error> {
    match beneath::open(open_root(root)?, path) {
        Err(error) if error.errno() == Errno::ENOENT => Ok(None),
        found => clone(&found.map_err(Error::Kernel)?).map(Some),
    }
}

fn open_root(root: &Path) -> Result<OwnedFd, Error> {
    rustix::fs::open(root, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::io("open", root, e.into()))
}

/// Like kubelet's bind mount, without the mounts below.
fn clone(found: &OwnedFd) -> Result<OwnedFd, Error> {
    rootfs::clone_opened(found, MountsBelow::Without).map_err(Error::Kernel)
}

/// Puts a detached mount at `place`, on a new directory or file; without one, only the directory.
fn attach(tree: Option<&OwnedFd>, place: &Path) -> Result<(), Error> {
    for earlier in mounted::mounts_below(place)?.iter().rev() {
        // The container of this mount has ended.
        mount::unmount(earlier, UnmountMode::Detach).map_err(Error::Kernel)?;
    }
    files::remove_mount_point(place)?;
    files::make_dir(place.parent().unwrap_or(Path::new("/")), 0o750)?;
    let is_directory = tree.map_or(Ok(true), rootfs::is_directory).map_err(Error::Kernel)?;
    if is_directory {
        files::make_mount_point(place, 0o755)?;
    } else {
        fs::File::create_new(place).map_err(|e| Error::io("create", place, e))?;
    }
    let Some(tree) = tree else { return Ok(()) };
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target =
        rustix::fs::open(place, flags, Mode::empty()).map_err(|e| Error::io("open", place, e.into()))?;
    rootfs::attach(tree, target.as_fd(), place).map_err(Error::Kernel)
}

/// The lock guards no data that a panic could corrupt.
fn lock(mounting: &Mutex<()>) -> MutexGuard<'_, ()> {
    mounting.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    fn unmount(place: &Path) {
        for mounted in mounted::mounts_below(place).unwrap() {
            mount::unmount(&mounted, UnmountMode::Detach).unwrap();
        }
    }

    #[test]
    fn only_relative_paths_without_dots_are_parts() {
        for good in ["a", "a/b", "./a", "a/./b/", "."] {
            check(good).unwrap();
        }
        for bad in ["", "/a", "..", "a/../b", "../a"] {
            let error = check(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn a_part_is_mounted_again_in_the_place_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let (root, place) = (dir.path().join("volume"), dir.path().join("pods/0"));
        fs::create_dir(&root).unwrap();
        fs::write(root.join("file"), "text").unwrap();
        for _ in 0..2 {
            attach(find_or_make(&root, Path::new("./made/here")).unwrap().as_ref(), &place).unwrap();
            assert_eq!(mounted::mounts_below(&place).unwrap().len(), 1);
            fs::write(place.join("x"), "").unwrap();
            assert!(root.join("made/here/x").exists());
            // A file takes the place of a directory.
            attach(find_or_make(&root, Path::new("file")).unwrap().as_ref(), &place).unwrap();
            assert_eq!(fs::read_to_string(&place).unwrap(), "text");
        }
        attach(find_existing(&root, Path::new("none")).unwrap().as_ref(), &place).unwrap();
        assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
        assert!(!root.join("none").exists());
        unmount(&place);
    }

    /// A container swaps a directory of its volume with a link to the host while the kubelet mounts it.
    #[test]
    fn no_swapped_link_shows_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let (root, host, place) =
            (dir.path().join("volume"), dir.path().join("host"), dir.path().join("pods/0"));
        fs::create_dir_all(root.join("part")).unwrap();
        fs::create_dir(&host).unwrap();
        fs::write(host.join("secret"), "").unwrap();
        symlink(&host, root.join("swap")).unwrap();
        let (volume, stop) = (open_root(&root).unwrap(), AtomicBool::new(false));
        let (mut shown, mut refused, mut is_open) = (0, 0, false);
        // On a busy machine the two threads rarely run together.
        let limit = Instant::now() + Duration::from_secs(120);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(&volume, "part", &volume, "swap", flags).unwrap();
                }
            });
            while (shown < 100 || refused < 100) && !is_open && Instant::now() < limit {
                match find_or_make(&root, Path::new("part")) {
                    Ok(found) => {
                        attach(found.as_ref(), &place).unwrap();
                        is_open = place.join("secret").exists();
                        shown += 1;
                    }
                    Err(_) => {
                        refused += 1;
                        std::thread::yield_now();
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        unmount(&place);
        assert!(!is_open, "the host's directory is mounted");
        assert!(shown >= 100 && refused >= 100, "{shown} mounted, {refused} refused");
    }
}
