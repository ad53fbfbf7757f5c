//! Where files pass through: ends the registrations of small removed files, some at a time.
//!
//! Invariant: as for the pruner, this thread serves no request.

use std::sync::Arc;

use crate::volume::Volume;

const STACK_BYTES: usize = 128 << 10;

/// Runs on a separate thread until the process ends.
pub(crate) fn start(volume: Arc<Volume>) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("ender".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(move || volume.end_backings()).map(drop)
}
