//! emptyDir volumes, created and unmounted outside the async threads, since a pod may have
//! thousands.
//!
//! Invariants:
//! - Once [`EmptyDirs::unmount_all`] of a pod has started, a cancelled `ensure` creates nothing for
//!   it.
//! - No pod waits for another pod's emptyDirs: a container can block changes of its emptyDir's root
//!   for minutes with getdents(2).

use std::fmt::Write;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use linux::mount::{self, MountFlags, UnmountMode};
use nix::sys::statfs::TMPFS_MAGIC;
use runtime::Locks;

use super::error::Error;
use super::files;
use crate::objects::{EmptyDirVolume, Quantity};

#[derive(Debug, Default)]
pub(super) struct EmptyDirs {
    /// By the directory of a pod's emptyDirs; locked during each creation.
    making: Locks<PathBuf, Mutex<()>>,
}

impl EmptyDirs {
    /// Ensures that the directory or tmpfs exists; returns its path. What a container has changed of it
    /// stays. A new tmpfs has no `ready` marker ([`super::ownership`]).
    pub(super) async fn ensure(
        &self,
        dir: PathBuf,
        volume: EmptyDirVolume,
        ready: PathBuf,
    ) -> Result<PathBuf, Error> {
        let wanted = Arc::new(());
        let making = self.making.of(dir.parent().unwrap_or(&dir));
        let is_wanted = Arc::downgrade(&wanted);
        let made = tokio::task::spawn_blocking(move || {
            let _making = lock(&making);
            // The caller is gone and may have unmounted everything.
            is_wanted.upgrade().ok_or(INTERRUPTED)?;
            ensure(&dir, &volume, &ready)
        });
        made.await.unwrap_or(Err(INTERRUPTED))
    }

    /// Unmounts a pod's emptyDirs with medium Memory; `dir` contains them.
    pub(super) async fn unmount_all(&self, dir: PathBuf) -> Result<(), Error> {
        let making = self.making.of(dir.as_path());
        let unmounted = tokio::task::spawn_blocking(move || {
            // Wait for a running creation; later ones find their caller gone.
            drop(lock(&making));
            files::subdirectories(&dir)?.iter().try_for_each(|dir| unmount(dir))
        });
        unmounted.await.unwrap_or(Err(INTERRUPTED))
    }
}

/// Every user of the pod writes there.
const MODE: u32 = 0o777;
/// Of a directory that has not got its mode yet.
const UNFINISHED: u32 = 0;
const INTERRUPTED: Error = Error::Interrupted { what: "an operation on an emptyDir" };

/// The lock guards no data that a panic could corrupt.
fn lock(making: &Mutex<()>) -> MutexGuard<'_, ()> {
    making.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ensure(dir: &Path, volume: &EmptyDirVolume, ready: &Path) -> Result<PathBuf, Error> {
    files::make_dir(dir.parent().unwrap_or(Path::new("/")), 0o750)?;
    files::make_dir(dir, UNFINISHED)?;
    match volume.medium.as_str() {
        "" => finish(dir)?,
        "Memory" => ensure_tmpfs(dir, volume, ready)?,
        other => {
            let field = format!("spec.volumes[].emptyDir.medium {other:?}");
            return Err(Error::Unsupported { field });
        }
    }
    Ok(dir.to_owned())
}

/// Containers may already use the directory: its mode is theirs, and they can block a change.
fn finish(dir: &Path) -> Result<(), Error> {
    let found = fs::symlink_metadata(dir).map_err(|e| Error::io("stat", dir, e))?;
    if found.permissions().mode() & 0o7777 == UNFINISHED {
        fs::set_permissions(dir, Permissions::from_mode(MODE))
            .map_err(|e| Error::io("set permissions of", dir, e))?;
    }
    Ok(())
}

fn ensure_tmpfs(dir: &Path, volume: &EmptyDirVolume, ready: &Path) -> Result<(), Error> {
    if mount::type_at(dir).map_err(Error::Kernel)?.is_some() {
        return Ok(());
    }
    // After a reboot, the marker is that of the tmpfs before.
    match fs::remove_file(ready) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("remove", ready, e)),
        _ => {}
    }
    let mut options = format!("mode={MODE:o}");
    // tmpfs takes 0 as no limit, not even its own.
    if let Some(limit) = volume.size_limit.as_ref().map(Quantity::value).filter(|limit| *limit > 0) {
        let _never_fails = write!(options, ",size={limit}");
    }
    mount::mount_fs("tmpfs", "tmpfs", dir, MountFlags::default(), &options).map_err(Error::Kernel)
}

fn unmount(dir: &Path) -> Result<(), Error> {
    match mount::type_at(dir).map_err(Error::Kernel)? {
        Some(TMPFS_MAGIC) => mount::unmount(dir, UnmountMode::Plain).map_err(Error::Kernel),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Barrier;
    use std::task::{Context, Waker};

    const NO_MARKER: &str = "/nowhere/ready";

    #[test]
    fn an_empty_dir_is_open_to_all_users_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("pods/u/volumes/kubernetes.io~empty-dir/scratch");
        let volume = EmptyDirVolume::default();
        for _ in 0..2 {
            ensure(&dir, &volume, NO_MARKER.as_ref()).unwrap();
            assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o777);
        }
    }

    fn memory() -> EmptyDirVolume {
        EmptyDirVolume { medium: "Memory".to_owned(), ..EmptyDirVolume::default() }
    }

    fn mounts_below(dir: &Path) -> usize {
        let mounts = linux::mountinfo::read().unwrap();
        mounts.iter().filter(|mount| mount.mount_point.starts_with(dir)).count()
    }

    #[tokio::test]
    async fn an_empty_dir_in_memory_is_mounted_once_and_unmounted() {
        let root = tempfile::tempdir().unwrap();
        let (all, dirs) = (root.path().join("all"), EmptyDirs::default());
        for name in ["a", "b", "a"] {
            dirs.ensure(all.join(name), memory(), NO_MARKER.into()).await.unwrap();
        }
        dirs.ensure(all.join("disk"), EmptyDirVolume::default(), NO_MARKER.into()).await.unwrap();
        assert_eq!(mounts_below(&all), 2);
        dirs.unmount_all(all.clone()).await.unwrap();
        assert_eq!(mounts_below(&all), 0);
        dirs.unmount_all(all).await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_created_for_a_caller_that_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let (all, dirs) = (root.path().join("all"), EmptyDirs::default());
        fs::create_dir(&all).unwrap();
        let (begun, end) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let making = dirs.making.of(all.as_path());
                let _busy = lock(&making);
                begun.wait();
                end.wait();
            });
            begun.wait();
            {
                let mut call = pin!(dirs.ensure(all.join("late"), memory(), NO_MARKER.into()));
                assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            }
            end.wait();
        });
        dirs.unmount_all(all.clone()).await.unwrap();
        // The waiting thread has finished, or finds its caller gone.
        drop(lock(&dirs.making.of(all.as_path())));
        assert_eq!((mounts_below(&all), fs::read_dir(&all).unwrap().count()), (0, 0));
    }

    #[test]
    fn no_pod_waits_for_another_pods_empty_dirs() {
        let root = tempfile::tempdir().unwrap();
        let (busy, other, dirs) = (root.path().join("busy"), root.path().join("other"), EmptyDirs::default());
        let making = dirs.making.of(busy.as_path());
        let _held = lock(&making);
        let threads = tokio::runtime::Runtime::new().unwrap();
        threads
            .block_on(dirs.ensure(other.join("scratch"), EmptyDirVolume::default(), NO_MARKER.into()))
            .unwrap();
        threads.block_on(dirs.unmount_all(other)).unwrap();
    }

    #[test]
    fn an_empty_dir_with_the_right_mode_is_not_changed() {
        use std::os::unix::fs::MetadataExt;
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("scratch");
        let changed = || fs::metadata(&dir).map(|found| (found.ctime(), found.ctime_nsec())).unwrap();
        ensure(&dir, &EmptyDirVolume::default(), NO_MARKER.as_ref()).unwrap();
        let before = changed();
        std::thread::park_timeout(std::time::Duration::from_millis(20));
        ensure(&dir, &EmptyDirVolume::default(), NO_MARKER.as_ref()).unwrap();
        assert_eq!(changed(), before);
    }

    #[test]
    fn what_a_container_has_changed_of_its_root_stays() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("scratch");
        let again = |medium: &str| {
            let volume = EmptyDirVolume { medium: medium.to_owned(), ..EmptyDirVolume::default() };
            ensure(&dir, &volume, NO_MARKER.as_ref()).unwrap();
            fs::metadata(&dir).unwrap().permissions().mode() & 0o7777
        };
        for medium in ["", "Memory"] {
            again(medium);
            for mode in [0o2777, 0o700] {
                fs::set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
                assert_eq!(again(medium), mode, "{medium:?}");
            }
        }
        unmount(&dir).unwrap();
    }

    #[test]
    fn a_new_tmpfs_has_no_marker_and_a_limit_of_zero_is_none_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        let (dir, ready) = (root.path().join("shared"), root.path().join("ready"));
        let limited = |limit: &str| EmptyDirVolume { size_limit: Some(limit.parse().unwrap()), ..memory() };
        let blocks = || nix::sys::statfs::statfs(&dir).unwrap().blocks();
        fs::write(&ready, "").unwrap();
        ensure(&dir, &limited("0"), &ready).unwrap();
        assert!(!ready.exists(), "it was of a tmpfs before");
        assert_ne!(blocks(), 0, "the kernel's own limit");
        fs::write(&ready, "").unwrap();
        ensure(&dir, &limited("0"), &ready).unwrap();
        assert!(ready.exists());
        unmount(&dir).unwrap();
        ensure(&dir, &limited("1Mi"), &ready).unwrap();
        assert_eq!(blocks(), 256);
        unmount(&dir).unwrap();
    }
}
