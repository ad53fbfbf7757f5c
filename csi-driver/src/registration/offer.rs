//! The registration socket as kubelet's plugin watcher sees it: there, and new
//! whenever kubelet has to look again.
//!
//! kubelet does not retry a registration that failed after it was validated; it
//! looks again only when a socket appears. So a refusal is answered by taking
//! the socket away and binding it anew, later and later; and a socket that
//! somebody removed, alone or with its directory, is bound anew as well.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use inotify::{EventStream, Inotify, WatchMask};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;

use super::stream::RewrittenStream;
use crate::error::chain;
use crate::server::{self, SocketError};

/// As kubelet makes it.
const REGISTRY_MODE: u32 = 0o755;
const FIRST_BACK_OFF: Duration = Duration::from_millis(500);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(122);
/// What inotify does not tell: something mounted over the directory, or a parent renamed.
const LOOK: Duration = Duration::from_secs(30);
/// Out of descriptors, say: not again before something may have changed.
const AFTER_FAILED_ACCEPT: Duration = Duration::from_secs(1);

/// kubelet's word on the registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Registered,
    Refused,
}

/// The socket, and who takes the connections that come by it. Gone when dropped.
#[derive(Debug)]
pub(super) struct Offer {
    path: PathBuf,
    bound: Option<Bound>,
    connections: mpsc::Sender<io::Result<RewrittenStream>>,
    verdicts: mpsc::UnboundedReceiver<Verdict>,
    back_off: BackOff,
}

#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    /// Device and inode of its socket file.
    file: (u64, u64),
}

/// Why a socket is not good any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Refused,
    Removed,
}

impl Offer {
    /// A socket of somebody who answers is an error, as is a directory that cannot be made.
    pub(super) async fn bind(
        path: &Path,
        connections: mpsc::Sender<io::Result<RewrittenStream>>,
        verdicts: mpsc::UnboundedReceiver<Verdict>,
    ) -> Result<Self, SocketError> {
        let bound = Some(Bound::at(path).await?);
        let path = path.to_owned();
        Ok(Self { path, bound, connections, verdicts, back_off: BackOff::default() })
    }

    /// Keeps the socket there. Ends when nobody takes its connections any more.
    pub(super) async fn keep(mut self) {
        loop {
            if let Some(bound) = &self.bound {
                let accepting = accept(&bound.listener, &self.connections);
                let lost = lost(&self.path, bound.file);
                let end = tokio::select! {
                    () = accepting => return,
                    end = refused(&mut self.verdicts, &mut self.back_off) => end,
                    end = lost => end,
                };
                let seconds = self.back_off.now.as_secs_f32();
                match end {
                    End::Refused => {
                        tracing::info!(seconds, "offering the driver for registration again later");
                    }
                    End::Removed => {
                        let path = self.path.display();
                        tracing::warn!(%path, seconds, "somebody removed the socket: binding it again later");
                    }
                }
            }
            self.take_away();
            tokio::time::sleep(self.back_off.next()).await;
            match Bound::at(&self.path).await {
                Ok(bound) => self.bound = Some(bound),
                Err(error) => tracing::warn!(error = chain(&error), "bind the registration socket"),
            }
        }
    }

    /// Removes the socket, unless another one stands in its place by now.
    fn take_away(&mut self) {
        if self.bound.take().is_some_and(|bound| is_at(&self.path, bound.file)) {
            server::remove_socket(&self.path);
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.take_away();
    }
}

impl Bound {
    async fn at(path: &Path) -> Result<Self, SocketError> {
        let listener = server::bind(path, REGISTRY_MODE).await?;
        let file = identity(path).map_err(|source| SocketError::Io {
            op: "look at",
            path: path.to_owned(),
            source,
        })?;
        Ok(Self { listener, file })
    }
}

/// Twice as long each time, until kubelet has registered the driver.
#[derive(Debug)]
struct BackOff {
    now: Duration,
}

impl Default for BackOff {
    fn default() -> Self {
        Self { now: FIRST_BACK_OFF }
    }
}

impl BackOff {
    fn next(&mut self) -> Duration {
        let now = self.now;
        self.now = (now * 2).min(LONGEST_BACK_OFF);
        now
    }
}

/// Ends when nobody takes the connections any more.
async fn accept(listener: &UnixListener, connections: &mpsc::Sender<io::Result<RewrittenStream>>) {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => {
                if connections.send(Ok(RewrittenStream::new(socket))).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accept a registration");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
            }
        }
    }
}

async fn refused(verdicts: &mut mpsc::UnboundedReceiver<Verdict>, back_off: &mut BackOff) -> End {
    loop {
        match verdicts.recv().await {
            Some(Verdict::Registered) => *back_off = BackOff::default(),
            Some(Verdict::Refused) => return End::Refused,
            // The server is gone, and `accept` says so.
            None => std::future::pending().await,
        }
    }
}

/// Ends when `file` is not at `path` any more.
async fn lost(path: &Path, file: (u64, u64)) -> End {
    let mut events = match watch(path) {
        Ok(events) => Some(events),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "watch the registration socket: it is only looked at now and then");
            None
        }
    };
    // After the watch is in place: nothing slips between the two.
    while is_at(path, file) {
        let changed = async {
            match &mut events {
                Some(events) => drop(events.next().await),
                None => std::future::pending().await,
            }
        };
        // Also where the stream has ended: its directory is gone, or moved away.
        let _changed_or_not = tokio::time::timeout(LOOK, changed).await;
    }
    End::Removed
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
