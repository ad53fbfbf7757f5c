//! One writer of rules at a time, among those who ask.
//!
//! flock(2) on the network namespace's own inode: no file on disk, and the
//! kernel releases it when the holder dies. Everybody who can open the
//! namespace's file can lock it, also who should not; so nobody waits for it
//! without end, and it only keeps commits from conflicting, never decides
//! what is right.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::mpsc;
use std::time::Duration;

use crate::lock::FileLock;

/// Two hundred others may be before us, with some milliseconds each.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Held until dropped.
#[derive(Debug)]
pub struct NamespaceLock {
    _lock: FileLock,
}

impl NamespaceLock {
    /// Of the calling thread's network namespace, which
    /// [`NfTables::update`](super::NfTables::update) locks too. `None` where
    /// there is no /proc, and after five seconds.
    pub fn take() -> Option<Self> {
        Self::of(&open()?, PATIENCE)
    }

    pub(super) fn of(namespace: &File, patience: Duration) -> Option<Self> {
        match FileLock::try_of(reopen(namespace)?).ok()? {
            Some(lock) => Some(Self { _lock: lock }),
            None => wait(reopen(namespace)?, patience),
        }
    }
}

pub(super) fn open() -> Option<File> {
    File::open("/proc/thread-self/ns/net").ok()
}

/// An open file of its own: a duplicate would share the lock with `namespace`
/// and hold it until both are closed.
fn reopen(namespace: &File) -> Option<File> {
    File::open(format!("/proc/self/fd/{}", namespace.as_raw_fd())).ok()
}

/// flock(2) knows no time limit: another thread waits, and what it gets too
/// late it gives back.
fn wait(file: File, patience: Duration) -> Option<NamespaceLock> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let waiter = std::thread::Builder::new().name("lock".to_owned()).spawn(move || {
        if let Ok(lock) = FileLock::of(file) {
            drop(sender.send(NamespaceLock { _lock: lock }));
        }
    });
    waiter.ok()?;
    receiver.recv_timeout(patience).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns;
    use crate::nftables::{Batch, Family, NfTables};

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
    fn who_waits_gets_it_from_who_drops_it() {
        run(|| {
            let namespace = open().unwrap();
            let (other, third) = (open().unwrap(), open().unwrap());
            let held = NamespaceLock::of(&namespace, PATIENCE).unwrap();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| NamespaceLock::of(&other, PATIENCE));
                drop(held);
                assert!(waiting.join().unwrap().is_some());
            });
            assert!(NamespaceLock::of(&third, PATIENCE).is_some());
        });
    }

    #[test]
    fn who_keeps_it_keeps_nobody_from_working() {
        run(|| {
            let held = NamespaceLock::take().unwrap();
            assert!(NamespaceLock::of(&open().unwrap(), IMPATIENT).is_none());
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
                    others.update(|_| crate::Result::Ok((table(&rounds.to_string()), ())))?;
                }
                crate::Result::Ok((table("late"), ()))
            });
            done.unwrap();
            assert_eq!((rounds, late.tables().unwrap().len()), (6, 6));
            drop(held);
        });
    }
}
