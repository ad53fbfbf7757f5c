//! The directories of launches and of volumes. A launch's directory has the socket that the daemon
//! dials, and the daemon's log if the driver starts it itself. It is the only directory of the host
//! that the pod of a static manifest sees. A volume's directory has the sockets that its daemon
//! listens on afterwards. The two are one directory unless the daemon was started before it got the
//! volume.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use linux::fd_passing::PacketListener;

use crate::daemon::untrusted_text::abridged;
use crate::kernel::private_dir::private_dir_all;
use crate::model::launch::LaunchKey;

const SOCKET: &str = "dial.sock";
const CONTROL: &str = "ctl.sock";
const METRICS: &str = "prom.sock";
/// Of a daemon that is to follow the one that serves. No longer than the dial socket's name.
const NEXT_CONTROL: &str = "ctl.next";
const NEXT_METRICS: &str = "prom.next";
const LOG: &str = "daemon.log";
const OLDER_LOG: &str = "daemon.log.1";
const LOG_FIFO: &str = "daemon.fifo";
/// A link to the directory of the launch that serves the volume, if it is another one.
const LAUNCH: &str = "launch";
/// Of a longer line, only the end is shown.
const MAX_LAST_LINE_BYTES: u64 = 4096;
#[derive(Debug, Clone)]
pub(crate) struct DialDir {
    path: PathBuf,
}

impl DialDir {
    /// That of a launch, or of a volume.
    pub(crate) fn of(run_dir: &Path, key: impl Into<LaunchKey>) -> Self {
        Self { path: run_dir.join(key.into().as_str()) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// The daemon answers the driver's requests here, once it serves.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.path.join(CONTROL)
    }

    /// The daemon serves its metrics here, once it serves.
    pub(crate) fn metrics_socket(&self) -> PathBuf {
        self.path.join(METRICS)
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    /// The previous log, renamed when it became too large.
    pub(crate) fn older_log(&self) -> PathBuf {
        self.path.join(OLDER_LOG)
    }

    /// A daemon that the driver starts itself writes its log here.
    pub(crate) fn log_fifo(&self) -> PathBuf {
        self.path.join(LOG_FIFO)
    }

    /// Makes the directory anew, empty.
    pub(crate) fn make(&self) -> linux::Result<()> {
        self.remove()?;
        private_dir_all(&self.path)
    }

    /// Makes the directory anew, and listens in it for one daemon.
    pub(crate) fn listen(&self) -> linux::Result<DialListener> {
        self.make()?;
        Ok(DialListener { listener: PacketListener::bind(&self.socket())? })
    }

    /// In a directory without these sockets.
    pub(crate) fn serving_sockets(&self) -> linux::Result<ServingSockets> {
        listen_at(&self.control_socket(), &self.metrics_socket())
    }

    /// Sockets for a daemon that is to follow the one that serves, which keeps its own until
    /// [`Self::use_next_sockets`].
    pub(crate) fn next_serving_sockets(&self) -> linux::Result<ServingSockets> {
        let (control, metrics) = self.next_sockets();
        for left in [&control, &metrics] {
            remove_file(left)?;
        }
        listen_at(&control, &metrics)
    }

    /// Callers reach the daemon that follows from here on.
    pub(crate) fn use_next_sockets(&self) -> linux::Result<()> {
        let (control, metrics) = self.next_sockets();
        for (next, socket) in [(control, self.control_socket()), (metrics, self.metrics_socket())] {
            std::fs::rename(&next, &socket).map_err(|e| linux::Error::at("rename", &next, e))?;
        }
        Ok(())
    }

    fn next_sockets(&self) -> (PathBuf, PathBuf) {
        (self.path.join(NEXT_CONTROL), self.path.join(NEXT_METRICS))
    }

    /// Records in the volume's directory which launch serves it, for a driver without its journal.
    pub(crate) fn record_launch(&self, key: &LaunchKey) -> linux::Result<()> {
        let link = self.path.join(LAUNCH);
        remove_file(&link)?;
        std::os::unix::fs::symlink(Path::new("..").join(key.as_str()), &link)
            .map_err(|e| linux::Error::at("link", &link, e))
    }

    /// The launch that serves the volume, if it was recorded.
    pub(crate) fn recorded_launch(&self) -> Option<LaunchKey> {
        let target = std::fs::read_link(self.path.join(LAUNCH)).ok()?;
        LaunchKey::parse(target.file_name()?.to_str()?)
    }

    /// A missing directory is a success.
    pub(crate) fn remove(&self) -> linux::Result<()> {
        linux::tree::remove(&self.path)
    }

    /// The last line with text in the log. Reads only the end of a long log.
    pub(crate) fn last_log_line(&self) -> Option<String> {
        let mut log = File::open(self.log()).ok()?;
        let begin = log.metadata().ok()?.len().saturating_sub(MAX_LAST_LINE_BYTES);
        log.seek(SeekFrom::Start(begin)).ok()?;
        let mut end = Vec::new();
        log.take(MAX_LAST_LINE_BYTES).read_to_end(&mut end).ok()?;
        let text = String::from_utf8_lossy(&end);
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(abridged)
    }
}

/// A missing one is a success.
fn remove_file(path: &Path) -> linux::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(linux::Error::at("remove", path, e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn listen_at(control: &Path, metrics: &Path) -> linux::Result<ServingSockets> {
    Ok(ServingSockets {
        control: PacketListener::bind(control)?.into(),
        metrics: UnixListener::bind(metrics).map_err(|e| linux::Error::at("bind", metrics, e))?.into(),
    })
}

/// The listening sockets of a volume's daemon before the hand-over; the driver still holds them. While
/// another process holds a copy, callers of a dead daemon wait instead of being refused.
#[derive(Debug)]
pub(crate) struct ServingSockets {
    pub(crate) control: OwnedFd,
    pub(crate) metrics: OwnedFd,
}

/// Listens for one hand-over. Once it is dropped, no daemon can connect.
#[derive(Debug)]
pub(crate) struct DialListener {
    listener: PacketListener,
}

impl DialListener {
    pub(crate) fn accept(&self) -> linux::Result<linux::fd_passing::PacketSocket> {
        self.listener.accept()
    }

    pub(crate) fn path(&self) -> &Path {
        self.listener.path()
    }
}

impl AsFd for DialListener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for DialListener {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.listener.path())
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.listener.path().display(), %error, "remove dial socket");
        }
    }
}

/// The volumes and launches that have a directory in `run_dir`.
pub(crate) fn list(run_dir: &Path) -> linux::Result<Vec<LaunchKey>> {
    let listed = |e| linux::Error::at("list", run_dir, e);
    let mut keys = Vec::new();
    let entries = match std::fs::read_dir(run_dir) {
        // The run directory is missing on every node between a reboot and the driver's start.
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(keys),
        entries => entries.map_err(listed)?,
    };
    for entry in entries {
        keys.extend(entry.map_err(listed)?.file_name().to_str().and_then(LaunchKey::parse));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::limits::MAX_RUN_DIR_BYTES;

    #[test]
    fn the_longest_run_directory_can_be_listened_in_and_one_more_byte_cannot() {
        let dir = tempfile::tempdir().unwrap();
        let id = LaunchKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        let base = dir.path().to_str().unwrap().len() + 1;
        let longest = dir.path().join("r".repeat(MAX_RUN_DIR_BYTES - base));
        let listener = DialDir::of(&longest, &id).listen().unwrap();
        assert_eq!(list(&longest).unwrap(), std::slice::from_ref(&id));
        drop(listener);
        assert!(!DialDir::of(&longest, &id).socket().exists());
        let too_long = dir.path().join("r".repeat(MAX_RUN_DIR_BYTES - base + 1));
        assert_eq!(DialDir::of(&too_long, &id).listen().unwrap_err().op, "bind");
    }

    #[test]
    fn the_last_log_line_is_the_last_line_with_text() {
        let dir = tempfile::tempdir().unwrap();
        let id = LaunchKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        let dial = DialDir::of(dir.path(), &id);
        assert_eq!(dial.last_log_line(), None);
        std::fs::create_dir(dial.path()).unwrap();
        std::fs::write(dial.log(), "one\ntwo \n\n").unwrap();
        assert_eq!(dial.last_log_line().as_deref(), Some("two"));
    }
}
