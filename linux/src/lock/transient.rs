//! A lock whose file exists only while the lock is used.
//!
//! Invariant: only the holder of the lock of the file at the path removes that file. A process that
//! gets the lock of a removed file starts over, so two never hold the lock at once. The file of a
//! killed holder passes to the next holder, which removes it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, O_NOFOLLOW};

use super::{FileLock, holder};
use crate::{Error, Result};

/// Owned by root, mode 0755: no other user opens, makes or replaces a file in it.
const DIR: &str = "/run";
/// The calling thread's network namespace.
const NETWORK_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Errors of a directory in which no file can be made. A full one may accept files later: until
/// then, the namespace's lock excludes only processes that also found it full.
const NO_FILES: [Errno; 7] =
    [Errno::EROFS, Errno::EACCES, Errno::EPERM, Errno::ENOENT, Errno::ENOTDIR, Errno::ENOSPC, Errno::EDQUOT];

/// Held until dropped. Taking and dropping a free lock takes 40 µs; passing it from one waiter to
/// the next 150 µs.
#[derive(Debug)]
pub struct TransientLock {
    lock: FileLock,
    /// The file to remove; `None` for a namespace's own file, which stays.
    path: Option<PathBuf>,
}

impl TransientLock {
    /// The file of the lock called `name`: `/run/hawser-<name>.lock`.
    pub fn path(name: &str) -> PathBuf {
        Path::new(DIR).join(format!("hawser-{name}.lock"))
    }

    /// Waits up to `timeout`; the error then names the process that holds it. `None` if the file
    /// cannot be made: /run is read-only, full or missing, or the caller is not root.
    pub fn take(path: &Path, timeout: Duration) -> Result<Option<Self>> {
        let once = || Self::attempt(path, FileLock::try_of);
        // Retried once: a lack of memory may pass, and the second attempt removes a file of the
        // first one.
        let taken = match once().or_else(|_| once()) {
            Ok(None) => {
                let path = path.to_owned();
                wait(timeout, move || Self::attempt(&path, announce_and_wait))
            }
            done => Ok(Some(done)),
        };
        match taken.map_err(|e| Error::at("lock", path, e))? {
            Some(Ok(Some(lock))) => Ok(Some(lock)),
            Some(Err(e)) if NO_FILES.contains(&e.errno()) => Ok(None),
            Some(Err(e)) => Err(e),
            Some(Ok(None)) | None => Err(held(path, timeout)),
        }
    }

    /// If the file cannot be made, takes the lock of the network namespace's own file instead. Any
    /// process in the namespace can hold that one, also without root.
    pub fn take_or_of_namespace(path: &Path, timeout: Duration) -> Result<Self> {
        match Self::take(path, timeout)? {
            Some(lock) => Ok(lock),
            None => Self::of_namespace(timeout),
        }
    }

    fn of_namespace(timeout: Duration) -> Result<Self> {
        let path = Path::new(NETWORK_NAMESPACE);
        let open = || File::open(path);
        let locked = || match FileLock::try_of(open()?)? {
            Some(lock) => Ok(Some(lock)),
            None => {
                let file = open()?;
                wait(timeout, move || FileLock::of(file))?.transpose()
            }
        };
        match locked().map_err(|e| Error::at("lock", path, e))? {
            Some(lock) => Ok(Self { lock, path: None }),
            None => Err(held(path, timeout)),
        }
    }

    /// `None` if `lock` returns none.
    fn attempt(path: &Path, lock: impl Fn(File) -> io::Result<Option<FileLock>>) -> Result<Option<Self>> {
        loop {
            let failed = |e| Error::at("lock", path, e);
            let file = open(path)?;
            let Some(lock) = lock(file).map_err(failed)? else { return Ok(None) };
            let taken = Self { lock, path: Some(path.to_owned()) };
            if is_at(taken.lock.file(), path).map_err(failed)? {
                return Ok(Some(taken));
            }
        }
    }
}

impl Drop for TransientLock {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        let file = self.lock.file();
        // If the file were removed while others wait, each waiter would make it again in turn. A
        // file that stays belongs to the next holder.
        if is_at(file, path).unwrap_or(false) && Mark::Alone.set(file).is_ok() {
            let _may_be_gone = fs::remove_file(path);
        }
        // Before the next process holds the lock and queries the marks.
        let _closing_clears_it_too = Mark::None.set(file);
    }
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(O_NOFOLLOW)
        .open(path)
        .map_err(|e| Error::at("open lock", path, e))
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let locked = file.metadata()?;
    let named = fs::symlink_metadata(path);
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (locked.dev(), locked.ino())))
}

/// A waiter's mark on the file, or the query for such marks: a record lock, which is released with
/// the open file.
#[derive(Clone, Copy)]
#[expect(clippy::cast_possible_truncation, reason = "`l_type` is an i16")]
#[repr(i16)]
enum Mark {
    Waiting = libc::F_RDLCK as i16,
    Alone = libc::F_WRLCK as i16,
    None = libc::F_UNLCK as i16,
}

impl Mark {
    fn set(self, file: &File) -> nix::Result<()> {
        let record = libc::flock { l_type: self as i16, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        fcntl(file, FcntlArg::F_OFD_SETLK(&record)).map(drop)
    }
}

fn announce_and_wait(file: File) -> io::Result<Option<FileLock>> {
    // May fail while the holder removes the file: then the file is made again.
    let _file_removed = Mark::Waiting.set(&file);
    FileLock::of(file).map(Some)
}

/// flock(2) has no timeout: another thread waits, and releases the lock if it gets it too late.
fn wait<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new().name("lock".to_owned()).spawn(move || {
        let _receiver_gone = sender.send(work());
    })?;
    Ok(receiver.recv_timeout(timeout).ok())
}

fn held(path: &Path, timeout: Duration) -> Error {
    let holder = holder(path).map_or("another process".to_owned(), |pid| format!("process {pid}"));
    let words = format!("{holder} still holds it after {timeout:?}");
    Error::at("lock", path, io::Error::new(io::ErrorKind::TimedOut, words))
}

fn holder(path: &Path) -> Option<libc::pid_t> {
    holder::of(&File::open(path).ok()?).ok()?.first().copied()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const IMPATIENT: Duration = Duration::from_millis(20);

    fn take(path: &Path) -> TransientLock {
        TransientLock::take(path, TIMEOUT).unwrap().unwrap()
    }

    #[test]
    fn the_file_is_there_while_it_is_held_and_of_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = take(&path);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn of_many_one_at_a_time_holds_it_and_none_leaves_the_file() {
        const TURNS: u32 = 50;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let (inside, turns) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..TURNS {
                        let _held = take(&path);
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        turns.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(turns.into_inner(), 8 * TURNS);
        assert!(!path.exists());
    }

    #[test]
    fn who_waits_gets_the_file_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = take(&path);
        let number = holder::number_of(&File::open(&path).unwrap()).unwrap();
        let file = held.lock.file().metadata().unwrap().ino();
        let next = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| take(&path));
            let is_marked = |line: &str| line.contains("OFDLCK") && line.contains(&number);
            while !fs::read_to_string("/proc/locks").unwrap().lines().any(is_marked) {
                std::thread::yield_now();
            }
            drop(held);
            waiting.join().unwrap()
        });
        assert_eq!(next.lock.file().metadata().unwrap().ino(), file);
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn who_waits_too_long_hears_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = take(&path);
        let error = TransientLock::take(&path, IMPATIENT).unwrap_err();
        let words = format!("process {} still holds it after 20ms", std::process::id());
        assert_eq!((error.object.as_str(), error.source.to_string()), (path.to_str().unwrap(), words));
        drop(held);
        drop(take(&path));
        // Who came too late gets it in the end, and gives it back.
        let before = std::time::Instant::now();
        while path.exists() {
            assert!(before.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_killed_holders_file_is_the_next_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = open(&path).unwrap();
        super::super::lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let mut holder = Command::new("sleep").arg("1000").stdin(Stdio::from(file)).spawn().unwrap();
        let refused = TransientLock::attempt(&path, FileLock::try_of).unwrap();
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(refused.is_none(), "the child held it");
        assert!(path.exists(), "no process was left to remove it");
        drop(take(&path));
        assert!(!path.exists());
    }

    #[test]
    fn a_link_in_the_files_place_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (path, target) = (dir.path().join("lock"), dir.path().join("target"));
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert_eq!(TransientLock::take(&path, IMPATIENT).unwrap_err().errno(), Errno::ELOOP);
        assert!(!target.exists());
    }

    #[test]
    fn a_file_replaced_by_hand_stays_its_holders() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = take(&path);
        fs::remove_file(&path).unwrap();
        let second = take(&path);
        drop(first);
        let third = TransientLock::attempt(&path, FileLock::try_of).unwrap();
        assert!(third.is_none(), "the second one's file is still there");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn where_no_file_can_be_made_the_namespace_is_locked() {
        let path = Path::new("/proc/1/no such directory/lock");
        assert!(TransientLock::take(path, IMPATIENT).unwrap().is_none());
        let dir = tempfile::tempdir().unwrap();
        let namespace = dir.path().join("ns");
        let take = || TransientLock::take_or_of_namespace(path, IMPATIENT);
        crate::netns::create_persistent(&namespace)
            .unwrap()
            .run(|| {
                let held = take().unwrap();
                let error = take().unwrap_err();
                let words = format!("process {} still holds it after 20ms", std::process::id());
                assert_eq!((error.object.as_str(), error.source.to_string()), (NETWORK_NAMESPACE, words));
                drop(held);
                drop(TransientLock::take_or_of_namespace(path, TIMEOUT).unwrap());
            })
            .unwrap();
        crate::netns::remove_persistent(&namespace).unwrap();
    }
}
