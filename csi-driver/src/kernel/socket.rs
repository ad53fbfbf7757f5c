//! Unix sockets that persist: bound over the socket of a dead process, and bound again when the
//! socket file or its directory is removed.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use inotify::{EventStream, Inotify, WatchMask};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;

use crate::error::chain;
use crate::{PREDECESSOR_EXIT, RETRY};

const FIRST_BACK_OFF: Duration = Duration::from_millis(500);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(122);
/// Regular check for what inotify does not report: a mount over the directory, or a renamed parent.
const LOOK: Duration = Duration::from_secs(30);
/// Pause after a failed accept, for example for want of descriptors.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("{}: another process answers there: is the driver running already?", path.display())]
    Live { path: PathBuf },
    #[error("{}: not a socket", path.display())]
    NotASocket { path: PathBuf },
    #[error("{op} {}", path.display())]
    Io {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("serve {}", path.display())]
    Serve {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
}

/// A listening socket. Removed when dropped.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    dir_mode: u32,
    bound: Option<Bound>,
}

#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    /// Device and inode of the socket file.
    file: (u64, u64),
}

/// Why no more connections arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The receiver was dropped.
    NotWanted,
    /// The socket is no longer at its path.
    Lost,
}

impl Socket {
    /// Binds `path`, mode 0600, and replaces a socket that no process serves. A socket that answers
    /// is an error. Creates a missing directory with `dir_mode`.
    pub(crate) async fn bind(path: &Path, dir_mode: u32) -> Result<Self, SocketError> {
        let bound = Some(Bound::at(path, dir_mode).await?);
        Ok(Self { path: path.to_owned(), dir_mode, bound })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Forwards connections until the socket is lost or the receiver is dropped.
    pub(crate) async fn accept(&self, connections: &mpsc::Sender<UnixStream>) -> End {
        let Some(bound) = &self.bound else { return End::Lost };
        tokio::select! {
            () = accept(bound, connections) => End::NotWanted,
            () = lost(&self.path, bound.file) => End::Lost,
        }
    }

    /// Forwards connections, and binds the socket again when it is lost. Ends when the receiver is
    /// dropped.
    pub(crate) async fn keep(mut self, connections: mpsc::Sender<UnixStream>) {
        let mut back_off = BackOff::default();
        while self.accept(&connections).await == End::Lost {
            if self.bound.is_some() {
                self.say_lost(&back_off);
            }
            if self.bind_again(&mut back_off).await {
                back_off = BackOff::default();
            }
        }
    }

    pub(crate) fn say_lost(&self, back_off: &BackOff) {
        let (path, seconds) = (self.path.display(), back_off.0.as_secs_f32());
        tracing::warn!(%path, seconds, "the socket was removed: binding it again later");
    }

    /// Removes the socket and binds it again after a pause. Returns whether that succeeded.
    pub(crate) async fn bind_again(&mut self, back_off: &mut BackOff) -> bool {
        self.take_away();
        tokio::time::sleep(back_off.next()).await;
        match Bound::at(&self.path, self.dir_mode).await {
            Ok(bound) => self.bound = Some(bound),
            Err(error) => tracing::warn!(error = chain(&error), "bind the socket again"),
        }
        self.bound.is_some()
    }

    /// Removes the socket file, unless another one has replaced it.
    fn take_away(&mut self) {
        let Some(bound) = self.bound.take() else { return };
        if is_at(&self.path, bound.file)
            && let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "remove socket");
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.take_away();
    }
}

/// Doubles the pause each time.
#[derive(Debug)]
pub(crate) struct BackOff(Duration);

impl Default for BackOff {
    fn default() -> Self {
        Self(FIRST_BACK_OFF)
    }
}

impl BackOff {
    /// The next pause.
    pub(crate) fn seconds(&self) -> f32 {
        self.0.as_secs_f32()
    }

    fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).min(LONGEST_BACK_OFF);
        now
    }
}

impl Bound {
    async fn at(path: &Path, dir_mode: u32) -> Result<Self, SocketError> {
        let io = |op| {
            let path = path.to_owned();
            move |source| SocketError::Io { op, path, source }
        };
        let dir = path.parent().unwrap_or(Path::new("/"));
        if !dir.is_dir() {
            std::fs::create_dir_all(dir).map_err(io("create directory of"))?;
            let mode = std::fs::Permissions::from_mode(dir_mode);
            std::fs::set_permissions(dir, mode).map_err(io("set mode of directory of"))?;
        }
        match connect_to_old(path).await {
            Ok(_) => return Err(SocketError::Live { path: path.to_owned() }),
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                let found = std::fs::symlink_metadata(path).map_err(io("look at"))?;
                if !found.file_type().is_socket() {
                    return Err(SocketError::NotASocket { path: path.to_owned() });
                }
                std::fs::remove_file(path).map_err(io("remove stale"))?;
            }
            Err(e) => return Err(io("connect")(e)),
        }
        // Never open to others, not even briefly: the process's umask is 0077.
        let listener = UnixListener::bind(path).map_err(io("bind"))?;
        let file = identity(path).map_err(io("look at"))?;
        Ok(Self { listener, file })
    }
}

/// Connects to the old socket, unless no process listens. Waits briefly for one that is ending.
async fn connect_to_old(path: &Path) -> io::Result<UnixStream> {
    let deadline = Instant::now() + PREDECESSOR_EXIT;
    loop {
        let stream = UnixStream::connect(path).await?;
        if stream.peer_cred()?.pid().is_some_and(linux::process::is_killed) {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        if Instant::now() >= deadline {
            return Ok(stream);
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Forwards connections until the receiver is dropped.
async fn accept(bound: &Bound, connections: &mpsc::Sender<UnixStream>) {
    loop {
        match bound.listener.accept().await {
            Ok((stream, _)) => {
                if connections.send(stream).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accept a connection: not again for a second");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
            }
        }
    }
}

/// Returns when `file` is no longer at `path`.
async fn lost(path: &Path, file: (u64, u64)) {
    let mut events = match watch(path) {
        Ok(events) => Some(events),
        Err(error) => {
            let path = path.display();
            tracing::warn!(%path, %error, "cannot watch the socket: checking it regularly instead");
            None
        }
    };
    // Checked after the watch is in place, so that no change is missed.
    while is_at(path, file) {
        let changed = async {
            match &mut events {
                Some(events) => events.next().await,
                None => std::future::pending().await,
            }
        };
        if let Ok(None | Some(Err(_))) = tokio::time::timeout(LOOK, changed).await {
            events = None;
        }
    }
}

fn watch(path: &Path) -> io::Result<EventStream<[u8; 1024]>> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    inotify.watches().add(path.parent().unwrap_or(Path::new("/")), mask)?;
    inotify.into_event_stream([0; 1024])
}

fn is_at(path: &Path, file: (u64, u64)) -> bool {
    identity(path).is_ok_and(|found| found == file)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_longest() {
        let mut back_off = BackOff::default();
        let pauses: Vec<u128> = (0..10).map(|_| back_off.next().as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 122_000, 122_000]);
    }
}
