//! Closes files on a thread of its own.
//!
//! The last close of a removed file deletes its content, which takes as long as the disk wants to;
//! the close of a file on a FUSE mount or a server waits for that (close(2) calls `flush`). Whoever
//! sent the descriptor may close its own first.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Its only calls are close(2) and those of the queue.
const STACK_BYTES: usize = 64 * 1024;

/// Descriptors of registered files that are closed together: each alone would wake the thread, while a daemon
/// waits for the next answer.
const MOST_TOGETHER: usize = 16;
/// How long one waits for others.
const WAITS_FOR_OTHERS: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(crate) struct Closer {
    queue: Sender<Job>,
    /// They count as queued.
    together: RefCell<Together>,
    /// Of all times.
    queued: Cell<u64>,
    /// Of all times, in the order of the queue.
    closed: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Together {
    fds: Vec<OwnedFd>,
    /// The first one waits until then.
    until: Option<Instant>,
}

#[derive(Debug)]
enum Job {
    Close(Vec<OwnedFd>),
    /// May be the last close of the backing file.
    Unregister {
        connection: OwnedFd,
        numbers: Vec<u32>,
        /// How many the connection has.
        registered: Arc<AtomicU32>,
    },
}

impl Job {
    /// How many it counts for.
    fn count(&self) -> u64 {
        match self {
            Self::Close(fds) => fds.len() as u64,
            Self::Unregister { .. } => 1,
        }
    }

    fn run(self) {
        match self {
            Self::Close(fds) => drop(fds),
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
                let done = job.count();
                job.run();
                count.fetch_add(done, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("closer".to_owned()).stack_size(STACK_BYTES).spawn(close_all)?;
        Ok(Self { queue, together: RefCell::default(), queued: Cell::new(0), closed })
    }

    pub(crate) fn close(&self, fd: OwnedFd) {
        self.add(Job::Close(vec![fd]));
    }

    /// Closes one that the kernel holds too, soon and together with others.
    pub(crate) fn close_registered(&self, fd: OwnedFd) {
        self.queued.set(self.queued.get() + 1);
        let mut together = self.together.borrow_mut();
        together.until.get_or_insert_with(|| Instant::now() + WAITS_FOR_OTHERS);
        together.fds.push(fd);
        if together.fds.len() >= MOST_TOGETHER {
            self.send(Job::Close(std::mem::take(&mut *together).fds));
        }
    }

    /// How long the first of those that wait for others still waits; `None` if there is none.
    pub(crate) fn left(&self) -> Option<Duration> {
        let until = self.together.borrow().until;
        until.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Closes those that have waited long enough.
    pub(crate) fn close_what_waited(&self) {
        if self.left() == Some(Duration::ZERO) {
            self.send_together();
        }
    }

    pub(crate) fn unregister(&self, connection: OwnedFd, numbers: Vec<u32>, registered: Arc<AtomicU32>) {
        self.add(Job::Unregister { connection, numbers, registered });
    }

    fn add(&self, job: Job) {
        // In the order in which they are counted.
        self.send_together();
        self.queued.set(self.queued.get() + job.count());
        self.send(job);
    }

    fn send_together(&self) {
        let Together { fds, .. } = self.together.take();
        if !fds.is_empty() {
            self.send(Job::Close(fds));
        }
    }

    fn send(&self, job: Job) {
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
