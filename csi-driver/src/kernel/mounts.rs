//! Mounts of our volumes. mountinfo identifies them: type `fuse.hawser`, and the volume's id as the
//! source.
//!
//! Invariant: no function here sends a request to the mounted file system; its daemon may be dead
//! or stuck.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use linux::mount::{AccessTimes, FuseConnections, FuseMountOptions, FuseName, MountFlags, UnmountMode};
use linux::mountinfo::{self, MountEntry};
use linux::rootfs::Attributes;
use nix::errno::Errno;

use crate::error::{Error, Result, Step};
use crate::kernel::bounded;
use crate::kernel::place::Place;
use crate::model::capability::{Access, MountFlag};
use crate::model::ids::VolumeId;
use crate::model::limits;

const SUBTYPE: &str = "hawser";
pub(crate) const FS_TYPE: &str = "fuse.hawser";
/// No event reports that a mount is no longer busy.
const BUSY_RETRY: Duration = Duration::from_millis(20);
/// Under an rshared root, mountinfo lists a mount twice, and stale mounts may be stacked. A taller
/// stack is left alone.
const MAX_LAYERS: usize = 16;

/// Mounts the connection for the volume at `place`.
pub(crate) fn mount(
    fuse_device: &OwnedFd,
    volume_id: &VolumeId,
    place: &Place,
    access: Access,
) -> Result<MountEntry> {
    let options = FuseMountOptions { flags: flags(access), allow_other: true, default_permissions: true };
    let tree = linux::mount::new_fuse(
        fuse_device,
        FuseName { source: volume_id.as_str(), subtype: SUBTYPE },
        options,
    );
    attach(&tree.step("mount volume")?, volume_id, place)
}

/// Attaches a detached mount at `place` and verifies that it is visible. After an error it is
/// mounted nowhere.
pub(crate) fn attach(tree: &OwnedFd, volume_id: &VolumeId, place: &Place) -> Result<MountEntry> {
    const STEP: &str = "mount volume";
    place.attach(tree, STEP)?;
    let gone = || Error::changed(place.field(), place.path(), "the volume was unmounted there at once");
    let found = find_at(place, volume_id).and_then(|found| found.ok_or_else(gone));
    found.map_err(|cause| place.detached(tree, cause))
}

/// A detached copy of `mount`. The path may have changed since mountinfo was read: so the opened
/// mount is verified.
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

/// Gives the volume's directory in the pool the rules for access times of `access`. The daemon's reads
/// change the access times there, and FUSE's mount has no say in that.
pub(crate) fn set_access_times(directory: &OwnedFd, access: Access) -> Result<()> {
    let MountFlags { access_times, nodiratime, .. } = flags(access);
    if access_times == AccessTimes::Kernels && !nodiratime {
        return Ok(());
    }
    let wanted = Attributes { access_times, nodiratime, ..Attributes::default() };
    linux::rootfs::set_attributes(directory, wanted).step("set the rules for access times")
}

/// Whether a mount has exactly the restrictions of `access`.
pub(crate) fn is_as_wanted(mount: &MountEntry, access: Access) -> bool {
    let has = |name: &str| mount.options.split(',').any(|option| option == name);
    // `sync` is a flag of the file system, not of the mount.
    let of_mount = |flag: &MountFlag| {
        matches!(flag, MountFlag::Noexec | MountFlag::Noatime | MountFlag::Nodiratime | MountFlag::Relatime)
    };
    mount.is_read_only() == access.read_only
        && has("nosuid")
        && has("nodev")
        && access.flags.iter().filter(of_mount).all(|flag| has(flag.as_str()))
}

/// The volume's mount that is visible at `path`, by mountinfo alone. A mount of something else
/// there is an error. Before a change, use [`find_at`].
pub(crate) fn find(path: &Path, volume_id: &VolumeId) -> Result<Option<MountEntry>> {
    only_of(mountinfo::at(path).step("read mountinfo")?, path, volume_id)
}

/// [`find`] at a place.
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

/// Whether the volume is mounted at `path`, also below another mount.
pub(crate) fn is_mounted(path: &Path, volume_id: &VolumeId) -> Result<bool> {
    Ok(all_of(volume_id)?.iter().any(|mount| mount.mount_point == path))
}

/// Whether the volume is mounted at any other path than these, visible or not.
pub(crate) fn is_mounted_beside(volume_id: &VolumeId, known: &[&Path]) -> Result<bool> {
    Ok(all_of(volume_id)?.iter().any(|mount| !known.contains(&mount.mount_point.as_path())))
}

/// Whether the volume is mounted anywhere, visible or not.
pub(crate) fn is_mounted_anywhere(volume_id: &VolumeId) -> Result<bool> {
    is_mounted_beside(volume_id, &[])
}

/// How connection `minor` of the volume is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ConnectionMount {
    Nowhere,
    /// Covered by another mount everywhere.
    Hidden,
    /// Visible as a whole at this mount.
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

/// What to do with a mount in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenBusy {
    /// Never end the I/O of its users: wait briefly for files that are being closed, then return
    /// ABORTED, and the caller retries.
    Refuse,
    /// The connection is served elsewhere and ends with its daemon: detach this mount at once.
    Hide,
    /// Our own users are gone. Other processes have until the limit, then the connection is
    /// aborted.
    Abort,
    /// No daemon serves the connection: abort it at once.
    AbortNow,
}

/// Unmounts every mount of the volume at `place`; none is a success. Waits for a daemon that does
/// not answer are ended by aborting the connection, so no detached mount is kept by a stuck
/// request.
pub(crate) fn unmount(place: &Place, volume_id: &VolumeId, when_busy: WhenBusy) -> Result<()> {
    unmount_found(place, volume_id, find_at(place, volume_id)?, when_busy)
}

/// [`unmount`], if [`find_at`] has just `found` the top mount.
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
            // Covered by another mount: no path leads to it.
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

/// [`unmount`] that leaves a mount of something else alone: a call that undoes finds nothing of its
/// volume there.
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

/// Aborts the connection, which ends all requests that wait for its daemon, then unmounts.
fn abort(place: &Place, volume_id: &VolumeId, minor: u32) -> Result<()> {
    tracing::warn!(path = %place.path().display(), "cannot unmount: aborting the FUSE connection");
    abort_connection(minor, || is_connection_of(volume_id, minor))?;
    match patient_unmount(place, Instant::now() + limits::CLOSING)? {
        Outcome::Gone | Outcome::NotReachable => Ok(()),
        // Remaining users get ENOTCONN from now on: no request can keep the mount.
        Outcome::Busy => bounded_unmount(place, UnmountMode::Detach).map(drop),
        Outcome::Stuck => Err(stuck(place)),
    }
}

fn stuck(place: &Place) -> Error {
    Error::Deadline { what: format!("unmount {}", place.path().display()), limit: limits::UNMOUNT }
}

static ABORTED: AtomicU64 = AtomicU64::new(0);

/// Number of connections that this driver has aborted since its start.
pub(crate) fn aborted_connections() -> u64 {
    ABORTED.load(Ordering::Relaxed)
}

/// Aborts the connection of the mounts with `minor`: every request on it, and every later one,
/// fails. A missing connection is a success.
///
/// The kernel reuses the number of an ended connection, possibly for another volume: `is_ours`
/// checks the connection after it was opened.
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

/// Whether connection `minor` belongs to the volume and is mounted.
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

/// umount2(2) on a separate thread, which is abandoned if the call does not return.
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
