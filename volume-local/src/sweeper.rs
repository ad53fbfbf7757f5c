//! After a takeover: drops the nodes that the kernel does not know, because an earlier daemon counted
//! a lookup that it did not answer, or read a FORGET that it did not carry out.
//!
//! Invariant: as for the pruner, this thread serves no request.

use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use volume_fs::notifications::Kernel;

use crate::rest::rest;
use crate::volume::Volume;

const STACK_BYTES: usize = 128 << 10;

/// After this time, the kernel has taken in every answer that an earlier daemon gave, and every one
/// that was on its way when a count became doubtful.
const ANSWERS_ARE_TAKEN: Duration = Duration::from_secs(10);

/// Runs on a separate thread until the process ends.
pub(crate) fn start(volume: Arc<Volume>, kernel: Arc<Kernel>) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("sweeper".to_owned()).stack_size(STACK_BYTES);
    thread
        .spawn(move || {
            // It fails when the volume is unmounted or its connection aborted.
            if let Err(errno) = sweep(&volume, &kernel) {
                tracing::debug!(error = %errno, "stopped looking for inodes that the kernel has forgotten");
            }
        })
        .map(drop)
}

fn sweep(volume: &Volume, kernel: &Kernel) -> Result<(), Errno> {
    let nodes = volume.nodes();
    rest(ANSWERS_ARE_TAKEN);
    for id in unknown(kernel, nodes.restored(), |id| *id)? {
        nodes.drop_unknown(id);
        volume.is_unknown(id);
    }
    loop {
        let doubtful = nodes.wait_for_doubtful();
        rest(ANSWERS_ARE_TAKEN);
        for (id, lookups) in unknown(kernel, doubtful, |(id, _)| *id)? {
            nodes.drop_doubtful(id, lookups);
            volume.is_unknown(id);
        }
    }
}

/// Those that the kernel does not know, and has not for a while: a FORGET that it has sent is carried out.
fn unknown<T>(kernel: &Kernel, all: Vec<T>, id: impl Fn(&T) -> u64) -> Result<Vec<T>, Errno> {
    let ask = |all: Vec<T>| {
        let mut unknown = Vec::new();
        for one in all {
            if !kernel.knows(id(&one))? {
                unknown.push(one);
            }
        }
        Ok(unknown)
    };
    let unknown = ask(all)?;
    if unknown.is_empty() {
        return Ok(unknown);
    }
    rest(ANSWERS_ARE_TAKEN);
    ask(unknown)
}
