//! Closes files on a thread of its own.
//!
//! The last close of a removed file deletes its content, which takes as long as the disk wants to;
//! the close of a file on a FUSE mount or a server waits for that (close(2) calls `flush`). Whoever
//! sent the descriptor may close its own first.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

/// Its only calls are close(2) and those of the queue.
const STACK_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Closer {
    queue: Sender<OwnedFd>,
    /// In the queue, or being closed.
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    pub(crate) fn start() -> io::Result<Self> {
        let (queue, closing) = channel::<OwnedFd>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&waiting);
        let close_all = move || {
            for fd in closing {
                drop(fd);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("closer".to_owned()).stack_size(STACK_BYTES).spawn(close_all)?;
        Ok(Self { queue, waiting })
    }

    pub(crate) fn close(&self, fd: OwnedFd) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // The thread ends only after the queue, so there is no error.
        drop(self.queue.send(fd));
    }

    /// How many are still open.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}
