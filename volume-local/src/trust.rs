//! How long the kernel may use an answer without asking again, and what it is made to ask again.
//!
//! A pool is used only through its volumes, so names, attributes and contents change only by requests,
//! and the kernel follows the changes that it requests itself. Exceptions:
//!
//! - In a volume that other programs change, names and attributes are valid for a second, and contents
//!   until the next open.
//! - With the data path `passthrough`, the kernel's writes do not pass by the pages of FUSE's inode
//!   ([`crate::backings`]).
//! - A kernel without FUSE_NOTIFY_PRUNE (before Linux 6.18) asks for names once a second: else the
//!   pruner would not see which inodes are in use, and mounts on them ([`crate::pruner`]).
//! - Some requests make the kernel discard its attributes of a file without taking note of that. If
//!   an earlier answer about the file is taken in only then, since the process that waits for it was
//!   not scheduled meanwhile, outdated attributes are cached. So the kernel is made to ask again, once
//!   that answer has certainly arrived ([`Trust::outdates`]).

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use volume_fs::file::Validity;
use volume_fs::notifications::Kernel;

use crate::rest::rest;

const STACK_BYTES: usize = 128 << 10;

/// A process that was answered is scheduled within this time, or a second time of it.
const ANSWERS_ARE_TAKEN: Duration = Duration::from_secs(1);

/// Who changes the volume's files.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Access {
    /// Not its users.
    pub(crate) read_only: bool,
    /// Programs other than this daemon.
    pub(crate) changed_from_outside: bool,
}

#[derive(Debug)]
pub(crate) struct Trust {
    changed_from_outside: bool,
    backing_reports_close: bool,
    /// The kernel need not show which names are in use.
    names_stay: AtomicBool,
    outdated: Mutex<Outdated>,
    first: Condvar,
}

/// Files whose attributes the kernel is to discard once more.
#[derive(Debug, Default)]
struct Outdated {
    young: HashSet<u64>,
    old: HashSet<u64>,
}

impl Trust {
    pub(crate) fn new(access: Access, root: impl AsFd) -> Self {
        Self {
            changed_from_outside: access.changed_from_outside,
            backing_reports_close: !writes_back_later(root),
            names_stay: AtomicBool::new(false),
            outdated: Mutex::new(Outdated::default()),
            first: Condvar::new(),
        }
    }

    /// Called before the first request: the kernel has FUSE_NOTIFY_PRUNE.
    pub(crate) fn kernel_prunes(&self) {
        self.names_stay.store(true, Ordering::Relaxed);
    }

    /// Whether the kernel knows how large a file is after writes that pass through. Certain from Linux 6.18 on.
    pub(crate) fn sizes_follow_writes(&self) -> bool {
        self.names_stay.load(Ordering::Relaxed)
    }

    /// Whether files change only by requests.
    pub(crate) fn knows_all_changes(&self) -> bool {
        !self.changed_from_outside
    }

    pub(crate) fn of_attributes(&self) -> Validity {
        if self.changed_from_outside { Validity::Second } else { Validity::Endless }
    }

    /// Of a name that a file has.
    pub(crate) fn of_name(&self) -> Validity {
        if self.names_stay.load(Ordering::Relaxed) { self.of_attributes() } else { Validity::Second }
    }

    /// Of a name that no file has: no inode belongs to it.
    pub(crate) fn of_missing_name(&self) -> Validity {
        self.of_attributes()
    }

    /// Whether close(2) of a file that was opened with `flags` may have an error to report. A file that
    /// is open for reading and writing may have been stored to through a mapping.
    pub(crate) fn reports_close(&self, flags: OFlags) -> bool {
        self.backing_reports_close || flags.contains(OFlags::RDWR)
    }

    pub(crate) fn backing_reports_close(&self) -> bool {
        self.backing_reports_close
    }

    /// A request has changed attributes of the file, and the kernel does not compare earlier answers
    /// with the change: it does so only after write(2), truncation, chmod, chown, utimensat, link and
    /// the removal of the file's own name (fs/fuse, `attr_version`).
    pub(crate) fn outdates(&self, id: u64) {
        if self.changed_from_outside {
            return;
        }
        let mut outdated = self.outdated();
        let is_first = outdated.young.is_empty() && outdated.old.is_empty();
        outdated.young.insert(id);
        if is_first {
            self.first.notify_one();
        }
    }

    /// The files whose earlier answers have arrived. Waits for them.
    fn wait_for_outdated(&self) -> HashSet<u64> {
        let mut outdated = self.outdated();
        while outdated.young.is_empty() && outdated.old.is_empty() {
            outdated = self.first.wait(outdated).unwrap_or_else(PoisonError::into_inner);
        }
        drop(outdated);
        rest(ANSWERS_ARE_TAKEN);
        let mut outdated = self.outdated();
        let young = std::mem::take(&mut outdated.young);
        std::mem::replace(&mut outdated.old, young)
    }

    fn outdated(&self) -> MutexGuard<'_, Outdated> {
        self.outdated.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this is a file system whose close(2) never reports an error: it stores data later, and has
/// no server.
fn writes_back_later(root: impl AsFd) -> bool {
    const OF_THE_NODE: [u64; 7] = [
        0xef53,      // ext4
        0x5846_5342, // xfs
        0x9123_683e, // Btrfs
        0x0102_1994, // tmpfs
        0xf2f5_2010, // f2fs
        0x2fc1_2fc1, // ZFS
        0xca45_1a4e, // bcachefs
    ];
    let found = rustix::fs::fstatfs(root);
    found.is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| OF_THE_NODE.contains(&kind)))
}

/// Runs on a separate thread until the process ends: a notification may wait for an answer of this
/// daemon.
pub(crate) fn start(trust: Arc<Trust>, kernel: Arc<Kernel>) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("attributes".to_owned()).stack_size(STACK_BYTES);
    thread
        .spawn(move || {
            // It fails when the volume is unmounted or its connection aborted.
            if let Err(errno) = discard(&trust, &kernel) {
                tracing::debug!(error = %errno, "stopped making the kernel discard attributes");
            }
        })
        .map(drop)
}

fn discard(trust: &Trust, kernel: &Kernel) -> Result<(), Errno> {
    loop {
        for id in trust.wait_for_outdated() {
            match kernel.knows(id) {
                Err(errno @ (Errno::NODEV | Errno::NOTCONN | Errno::PERM | Errno::BADF)) => {
                    return Err(errno);
                }
                // Such as a lack of memory.
                Err(error) => tracing::debug!(%error, id, "attributes are not discarded"),
                Ok(_is_known) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn trust(changed_from_outside: bool) -> Trust {
        let directory = std::fs::File::open("/var/tmp").unwrap();
        Trust::new(Access { read_only: false, changed_from_outside }, directory)
    }

    #[test]
    fn only_a_kernel_that_prunes_keeps_names() {
        let trust = trust(false);
        assert_eq!((trust.of_name(), trust.of_attributes()), (Validity::Second, Validity::Endless));
        assert_eq!(trust.of_missing_name(), Validity::Endless);
        trust.kernel_prunes();
        assert_eq!(trust.of_name(), Validity::Endless);
    }

    #[test]
    fn what_others_change_is_valid_for_a_second() {
        let trust = trust(true);
        trust.kernel_prunes();
        let all = [trust.of_name(), trust.of_missing_name(), trust.of_attributes()];
        assert_eq!(all, [Validity::Second; 3]);
    }

    #[test]
    fn a_close_reports_what_was_stored_through_a_mapping_or_what_a_server_says() {
        let disk = trust(false);
        let reports = [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR].map(|flags| disk.reports_close(flags));
        assert_eq!(reports, [false, false, true]);
        let proc = std::fs::File::open("/proc").unwrap();
        let unknown = Trust::new(Access::default(), proc);
        assert!(unknown.reports_close(OFlags::RDONLY), "an unknown file system");
    }

    #[test]
    fn attributes_are_discarded_once_and_not_before_earlier_answers_have_arrived() {
        let trust = trust(false);
        let begun = Instant::now();
        trust.outdates(7);
        trust.outdates(7);
        assert_eq!(trust.wait_for_outdated(), HashSet::new());
        assert!(begun.elapsed() >= ANSWERS_ARE_TAKEN);
        assert_eq!(trust.wait_for_outdated(), HashSet::from([7]));
        trust.outdates(8);
        assert_eq!(trust.wait_for_outdated(), HashSet::new());
    }
}
