//! One writer of rules at a time, among those who ask.
//!
//! The lock is root's own file, named after the network namespace: who is not
//! root cannot hold it up. A writer who holds it too long holds nobody up for
//! good: it keeps commits from conflicting, the generation decides what is
//! right.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::lock::TransientLock;

/// Two hundred others may be before us, with some milliseconds each.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Held until dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    _lock: TransientLock,
}

impl NamespaceLock {
    /// Of the calling thread's network namespace, which
    /// [`NfTables::update`](super::NfTables::update) locks too. Where /run takes
    /// no files, a lock among those who call this only. `None` where there is
    /// no /proc, and after five seconds.
    pub fn take() -> Option<Self> {
        Some(Self { _lock: TransientLock::take_or_of_namespace(&path()?, PATIENCE).ok()? })
    }

    /// `None` also where /run takes no files.
    pub(super) fn at(path: &Path, patience: Duration) -> Option<Self> {
        Some(Self { _lock: TransientLock::take(path, patience).ok()?? })
    }
}

/// Of the calling thread's network namespace: no two that exist at once have
/// the same inode number.
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

    const IMPATIENT: Duration = Duration::from_millis(50);

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
            assert!(before.elapsed() < PATIENCE / 2, "{:?}", before.elapsed());
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
            assert!(NamespaceLock::at(&path().unwrap(), IMPATIENT).is_none());
            let (mut late, mut others) = (NfTables::open().unwrap(), NfTables::open().unwrap());
            late.patience = IMPATIENT;
            others.patience = IMPATIENT;
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
