//! Detects mounts whose server has ended, with a time limit.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;

/// A FUSE root answers in microseconds; a hanging one must not delay other volumes.
const STATFS_DEADLINE: Duration = Duration::from_secs(1);

/// Mounts with a pending statfs(2): one thread per mount, however often a pod is retried.
static UNANSWERED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unanswered() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNANSWERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a mount's server has ended. A hanging server is not dead: it may still answer.
pub(super) async fn is_dead(path: &Path) -> bool {
    let path = path.to_owned();
    if !unanswered().insert(path.clone()) {
        return false;
    }
    let asked = tokio::task::spawn_blocking(move || {
        let error = nix::sys::statfs::statfs(&path).err();
        unanswered().remove(&path);
        error
    });
    match tokio::time::timeout(STATFS_DEADLINE, asked).await {
        Ok(Ok(Some(errno))) => matches!(
            errno,
            Errno::ENOTCONN
                | Errno::ECONNABORTED
                | Errno::ESTALE
                | Errno::EIO
                | Errno::ENODEV
                | Errno::EHOSTDOWN
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use linux::mount::{UnmountMode, unmount};

    use super::*;
    use crate::volumes::host_paths::mount_silent;

    /// Threads of this process in statfs(2).
    fn waiting_threads() -> usize {
        let statfs = format!("{} ", nix::libc::SYS_statfs);
        let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        tasks
            .filter(|task| fs::read_to_string(task.join("syscall")).is_ok_and(|s| s.starts_with(&statfs)))
            .count()
    }

    #[tokio::test]
    async fn repeated_checks_of_a_hanging_mount_use_one_thread() {
        let root = tempfile::tempdir().unwrap();
        let (silent, connection) = mount_silent(root.path());
        let mut dead = Vec::new();
        for _ in 0..3 {
            dead.push(is_dead(&silent).await);
        }
        let threads = waiting_threads();
        drop(connection);
        let begun = Instant::now();
        while unanswered().contains(&silent) {
            assert!(begun.elapsed() < Duration::from_secs(60), "the thread never ends");
            tokio::task::yield_now().await;
        }
        let is_dead_now = is_dead(&silent).await;
        unmount(&silent, UnmountMode::Detach).unwrap();
        assert_eq!((dead, threads, is_dead_now), (vec![false; 3], 1, true));
    }
}
