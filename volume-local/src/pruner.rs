//! Asks the kernel to forget inodes, when it knows more than the volume's bound.
//!
//! Invariant: the thread serves no request. A notification may wait for pages
//! that are written back and for directories that are locked, and both may
//! wait for an answer of ours.

use std::collections::HashSet;
use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use volume_fs::notifications::{Kernel, MOST_PRUNED};

use crate::nodes::{Place, Pressure};
use crate::volume::Volume;

const STACK_BYTES: usize = 128 << 10;

/// FORGETs are read in between requests: so long without one, and the rest is in use.
const QUIET: Duration = Duration::from_millis(50);

/// After a round that left too many: as many times what it took, within these.
const REST_FACTOR: u32 = 10;
const LEAST_REST: Duration = Duration::from_secs(1);
const MOST_REST: Duration = Duration::from_secs(30);

/// How old a list of mount points may be. A mount that was made later was made on
/// an entry that was looked up a second before at most, and that is not forgotten.
const LIST_IS_GOOD: Duration = Duration::from_secs(10);

/// At least between two rounds whose lists are asked for: so every list is
/// asked for two seconds after the round before it began.
const BETWEEN_LISTS: Duration = Duration::from_secs(2);

struct Pruner {
    volume: Arc<Volume>,
    kernel: Kernel,
    can_prune: bool,
}

/// On a thread of its own until the process ends.
pub(crate) fn start(volume: Arc<Volume>, kernel: Kernel) -> std::io::Result<()> {
    let mut pruner = Pruner { volume, kernel, can_prune: true };
    let thread = std::thread::Builder::new().name("pruner".to_owned()).stack_size(STACK_BYTES);
    thread
        .spawn(move || {
            // It fails when the volume is unmounted or its connection aborted.
            if let Err(errno) = pruner.run() {
                tracing::debug!(error = %errno, "the kernel is asked to forget no more");
            }
        })
        .map(drop)
}

impl Pruner {
    fn run(&mut self) -> Result<(), Errno> {
        let mut barren = 0;
        loop {
            match self.volume.nodes().wait_for_pressure() {
                Pressure::MuchFreed => linux::memory::give_back(),
                Pressure::TooManyNodes => {
                    let (begun, dropped) = (Instant::now(), self.volume.nodes().dropped());
                    self.round()?;
                    barren = if self.volume.nodes().is_stuck_since(dropped) { barren + 1 } else { 0 };
                    // Entries are left alone that were used seconds ago: those of a walk
                    // are for the next round.
                    if barren >= if self.can_prune { 1 } else { 2 } {
                        // A round without prunes is mostly a wait.
                        let factor = if self.can_prune { REST_FACTOR } else { 1 };
                        let rest = begun.elapsed().saturating_mul(factor);
                        self.volume.nodes().rest(rest.clamp(LEAST_REST, MOST_REST));
                    }
                }
            }
        }
    }

    fn round(&mut self) -> Result<(), Errno> {
        if self.can_prune && self.prune()? {
            return Ok(());
        }
        self.can_prune = false;
        self.invalidate()
    }

    /// Whether the kernel knows FUSE_NOTIFY_PRUNE. It drops only unused entries.
    fn prune(&self) -> Result<bool, Errno> {
        let nodes = self.volume.nodes();
        let round = nodes.begin_round();
        // First what was not used since the round before this one began, last
        // what is being used: the kernel knows better what is unused.
        // Directories follow what is in them.
        for before in [round.saturating_sub(1), round, round.saturating_add(1)] {
            let mut turn = nodes.turn(before);
            while !turn.is_over() {
                let excess = nodes.excess();
                if excess == 0 {
                    return Ok(true);
                }
                let ids = nodes.candidates(&mut turn, excess, |id, _place| id);
                for some in ids.chunks(MOST_PRUNED) {
                    match self.kernel.prune(some) {
                        Ok(()) => nodes.asked_to_forget(some.len()),
                        Err(Errno::INVAL) => return Ok(false),
                        Err(errno) => return Err(errno),
                    }
                }
                if !ids.is_empty() {
                    nodes.wait_for_forgets(QUIET);
                }
            }
        }
        Ok(true)
    }

    /// FUSE_NOTIFY_INVAL_ENTRY takes an entry out of the tree whoever uses it, and with
    /// it every mount on or below it, in all mount namespaces. So directories stay,
    /// and entries that carry a mount, are open, or were used lately.
    fn invalidate(&self) -> Result<(), Errno> {
        let nodes = self.volume.nodes();
        // Two rounds before the question: what was used since stays.
        let before = nodes.begin_round();
        let begun = Instant::now();
        while begun.elapsed() < BETWEEN_LISTS {
            std::thread::park_timeout(BETWEEN_LISTS);
        }
        let round = nodes.begin_round();
        let (mounted, answered) = self.kernel.mount_points(round);
        let open = self.volume.open_nodes();
        let mut turn = nodes.turn(before);
        while !turn.is_over() && nodes.excess() > 0 && answered.elapsed() < LIST_IS_GOOD {
            let most = nodes.excess().min(MOST_PRUNED);
            for (id, place) in nodes.candidates(&mut turn, most, |id, place| (id, place.clone())) {
                if open.contains(&id) || !self.may_be_invalidated(&place, &mounted) {
                    continue;
                }
                if answered.elapsed() >= LIST_IS_GOOD {
                    break;
                }
                let invalidate = || self.kernel.invalidate_entry(place.directory, &place.name);
                match nodes.prune_in(place.directory, invalidate) {
                    // The kernel has dropped it already.
                    Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::NOTDIR) => nodes.asked_to_forget(1),
                    Err(errno) => return Err(errno),
                }
            }
            nodes.wait_for_forgets(QUIET);
        }
        Ok(())
    }

    fn may_be_invalidated(&self, place: &Place, mounted: &HashSet<Vec<u8>>) -> bool {
        let Some(path) = self.volume.nodes().path(place) else { return false };
        let path: Vec<&[u8]> = path.iter().map(CString::as_bytes).collect();
        !mounted.contains(&path.join(&b'/')) && self.volume.is_no_directory(place)
    }
}
