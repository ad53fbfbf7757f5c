//! hostPath volumes, and other work on paths that may be in a file system that does not answer: each
//! check, and each walk over a volume, has its own thread.
//!
//! Invariants:
//! - No caller waits longer than [`TIMEOUT`] for a check. A walk has no time limit, but its caller gives it up.
//! - A pod checks its volumes one after the other, so it has at most one late check.
//! - A mount has at most [`MAX_LATE_OF_MOUNT`] late checks, and a volume as many late walks. The node has at
//!   most [`MAX_LATE`] late threads.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use linux::mountinfo;
use tokio::sync::{Semaphore, oneshot};

use super::error::Error;
use super::files;
use crate::objects::{HostPathType, HostPathVolume};

/// Enough for a disk under load.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Concurrent checks that are not late; walks are not counted.
const CONCURRENT_CHECKS: usize = 8;
const MAX_LATE: usize = 256;
const TYPE_CHECK: &str = "hostPath type check failed";
/// For each mount but the root, from which a symbolic link may lead anywhere.
pub(super) const MAX_LATE_OF_MOUNT: usize = CONCURRENT_CHECKS;

#[derive(Debug)]
pub(super) struct HostPaths {
    permits: Semaphore,
    late: Arc<Mutex<Late>>,
}

/// Late threads, and where each waits. The key is the uid of a check's pod, or the root of a walk.
type Late = HashMap<String, PathBuf>;

/// A walk over a pod's volume.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    pub(super) root: &'a Path,
    /// The same for all pods of the volume.
    pub(super) volume: &'a Path,
    /// For errors.
    pub(super) what: &'static str,
}

impl Default for HostPaths {
    fn default() -> Self {
        Self { permits: Semaphore::new(CONCURRENT_CHECKS), late: Arc::default() }
    }
}

impl HostPaths {
    /// Checks the path and creates it for the `OrCreate` types. One call at a time per pod.
    pub(super) async fn ensure(&self, uid: &str, volume: &HostPathVolume) -> Result<PathBuf, Error> {
        let path = Path::new(&volume.path);
        if !path.is_absolute() || path.components().any(|c| c == Component::ParentDir) {
            return Err(Error::HostPathRelative { found: volume.path.clone() });
        }
        if volume.path_type == HostPathType::Unset {
            return Ok(path.to_owned());
        }
        let wanted = volume.clone();
        self.in_own_thread(uid, path, TYPE_CHECK, move || ensure(&wanted)).await
    }

    /// Runs `work` on `path`, which may be in a file system that does not answer; errors say that it
    /// is `what`. Work that is late continues, and its outcome is dropped. One call at a time per pod.
    pub(super) async fn in_own_thread<T: Send + 'static>(
        &self,
        uid: &str,
        path: &Path,
        what: &'static str,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let mount = mountinfo::point_above(path).map_err(Error::Kernel)?;
        // Check before waiting for a permit, and again after, since more checks may be late.
        self.check_not_late(uid, path, what, &mount)?;
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        self.check_not_late(uid, path, what, &mount)?;
        let thread = Builder::new().name("host-path".to_owned());
        let done = self.until(tokio::time::sleep(TIMEOUT), thread, uid.to_owned(), mount, work);
        let done = done.await.map_err(|e| Error::io("start a thread to check", path, e))?;
        done.unwrap_or_else(|| Err(Error::PathTimeout { what, path: path.to_owned() }))
    }

    /// Runs a walk until `given_up` is over: `None`. It may then continue, and its outcome is dropped. A volume
    /// has at most [`MAX_LATE_OF_MOUNT`] of these.
    pub(super) async fn walk<T: Send + 'static>(
        &self,
        Walk { root, volume, what }: Walk<'_>,
        given_up: impl Future<Output = ()>,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<Option<T>, Error> {
        let key = root.to_string_lossy().into_owned();
        self.check_not_late(&key, root, what, volume)?;
        let thread = Builder::new().name("volume-walk".to_owned());
        let done = self.until(given_up, thread, key, volume.to_owned(), work);
        done.await.map_err(|e| Error::io("start a thread to walk", root, e))?.transpose()
    }

    /// Runs `work` in the thread until `given_up` is over: `None`, and it is late with this key.
    async fn until<T: Send + 'static>(
        &self,
        given_up: impl Future<Output = ()>,
        thread: Builder,
        key: String,
        place: PathBuf,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> std::io::Result<Option<Result<T, Error>>> {
        let (sender, mut answer) = oneshot::channel();
        let work_and_send = {
            let (late, key) = (Arc::clone(&self.late), key.clone());
            move || {
                // A closed channel means that the work is late.
                let _receiver_gone = sender.send(work());
                lock(&late).remove(&key);
            }
        };
        thread.spawn(work_and_send)?;
        tokio::select! {
            biased;
            answered = &mut answer => {
                // It has panicked.
                let interrupted = |_| Err(Error::Interrupted { what: "the work on a path" });
                return Ok(Some(answered.unwrap_or_else(interrupted)));
            }
            () = given_up => {}
        }
        // The thread takes this lock only after it has sent its answer.
        let mut late = lock(&self.late);
        if let Ok(answered) = answer.try_recv() {
            return Ok(Some(answered));
        }
        late.insert(key, place);
        Ok(None)
    }

    #[cfg(test)]
    pub(super) fn late(&self) -> usize {
        lock(&self.late).len()
    }

    fn check_not_late(&self, key: &str, path: &Path, what: &'static str, mount: &Path) -> Result<(), Error> {
        let late = lock(&self.late);
        let of_mount = late.values().filter(|late| *late == mount).count();
        if late.contains_key(key) || (mount != Path::new("/") && of_mount >= MAX_LATE_OF_MOUNT) {
            return Err(Error::PathTimeout { what, path: path.to_owned() });
        }
        if late.len() >= MAX_LATE {
            return Err(Error::PathUnchecked { what, path: path.to_owned(), late: late.len() });
        }
        Ok(())
    }
}

/// A panic cannot corrupt the map.
fn lock(late: &Mutex<Late>) -> MutexGuard<'_, Late> {
    late.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ensure(volume: &HostPathVolume) -> Result<PathBuf, Error> {
    let path = Path::new(&volume.path);
    match volume.path_type {
        HostPathType::DirectoryOrCreate if !path.exists() => files::make_dir(path, 0o755)?,
        HostPathType::FileOrCreate if !path.exists() => {
            let mut new = fs::OpenOptions::new();
            new.write(true)
                .create_new(true)
                .mode(0o644)
                .open(path)
                .map_err(|e| Error::io("create", path, e))?;
        }
        _ => {}
    }
    check(path, volume.path_type)?;
    Ok(path.to_owned())
}

fn check(path: &Path, wanted: HostPathType) -> Result<(), Error> {
    let found = fs::metadata(path).ok().map(|m| m.file_type());
    let (fits, wanted) = match wanted {
        HostPathType::Unset => return Ok(()),
        HostPathType::Directory | HostPathType::DirectoryOrCreate => (found.map(|t| t.is_dir()), "directory"),
        HostPathType::File | HostPathType::FileOrCreate => (found.map(|t| t.is_file()), "file"),
        HostPathType::Socket => (found.map(|t| t.is_socket()), "socket"),
        HostPathType::CharDevice => (found.map(|t| t.is_char_device()), "character device"),
        HostPathType::BlockDevice => (found.map(|t| t.is_block_device()), "block device"),
    };
    if fits == Some(true) { Ok(()) } else { Err(Error::HostPathType { path: path.to_owned(), wanted }) }
}

/// A file system in `dir` that does not answer until the connection is dropped.
#[cfg(test)]
pub(super) fn mount_silent(dir: &Path) -> (PathBuf, std::os::fd::OwnedFd) {
    let silent = dir.join("silent");
    let connection = mount_silent_at(&silent);
    (silent, connection)
}

/// The same at a path that does not exist yet.
#[cfg(test)]
pub(crate) fn mount_silent_at(silent: &Path) -> std::os::fd::OwnedFd {
    use linux::mount::{FuseMountOptions, FuseName, MountFlags, mount_fuse, open_fuse_device};
    fs::create_dir(silent).expect("an empty directory");
    let connection = open_fuse_device().expect("this test needs root and FUSE");
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: false, default_permissions: false };
    mount_fuse(&connection, FuseName { source: "unserved", subtype: "test" }, silent, options)
        .expect("mount");
    connection
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::mount::{UnmountMode, unmount};
    use rustix::fs::FileType;
    use std::time::Instant;

    fn volume(path: &Path, path_type: HostPathType) -> HostPathVolume {
        HostPathVolume { path: path.to_str().unwrap().to_owned(), path_type }
    }

    #[tokio::test]
    async fn a_host_path_must_match_its_type() {
        let root = tempfile::tempdir().unwrap();
        let paths = HostPaths::default();
        let ensure = async |path: &Path, path_type| paths.ensure("u", &volume(path, path_type)).await;
        ensure(root.path(), HostPathType::Directory).await.unwrap();
        let err = ensure(root.path(), HostPathType::Socket).await.unwrap_err();
        assert!(err.to_string().contains("is not a socket"), "{err}");
        let made = root.path().join("a/b");
        ensure(&made, HostPathType::DirectoryOrCreate).await.unwrap();
        assert!(made.is_dir());
        let file = root.path().join("file");
        ensure(&file, HostPathType::File).await.unwrap_err();
        ensure(&file, HostPathType::FileOrCreate).await.unwrap();
        ensure(&file, HostPathType::File).await.unwrap();
        let socket = root.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        ensure(&socket, HostPathType::Socket).await.unwrap();
        let device = root.path().join("device");
        let block = root.path().join("block");
        for (path, kind) in [(&device, FileType::CharacterDevice), (&block, FileType::BlockDevice)] {
            let null = rustix::fs::makedev(1, 3);
            rustix::fs::mknodat(rustix::fs::CWD, path, kind, rustix::fs::Mode::RUSR, null).unwrap();
        }
        ensure(&device, HostPathType::CharDevice).await.unwrap();
        ensure(&block, HostPathType::BlockDevice).await.unwrap();
        for (path, wrong) in [(&device, HostPathType::BlockDevice), (&file, HostPathType::DirectoryOrCreate)]
        {
            ensure(path, wrong).await.unwrap_err();
        }
        let err = ensure(Path::new("/tmp/../etc"), HostPathType::Unset).await.unwrap_err();
        assert!(matches!(err, Error::HostPathRelative { .. }));
    }

    /// Runs on one thread: a blocking wait for the file system would stop both pods.
    #[tokio::test]
    async fn a_hanging_file_system_blocks_one_thread_per_pod_and_no_other_pod() {
        let root = tempfile::tempdir().unwrap();
        let (silent, connection) = mount_silent(root.path());

        let paths = HostPaths::default();
        let inside = volume(&silent.join("x"), HostPathType::Directory);
        let checks = async {
            let first = paths.ensure("hung", &inside).await.unwrap_err();
            let begun = Instant::now();
            let second = paths.ensure("hung", &inside).await.unwrap_err();
            (first.to_string(), second.to_string(), begun.elapsed())
        };
        let other = volume(root.path(), HostPathType::Directory);
        let (checked, other) = tokio::join!(checks, paths.ensure("other", &other));
        let late = lock(&paths.late).clone();
        drop(connection);
        unmount(&silent, UnmountMode::Detach).unwrap();

        other.unwrap();
        let (first, second, waited) = checked;
        assert!(first.contains("has not answered within 5 s"), "{first}");
        assert!(first == second && waited < TIMEOUT, "{second}: {waited:?}");
        assert_eq!(late, Late::from([("hung".to_owned(), silent)]));
        // Closing the connection ends the thread.
        let begun = Instant::now();
        while !lock(&paths.late).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the thread never ends");
            tokio::task::yield_now().await;
        }
    }
}
