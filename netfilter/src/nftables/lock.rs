//! Serializes the writers of rules that use this lock.
//!
//! The lock is a file of root, named after the network namespace, so only root can hold it. A
//! writer that holds it too long does not block others permanently: the lock avoids conflicts of
//! commits, and the generation ensures correctness.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::lock::TransientLock;

/// Two hundred other writers may come first, each with some milliseconds.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// Held until dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    _lock: TransientLock,
}

impl NamespaceLock {
    /// Locks the calling thread's network namespace, as
    /// [`NfTables::update`](super::NfTables::update) does. If /run accepts no files, the lock only
    /// excludes other callers of this function. `None` without /proc, and after five seconds.
    pub fn take() -> Option<Self> {
        Some(Self { _lock: TransientLock::take_or_of_namespace(&path()?, TIMEOUT).ok()? })
    }

    /// Also `None` if /run accepts no files.
    pub(super) fn at(path: &Path, timeout: Duration) -> Option<Self> {
        Some(Self { _lock: TransientLock::take(path, timeout).ok()?? })
    }
}

/// The lock file of the calling thread's network namespace: no two existing namespaces have the
/// same inode number.
pub(super) fn path() -> Option<PathBuf> {
    let namespace = fs::metadata("/proc/thread-self/ns/net").ok()?;
    Some(TransientLock::path(&format!("nftables-{}", namespace.ino())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nftables::{Batch, Family, NfTables};
    use linux::lock::FileLock;
    use linux::netns;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(50);

    /// A namespace of its own.
    fn run(test: impl FnOnce() + Send) {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        netns::create_persistent(&path).unwrap().run(test).unwrap();
        netns::remove_persistent(&path).unwrap();
    }

    #[test]
    fn who_holds_the_namespaces_own_file_holds_up_nobody() {
        run(|| {
            // What every process in the namespace may do.
            let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
            let _held = FileLock::try_of(namespace).unwrap().unwrap();
            let mut nf = NfTables::open().unwrap();
            let before = std::time::Instant::now();
            nf.update(|_| linux::Result::Ok((Batch::new(), ()))).unwrap();
            assert!(before.elapsed() < TIMEOUT / 2, "{:?}", before.elapsed());
        });
    }

    #[test]
    fn an_update_holds_the_file_and_leaves_none() {
        run(|| {
            let path = path().unwrap();
            let is_held = |_: &mut NfTables| {
                let other = FileLock::try_exclusive(&path, 0o600)?;
                linux::Result::Ok((Batch::new(), other.is_none()))
            };
            assert!(NfTables::open().unwrap().update(is_held).unwrap());
            assert!(!path.exists());
        });
    }

    #[test]
    fn who_keeps_it_keeps_nobody_from_working() {
        run(|| {
            let held = NamespaceLock::take().unwrap();
            assert!(NamespaceLock::at(&path().unwrap(), SHORT_TIMEOUT).is_none());
            let (mut late, mut others) = (NfTables::open().unwrap(), NfTables::open().unwrap());
            late.lock_timeout = SHORT_TIMEOUT;
            others.lock_timeout = SHORT_TIMEOUT;
            let mut rounds = 0;
            let table = |name: &str| {
                let mut batch = Batch::new();
                batch.add_table(Family::Inet, name, None);
                batch
            };
            let done = late.update(|_| {
                rounds += 1;
                if rounds < 6 {
                    others.update(|_| linux::Result::Ok((table(&rounds.to_string()), ())))?;
                }
                linux::Result::Ok((table("late"), ()))
            });
            done.unwrap();
            assert_eq!((rounds, late.tables().unwrap().len()), (6, 6));
            drop(held);
        });
    }
}
