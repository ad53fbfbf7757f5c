//! Mounts of our volumes, told from all others by what mountinfo shows: type
//! `fuse.hawser`, and the volume's id as the source.
//!
//! Invariant: nothing here asks the mounted file system itself: its daemon may
//! be dead or stuck.

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use linux::mount::{FuseMountOptions, MountFlags, UnmountMode};
use linux::mountinfo::{self, MountEntry};
use nix::errno::Errno;

use crate::error::{Error, Result, Step};
use crate::volume::VolumeId;

const SUBTYPE: &str = "hawser";
const FS_TYPE: &str = "fuse.hawser";
/// umount(2) of a FUSE mount waits for nothing but a daemon's reply to a flush.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(10);
/// How long the files of a pod that was just killed may take to close.
const CLOSING_LIMIT: Duration = Duration::from_secs(1);
/// A busy mount has no event that says when it is so no more.
const BUSY_RETRY: Duration = Duration::from_millis(20);
/// Under an rshared root one mount stands in mountinfo twice, and stale mounts
/// may stand upon each other; more than this many is not ours to dissolve.
const MAX_LAYERS: usize = 16;

/// Mounts the connection for the volume at `target`.
pub(crate) fn mount(
    fuse_device: &std::os::fd::OwnedFd,
    volume_id: &VolumeId,
    target: &Path,
    read_only: bool,
) -> Result<()> {
    let options = FuseMountOptions { flags: flags(read_only), allow_other: true, default_permissions: true };
    linux::mount::mount_fuse(fuse_device, (volume_id.as_str(), SUBTYPE), target, options).step("mount volume")
}

/// What every mount of a volume refuses.
pub(crate) fn flags(read_only: bool) -> MountFlags {
    MountFlags { read_only, nosuid: true, nodev: true, noexec: false }
}

/// The volume's mount that is visible at `path`; a mount of something else there is an error.
pub(crate) fn find(path: &Path, volume_id: &VolumeId) -> Result<Option<MountEntry>> {
    match mountinfo::at(path).step("read mountinfo")? {
        None => Ok(None),
        Some(entry) if is_of(&entry, volume_id) => Ok(Some(entry)),
        Some(entry) => Err(Error::ForeignMount {
            volume_id: volume_id.clone(),
            path: path.to_owned(),
            found: format!("{} from {}", entry.fs_type, entry.source.display()),
        }),
    }
}

fn is_of(entry: &MountEntry, volume_id: &VolumeId) -> bool {
    entry.fs_type == FS_TYPE && entry.source == volume_id.as_str()
}

/// What to do with a mount that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenBusy {
    /// Somebody's I/O is not ours to end: after a moment for what is being closed
    /// already, ABORTED, and the caller comes back.
    Refuse,
    /// Nobody of ours uses it any more. Strangers have until the limit, then the
    /// connection is aborted under them.
    Abort,
    /// Nobody serves it any more: take it out of the tree at once.
    Detach,
}

/// Takes every mount of the volume off `path`; none there is a success. One
/// whose daemon does not let it go within the limit has its connection aborted.
pub(crate) fn unmount(path: &Path, volume_id: &VolumeId, when_busy: WhenBusy) -> Result<()> {
    let begun = Instant::now();
    for _ in 0..MAX_LAYERS {
        if find(path, volume_id)?.is_none() {
            return Ok(());
        }
        let outcome = match when_busy {
            WhenBusy::Detach => bounded_unmount(path, UnmountMode::Plain)?,
            WhenBusy::Refuse => patient_unmount(path, begun + CLOSING_LIMIT)?,
            WhenBusy::Abort => patient_unmount(path, begun + UNMOUNT_LIMIT)?,
        };
        match (outcome, when_busy) {
            (Outcome::Gone, _) => {}
            // Beneath another mount, where no path leads.
            (Outcome::NotReachable, _) => return Ok(()),
            (Outcome::Busy, WhenBusy::Refuse) => return Err(Error::Busy { path: path.to_owned() }),
            (Outcome::Busy, WhenBusy::Detach) => drop(bounded_unmount(path, UnmountMode::Detach)?),
            (Outcome::Busy, WhenBusy::Abort) | (Outcome::Stuck, _) => abort(path)?,
        }
    }
    Err(Error::Busy { path: path.to_owned() })
}

fn patient_unmount(path: &Path, deadline: Instant) -> Result<Outcome> {
    loop {
        match bounded_unmount(path, UnmountMode::Plain)? {
            Outcome::Busy if Instant::now() < deadline => std::thread::park_timeout(BUSY_RETRY),
            outcome => return Ok(outcome),
        }
    }
}

/// Ends the connection, and with it all that waits for its daemon, then the mount.
fn abort(path: &Path) -> Result<()> {
    tracing::warn!(path = %path.display(), "does not unmount: aborting the connection");
    // MNT_FORCE aborts the connection before it waits for anything.
    match bounded_unmount(path, UnmountMode::Force)? {
        Outcome::Gone | Outcome::NotReachable => Ok(()),
        Outcome::Busy => bounded_unmount(path, UnmountMode::Detach).map(drop),
        Outcome::Stuck => {
            let what = format!("unmount {}", path.display());
            Err(Error::Deadline { what, limit: UNMOUNT_LIMIT })
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Gone,
    NotReachable,
    Busy,
    Stuck,
}

/// umount2(2) on a thread of its own, which is left behind when it does not return.
fn bounded_unmount(path: &Path, mode: UnmountMode) -> Result<Outcome> {
    let (done, finished) = mpsc::channel();
    let target = path.to_owned();
    std::thread::Builder::new()
        .name("unmount".to_owned())
        .spawn(move || {
            // Nobody listens any more once the limit is over.
            let _too_late = done.send(linux::mount::unmount(&target, mode));
        })
        .map_err(|e| linux::Error::at("start thread to unmount", path, e))
        .step("unmount volume")?;
    match finished.recv_timeout(UNMOUNT_LIMIT) {
        Ok(Ok(())) => Ok(Outcome::Gone),
        Ok(Err(e)) if matches!(e.errno(), Errno::EINVAL | Errno::ENOENT) => Ok(Outcome::NotReachable),
        Ok(Err(e)) if e.errno() == Errno::EBUSY => Ok(Outcome::Busy),
        Ok(Err(e)) => Err(e).step("unmount volume"),
        Err(_) => Ok(Outcome::Stuck),
    }
}
