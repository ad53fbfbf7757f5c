//! hostPath volumes. A path may lead into a file system that does not answer: each is looked
//! at by a thread of its own.
//!
//! Invariants: no caller waits longer than [`LONGEST`] for a look. A pod, whose volumes are
//! looked at one after the other, has at most one thread left behind, a mount
//! [`MOST_LEFT_OF_MOUNT`], and the node [`MOST_LEFT`].

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use linux::mountinfo;
use tokio::sync::{Semaphore, oneshot};

use super::error::Error;
use super::files;
use crate::objects::{HostPathType, HostPathVolume};

/// What a disk takes, under load too.
const LONGEST: Duration = Duration::from_secs(5);
/// Looks at a time that are not late yet.
const TURNS: usize = 8;
const MOST_LEFT: usize = 256;
/// For each but the root: a link from there leads anywhere.
const MOST_LEFT_OF_MOUNT: usize = TURNS;

#[derive(Debug)]
pub(super) struct HostPaths {
    turns: Semaphore,
    late: Arc<Mutex<Late>>,
}

/// Pods, by uid, with a look that is late, and the mount that its path leads through.
type Late = HashMap<String, PathBuf>;

impl Default for HostPaths {
    fn default() -> Self {
        Self { turns: Semaphore::new(TURNS), late: Arc::default() }
    }
}

impl HostPaths {
    /// Checks (and, for the `OrCreate` types, makes) what is at the path. Of one pod one call
    /// at a time.
    pub(super) async fn ensure(&self, uid: &str, volume: &HostPathVolume) -> Result<PathBuf, Error> {
        let path = Path::new(&volume.path);
        if !path.is_absolute() || path.components().any(|c| c == Component::ParentDir) {
            return Err(Error::HostPathRelative { found: volume.path.clone() });
        }
        if volume.path_type == HostPathType::Unset {
            return Ok(path.to_owned());
        }
        let mount = mountinfo::point_above(path).map_err(Error::Kernel)?;
        // Before, so that what is refused takes no turn; after, as there may be more by then.
        self.check_not_late(uid, path, &mount)?;
        // Never closed, so never an error.
        let _turn = self.turns.acquire().await;
        self.check_not_late(uid, path, &mount)?;
        let (sender, mut answer) = oneshot::channel();
        let look = {
            let (late, uid, volume) = (Arc::clone(&self.late), uid.to_owned(), volume.clone());
            move || {
                // Without a listener it is late.
                drop(sender.send(ensure(&volume)));
                lock(&late).remove(&uid);
            }
        };
        let spawned = std::thread::Builder::new().name("host-path".to_owned()).spawn(look);
        spawned.map_err(|e| Error::io("start a thread that looks at", path, e))?;
        let interrupted = |_| Error::Interrupted { what: "the look at a hostPath" };
        if let Ok(answered) = tokio::time::timeout(LONGEST, &mut answer).await {
            return answered.map_err(interrupted)?;
        }
        // The thread takes the lock after its answer.
        let mut late = lock(&self.late);
        if let Ok(answered) = answer.try_recv() {
            return answered;
        }
        late.insert(uid.to_owned(), mount);
        Err(Error::HostPathSilent { path: path.to_owned() })
    }

    fn check_not_late(&self, uid: &str, path: &Path, mount: &Path) -> Result<(), Error> {
        let late = lock(&self.late);
        let of_mount = late.values().filter(|late| *late == mount).count();
        if late.contains_key(uid) || (mount != Path::new("/") && of_mount >= MOST_LEFT_OF_MOUNT) {
            return Err(Error::HostPathSilent { path: path.to_owned() });
        }
        if late.len() >= MOST_LEFT {
            return Err(Error::HostPathUnseen { path: path.to_owned(), late: late.len() });
        }
        Ok(())
    }
}

/// A panic leaves the map whole.
fn lock(late: &Mutex<Late>) -> MutexGuard<'_, Late> {
    late.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ensure(volume: &HostPathVolume) -> Result<PathBuf, Error> {
    let path = Path::new(&volume.path);
    match volume.path_type {
        HostPathType::DirectoryOrCreate if !path.exists() => files::make_dir(path, 0o755)?,
        HostPathType::FileOrCreate if !path.exists() => {
            fs::File::create_new(path).map_err(|e| Error::io("create", path, e))?;
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

/// A file system in `dir` that answers nothing until the connection is dropped.
#[cfg(test)]
pub(super) fn mount_silent(dir: &Path) -> (PathBuf, std::os::fd::OwnedFd) {
    use linux::mount::{FuseMountOptions, FuseName, MountFlags, mount_fuse, open_fuse_device};
    let silent = dir.join("silent");
    fs::create_dir(&silent).expect("an empty directory");
    let connection = open_fuse_device().expect("this test needs root and FUSE");
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: false, default_permissions: false };
    mount_fuse(&connection, FuseName { source: "unserved", subtype: "test" }, &silent, options)
        .expect("mount");
    (silent, connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux::mount::{UnmountMode, unmount};
    use std::time::Instant;

    fn volume(path: &Path, path_type: HostPathType) -> HostPathVolume {
        HostPathVolume { path: path.to_str().unwrap().to_owned(), path_type }
    }

    #[tokio::test]
    async fn a_host_path_must_be_what_its_type_says() {
        let root = tempfile::tempdir().unwrap();
        let paths = HostPaths::default();
        let ensure = async |path: &Path, path_type| paths.ensure("u", &volume(path, path_type)).await;
        ensure(root.path(), HostPathType::Directory).await.unwrap();
        let err = ensure(root.path(), HostPathType::Socket).await.unwrap_err();
        assert!(err.to_string().contains("is not a socket"), "{err}");
        let made = root.path().join("a/b");
        ensure(&made, HostPathType::DirectoryOrCreate).await.unwrap();
        assert!(made.is_dir());
        let err = ensure(Path::new("/tmp/../etc"), HostPathType::Unset).await.unwrap_err();
        assert!(matches!(err, Error::HostPathRelative { .. }));
    }

    /// On the one thread of this runtime: a wait for the file system would keep all.
    #[tokio::test]
    async fn a_file_system_that_does_not_answer_keeps_one_thread_of_a_pod_and_no_other_pod() {
        let root = tempfile::tempdir().unwrap();
        let (silent, connection) = mount_silent(root.path());

        let paths = HostPaths::default();
        let inside = volume(&silent.join("x"), HostPathType::Directory);
        let looks = async {
            let first = paths.ensure("hung", &inside).await.unwrap_err();
            let begun = Instant::now();
            let second = paths.ensure("hung", &inside).await.unwrap_err();
            (first.to_string(), second.to_string(), begun.elapsed())
        };
        let other = volume(root.path(), HostPathType::Directory);
        let (looked, other) = tokio::join!(looks, paths.ensure("other", &other));
        let late = lock(&paths.late).clone();
        drop(connection);
        unmount(&silent, UnmountMode::Detach).unwrap();

        other.unwrap();
        let (first, second, waited) = looked;
        assert!(first.contains("has not answered within 5 s"), "{first}");
        assert!(first == second && waited < LONGEST, "{second}: {waited:?}");
        assert_eq!(late, Late::from([("hung".to_owned(), silent)]));
        // The end of the connection ends the thread.
        let begun = Instant::now();
        while !lock(&paths.late).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(60), "the thread is left behind for good");
            tokio::task::yield_now().await;
        }
    }
}
