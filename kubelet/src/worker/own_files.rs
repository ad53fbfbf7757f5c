//! The files that the kubelet makes for each start of a container: its /etc/hosts and its
//! termination log.
//!
//! Invariant: a container keeps the kubelet waiting in no call on such a file. It can make any
//! call on its inode wait, also after its end, if it gave the descriptor to another one: by writes
//! that never end, by a lease. So each start gets files of its own, and what is done with them
//! later is done beside the kubelet's other work, for a limited time, by one thread a pod.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use runtime::Locks;
use tokio::sync::Mutex;

/// What takes longer is a container's doing.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// The files of one start of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnFiles {
    pub(crate) etc_hosts: PathBuf,
    pub(crate) termination_log: PathBuf,
}

impl OwnFiles {
    /// Of start `number` of the container whose files lie in `dir`.
    pub(crate) fn new(dir: &Path, number: u32) -> Self {
        Self { etc_hosts: dir.join(format!("{number}.hosts")), termination_log: dir.join(number.to_string()) }
    }

    /// No container has them yet.
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

/// Of work on such files; one at a time for each pod, by its uid.
#[derive(Debug, Default)]
pub(crate) struct FileTurns(Locks<String, Mutex<()>>);

impl FileTurns {
    /// Does `work`, which touches files that containers of the pod have. `TimedOut` where they
    /// keep it waiting: it goes on, and no other of this pod begins until it is through.
    pub(super) async fn take<T: Send + 'static>(
        &self,
        pod_uid: &str,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let turn = self.0.of(pod_uid).lock_owned();
        let done = async {
            let turn = turn.await;
            let work = move || {
                let _until_it_is_through = turn;
                work()
            };
            tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
        };
        let late = || io::Error::new(ErrorKind::TimedOut, "a container keeps its file busy");
        tokio::time::timeout(TIME_LIMIT, done).await.unwrap_or_else(|_| Err(late()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_pod_whose_file_is_kept_busy_holds_one_thread_and_no_other_pod() {
        let turns = FileTurns::default();
        let (release, held) = mpsc::channel::<()>();
        let stuck = turns.take("a", move || held.recv().map_err(io::Error::other)).await;
        assert_eq!(stuck.unwrap_err().kind(), ErrorKind::TimedOut);
        let second = turns.take::<()>("a", || panic!("the first is not through")).await;
        assert_eq!(second.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(turns.take("b", || Ok(7)).await.unwrap(), 7);
        release.send(()).unwrap();
        assert_eq!(turns.take("a", || Ok(8)).await.unwrap(), 8);
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
