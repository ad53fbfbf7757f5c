//! What a daemon writes to stdout and stderr, within bounds: it goes through a FIFO to the
//! driver, which keeps it in two files that take turns.
//!
//! Invariant: a daemon, hostile or not, neither fills the disk nor waits nor gets SIGPIPE.
//! It has both ends of the FIFO open, without blocking: while no driver reads, the pipe
//! holds 64 KiB (pipe(7)), and what the daemon writes beyond them is lost.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use tokio::net::unix::pipe::{OpenOptions as PipeOptions, Receiver};

use crate::daemon::dial::DialDir;
use crate::error::chain;
use crate::model::launch::LaunchKey;

/// Of one file; there are two.
const MAX_LOG_BYTES: u64 = 1 << 20;
const READ_BYTES: usize = 4 << 10;
/// For the driver to write down what an ended daemon said.
const LOG_WAIT: Duration = Duration::from_secs(1);

/// The logs of the daemons that this driver follows.
#[derive(Debug, Clone)]
pub(crate) struct DaemonLogs {
    run_dir: PathBuf,
    followed: Arc<Followed>,
}

/// Launches whose daemon may have said more than is in the file.
#[derive(Debug, Default)]
struct Followed {
    launches: Mutex<HashSet<LaunchKey>>,
    one_ended: Condvar,
}

impl DaemonLogs {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.to_path_buf(), followed: Arc::default() }
    }

    /// Makes the FIFO and follows it. Returns the daemon's descriptor, for stdout and stderr.
    pub(super) fn start(&self, key: &LaunchKey) -> linux::Result<OwnedFd> {
        let fifo = DialDir::of(&self.run_dir, key).log_fifo();
        nix::unistd::mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR)
            .map_err(|e| linux::Error::new("make FIFO", fifo.display().to_string(), e))?;
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits();
        let daemons = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&fifo);
        let daemons = daemons.map_err(|e| linux::Error::at("open", &fifo, e))?;
        self.follow(key)?;
        Ok(daemons.into())
    }

    /// Follows the log of an earlier driver's daemon, unless this driver does so already.
    pub(super) fn adopt(&self, key: &LaunchKey) -> linux::Result<()> {
        let is_followed = lock(&self.followed.launches).contains(key);
        if is_followed { Ok(()) } else { self.follow(key) }
    }

    /// Follows the FIFO of a daemon that may have been started by an earlier driver, until the
    /// daemon has ended. Must be called once for each daemon and driver, within a runtime.
    fn follow(&self, key: &LaunchKey) -> linux::Result<()> {
        let dial = DialDir::of(&self.run_dir, key);
        let fifo = dial.log_fifo();
        let receiver = match PipeOptions::new().open_receiver(&fifo) {
            Ok(receiver) => receiver,
            // The daemon of a driver that gave it a file, or one that has ended.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(linux::Error::at("open", &fifo, e)),
        };
        // If the daemon has ended before the open, no writer was ever seen, and the kernel reports
        // no end (pipe_poll()). A writer that comes and goes changes that.
        let writer = OpenOptions::new().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&fifo);
        drop(writer.map_err(|e| linux::Error::at("open", &fifo, e))?);
        let files = Files { log: dial.log(), older: dial.older_log(), limit_bytes: MAX_LOG_BYTES };
        let (key, followed) = (key.clone(), Arc::clone(&self.followed));
        lock(&followed.launches).insert(key.clone());
        tokio::spawn(async move {
            if let Err(error) = copy(&receiver, files).await {
                tracing::warn!(%key, error = chain(&error), "the daemon's log goes on without what it writes now");
                discard(&receiver).await;
            }
            lock(&followed.launches).remove(&key);
            followed.one_ended.notify_all();
        });
        Ok(())
    }

    /// The last line of a daemon that has ended, for the message about its end.
    pub(super) fn last_line(&self, key: &LaunchKey) -> Option<String> {
        let launches = lock(&self.followed.launches);
        let is_followed = |launches: &mut HashSet<LaunchKey>| launches.contains(key);
        let ended = self.followed.one_ended.wait_timeout_while(launches, LOG_WAIT, is_followed);
        let (launches, _timed_out) = ended.unwrap_or_else(PoisonError::into_inner);
        // The log is read without the lock.
        drop(launches);
        DialDir::of(&self.run_dir, key).last_log_line()
    }
}

fn lock(launches: &Mutex<HashSet<LaunchKey>>) -> MutexGuard<'_, HashSet<LaunchKey>> {
    // Nothing panics while it is held.
    launches.lock().unwrap_or_else(PoisonError::into_inner)
}

/// To the end of the last writer. Files are written where a thread may wait for the disk.
async fn copy(receiver: &Receiver, files: Files) -> linux::Result<()> {
    let mut log = None;
    let mut buffer = vec![0; READ_BYTES];
    while let Some(length) = read(receiver, &mut buffer).await {
        let text = buffer[..length].to_vec();
        let (files, open) = (files.clone(), log.take());
        let written = tokio::task::spawn_blocking(move || {
            let mut open = open.map_or_else(|| files.open(), Ok)?;
            open.write(&files, &text).map(|()| open)
        });
        // Ends early when the driver does, like this task.
        let Ok(written) = written.await else { return Ok(()) };
        log = Some(written?);
    }
    Ok(())
}

async fn discard(receiver: &Receiver) {
    let mut buffer = vec![0; READ_BYTES];
    while read(receiver, &mut buffer).await.is_some() {}
}

/// How much there was; `None` at the end.
async fn read(receiver: &Receiver, buffer: &mut [u8]) -> Option<usize> {
    loop {
        receiver.readable().await.ok()?;
        match receiver.try_read(buffer) {
            Ok(0) => return None,
            Ok(length) => return Some(length),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => return None,
        }
    }
}

#[derive(Debug, Clone)]
struct Files {
    log: PathBuf,
    older: PathBuf,
    limit_bytes: u64,
}

impl Files {
    fn open(&self) -> linux::Result<Log> {
        let flags = OFlag::O_NOFOLLOW.bits();
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o600).custom_flags(flags);
        let file = options.open(&self.log).map_err(|e| linux::Error::at("open log", &self.log, e))?;
        let bytes = file.metadata().map_err(|e| linux::Error::at("look at log", &self.log, e))?.len();
        Ok(Log { file, bytes })
    }
}

/// The file that is written to.
#[derive(Debug)]
struct Log {
    file: File,
    bytes: u64,
}

impl Log {
    fn write(&mut self, files: &Files, text: &[u8]) -> linux::Result<()> {
        if self.bytes + text.len() as u64 > files.limit_bytes {
            std::fs::rename(&files.log, &files.older)
                .map_err(|e| linux::Error::at("rename log", &files.log, e))?;
            *self = files.open()?;
        }
        self.file.write_all(text).map_err(|e| linux::Error::at("write log", &files.log, e))?;
        self.bytes += text.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path, limit_bytes: u64) -> Files {
        Files { log: dir.join("log"), older: dir.join("log.1"), limit_bytes }
    }

    #[test]
    fn two_files_take_turns_and_a_log_is_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 10);
        for line in [b"12345\n", b"abcde\n", b"fghij\n"] {
            files.open().unwrap().write(&files, line).unwrap();
        }
        assert_eq!(std::fs::read(&files.log).unwrap(), b"fghij\n");
        assert_eq!(std::fs::read(&files.older).unwrap(), b"abcde\n");
        files.open().unwrap().write(&files, b"kl\n").unwrap();
        assert_eq!(std::fs::read(&files.log).unwrap(), b"fghij\nkl\n");
    }

    fn logs(dir: &Path) -> (DaemonLogs, LaunchKey, DialDir) {
        let key = LaunchKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        let dial = DialDir::of(dir, &key);
        std::fs::create_dir(dial.path()).unwrap();
        (DaemonLogs::new(dir), key, dial)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_last_line_of_a_daemon_that_has_ended_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, key, dial) = logs(dir.path());
        let mut daemons = File::from(logs.start(&key).unwrap());
        daemons.write_all(b"one\nlast words\n").unwrap();
        drop(daemons);
        let last = tokio::task::spawn_blocking(move || logs.last_line(&key)).await.unwrap();
        assert_eq!(last.as_deref(), Some("last words"));
        assert_eq!(std::fs::read(dial.log()).unwrap(), b"one\nlast words\n");
    }

    #[tokio::test]
    async fn without_a_reader_a_daemon_loses_lines_and_does_not_wait() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, key, _dial) = logs(dir.path());
        let mut daemons = File::from(logs.start(&key).unwrap());
        // This test's only thread: the follower does not run meanwhile.
        let mut written = 0;
        let refused = loop {
            match daemons.write(&[b'x'; 1000]) {
                Ok(length) => written += length,
                Err(error) => break error,
            }
            assert!(written < 2 << 20, "a pipe has no such size");
        };
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn the_log_of_a_daemon_that_ended_before_is_not_followed_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let key = LaunchKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        let dial = DialDir::of(dir.path(), &key);
        std::fs::create_dir(dial.path()).unwrap();
        nix::unistd::mkfifo(&dial.log_fifo(), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let logs = DaemonLogs::new(dir.path());
        logs.follow(&key).unwrap();
        let ended = async {
            while lock(&logs.followed.launches).contains(&key) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap();
    }
}
