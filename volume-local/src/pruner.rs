//! Asks the kernel to forget inodes if it knows more than the volume's limit.
//!
//! Invariant: this thread serves no request. A notification may wait for pages under writeback and
//! for locked directories, and both may wait for an answer of this daemon.

use std::collections::HashSet;
use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use volume_fs::notifications::{Kernel, MOST_PRUNED};

use crate::held_back::HeldBack;
use crate::nodes::Pressure;
use crate::place::Place;
use crate::volume::Volume;

const STACK_BYTES: usize = 128 << 10;

/// Without a FORGET for this long, the remaining inodes are in use: FORGETs are read between
/// requests.
const QUIET: Duration = Duration::from_millis(50);

/// Pause after a round that left too many: this multiple of the round's time, within these limits.
const REST_FACTOR: u32 = 10;
const LEAST_REST: Duration = Duration::from_secs(1);
const MOST_REST: Duration = Duration::from_secs(30);

/// The validity of a list of mount points. A later mount was made on an entry that was looked up at
/// most a second before it, and such an entry is not forgotten: names are valid for a second on these
/// kernels ([`crate::trust`]).
const LIST_IS_GOOD: Duration = Duration::from_secs(10);

/// The shortest time between two rounds with lists: so every list is requested two seconds after
/// the previous round began.
const BETWEEN_LISTS: Duration = Duration::from_secs(2);

struct Pruner {
    volume: Arc<Volume>,
    kernel: Arc<Kernel>,
    names_held: Arc<HeldBack>,
    can_prune: bool,
}

/// Runs on a separate thread until the process ends.
pub(crate) fn start(
    volume: Arc<Volume>,
    kernel: Arc<Kernel>,
    names_held: Arc<HeldBack>,
) -> std::io::Result<()> {
    let mut pruner = Pruner { volume, kernel, names_held, can_prune: true };
    let thread = std::thread::Builder::new().name("pruner".to_owned()).stack_size(STACK_BYTES);
    thread
        .spawn(move || {
            // It fails when the volume is unmounted or its connection aborted.
            if let Err(errno) = pruner.run() {
                tracing::debug!(error = %errno, "stopped asking the kernel to forget inodes");
            }
        })
        .map(drop)
}

impl Pruner {
    fn run(&mut self) -> Result<(), Errno> {
        let mut barren = 0;
        loop {
            match self.volume.nodes().wait_for_pressure() {
                Pressure::MuchFreed => {
                    if self.volume.nodes().give_back(QUIET) {
                        self.volume.give_back();
                    }
                }
                Pressure::TooManyUnplaced => self.look_up_again()?,
                Pressure::TooManyNodes => {
                    self.look_up_again()?;
                    let (begun, dropped) = (Instant::now(), self.volume.nodes().dropped());
                    self.round()?;
                    barren = if self.volume.nodes().is_stuck_since(dropped) { barren + 1 } else { 0 };
                    // Entries used in the last seconds are left alone: a walk's entries are for the
                    // next round.
                    if barren >= if self.can_prune { 1 } else { 2 } {
                        // A round without prunes mostly waits.
                        let factor = if self.can_prune { REST_FACTOR } else { 1 };
                        let rest = begun.elapsed().saturating_mul(factor);
                        self.rest(rest.clamp(LEAST_REST, MOST_REST))?;
                    }
                }
            }
        }
    }

    fn rest(&self, pause: Duration) -> Result<(), Errno> {
        let begun = Instant::now();
        let nodes = self.volume.nodes();
        nodes.rest(pause);
        while !nodes.unplaced_if_too_many().is_empty() && begun.elapsed() < pause {
            self.look_up_again()?;
            nodes.rest(pause.saturating_sub(begun.elapsed()));
        }
        Ok(())
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
        // First the nodes that were not used since the previous round began, last those in use:
        // only the kernel knows which are unused. Directories follow their contents.
        for before in [round.saturating_sub(1), round, round.saturating_add(1)] {
            let mut turn = nodes.turn(before);
            while !turn.is_over() {
                let excess = nodes.excess();
                if excess == 0 {
                    return Ok(true);
                }
                let ids = nodes.candidates(&mut turn, excess, |id, _place| id);
                if !self.prune_these(&ids)? {
                    return Ok(false);
                }
                if !ids.is_empty() {
                    nodes.wait_for_forgets(QUIET);
                }
            }
        }
        Ok(true)
    }

    /// Whether the kernel knows FUSE_NOTIFY_PRUNE.
    fn prune_these(&self, ids: &[u64]) -> Result<bool, Errno> {
        for some in ids.chunks(MOST_PRUNED) {
            match self.kernel.prune(some) {
                Ok(()) => self.volume.nodes().asked_to_forget(some.len()),
                Err(Errno::INVAL) => return Ok(false),
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }

    /// Files that have lost the name where they were last seen get a place with the next lookup. So the
    /// kernel drops its unused entries, if there are too many such files. A kernel that cannot looks names
    /// up again after a second.
    fn look_up_again(&self) -> Result<(), Errno> {
        let nodes = self.volume.nodes();
        let unplaced = nodes.unplaced_if_too_many();
        if unplaced.is_empty() {
            return Ok(());
        }
        if self.prune_these(&unplaced)? {
            nodes.wait_for_unplaced(&unplaced, QUIET);
        } else {
            nodes.keep_unplaced();
        }
        Ok(())
    }

    /// FUSE_NOTIFY_INVAL_ENTRY removes an entry even if it is in use, and every mount on or below
    /// it in all mount namespaces. So directories stay, and entries with a mount, open ones, and
    /// recently used ones.
    fn invalidate(&self) -> Result<(), Errno> {
        let nodes = self.volume.nodes();
        // Two rounds before the request: nodes used since then stay.
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
                // A directory is locked while a change in it waits. While this thread waits for that lock, this process
                // cannot end.
                if answered.elapsed() >= LIST_IS_GOOD || self.names_held.any() {
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
