//! Waits for images that are put into the images directory.

use std::future::poll_fn;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::Poll;

use inotify::{EventOwned, EventStream, Inotify, WatchMask};
use tokio_stream::{Stream, StreamExt};

/// Reports changes of the directory from [`Self::new`] on.
#[derive(Debug)]
pub struct ImagesWatch {
    events: EventStream<Vec<u8>>,
}

impl ImagesWatch {
    /// Fails if `images_dir` is missing.
    pub fn new(images_dir: &Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE | WatchMask::MOVED_TO | WatchMask::CREATE | WatchMask::ONLYDIR;
        inotify.watches().add(images_dir, mask)?;
        Ok(Self { events: inotify.into_event_stream(vec![0; 4096])? })
    }

    /// Waits for a change; queued events count as one.
    pub async fn changed(&mut self) -> io::Result<()> {
        match self.events.next().await {
            Some(event) => drop(event?),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        while let Some(event) = self.queued().await {
            event?;
        }
        Ok(())
    }

    /// An event, without waiting for one.
    async fn queued(&mut self) -> Option<io::Result<EventOwned>> {
        poll_fn(|context| match Pin::new(&mut self.events).poll_next(context) {
            Poll::Ready(event) => Poll::Ready(event),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn images_that_come_together_are_one_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = ImagesWatch::new(dir.path()).unwrap();
        for n in 0..100 {
            std::fs::write(dir.path().join(format!("{n}.tar")), "").unwrap();
        }
        watch.changed().await.unwrap();
        let mut further = 0;
        loop {
            tokio::select! {
                biased;
                changed = watch.changed() => changed.unwrap(),
                () = std::future::ready(()) => break,
            }
            further += 1;
        }
        assert!(further <= 1, "{further} further looks");
        std::fs::write(dir.path().join("later.tar"), "").unwrap();
        watch.changed().await.unwrap();
    }
}
