//! Tells when to look: inotify on the directory or, while it is missing, on
//! its nearest ancestor that exists.

use std::future::poll_fn;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::Poll;

use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio_stream::{Stream, StreamExt};

use super::Error;

/// The link by which kubelet replaces all files of a ConfigMap's directory at
/// once; the files themselves are links through it and do not change.
const DATA_LINK: &str = "..data";

#[derive(Debug)]
pub(super) struct Watch {
    dir: PathBuf,
    events: EventStream<Vec<u8>>,
    watched: Option<WatchDescriptor>,
}

impl Watch {
    pub(super) fn new(dir: &Path) -> Result<Self, Error> {
        let failed = |cause| Error { path: dir.to_owned(), cause };
        let events = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
        Ok(Self { dir: dir.to_owned(), events: events.map_err(failed)?, watched: None })
    }

    /// Watches what is at the path now, which need not be what was there before.
    pub(super) fn renew(&mut self) {
        let mut watches = self.events.watches();
        let found = watches.add(&self.dir, dir_mask()).ok().or_else(|| {
            let mut ancestors = self.dir.ancestors().skip(1);
            ancestors.find_map(|ancestor| watches.add(or_here(ancestor), ancestor_mask()).ok())
        });
        if let Some(before) = self.watched.take()
            && found.as_ref() != Some(&before)
        {
            // The kernel has removed it already if what it watched is gone.
            drop(watches.remove(before));
        }
        self.watched = found;
    }

    /// Waits for a reason to look; events that are there together are one.
    pub(super) async fn changed(&mut self) {
        loop {
            match self.events.next().await {
                Some(Ok(event)) if concerns(&self.dir, &event) => break,
                Some(Ok(_)) => {}
                // Left to the regular look: a queue that fails would fail in a circle.
                Some(Err(_)) | None => return std::future::pending().await,
            }
        }
        while let Some(Some(Ok(_))) = self.pending_event().await {}
    }

    /// What is in the queue already, without waiting.
    async fn pending_event(&mut self) -> Option<Option<std::io::Result<EventOwned>>> {
        poll_fn(|context| match Pin::new(&mut self.events).poll_next(context) {
            Poll::Ready(event) => Poll::Ready(Some(event)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }
}

/// A file that is created is written next, and closing it tells; only links
/// come complete. Names with a dot are nobody's manifests.
fn concerns(dir: &Path, event: &EventOwned) -> bool {
    let Some(name) = &event.name else { return !event.mask.contains(EventMask::IGNORED) };
    if name == DATA_LINK {
        return true;
    }
    if name.as_encoded_bytes().starts_with(b".") {
        return false;
    }
    if !event.mask.contains(EventMask::CREATE) {
        return true;
    }
    let created = std::fs::symlink_metadata(dir.join(name));
    created.map_or(true, |file| !file.is_file() || file.nlink() > 1)
}

fn dir_mask() -> WatchMask {
    WatchMask::CLOSE_WRITE
        | WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVE
        | WatchMask::ATTRIB
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
}

fn ancestor_mask() -> WatchMask {
    WatchMask::CREATE | WatchMask::MOVED_TO | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF
}

/// The parent of a bare name is "".
fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}
