//! Counts the changes that wait for the gate and may keep a directory locked in the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many changes wait.
#[derive(Debug, Default)]
pub(crate) struct HeldBack(AtomicUsize);

/// One of them, until it is dropped.
pub(crate) struct Waits(Arc<HeldBack>);

impl HeldBack {
    pub(crate) fn another(self: &Arc<Self>) -> Waits {
        self.0.fetch_add(1, Ordering::Relaxed);
        Waits(Arc::clone(self))
    }

    /// Whether any waits. This may be different at once.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
