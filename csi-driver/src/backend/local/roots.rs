//! How the data of a volume or snapshot are made in `incoming`, and removed.
//!
//! A directory, or a subvolume of Btrfs: where the kernel limits the volume, and where data pass
//! through, so that the file system can cut it. A removal deletes a subvolume at once, with all that
//! a killed call left in it, and ends the limit of a project.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use linux::btrfs::subvolume::{self, Changeable, SubvolumeId};
use linux::tree::WITHIN;
use rustix::fs::{Timespec, Timestamps};

use super::quota::{self, Forgotten, Kind};
use super::tree::{self, CopyMode};
use super::{DATA, LINKS, Place, Pool, open_root};
use crate::backend::VolumeBackend;
use crate::backend::copies::{Count, Progress};
use crate::error::{Error, Result, Step, chain};
use crate::kernel::private_dir::private_dir;
use crate::model::capacity::VolumeLimits;
use crate::model::ids::VolumeId;
use crate::model::policies::{Allowance, CapacityPolicy, DataPath};

/// The name of [`DATA`] in its place.
const DATA_NAME: &CStr = c"data";
const PRIVATE_MODE: u32 = 0o700;

/// What the root of a new volume or snapshot is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Root {
    pub(super) is_subvolume: bool,
    /// The kernel's limits.
    pub(super) limits: Option<(Kind, VolumeLimits)>,
    pub(super) changeable: Changeable,
}

impl Root {
    /// Of a snapshot that is copied file by file.
    pub(super) const COPY: Self = Self { is_subvolume: false, limits: None, changeable: Changeable::Yes };
    /// Of a snapshot that the file system cuts.
    pub(super) const CUT: Self = Self { is_subvolume: true, limits: None, changeable: Changeable::No };
}

impl Pool {
    /// The root of a volume with this allowance. An error if the kernel is to limit it and cannot.
    pub(super) fn root_of(&self, id: &VolumeId, allowed: Allowance) -> Result<Root> {
        let limits = match allowed.policies.capacity {
            CapacityPolicy::Kernel => Some((self.quota_kind(id)?, self.limits(allowed.capacity_bytes))),
            CapacityPolicy::Daemon | CapacityPolicy::None => None,
        };
        let passes_through = allowed.policies.data_path == DataPath::Passthrough;
        let is_subvolume = limits.is_some_and(|(kind, _)| kind == Kind::Groups)
            || (passes_through && self.is_btrfs().step("look at pool")?);
        Ok(Root { is_subvolume, limits, changeable: Changeable::Yes })
    }

    /// How the kernel limits the volume.
    fn quota_kind(&self, id: &VolumeId) -> Result<Kind> {
        quota::kind(&self.dir).step("look at the pool's quotas")?.map_err(|missing| Error::NoKernelQuota {
            what: format!("volume {id}"),
            pool: self.dir.clone(),
            reason: missing.reason,
            remedy: missing.remedy,
        })
    }

    fn is_btrfs(&self) -> linux::Result<bool> {
        let dir = open_root(&self.dir)?;
        linux::btrfs::is_btrfs(&dir).map_err(|e| linux::Error::at("statfs", &self.dir, e))
    }

    /// Makes an empty `data` with its limit in the place's part of `incoming`.
    pub(super) fn begin(&self, place: Place<'_>, root: Root) -> linux::Result<PathBuf> {
        let data = self.begin_unlimited(place, root)?;
        self.limit_new(place, &data, root)?;
        Ok(data)
    }

    fn begin_unlimited(&self, place: Place<'_>, root: Root) -> linux::Result<PathBuf> {
        let data = self.begin_place(place)?;
        if root.is_subvolume {
            subvolume::create(open_parent(&data)?, DATA_NAME)?;
            std::fs::set_permissions(&data, Permissions::from_mode(PRIVATE_MODE))
                .map_err(|e| linux::Error::at("chmod", &data, e))?;
        } else {
            private_dir(&data)?;
        }
        Ok(data)
    }

    /// Makes the place's part of `incoming`, and returns where its `data` belongs.
    fn begin_place(&self, place: Place<'_>) -> linux::Result<PathBuf> {
        let incoming = self.incoming.join(place.name);
        self.remover.remove(&incoming)?;
        // Not create_dir_all: if the parents are missing, the pool has just been unmounted.
        private_dir(&incoming)?;
        Ok(incoming.join(DATA))
    }

    fn limit_new(&self, place: Place<'_>, data: &Path, root: Root) -> linux::Result<()> {
        let Some((kind, limits)) = root.limits else { return Ok(()) };
        quota::limit_new(kind, &open_root(data)?, place.name, limits, &self.numbering)
    }

    /// Makes the tree at `place` from the one at `from` and replaces what an earlier call left.
    pub(super) fn copy(
        &self,
        place: Place<'_>,
        from: &Path,
        (root, mode): (Root, CopyMode),
        progress: &Progress,
    ) -> linux::Result<Count> {
        self.clear(place)?;
        let from = open_root(from)?;
        let is_cut = root.is_subvolume && subvolume::with_root(&from)?.is_some();
        let count = match is_cut {
            true => self.cut(place, &from, root, progress)?,
            false => self.copy_files(place, &from, (root, mode), progress)?,
        };
        self.complete(place)?;
        Ok(count)
    }

    /// Lets the file system cut the tree.
    fn cut(&self, place: Place<'_>, from: &OwnedFd, root: Root, progress: &Progress) -> linux::Result<Count> {
        let data = self.begin_place(place)?;
        // By itself, Btrfs leaves out data that was written and is not on the disk yet (seen on Linux 6.18).
        rustix::fs::syncfs(from).map_err(|e| linux::Error::at("syncfs", &data, e))?;
        subvolume::snapshot(from, open_parent(&data)?, DATA_NAME, root.changeable)?;
        if root.limits.is_some() {
            check_unlimited_group(&open_root(&data)?, progress)?;
        }
        self.limit_new(place, &data, root)?;
        let data = open_root(&data)?;
        if root.limits.is_none() && root.changeable == Changeable::Yes {
            // A snapshot has the limit of its source.
            quota::unlimit_group(&data)?;
        }
        match quota::used(&data)? {
            Some(count) => Ok(count),
            None => tree::count_tree(data.as_fd(), &progress.stop),
        }
    }

    fn copy_files(
        &self,
        place: Place<'_>,
        from: &OwnedFd,
        (root, mode): (Root, CopyMode),
        progress: &Progress,
    ) -> linux::Result<Count> {
        let data = self.begin_unlimited(place, root)?;
        let to = open_root(&data)?;
        if let Some((kind, limits)) = root.limits {
            quota::make_room_for_copy(kind, &to, place.name, limits, &self.numbering)?;
        }
        // No link leads out of a subvolume or of a project.
        let is_inside = root.is_subvolume || root.limits.is_some();
        let links = match is_inside {
            true => data.join(linux::random::hexadecimal()?),
            false => data.with_file_name(LINKS),
        };
        private_dir(&links)?;
        let count = tree::copy_tree(from.as_fd(), to.as_fd(), open_root(&links)?.as_fd(), mode, progress)?;
        let times = times_of(&to)?;
        linux::tree::remove(&links)?;
        if is_inside {
            rustix::fs::futimens(&to, &times).map_err(|e| linux::Error::at("set times of", &data, e))?;
        }
        // Last: a copy of a full volume and `links` together take more than a volume of its size may.
        if let Some((kind, limits)) = root.limits {
            quota::limit(kind, &to, limits)?;
        }
        Ok(count)
    }
}

fn times_of(directory: &OwnedFd) -> linux::Result<Timestamps> {
    let found = linux::tree::stat(directory.as_fd(), c"")?;
    let time =
        |stamp: rustix::fs::StatxTimestamp| Timespec { tv_sec: stamp.tv_sec, tv_nsec: stamp.tv_nsec.into() };
    Ok(Timestamps { last_access: time(found.stx_atime), last_modification: time(found.stx_mtime) })
}

/// `EDQUOT` if nothing has limited the source of a new subvolume, and that holds more than the copy may. A
/// subvolume has the limit of its source, which kept it from that.
fn check_unlimited_group(data: &OwnedFd, progress: &Progress) -> linux::Result<()> {
    if quota::group_limit(data)?.is_some() {
        return Ok(());
    }
    let Some(count) = quota::used(data)? else { return Ok(()) };
    progress.done_bytes.store(count.bytes, Ordering::Relaxed);
    progress.check(count, 0, 0).map_err(|e| linux::Error::new("cut", "the volume", e))
}

fn open_parent(data: &Path) -> linux::Result<OwnedFd> {
    open_root(data.parent().unwrap_or(data))
}

/// Removes what volumes and snapshots have in the pool.
#[derive(Debug, Default, Clone)]
pub(super) struct Remover {
    /// Quota groups of deleted subvolumes, which Btrfs keeps until it has freed all of the subvolume.
    groups: Arc<Mutex<BTreeSet<SubvolumeId>>>,
}

impl Remover {
    /// Removes what a volume or snapshot has in `path`, a directory of the pool. A missing one is a
    /// success. May be repeated after a kill or a failure at any point.
    pub(super) fn remove(&self, path: &Path) -> linux::Result<()> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return linux::tree::remove(path);
        };
        let parent = open_root(parent)?;
        let open_data = || {
            let place = linux::tree::open_dir(&parent, name, WITHIN)?;
            linux::tree::open_dir(&place, DATA_NAME, WITHIN)
        };
        // Missing, or not complete.
        let Ok(data) = open_data() else { return linux::tree::remove(path) };
        match subvolume::with_root(&data)? {
            Some(id) => {
                // Others are in it, or the kernel is older than Linux 5.7.
                if let Err(error) = subvolume::delete(&parent, id) {
                    tracing::debug!(path = %path.display(), error = chain(&error), "removed file by file");
                    drop(data);
                    linux::tree::remove(path)?;
                    self.forget_group(&parent, id);
                    return Ok(());
                }
                self.forget_group(&parent, id);
            }
            // First: no directory names the project after it. As long as it has files, its number is in use.
            None => {
                if let Some(project) = quota::project_of(&data)? {
                    quota::forget_project(&parent, project)?;
                }
            }
        }
        drop(data);
        linux::tree::remove(path)
    }

    /// That of a subvolume that was deleted: at once, or later.
    fn forget_group(&self, pool: &OwnedFd, subvolume: SubvolumeId) {
        if quota::forget_group(pool, subvolume) != Forgotten::Now {
            self.groups().insert(subvolume);
        }
    }

    /// [`Self::remove`] of several, on a thread of its own. What stays is removed by the next driver.
    pub(super) fn remove_in_background(&self, paths: Vec<PathBuf>) {
        if paths.is_empty() {
            return;
        }
        let failed = |error: &dyn std::error::Error| {
            tracing::warn!(error = chain(error), "a tree stays in the trash until the next start");
        };
        let own = self.clone();
        let remove = move || paths.iter().filter_map(|path| own.remove(path).err()).for_each(|e| failed(&e));
        if let Err(error) = std::thread::Builder::new().name("trash".to_owned()).spawn(remove) {
            failed(&error);
        }
    }

    /// Removes the quota groups of deleted subvolumes that Btrfs has kept so far. Kernels from Linux 6.11 on do so
    /// themselves; others keep a group, with its limit, until someone removes it. A driver that ends before does not.
    pub(super) fn forget_groups(&self, pool: &OwnedFd) {
        let kept = self.groups().clone();
        for subvolume in kept {
            if quota::forget_group(pool, subvolume) == Forgotten::Now {
                self.groups().remove(&subvolume);
            }
        }
    }

    /// Whether there may be such groups.
    pub(super) fn has_groups(&self) -> bool {
        !self.groups().is_empty()
    }

    fn groups(&self) -> MutexGuard<'_, BTreeSet<SubvolumeId>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
