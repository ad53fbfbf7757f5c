//! Mounts of our volumes, told from all others by what mountinfo shows: type
//! `fuse.hawser`, and the volume's id as the source.
//!
//! Invariant: nothing here asks the mounted file system itself: its daemon may
//! be dead or stuck.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use linux::mount::{AccessTimes, FuseConnections, FuseMountOptions, MountFlags, UnmountMode};
use linux::mountinfo::{self, MountEntry};
use nix::errno::Errno;

use crate::error::{Error, Result, Step};
use crate::kernel::bounded;
use crate::kernel::place::Place;
use crate::model::capability::{Access, MountFlag};
use crate::model::ids::VolumeId;
use crate::model::limits;

const SUBTYPE: &str = "hawser";
pub(crate) const FS_TYPE: &str = "fuse.hawser";
/// A busy mount has no event that says when it is so no more.
const BUSY_RETRY: Duration = Duration::from_millis(20);
/// Under an rshared root one mount stands in mountinfo twice, and stale mounts
/// may stand upon each other; more than this many is not ours to dissolve.
const MAX_LAYERS: usize = 16;

/// Mounts the connection for the volume at `place`.
pub(crate) fn mount(
    fuse_device: &OwnedFd,
    volume_id: &VolumeId,
    place: &Place,
    access: Access,
) -> Result<MountEntry> {
    let options = FuseMountOptions { flags: flags(access), allow_other: true, default_permissions: true };
    let tree = linux::mount::new_fuse(fuse_device, (volume_id.as_str(), SUBTYPE), options);
    attach(&tree.step("mount volume")?, volume_id, place)
}

/// Mounts what is detached at `place`, where the volume is seen afterwards. It is there, or nowhere.
pub(crate) fn attach(tree: &OwnedFd, volume_id: &VolumeId, place: &Place) -> Result<MountEntry> {
    const STEP: &str = "mount volume";
    place.attach(tree, STEP)?;
    let gone = || Error::changed(place.field(), place.path(), "the volume was unmounted there at once");
    let found = find_at(place, volume_id).and_then(|found| found.ok_or_else(gone));
    found.map_err(|cause| place.detached(tree, cause))
}

/// A detached copy of `mount`, and of nothing else that may have come to its place since: the path
/// is followed, and what was opened is verified.
pub(crate) fn copy(mount: &MountEntry, step: &'static str) -> Result<OwnedFd> {
    let path = &mount.mount_point;
    let tree = linux::mount::open_tree_clone(path).step(step)?;
    if linux::mount::minor_of(&tree).step(step)? != mount.minor {
        return Err(Error::unusable("staging_target_path", path, "the volume has just been unmounted there"));
    }
    Ok(tree)
}

/// The flags of a mount for `access`. Every mount of a volume is nosuid and nodev.
pub(crate) fn flags(access: Access) -> MountFlags {
    let has = |flag| access.flags.contains(flag);
    MountFlags {
        read_only: access.read_only,
        nosuid: true,
        nodev: true,
        noexec: has(MountFlag::Noexec),
        access_times: match (has(MountFlag::Noatime), has(MountFlag::Relatime)) {
            (true, _) => AccessTimes::Never,
            (false, true) => AccessTimes::Relative,
            (false, false) => AccessTimes::Kernels,
        },
        nodiratime: has(MountFlag::Nodiratime),
        sync: has(MountFlag::Sync),
    }
}

/// Whether a mount refuses what `access` wants refused, and no writing beside.
pub(crate) fn is_as_wanted(mount: &MountEntry, access: Access) -> bool {
    let has = |name: &str| mount.options.split(',').any(|option| option == name);
    // `sync` is the file system's, not the mount's.
    let of_mount = |flag: &MountFlag| {
        matches!(flag, MountFlag::Noexec | MountFlag::Noatime | MountFlag::Nodiratime | MountFlag::Relatime)
    };
    mount.is_read_only() == access.read_only
        && has("nosuid")
        && has("nodev")
        && access.flags.iter().filter(of_mount).all(|flag| has(flag.as_str()))
}

/// The volume's mount that is visible at `path`, by mountinfo alone; a mount of something else
/// there is an error. To change what is there, look with [`find_at`].
pub(crate) fn find(path: &Path, volume_id: &VolumeId) -> Result<Option<MountEntry>> {
    only_of(mountinfo::at(path).step("read mountinfo")?, path, volume_id)
}

/// [`find`], at a place.
pub(crate) fn find_at(place: &Place, volume_id: &VolumeId) -> Result<Option<MountEntry>> {
    only_of(place.mount().step("look at mount point")?, place.path(), volume_id)
}

fn only_of(found: Option<MountEntry>, path: &Path, volume_id: &VolumeId) -> Result<Option<MountEntry>> {
    match found {
        None => Ok(None),
        Some(entry) if is_of(&entry, volume_id) => Ok(Some(entry)),
        Some(entry) => Err(Error::ForeignMount {
            volume_id: volume_id.clone(),
            path: path.to_owned(),
            found: format!("{} from {}", entry.fs_type, entry.source.display()),
        }),
    }
}

/// Whether the volume is mounted at `path`, be it beneath something else.
pub(crate) fn is_mounted(path: &Path, volume_id: &VolumeId) -> Result<bool> {
    Ok(all_of(volume_id)?.iter().any(|mount| mount.mount_point == path))
}

/// Whether anything of the volume is mounted, visible or not, at any path but these.
pub(crate) fn is_mounted_beside(volume_id: &VolumeId, known: &[&Path]) -> Result<bool> {
    Ok(all_of(volume_id)?.iter().any(|mount| !known.contains(&mount.mount_point.as_path())))
}

/// Whether anything of the volume is mounted anywhere, visible or not.
pub(crate) fn is_mounted_anywhere(volume_id: &VolumeId) -> Result<bool> {
    is_mounted_beside(volume_id, &[])
}

/// Where connection `minor` of the volume is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectionMount {
    Nowhere,
    /// Beneath something else, wherever it is.
    Hidden,
    /// All of it, and a path leads there.
    At(Box<MountEntry>),
}

pub(crate) fn connection_mount(volume_id: &VolumeId, minor: u32) -> Result<ConnectionMount> {
    let mut found = ConnectionMount::Nowhere;
    for mount in all_of(volume_id)?.into_iter().filter(|mount| mount.minor == minor) {
        let seen = mountinfo::at(&mount.mount_point).step("read mountinfo")?;
        if mount.root == Path::new("/") && seen.is_some_and(|seen| seen.mount_id == mount.mount_id) {
            return Ok(ConnectionMount::At(Box::new(mount)));
        }
        found = ConnectionMount::Hidden;
    }
    Ok(found)
}

/// The volume's mounts, visible or not.
fn all_of(volume_id: &VolumeId) -> Result<Vec<MountEntry>> {
    let mut mounts = mountinfo::from_source(volume_id.as_str().as_ref()).step("read mountinfo")?;
    mounts.retain(|mount| is_of(mount, volume_id));
    Ok(mounts)
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
    /// The connection serves elsewhere and ends with its daemon: take this mount of
    /// it out of the tree at once.
    Hide,
    /// Nobody of ours uses the connection any more. Strangers have until the limit,
    /// then it is aborted under them.
    Abort,
    /// Nobody serves the connection any more: abort it at once.
    AbortNow,
}

/// Takes every mount of the volume off `place`; none there is a success. What
/// waits for a daemon that does not answer is ended by an abort of the
/// connection, so nothing is detached that a request could keep for ever.
pub(crate) fn unmount(place: &Place, volume_id: &VolumeId, when_busy: WhenBusy) -> Result<()> {
    unmount_found(place, volume_id, find_at(place, volume_id)?, when_busy)
}

/// [`unmount`], where [`find_at`] has just `found` what is to be unmounted first.
pub(crate) fn unmount_found(
    place: &Place,
    volume_id: &VolumeId,
    mut found: Option<MountEntry>,
    when_busy: WhenBusy,
) -> Result<()> {
    let begun = Instant::now();
    for _ in 0..MAX_LAYERS {
        let Some(mount) = found else { return Ok(()) };
        let time_limit = match when_busy {
            WhenBusy::Hide | WhenBusy::AbortNow => Duration::ZERO,
            WhenBusy::Refuse => limits::CLOSING,
            WhenBusy::Abort => limits::UNMOUNT,
        };
        match (patient_unmount(place, begun + time_limit)?, when_busy) {
            (Outcome::Gone, _) => {}
            // Beneath another mount, where no path leads.
            (Outcome::NotReachable, _) => return Ok(()),
            (Outcome::Busy, WhenBusy::Refuse) => return Err(Error::Busy { path: place.path().to_owned() }),
            (Outcome::Busy, WhenBusy::Hide) => drop(bounded_unmount(place, UnmountMode::Detach)?),
            (Outcome::Stuck, WhenBusy::Refuse | WhenBusy::Hide) => return Err(stuck(place)),
            (Outcome::Busy | Outcome::Stuck, WhenBusy::Abort | WhenBusy::AbortNow) => {
                abort(place, volume_id, mount.minor)?;
            }
        }
        found = find_at(place, volume_id)?;
    }
    Err(Error::Busy { path: place.path().to_owned() })
}

/// [`unmount`], with a mount of something else left alone: a call that undoes finds
/// nothing of its volume there, and nothing to undo.
pub(crate) fn unmount_own(place: &Place, volume_id: &VolumeId, when_busy: WhenBusy) -> Result<()> {
    match unmount(place, volume_id, when_busy) {
        Err(Error::ForeignMount { .. }) => Ok(()),
        outcome => outcome,
    }
}

fn patient_unmount(place: &Place, deadline: Instant) -> Result<Outcome> {
    loop {
        match bounded_unmount(place, UnmountMode::Plain)? {
            Outcome::Busy if Instant::now() < deadline => std::thread::park_timeout(BUSY_RETRY),
            outcome => return Ok(outcome),
        }
    }
}

/// Ends the connection, and with it all that waits for its daemon, then the mount.
fn abort(place: &Place, volume_id: &VolumeId, minor: u32) -> Result<()> {
    tracing::warn!(path = %place.path().display(), "does not unmount: its connection is aborted");
    abort_connection(minor, || is_connection_of(volume_id, minor))?;
    match patient_unmount(place, Instant::now() + limits::CLOSING)? {
        Outcome::Gone | Outcome::NotReachable => Ok(()),
        // Whoever holds it gets ENOTCONN from now on: no request can keep it.
        Outcome::Busy => bounded_unmount(place, UnmountMode::Detach).map(drop),
        Outcome::Stuck => Err(stuck(place)),
    }
}

fn stuck(place: &Place) -> Error {
    Error::Deadline { what: format!("unmount {}", place.path().display()), limit: limits::UNMOUNT }
}

static ABORTED: AtomicU64 = AtomicU64::new(0);

/// How many connections this driver has aborted since it started.
pub(crate) fn aborted_connections() -> u64 {
    ABORTED.load(Ordering::Relaxed)
}

/// Ends every request of the connection of the mounts with `minor`, and all later
/// ones. One that is gone already is a success.
///
/// The kernel gives the number of a connection that has ended to the next one, which may be
/// another volume's: `is_ours` says whether it is the right one that has been opened.
pub(crate) fn abort_connection(minor: u32, is_ours: impl FnOnce() -> Result<bool>) -> Result<()> {
    let connection = FuseConnections::open().and_then(|all| all.connection(minor));
    if let Some(connection) = connection.step("look for connection")?
        && is_ours()?
    {
        connection.abort().step("abort connection")?;
        ABORTED.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether connection `minor` is the volume's, and mounted.
pub(crate) fn is_connection_of(volume_id: &VolumeId, minor: u32) -> Result<bool> {
    Ok(all_of(volume_id)?.iter().any(|mount| mount.minor == minor))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Gone,
    NotReachable,
    Busy,
    Stuck,
}

/// umount2(2) on a thread of its own, which is left behind when it does not return.
fn bounded_unmount(place: &Place, mode: UnmountMode) -> Result<Outcome> {
    let target = place.clone();
    let unmount = move || target.unmount(mode);
    match bounded::within(format!("unmount {}", place.path().display()), limits::UNMOUNT, unmount) {
        Ok(Ok(())) => Ok(Outcome::Gone),
        Ok(Err(e)) if matches!(e.errno(), Errno::EINVAL | Errno::ENOENT) => Ok(Outcome::NotReachable),
        Ok(Err(e)) if e.errno() == Errno::EBUSY => Ok(Outcome::Busy),
        Ok(Err(e)) => Err(e).step("unmount volume"),
        Err(Error::Deadline { .. }) => Ok(Outcome::Stuck),
        Err(e) => Err(e),
    }
}
