//! The kubelet's files for each start of a container: its /etc/hosts and its termination log.
//!
//! Invariant: no call on such a file can block the kubelet. A container can block any call on its
//! inode, even after its end if it passed the descriptor on: by endless writes, or by a lease. So
//! each start has its own files, and later accesses run on one separate thread per pod, with a time
//! limit.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use runtime::Locks;
use tokio::sync::Mutex;

/// Only a container can make an access take longer.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// The files of one start of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnFiles {
    pub(crate) etc_hosts: PathBuf,
    pub(crate) termination_log: PathBuf,
}

impl OwnFiles {
    /// The files of start `number` of the container with the directory `dir`.
    pub(crate) fn new(dir: &Path, number: u32) -> Self {
        Self { etc_hosts: dir.join(format!("{number}.hosts")), termination_log: dir.join(number.to_string()) }
    }

    /// No container uses the files yet.
    pub(super) fn make(&self, hosts: &str) -> io::Result<()> {
        if let Some(dir) = self.etc_hosts.parent() {
            std::fs::create_dir_all(dir)?;
        }
        linux::shared_file::create(&self.etc_hosts, hosts, 0o644)?;
        // Any user of a container may write it.
        linux::shared_file::create(&self.termination_log, "", 0o666)
    }

    pub(super) fn remove(&self) -> linux::Result<()> {
        linux::atomic_file::discard(&self.etc_hosts)?;
        linux::atomic_file::discard(&self.termination_log)
    }
}

/// Serializes the work on such files per pod, by uid.
#[derive(Debug, Default)]
pub(crate) struct FileWork(Locks<String, Mutex<()>>);

impl FileWork {
    /// Runs `work`, which accesses files that the pod's containers use. Returns `TimedOut` if they
    /// block it; then it continues, and no other work of this pod starts until it ends.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        pod_uid: &str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let lock = self.0.of(pod_uid).lock_owned();
        let done = async {
            let lock = lock.await;
            let work = move || {
                let _until_done = lock;
                work()
            };
            tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
        };
        let late = || io::Error::new(ErrorKind::TimedOut, "a container blocks access to its file");
        tokio::time::timeout(TIME_LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_pod_that_blocks_its_file_holds_one_thread_and_no_other_pod() {
        let work = FileWork::default();
        let (release, held) = mpsc::channel::<()>();
        let stuck = work.run("a", move || held.recv().map_err(io::Error::other)).await;
        assert_eq!(stuck.unwrap_err().kind(), ErrorKind::TimedOut);
        let second = work.run::<()>("a", || panic!("the first has not finished")).await;
        assert_eq!(second.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(work.run("b", || Ok(7)).await.unwrap(), 7);
        release.send(()).unwrap();
        assert_eq!(work.run("a", || Ok(8)).await.unwrap(), 8);
    }

    #[test]
    fn each_start_has_files_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let inode = |path: &Path| path.metadata().unwrap().ino();
        let (first, second) = (OwnFiles::new(dir.path(), 0), OwnFiles::new(dir.path(), 1));
        first.make("1.2.3.4 a\n").unwrap();
        std::fs::write(&first.etc_hosts, "changed").unwrap();
        second.make("1.2.3.4 a\n").unwrap();
        assert_ne!(inode(&first.etc_hosts), inode(&second.etc_hosts));
        assert_eq!(std::fs::read_to_string(&second.etc_hosts).unwrap(), "1.2.3.4 a\n");
        assert_eq!(std::fs::read_to_string(&first.etc_hosts).unwrap(), "changed");
        first.remove().unwrap();
        assert!(!first.etc_hosts.exists() && !first.termination_log.exists());
        first.remove().unwrap();
    }
}
