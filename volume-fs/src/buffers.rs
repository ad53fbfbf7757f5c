//! The memory of the event loops' request buffers.
//!
//! A kill while the kernel copies a request to a buffer whose pages are not present would answer the
//! request with EIO (fuse_dev_do_read of fs/fuse/dev.c): a killed process gets no more pages. So in a
//! daemon that another one can follow, as much of each buffer is present as a request can fill: little
//! until the kernel can send the data of files.
//!
//! Invariant: while a [`LargeRequests`] is held, the largest request finds its pages present.

#![cfg_attr(
    target_env = "gnu",
    expect(unsafe_code, reason = "only this crate knows that fuser uses a buffer for one request at a time")
)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Of a request that writes, at any place in its first page.
const HEADERS_BYTES: usize = 2 * 4096;
/// Of requests but those that write a file's data: an attribute has the most, 64 KiB and its name.
/// FORGET of many nodes may have more, and is not answered.
const OTHER_REQUEST_BYTES: usize = (64 << 10) + 3 * 4096;
/// Nodes of a FORGET with as many bytes: struct fuse_forget_one has 16.
const MANY_NODES: usize = OTHER_REQUEST_BYTES / 16;

/// fuser's buffers are the only allocations of this size.
#[cfg(target_env = "gnu")]
#[global_allocator]
static ALLOCATOR: linux::memory::Populating = linux::memory::Populating::new(16 << 20);

/// How long the buffers stay large after the last [`LargeRequests`].
const STAY_LARGE: Duration = Duration::from_secs(10);

thread_local! {
    /// The [`RequestBuffers::growths`] after which this event loop has given its memory back.
    static GIVEN_BACK: Cell<u64> = const { Cell::new(0) };
    /// Nodes that this event loop has forgotten since another request.
    static FORGOTTEN: Cell<usize> = const { Cell::new(0) };
}

/// One of the nodes of a FORGET, which may fill the buffer of its event loop.
pub(crate) fn note_forget() {
    FORGOTTEN.set(FORGOTTEN.get().saturating_add(1));
}

/// The buffers of all event loops.
#[derive(Debug)]
pub struct RequestBuffers {
    /// Of [`LargeRequests`].
    held: AtomicUsize,
    growths: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes of the largest request, in a daemon that another one can follow, once its event loops begin.
    present: Option<usize>,
    /// No event loop has given its memory back since they grew.
    are_large: bool,
    /// When the last [`LargeRequests`] went.
    unused_since: Instant,
}

/// Held while the kernel can send the data of a file.
#[derive(Debug)]
pub struct LargeRequests(Arc<RequestBuffers>);

impl Default for RequestBuffers {
    /// Nothing is present until the event loops begin.
    fn default() -> Self {
        let state = State { present: None, are_large: false, unused_since: Instant::now() };
        Self { held: AtomicUsize::new(0), growths: AtomicU64::new(0), state: Mutex::new(state) }
    }
}

impl RequestBuffers {
    /// Called before the event loops begin, in a daemon that another one can follow. `max_write`: bytes of
    /// data in one request.
    pub(crate) fn make_present(&self, max_write: u32) {
        let mut state = self.locked();
        let largest = usize::try_from(max_write).unwrap_or(usize::MAX).saturating_add(HEADERS_BYTES);
        state.present = Some(largest);
        if self.held.load(Ordering::Relaxed) > 0 {
            self.grow(&mut state);
        } else {
            populate(OTHER_REQUEST_BYTES);
        }
    }

    /// Called before the answer to an open by which the kernel can write through this daemon.
    pub fn for_writes(self: &Arc<Self>) -> LargeRequests {
        let mut state = self.locked();
        self.held.fetch_add(1, Ordering::Relaxed);
        if !state.are_large {
            self.grow(&mut state);
        }
        LargeRequests(Arc::clone(self))
    }

    fn grow(&self, state: &mut State) {
        // In other daemons the kernel makes it present while it copies.
        if let Some(largest) = state.present {
            populate(largest);
        }
        state.are_large = true;
        self.growths.fetch_add(1, Ordering::Relaxed);
    }

    /// Called by an event loop that has read a request of less than [`OTHER_REQUEST_BYTES`]: it returns
    /// memory that no request needs now. Only the event loop itself can, and so a volume without requests
    /// keeps it. Not for FORGET of many nodes, which may fill the buffer.
    pub(crate) fn rest(&self) {
        if FORGOTTEN.replace(0) > MANY_NODES {
            // It does not grow meanwhile.
            let state = self.locked();
            give_back_own(state.present.filter(|_| state.are_large).unwrap_or(OTHER_REQUEST_BYTES));
        }
        if self.growths.load(Ordering::Relaxed) == GIVEN_BACK.get() || self.held.load(Ordering::Relaxed) > 0 {
            return;
        }
        // Its next request tries again.
        let Ok(mut state) = self.state.try_lock() else { return };
        if self.held.load(Ordering::Relaxed) > 0 || state.unused_since.elapsed() < STAY_LARGE {
            return;
        }
        give_back_own(OTHER_REQUEST_BYTES);
        state.are_large = false;
        GIVEN_BACK.set(self.growths.load(Ordering::Relaxed));
        drop(state);
        // And of the largest answers.
        linux::memory::give_back();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LargeRequests {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        if self.0.held.fetch_sub(1, Ordering::Relaxed) == 1 {
            state.unused_since = Instant::now();
        }
    }
}

/// Without memory the daemon goes on: then only a kill at the moment of a copy shows.
fn populate(bytes: usize) {
    #[cfg(target_env = "gnu")]
    if let Err(error) = ALLOCATOR.populate(bytes) {
        tracing::warn!(error = linux::chain(&error), bytes, "request buffers");
    }
    #[cfg(not(target_env = "gnu"))]
    let _unused = bytes;
}

fn give_back_own(kept: usize) {
    #[cfg(target_env = "gnu")]
    // SAFETY: fuser uses the buffer for one request at a time, and the one that this event loop has read is
    // shorter than what is kept.
    if let Err(error) = unsafe { ALLOCATOR.give_back_own(kept) } {
        tracing::debug!(error = linux::chain(&error), "request buffers");
    }
    #[cfg(not(target_env = "gnu"))]
    let _unused = kept;
}
