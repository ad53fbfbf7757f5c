//! Triggers scans: inotify on the directory or, while it is missing, on its nearest existing
//! ancestor.
//!
//! The kernel limits inotify instances per user, and a pod's root may hold all of them. Until one
//! is free, only the periodic scan finds changes.

use std::future::poll_fn;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::Poll;

use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio_stream::{Stream, StreamExt};

/// The link that kubelet swaps to replace all files of a ConfigMap's directory at once. The files
/// are links through it and do not change.
const DATA_LINK: &str = "..data";

#[derive(Debug)]
pub(super) struct Watch {
    dir: PathBuf,
    /// `None` while no inotify instance is available.
    events: Option<EventStream<Vec<u8>>>,
    watched: Option<WatchDescriptor>,
}

impl Watch {
    pub(super) fn new(dir: &Path) -> Self {
        let events = event_stream().inspect_err(|error| {
            tracing::warn!(dir = %dir.display(), %error, "no inotify instance: only the periodic scan finds changes");
        });
        Self { dir: dir.to_owned(), events: events.ok(), watched: None }
    }

    /// Watches the path's current target, which may differ from the previous one.
    pub(super) fn renew(&mut self) {
        if self.events.is_none() {
            self.events = event_stream().ok();
        }
        let Some(events) = &self.events else { return };
        let mut watches = events.watches();
        let found = watches.add(&self.dir, dir_mask()).ok().or_else(|| {
            let mut ancestors = self.dir.ancestors().skip(1);
            ancestors.find_map(|ancestor| watches.add(or_here(ancestor), ancestor_mask()).ok())
        });
        if let Some(before) = self.watched.take()
            && found.as_ref() != Some(&before)
        {
            // The kernel has already removed the watch if its target is gone.
            let _already_removed = watches.remove(before);
        }
        self.watched = found;
    }

    /// Waits for a relevant event; queued events count as one.
    pub(super) async fn changed(&mut self) {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                Some(Ok(event)) if concerns(&self.dir, &event) => break,
                Some(Ok(_)) => {}
                // Leave it to the periodic scan: retrying a failed queue would loop.
                Some(Err(_)) | None => return std::future::pending().await,
            }
        }
        while let Some(Some(Ok(_))) = self.pending_event().await {}
    }

    /// Returns a queued event without waiting.
    async fn pending_event(&mut self) -> Option<Option<std::io::Result<EventOwned>>> {
        let events = self.events.as_mut()?;
        poll_fn(|context| match Pin::new(&mut *events).poll_next(context) {
            Poll::Ready(event) => Poll::Ready(Some(event)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }
}

fn event_stream() -> std::io::Result<EventStream<Vec<u8>>> {
    Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]))
}

/// Ignores the creation of a regular file: closing it after the write causes another event. Links
/// are complete at once. Hidden files are not manifests.
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

/// `Path::parent` of a bare name is "".
fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_watch_without_an_instance_gets_one_later() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch { dir: dir.path().to_owned(), events: None, watched: None };
        watch.renew();
        std::fs::write(dir.path().join("a.yaml"), "").unwrap();
        watch.changed().await;
    }
}
