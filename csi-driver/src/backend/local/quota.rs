//! Limits that the pool's file system enforces. On Btrfs, a volume's `data` is a subvolume with a
//! quota group. On ext4 and XFS, `data` and all that is created below it belong to a project.
//!
//! Which group or project is a volume's, its `data` alone says. No process of a volume can change
//! that: daemons may not call ioctl(2).

use std::fmt::Display;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use linux::btrfs::quota::{self as groups, Quotas};
use linux::btrfs::subvolume::{self, SubvolumeId};
use linux::mountinfo::MountEntry;
use linux::project_quota::{self as projects, Limits};
use rustix::fs::fstat;
use rustix::io::Errno;

use super::open_root;
use super::traits::fs_type;
use crate::backend::copies::Count;
use crate::model::capacity::VolumeLimits;

/// How a file system limits a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Groups,
    Projects,
}

/// Why a file system limits no directory, and what changes that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) reason: String,
    pub(super) remedy: String,
}

/// Project numbers of volumes: other programs use small ones, and Kubernetes 1048577 and more.
const FIRST_PROJECT: u32 = 1 << 30;
const PROJECTS: u32 = 1 << 30;
/// What a copy into the smallest volume may take beside its files.
const COPY_EXTRA_BYTES: u64 = 1 << 20;
/// Of XFS and ext4; some have smaller ones.
const BLOCK_BYTES: u64 = 4096;

/// How the file system of the pool limits a directory.
pub(super) fn kind(pool: &Path) -> linux::Result<Result<Kind, Missing>> {
    let missing = |reason: String, remedy: String| Ok(Err(Missing { reason, remedy }));
    let (dir, fs_type, path) = (open_root(pool)?, fs_type(pool)?, pool.display());
    match fs_type.as_str() {
        "btrfs" if !groups::are_shown(&dir)? => missing(
            format!("{fs_type}, and /sys/fs/btrfs does not show whether it has quotas"),
            "mount sysfs at /sys".to_owned(),
        ),
        "btrfs" => match groups::quotas(&dir)? {
            Quotas::Groups { .. } => Ok(Ok(Kind::Groups)),
            Quotas::Off => {
                missing(format!("{fs_type} without quotas"), format!("run \"btrfs quota enable {path}\""))
            }
            Quotas::Simple => missing(
                format!("{fs_type} with simple quotas, which do not count what clones share"),
                format!("run \"btrfs quota disable {path}\", then \"btrfs quota enable {path}\""),
            ),
        },
        "ext4" | "xfs" if projects::is_enforced(&dir)? => Ok(Ok(Kind::Projects)),
        "ext4" => missing(format!("{fs_type} without project quotas"), remedy_of_ext4(&mounts_of(&dir))),
        "xfs" => missing(format!("{fs_type} without project quotas"), remedy_of_xfs(&mounts_of(&dir))),
        _ => missing(
            format!("{fs_type}, which limits no directories"),
            "use a pool on Btrfs, ext4 or XFS".to_owned(),
        ),
    }
}

/// Why what the file system counts is wrong now, and what changes that.
pub(super) fn why_inexact(kind: Kind, pool: &Path) -> Option<String> {
    let is_exact = || groups::quotas(open_root(pool)?).map(|found| found == Quotas::Groups { exact: true });
    let is_wrong = kind == Kind::Groups && matches!(is_exact(), Ok(false));
    is_wrong.then(|| format!("limits are not exact until \"btrfs quota rescan -w {}\" ends", pool.display()))
}

/// How an administrator turns project quotas on. The root file system cannot be unmounted.
fn remedy_of_ext4(mounts: &[MountEntry]) -> String {
    let device = device(mounts);
    match is_root(mounts) {
        true => format!(
            "use a pool on a file system of its own, or run \"tune2fs -O quota,project {device}\" in another system \
             and boot with rootflags=prjquota"
        ),
        false => format!(
            "unmount it, run \"tune2fs -O quota,project {device}\", and mount it with the option prjquota"
        ),
    }
}

/// [`remedy_of_ext4`], for XFS.
fn remedy_of_xfs(mounts: &[MountEntry]) -> String {
    match is_root(mounts) {
        true => "use a pool on a file system of its own, or boot with rootflags=prjquota",
        false => "unmount it, and mount it with the option prjquota",
    }
    .to_owned()
}

/// The mounts of a directory's file system.
fn mounts_of(dir: &OwnedFd) -> Vec<MountEntry> {
    let Ok(found) = fstat(dir) else { return Vec::new() };
    let device = (rustix::fs::major(found.st_dev), rustix::fs::minor(found.st_dev));
    let mut mounts = linux::mountinfo::read().unwrap_or_default();
    mounts.retain(|mount| (mount.major, mount.minor) == device);
    mounts
}

fn is_root(mounts: &[MountEntry]) -> bool {
    mounts.iter().any(|mount| mount.mount_point == Path::new("/"))
}

/// The device of a file system, for messages.
fn device(mounts: &[MountEntry]) -> &str {
    mounts.first().and_then(|mount| mount.source.to_str()).unwrap_or("DEVICE")
}

/// Limits a new `data`, which is empty or a snapshot. `name` is that of its volume. One process at a
/// time holds `numbering`.
pub(super) fn limit_new(
    kind: Kind,
    data: &OwnedFd,
    name: &str,
    limits: VolumeLimits,
    numbering: &Mutex<()>,
) -> linux::Result<()> {
    if kind == Kind::Groups {
        return groups::limit(data, limits.bytes);
    }
    let _alone = numbering.lock().unwrap_or_else(PoisonError::into_inner);
    let project = unused_project(data, name)?;
    // First: from here on the number is in use, and a limit that is set has a directory that names it.
    projects::assign(data, project)?;
    projects::limit(data, project, of_project(limits))
}

/// Prepares a new, empty `data` for a copy. Its own limits come after the copy, by [`limit`]. A project
/// gets its number at once, with limits that the copy of a full volume stays below.
pub(super) fn make_room_for_copy(
    kind: Kind,
    data: &OwnedFd,
    name: &str,
    limits: VolumeLimits,
    numbering: &Mutex<()>,
) -> linux::Result<()> {
    let VolumeLimits { bytes, inodes } = limits;
    let room = VolumeLimits {
        bytes: bytes.saturating_mul(2).saturating_add(COPY_EXTRA_BYTES),
        inodes: inodes.saturating_mul(2),
    };
    match kind {
        Kind::Groups => Ok(()),
        Kind::Projects => limit_new(kind, data, name, room, numbering),
    }
}

/// Ends the limit of the group of a subvolume.
pub(super) fn unlimit_group(data: &OwnedFd) -> linux::Result<()> {
    match groups::unlimit(data) {
        // Quotas are off.
        Err(e) if e.errno() == nix::errno::Errno::ENOTCONN => Ok(()),
        unlimited => unlimited,
    }
}

/// The limit of the group of a subvolume.
pub(super) fn group_limit(data: &OwnedFd) -> linux::Result<Option<u64>> {
    let Some(id) = subvolume::with_root(data)? else { return Ok(None) };
    Ok(groups::group(data, id)?.and_then(|group| group.limit_bytes))
}

/// Gives the `data` of a volume these limits, unless it has them.
pub(super) fn limit(kind: Kind, data: &OwnedFd, limits: VolumeLimits) -> linux::Result<()> {
    match kind {
        Kind::Groups => {
            let Some(id) = subvolume::with_root(data)? else { return Err(unlimited("is not a subvolume")) };
            let found = groups::group(data, id)?.and_then(|group| group.limit_bytes);
            if found == Some(limits.bytes) { Ok(()) } else { groups::limit(data, limits.bytes) }
        }
        Kind::Projects => {
            let Some(project) = project_of(data)? else {
                return Err(unlimited("belongs to no project of this driver's"));
            };
            let found = projects::find(data, project)?.map(|known| known.limits);
            let wanted = of_project(limits);
            if found == Some(wanted) { Ok(()) } else { projects::limit(data, project, wanted) }
        }
    }
}

/// Why [`limit`] refuses the `data` of a volume, and the commands that change that; `None` if it does not. A copy
/// by files, such as a restored one, has neither subvolumes nor projects.
pub(super) fn why_not_to_limit(kind: Kind, data: &Path, name: &str) -> Option<String> {
    let root = open_root(data).ok()?;
    let volume = data.parent()?.display();
    match kind {
        Kind::Groups if subvolume::with_root(&root).ok()?.is_some() => None,
        Kind::Groups => Some(format!(
            "its data is not a subvolume: run \"cd {volume} && mv data old && btrfs subvolume create data && cp -a \
             --reflink=always old/. data/ && rm -r old\""
        )),
        Kind::Projects if project_of(&root).ok()?.is_some() => None,
        Kind::Projects => {
            let project = unused_project(&root, name).ok()?;
            // chattr(1) skips symbolic links, which could then not be renamed.
            Some(format!(
                "its data belongs to no project of this driver's: run \"cd {volume} && mkdir new && chattr +P -p \
                 {project} new && cp -a --reflink=auto data/. new/ && mv data old && mv new data && rm -r old\""
            ))
        }
    }
}

/// What `data` holds, as its limit counts it; `None` if nothing counts it.
pub(super) fn used(data: impl AsFd) -> linux::Result<Option<Count>> {
    let data = data.as_fd();
    if let Some(id) = subvolume::with_root(data)? {
        let group = groups::group(data, id)?;
        return Ok(group.map(|group| Count {
            bytes: group.referenced_bytes.saturating_add(group.reserved_bytes),
            inodes: 0,
        }));
    }
    let Some(project) = project_of(data)? else { return Ok(None) };
    let used = projects::find(data, project)?.map(|known| known.used).unwrap_or_default();
    Ok(Some(Count { bytes: used.bytes, inodes: used.inodes }))
}

/// The project that this driver gave a directory, also where files have no attributes of that kind. An
/// administrator may have put the whole pool into another project, which its directories inherit.
pub(super) fn project_of(directory: impl AsFd) -> linux::Result<Option<NonZeroU32>> {
    use nix::errno::Errno::{EINVAL, ENOTTY, EOPNOTSUPP};
    match projects::project_of(directory) {
        Err(e) if matches!(e.errno(), ENOTTY | EOPNOTSUPP | EINVAL) => Ok(None),
        found => Ok(found?.filter(|project| is_own(*project))),
    }
}

fn is_own(project: NonZeroU32) -> bool {
    (FIRST_PROJECT..FIRST_PROJECT + PROJECTS).contains(&project.get())
}

/// Whether a quota group was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Forgotten {
    Now,
    /// Parts of its subvolume are still there, or a disk is full.
    Later,
}

/// Removes the group of a subvolume that was deleted.
pub(super) fn forget_group(pool: &OwnedFd, subvolume: SubvolumeId) -> Forgotten {
    use nix::errno::Errno::{EINVAL, ENOENT, ENOTCONN};
    match groups::remove(pool, subvolume) {
        Ok(()) => Forgotten::Now,
        // The kernel has removed it, or quotas are off, which forgets all groups.
        Err(error) if matches!(error.errno(), ENOENT | ENOTCONN | EINVAL) => Forgotten::Now,
        Err(error) => {
            tracing::debug!(%subvolume, error = linux::chain(&error), "its quota group stays for now");
            Forgotten::Later
        }
    }
}

/// Ends the limit of a project whose files are about to be removed.
pub(super) fn forget_project(pool: &OwnedFd, project: NonZeroU32) -> linux::Result<()> {
    use nix::errno::Errno::{EINVAL, ENOSYS, EOPNOTSUPP, ESRCH};
    match projects::limit(pool, project, Limits { bytes: 0, inodes: 0 }) {
        // The file system has no quotas any more.
        Err(e) if matches!(e.errno(), EINVAL | ENOSYS | EOPNOTSUPP | ESRCH) => Ok(()),
        forgotten => forgotten,
    }
}

fn of_project(limits: VolumeLimits) -> Limits {
    // Stored in whole KiB or blocks, rounded up: a limit is never more than the volume's. None at all would
    // be no limit.
    let bytes = (limits.bytes / BLOCK_BYTES * BLOCK_BYTES).max(BLOCK_BYTES);
    Limits { bytes, inodes: limits.inodes }
}

/// A number that no file has and that has no limit, on the file system of `mount`. The same volume
/// gets the same number again, unless it is taken.
fn unused_project(mount: impl AsFd, name: &str) -> linux::Result<NonZeroU32> {
    let mount = mount.as_fd();
    for number in candidates(name) {
        if projects::find(mount, number)?.is_none() {
            return Ok(number);
        }
    }
    Err(linux::Error::new("find an unused project for", name, Errno::NOSPC))
}

fn candidates(name: &str) -> impl Iterator<Item = NonZeroU32> {
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (0..PROJECTS).filter_map(move |more| NonZeroU32::new(FIRST_PROJECT + hash.wrapping_add(more) % PROJECTS))
}

fn unlimited(why: impl Display) -> linux::Error {
    let object = format!(
        "the volume's directory, which {why}: hawser-csi doctor prints the command that changes this"
    );
    linux::Error::new("limit", object, Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_volume_has_a_project_of_its_own_range_and_further_ones_if_that_is_taken() {
        let name = "vol-0123456789abcdef0123456789abcdef";
        let some: Vec<u32> = candidates(name).take(1000).map(NonZeroU32::get).collect();
        assert!(some.iter().all(|number| (FIRST_PROJECT..FIRST_PROJECT + PROJECTS).contains(number)));
        assert_eq!(some.iter().collect::<BTreeSet<_>>().len(), 1000);
        assert_eq!(candidates(name).next().map(NonZeroU32::get), Some(some[0]));
        assert_ne!(
            candidates("vol-0123456789abcdef0123456789abcdee").next().map(NonZeroU32::get),
            Some(some[0])
        );
    }

    #[test]
    fn the_root_file_system_is_not_to_be_unmounted() {
        let other = mounts_of(&open_root(Path::new("/proc")).unwrap());
        assert!(!other.is_empty() && other.iter().all(|mount| mount.fs_type == "proc"), "{other:?}");
        let mut root = linux::mountinfo::read().unwrap();
        root.retain(|mount| mount.mount_point == Path::new("/"));
        for remedy in [remedy_of_ext4, remedy_of_xfs] {
            assert!(remedy(&root).starts_with("use a pool on a file system of its own, or "));
            assert!(remedy(&root).contains("boot with rootflags=prjquota"));
            assert!(remedy(&other).starts_with("unmount it, "));
        }
    }

    #[test]
    fn a_limit_is_never_rounded_up() {
        let limits = |bytes| of_project(VolumeLimits { bytes, inodes: 5 });
        assert_eq!(limits(4097), Limits { bytes: 4096, inodes: 5 });
        assert_eq!(limits(4096), Limits { bytes: 4096, inodes: 5 });
    }

    #[test]
    fn the_smallest_volume_has_a_limit() {
        assert_eq!(of_project(VolumeLimits { bytes: 1, inodes: 5 }), Limits { bytes: 4096, inodes: 5 });
    }

    #[test]
    fn a_project_of_an_administrator_is_not_a_volumes() {
        let own = |number| is_own(NonZeroU32::new(number).unwrap());
        assert!(own(FIRST_PROJECT) && own(FIRST_PROJECT + PROJECTS - 1));
        assert!(!own(42) && !own(FIRST_PROJECT - 1) && !own(FIRST_PROJECT + PROJECTS));
    }
}
