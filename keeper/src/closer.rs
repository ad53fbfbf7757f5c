//! Closes files on a thread of its own.
//!
//! The last close of a removed file deletes its content, which takes as long as the disk wants to;
//! the close of a file on a FUSE mount or a server waits for that (close(2) calls `flush`). Whoever
//! sent the descriptor may close its own first.

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

/// Its only calls are close(2) and those of the queue.
const STACK_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Closer {
    queue: Sender<Job>,
    /// Of all times.
    queued: Cell<u64>,
    /// Of all times, in the order of the queue.
    closed: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Job {
    Close(OwnedFd),
    /// May be the last close of the backing file.
    Unregister {
        connection: OwnedFd,
        numbers: Vec<u32>,
        /// How many the connection has.
        registered: Arc<AtomicU32>,
    },
}

impl Job {
    fn run(self) {
        match self {
            Self::Close(fd) => drop(fd),
            Self::Unregister { connection, numbers, registered } => {
                for number in numbers {
                    // Its daemon may name any number.
                    if linux::fuse_backing::unregister(&connection, number).is_ok() {
                        let one_less = |count: u32| Some(count.saturating_sub(1));
                        let _before = registered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
                    }
                }
            }
        }
    }
}

impl Closer {
    pub(crate) fn start() -> io::Result<Self> {
        let (queue, closing) = channel::<Job>();
        let closed = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&closed);
        let close_all = move || {
            for job in closing {
                job.run();
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("closer".to_owned()).stack_size(STACK_BYTES).spawn(close_all)?;
        Ok(Self { queue, queued: Cell::new(0), closed })
    }

    pub(crate) fn close(&self, fd: OwnedFd) {
        self.add(Job::Close(fd));
    }

    pub(crate) fn unregister(&self, connection: OwnedFd, numbers: Vec<u32>, registered: Arc<AtomicU32>) {
        self.add(Job::Unregister { connection, numbers, registered });
    }

    fn add(&self, job: Job) {
        self.queued.set(self.queued.get() + 1);
        // The thread ends only after the queue, so there is no error.
        drop(self.queue.send(job));
    }

    /// How many are still open.
    pub(crate) fn waiting(&self) -> u64 {
        self.queued() - self.closed()
    }

    /// How many it was given.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.get()
    }

    /// How many of these are closed: the first ones.
    pub(crate) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Relaxed)
    }
}
