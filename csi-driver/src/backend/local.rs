//! The backend `local`: each volume is a directory in a pool on this node.
//!
//! `<pool>/volumes/<id>/data` is a volume's root, and `usage` beside it is its daemon's count, or the
//! kernel's, written down for the daemon.
//! `<pool>/snapshots/<id>/data` is a snapshot's root. A volume or snapshot is built in
//! `<pool>/incoming/<id>` and renamed into place when it is complete. For removal it is first
//! renamed to `<pool>/trash/<id>`. All four parents have mode 0700: on the host only root gets in,
//! and a volume's users choose the modes inside it.

mod choice;
mod counting;
mod inodes;
mod leftovers;
mod listing;
mod presence;
mod quota;
mod roots;
mod traits;
mod tree;
mod usage;

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use linux::btrfs::subvolume;
use linux::tree::Trash;
use nix::sys::stat::{FileStat, lstat};
use proto::handover::{Local, Role, assignment};
use rustix::fs::{CWD, ResolveFlags};

use crate::backend::copies::{Count, Progress};
use crate::backend::{Assigned, Diagnosis, VolumeBackend};
use crate::error::{Error, Result, Step, chain};
use crate::kernel::bounded::{self, Shared};
use crate::kernel::private_dir::probe_dir;
use crate::model::capacity::{self, BYTES_PER_INODE, InodeRoom, Overcommit, Room, VolumeLimits};
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::limits;
use crate::model::policies::{Allowance, CapacityPolicy, Policies, Wanted};
use crate::model::records::{DataId, Source};
use crate::model::snapshot_mode::SnapshotMode;
use crate::model::topology::Topology;
use counting::{limit_again, publish};
use inodes::Inodes;
use leftovers::leftovers_in;
use listing::{entries_of, stored};
use presence::Presence;
use roots::{Remover, Root};
use traits::fs_type;
use tree::CopyMode;

/// Users of a volume need not be root: every container that mounts it may create files.
const ROOT_MODE: u32 = 0o777;
/// The pool's directories: complete volumes, complete snapshots, those being built, those being
/// removed.
const PARTS: [&str; 4] = ["volumes", "snapshots", "incoming", "trash"];
const DATA: &str = "data";
const USAGE: &str = "usage";
/// Used by a copy to find hard links; beside `data` until the copy is complete.
const LINKS: &str = "links";

/// How the pool is configured.
#[derive(Debug)]
pub(crate) struct PoolSettings {
    pub(crate) dir: PathBuf,
    /// `None`: the size of the file system.
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) overcommit: Overcommit,
    pub(crate) topology: Topology,
}

#[derive(Debug)]
pub(crate) struct Pool {
    dir: PathBuf,
    volumes: PathBuf,
    snapshots: PathBuf,
    incoming: PathBuf,
    trash: PathBuf,
    /// As configured; `None`: the size of the file system.
    capacity_bytes: Option<u64>,
    overcommit: Overcommit,
    topology: Topology,
    presence: Presence,
    /// Held while a project number is chosen.
    numbering: Mutex<()>,
    /// Set once it is known, and not changed when the file system grows.
    bytes_per_inode: OnceLock<u64>,
    /// Checks of volumes' directories, which may not return.
    looks: Shared<VolumeId, nix::Result<FileStat>>,
    remover: Remover,
    /// Data in `trash` that is removed in the background.
    leaving: Trash,
    /// True until the driver listens.
    is_starting: AtomicBool,
    /// Whether the kernel has FUSE_PASSTHROUGH, once it is known.
    passthrough: OnceLock<bool>,
    /// When the driver has asked Btrfs to count its quota groups anew, until the count was right.
    counted: Mutex<Option<Instant>>,
}

/// One volume or snapshot: the directory it belongs in, and its name there.
#[derive(Debug, Clone, Copy)]
struct Place<'a> {
    live: &'a Path,
    name: &'a str,
}

impl Place<'_> {
    fn path(&self) -> PathBuf {
        self.live.join(self.name)
    }
}

impl Pool {
    /// The pool in `settings.dir` if `state_dir` records it; otherwise the pool counts as away.
    /// Without a recorded pool, the first check of its presence makes and records a new one.
    pub(crate) fn open(settings: PoolSettings, state_dir: &Path) -> Result<Self> {
        let PoolSettings { dir, capacity_bytes, overcommit, topology } = settings;
        let [volumes, snapshots, incoming, trash] = PARTS.map(|name| dir.join(name));
        let presence = Presence::watch(&dir, state_dir, limits::POOL)?;
        Ok(Self {
            dir,
            volumes,
            snapshots,
            incoming,
            remover: Remover::default(),
            leaving: Trash::new(trash.clone()),
            trash,
            capacity_bytes,
            overcommit,
            topology,
            presence,
            numbering: Mutex::default(),
            bytes_per_inode: OnceLock::new(),
            looks: Shared::default(),
            is_starting: AtomicBool::new(false),
            passthrough: OnceLock::new(),
            counted: Mutex::new(None),
        })
    }

    fn capacity_bytes(&self) -> Result<u64> {
        match self.capacity_bytes {
            Some(bytes) => Ok(bytes),
            None => nix::sys::statvfs::statvfs(&self.volumes)
                .map(|fs| fs.blocks().saturating_mul(fs.fragment_size()))
                .map_err(|e| linux::Error::at("statvfs", &self.volumes, e))
                .step("measure pool"),
        }
    }

    /// `None` if the file system creates inodes as long as it has space.
    fn inodes(&self) -> Result<Option<Inodes>> {
        self.check_present()?;
        let found = Inodes::of(&self.volumes)
            .map_err(|e| linux::Error::at("count inodes of", &self.volumes, e))
            .step("measure pool")?;
        let _known_from_now_on =
            self.bytes_per_inode.set(found.as_ref().map_or(BYTES_PER_INODE, Inodes::bytes_each));
        Ok(found)
    }

    /// Whether a copy can share its original's extents.
    fn can_reflink(&self) -> Result<bool> {
        let away = |reason| Error::PoolAway { path: self.dir.clone(), reason };
        self.presence.check()?.can_reflink.map_err(away)
    }

    fn volume<'a>(&'a self, id: &'a VolumeId) -> Place<'a> {
        Place { live: &self.volumes, name: id.as_str() }
    }

    fn snapshot_place<'a>(&'a self, id: &'a SnapshotId) -> Place<'a> {
        Place { live: &self.snapshots, name: id.as_str() }
    }

    fn is_complete(place: Place<'_>) -> bool {
        place.path().join(DATA).is_dir()
    }

    fn check_vacant(&self, what: String, place: Place<'_>) -> Result<()> {
        self.check_present()?;
        let path = place.path();
        match std::fs::symlink_metadata(&path) {
            Ok(_) => Err(Error::UnknownData { what, path }),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(linux::Error::at("look at", &path, e)).step("look at pool"),
        }
    }

    /// The directory that the volume's daemon is to serve.
    fn data_dir(&self, id: &VolumeId) -> PathBuf {
        self.volume(id).path().join(DATA)
    }

    /// The daemon's count, for [`usage::open`].
    fn usage_path(&self, id: &VolumeId) -> PathBuf {
        self.volume(id).path().join(USAGE)
    }

    /// Refused at once while an earlier check of the volume is stuck.
    fn look_at(&self, id: &VolumeId) -> Result<linux::Result<DataId>> {
        let dir = self.data_dir(id);
        let (what, looked_at) = (format!("look at volume {id} in the pool"), dir.clone());
        let found = self.looks.within(id, what, limits::POOL_LOOK, move || lstat(&looked_at))?;
        Ok(found
            .map(|found| DataId { device: found.st_dev, inode: found.st_ino })
            .map_err(|e| linux::Error::at("stat", &dir, e)))
    }

    /// Gives a volume whose limit the kernel enforces the limits of its size.
    fn limit(&self, id: &VolumeId, allowed: Allowance) -> Result<()> {
        let Some((kind, limits)) = self.root_of(id, allowed)?.limits else { return Ok(()) };
        let data = open_root(&self.data_dir(id)).step("limit volume")?;
        quota::limit(kind, &data, limits).step("limit volume")
    }

    fn complete(&self, place: Place<'_>) -> linux::Result<()> {
        let (incoming, live) = (self.incoming.join(place.name), place.path());
        std::fs::rename(&incoming, &live).map_err(|e| linux::Error::at("move into place", &incoming, e))?;
        linux::atomic_file::sync_dir(place.live)
    }
}

impl VolumeBackend for Pool {
    fn topology(&self) -> &Topology {
        &self.topology
    }

    fn diagnose(&self, served: &BTreeMap<VolumeId, DataId>) -> Diagnosis {
        let away = self.presence.why_away();
        let mut serving_other_data = served.clone();
        serving_other_data.retain(|id, served| {
            let found = std::fs::symlink_metadata(self.data_dir(id));
            let found = found.map(|found| DataId { device: found.dev(), inode: found.ino() });
            away.is_none() && found.is_ok_and(|found| found != *served)
        });
        let (volumes, snapshots) = stored(&self.dir);
        let mut complete_snapshots = snapshots.clone();
        complete_snapshots.retain(|id| Self::is_complete(self.snapshot_place(id)));
        let leftovers = entries_of([&self.incoming, &self.trash]);
        let serving_other_data = serving_other_data.into_keys().collect();
        let quotas = if away.is_none() { quota::kind(&self.dir).ok() } else { None };
        let (kind, missing) = match quotas {
            Some(Ok(kind)) => (Some(kind), None),
            Some(Err(missing)) => (None, Some(missing)),
            None => (None, None),
        };
        let why = |id: &VolumeId| quota::why_not_to_limit(kind?, &self.data_dir(id), id.as_str());
        let not_to_limit = volumes.iter().filter_map(|id| Some((id.clone(), why(id)?))).collect();
        Diagnosis {
            away,
            volumes,
            snapshots,
            complete_snapshots,
            leftovers,
            serving_other_data,
            no_kernel_limits: missing.map(|missing| format!("{}: {}", missing.reason, missing.remedy)),
            not_to_limit,
            clones_with_kernel_limits: kind.and_then(|_| clone_mode(&self.dir)),
            counts_are_wrong: kind.and_then(|kind| quota::why_inexact(kind, &self.dir)),
        }
    }

    fn about_limits(&self) -> String {
        let pool = self.dir.display();
        match quota::kind(&self.dir) {
            Ok(Ok(_)) => format!("The kernel limits new volumes of the pool {pool}."),
            Ok(Err(quota::Missing { reason, remedy })) => {
                format!(
                    "The daemons, not the kernel, keep new volumes of the pool {pool} within their capacity. It is {reason}: for limits by the kernel, {remedy}."
                )
            }
            Err(error) => format!("Who limits volumes of the pool {pool} is not known: {}.", chain(&error)),
        }
    }

    fn check_present(&self) -> Result<()> {
        self.presence.check().map(drop)
    }

    /// Writes and removes a file.
    fn probe(&self) -> linux::Result<()> {
        let away = |e: Error| linux::Error::at("look at", &self.dir, std::io::Error::other(chain(&e)));
        self.check_present().map_err(away).and_then(|()| probe_dir(&self.trash))
    }

    fn room(&self) -> Result<Room> {
        let inodes = self.inodes()?;
        let pool_bytes = self.capacity_bytes()?;
        let inodes = inodes.map(|inodes| InodeRoom {
            promised: self.overcommit.of(inodes.claimable_by(pool_bytes)),
            bytes_each: inodes.bytes_each(),
        });
        Ok(Room { pool_bytes, promised_bytes: self.overcommit.of(pool_bytes), inodes })
    }

    fn limits(&self, capacity_bytes: u64) -> VolumeLimits {
        if self.bytes_per_inode.get().is_none()
            && let Err(error) = self.inodes()
        {
            tracing::debug!(error = chain(&error), "the pool's inodes are not known");
        }
        let bytes_each = self.bytes_per_inode.get().copied().unwrap_or(BYTES_PER_INODE);
        let inodes = capacity::inode_limit(capacity_bytes, bytes_each);
        VolumeLimits { bytes: capacity_bytes, inodes }
    }

    fn has_passthrough(&self) -> Result<bool> {
        self.kernel_has_passthrough()
    }

    fn policies(&self, wanted: Wanted, keeper: bool) -> Result<Policies> {
        self.choose(wanted, keeper)
    }

    fn create(&self, id: &VolumeId, allowed: Allowance) -> Result<()> {
        self.check_present()?;
        let place = self.volume(id);
        if Self::is_complete(place) {
            return self.limit(id, allowed);
        }
        let root = self.root_of(id, allowed)?;
        self.begin(place, root)
            .and_then(|data| {
                std::fs::set_permissions(&data, Permissions::from_mode(ROOT_MODE))
                    .map_err(|e| linux::Error::at("chmod", &data, e))
            })
            .and_then(|()| self.complete(place))
            .step("create volume directory")
    }

    /// A size that only the daemon enforces needs no change of the pool.
    fn expand(&self, id: &VolumeId, allowed: Allowance) -> Result<VolumeLimits> {
        self.limit(id, allowed)?;
        Ok(self.limits(allowed.capacity_bytes))
    }

    fn delete(&self, id: &VolumeId) -> Result<()> {
        self.delete_at(self.volume(id), "remove volume data")
    }

    fn check_no_volume(&self, id: &VolumeId) -> Result<()> {
        self.check_vacant(format!("volume {id}"), self.volume(id))
    }

    fn has_lost_volume(&self, id: &VolumeId) -> Result<bool> {
        // In this order: the pool may go away in between.
        let is_absent = is_absent(&self.volume(id).path());
        self.check_present()?;
        Ok(is_absent)
    }

    fn cuts_at_once(&self, from: &VolumeId, clone: Option<(&VolumeId, Allowance)>) -> Result<bool> {
        if let Some((id, allowed)) = clone
            && !self.root_of(id, allowed)?.is_subvolume
        {
            return Ok(false);
        }
        let data = open_root(&self.data_dir(from)).step("look at volume")?;
        Ok(subvolume::with_root(data).step("look at volume")?.is_some())
    }

    /// The kernel's count; else the last daemon's count if it is valid; otherwise counts the tree now.
    fn used(&self, id: &VolumeId, policy: CapacityPolicy) -> Result<Count> {
        self.check_present()?;
        if policy == CapacityPolicy::Kernel {
            let data = open_root(&self.data_dir(id)).step("look at volume")?;
            if let Some(used) = quota::used(&data).step("read the volume's quota")? {
                return Ok(used);
            }
        }
        let file = usage::open(&self.usage_path(id)).step("open usage file")?;
        if let Some(count) = usage::read(&file).step("read usage file")? {
            return Ok(count);
        }
        let data = open_root(&self.data_dir(id)).step("count volume")?;
        tree::count_tree(data.as_fd(), &AtomicBool::new(false)).step("count volume")
    }

    /// The root changes last: a root with the group shows that all files have it.
    fn give_group(&self, id: &VolumeId, gid: u32) -> Result<()> {
        let data = open_root(&self.data_dir(id)).step("give volume to its group")?;
        tree::give_group_once(data.as_fd(), gid).step("give volume to its group")
    }

    /// The directory as a detached mount, which no path leads to, and the usage file.
    fn assign(&self, id: &VolumeId, allowed: Allowance) -> Result<Assigned> {
        self.check_present()?;
        let (dir, usage_path) = (self.data_dir(id), self.usage_path(id));
        let limits = self.root_of(id, allowed)?.limits;
        let open = move || {
            if let Some((kind, limits)) = limits {
                let data = open_root(&dir)?;
                // Quotas that were off for some time have forgotten it.
                quota::limit(kind, &data, limits)?;
                // A full pool has no room for it. It is repeated while the volume is served.
                if let Err(error) = publish(&data, &usage_path) {
                    tracing::warn!(error = chain(&error), "the kernel's count is not passed on");
                }
            }
            let tree = linux::mount::open_tree_clone(&dir)?;
            let found = rustix::fs::fstat(&tree).map_err(|e| linux::Error::at("stat", &dir, e))?;
            let id = DataId { device: found.st_dev, inode: found.st_ino };
            Ok(Assigned {
                id,
                backend: assignment::Backend::Local(Local {}),
                descriptors: vec![(Role::Directory, tree), (Role::UsageFile, usage::open(&usage_path)?)],
            })
        };
        bounded::within(format!("open volume {id} in the pool"), limits::POOL, open)?.step("open volume")
    }

    fn assignment(&self) -> assignment::Backend {
        assignment::Backend::Local(Local {})
    }

    fn data_id(&self, id: &VolumeId) -> Result<DataId> {
        self.look_at(id)?.step("look at volume")
    }

    fn check_serves(&self, id: &VolumeId, served: Option<DataId>) -> Result<()> {
        let Some(served) = served else { return Ok(()) };
        let is_another = match self.look_at(id) {
            // While the daemon holds its directory open, no other directory can have the same
            // numbers.
            Ok(Ok(found)) => found != served,
            Ok(Err(e)) => e.errno() == nix::errno::Errno::ENOENT && self.check_present().is_ok(),
            Err(_) => false,
        };
        match is_another {
            true => Err(Error::ServesAnother { volume_id: id.clone(), path: self.data_dir(id) }),
            false => Ok(()),
        }
    }

    /// A class that allows a blocking copy still gets a reflink where the file system supports it.
    fn snapshot_mode(&self, allowed: Option<SnapshotMode>, class: &'static str) -> Result<SnapshotMode> {
        match allowed {
            _ if self.can_reflink()? => Ok(SnapshotMode::Reflink),
            Some(SnapshotMode::BlockingCopy) => Ok(SnapshotMode::BlockingCopy),
            Some(SnapshotMode::Reflink) | None => {
                let fs_type = self.presence.check()?.fs_type;
                Err(Error::NoReflink { pool: self.dir.clone(), fs_type, class })
            }
        }
    }

    fn snapshot(
        &self,
        id: &SnapshotId,
        from: &VolumeId,
        mode: SnapshotMode,
        progress: &Progress,
    ) -> Result<Count> {
        let mode = match mode {
            SnapshotMode::Reflink => CopyMode::Reflink,
            SnapshotMode::BlockingCopy => CopyMode::Bytes,
        };
        let root = if self.cuts_at_once(from, None)? { Root::CUT } else { Root::COPY };
        self.copy(self.snapshot_place(id), &self.data_dir(from), (root, mode), progress)
            .step("copy volume into snapshot")
    }

    fn fill(&self, id: &VolumeId, allowed: Allowance, from: &Source, progress: &Progress) -> Result<Count> {
        let mode = if self.can_reflink()? { CopyMode::Reflink } else { CopyMode::Bytes };
        let from = match from {
            Source::Snapshot(id) => self.snapshot_place(id).path().join(DATA),
            Source::Volume(id) => self.data_dir(id),
        };
        let root = self.root_of(id, allowed)?;
        let count = self.copy(self.volume(id), &from, (root, mode), progress).step("fill volume")?;
        if allowed.policies.capacity != CapacityPolicy::Daemon {
            return Ok(count);
        }
        let file = usage::open(&self.usage_path(id)).step("open usage file")?;
        usage::write(&file, count).step("write usage file")?;
        Ok(count)
    }

    fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.delete_at(self.snapshot_place(id), "remove snapshot data")
    }

    fn check_no_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.check_vacant(format!("snapshot {id}"), self.snapshot_place(id))
    }

    fn has_lost_snapshot(&self, id: &SnapshotId) -> Result<bool> {
        let data = self.snapshot_place(id).path().join(DATA);
        let found = std::fs::metadata(&data);
        // In this order: the pool may go away in between.
        self.check_present()?;
        match found {
            Ok(found) => Ok(!found.is_dir()),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(true),
            Err(e) => Err(linux::Error::at("look at", &data, e)).step("look at snapshot"),
        }
    }

    fn sync(&self) -> Result<()> {
        let dir = open_root(&self.dir).step("sync pool")?;
        rustix::fs::syncfs(dir).map_err(|e| linux::Error::at("syncfs", &self.dir, e)).step("sync pool")
    }

    fn publish_use(&self, volumes: &[(VolumeId, Allowance)]) {
        if volumes.is_empty() && !self.remover.has_groups() {
            return;
        }
        self.keep_counting();
        let has_groups = matches!(quota::kind(&self.dir), Ok(Ok(quota::Kind::Groups)));
        for (id, allowed) in volumes {
            let publish_and_limit = || {
                let data = open_root(&self.data_dir(id))?;
                // First: a full pool may have no room for the count.
                if has_groups {
                    limit_again(&data, self.limits(allowed.capacity_bytes), id)?;
                }
                publish(&data, &self.usage_path(id))
            };
            if let Err(error) = publish_and_limit() {
                tracing::debug!(volume_id = %id, error = chain(&error), "the kernel's count is not passed on");
            }
        }
    }

    fn set_starting(&self, is_starting: bool) {
        self.is_starting.store(is_starting, Ordering::Relaxed);
    }

    fn sweep(&self) -> Result<()> {
        self.check_present()?;
        let parts = [&self.incoming, &self.trash];
        let swept = parts.into_iter().try_for_each(|dir| remove_probes(dir)).and_then(|()| {
            if self.is_starting() {
                return self.sweep_later();
            }
            let leftovers = [leftovers_in(&self.incoming)?, leftovers_in(&self.trash)?].concat();
            // All of them, also after one that stays.
            leftovers.iter().map(|path| self.remover.remove(path)).fold(Ok(()), linux::Result::and)
        });
        swept.step("sweep pool")
    }
}

/// How a clone is made, as far as the type of the file system shows it: a diagnosis writes no file to
/// try it.
fn clone_mode(pool: &Path) -> Option<SnapshotMode> {
    let fs_type = fs_type(pool).ok()?;
    Some(if fs_type == "ext4" { SnapshotMode::BlockingCopy } else { SnapshotMode::Reflink })
}

fn remove_probes(dir: &Path) -> linux::Result<()> {
    let listed = |e| linux::Error::at("list", dir, e);
    for entry in std::fs::read_dir(dir).map_err(listed)? {
        let path = entry.map_err(listed)?.path();
        if path.extension().is_some_and(|e| e == "tmp") {
            linux::atomic_file::remove(&path)?;
        }
    }
    Ok(())
}

fn is_absent(path: &Path) -> bool {
    matches!(std::fs::symlink_metadata(path), Err(e) if e.kind() == ErrorKind::NotFound)
}

/// Opens a directory of the pool's own; symbolic links are followed.
fn open_root(dir: &Path) -> linux::Result<OwnedFd> {
    linux::tree::open_dir(CWD, dir, ResolveFlags::empty()).map_err(|e| linux::Error::at("open", dir, e))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::model::name::VolumeName;
    use crate::model::policies::DataPath;

    /// Counted by its daemon.
    const ALLOWED: Allowance = Allowance {
        capacity_bytes: 1 << 20,
        policies: Policies { data_path: DataPath::Daemon, capacity: CapacityPolicy::Daemon },
    };

    fn open(dir: &Path, capacity_bytes: Option<u64>) -> Result<Pool> {
        let settings = PoolSettings {
            dir: dir.join("pool"),
            capacity_bytes,
            overcommit: Overcommit::NONE,
            topology: Topology::EveryNode,
        };
        Pool::open(settings, dir)
    }

    #[test]
    fn a_volume_comes_and_goes_and_both_may_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let pool = open(dir.path(), None).unwrap();
        let id = VolumeId::for_name(&VolumeName::parse("a").unwrap());
        pool.create(&id, ALLOWED).unwrap();
        std::fs::write(pool.data_dir(&id).join("file"), "content").unwrap();
        pool.create(&id, ALLOWED).unwrap();
        assert_eq!(std::fs::read(pool.data_dir(&id).join("file")).unwrap(), b"content");
        assert_eq!(std::fs::metadata(pool.data_dir(&id)).unwrap().permissions().mode() & 0o7777, ROOT_MODE);
        pool.delete(&id).unwrap();
        pool.delete(&id).unwrap();
        assert_eq!(std::fs::read_dir(&pool.volumes).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(&pool.trash).unwrap().count(), 0);
    }

    #[test]
    fn a_removal_that_was_killed_is_finished_beside_a_volume_of_the_same_id() {
        let dir = tempfile::tempdir().unwrap();
        let pool = open(dir.path(), None).unwrap();
        let id = VolumeId::for_name(&VolumeName::parse("a").unwrap());
        std::fs::create_dir_all(id.under(&pool.trash).join("data/half")).unwrap();
        pool.create(&id, ALLOWED).unwrap();
        pool.delete(&id).unwrap();
        assert_eq!(std::fs::read_dir(&pool.trash).unwrap().count(), 0);
    }

    #[test]
    fn a_driver_that_starts_waits_for_no_removal() {
        let dir = tempfile::tempdir().unwrap();
        let pool = open(dir.path(), None).unwrap();
        let [deleted, cut_short, half_made] =
            ["a", "b", "c"].map(|name| VolumeId::for_name(&VolumeName::parse(name).unwrap()));
        pool.create(&deleted, ALLOWED).unwrap();
        std::fs::create_dir_all(cut_short.under(&pool.trash).join("data/half")).unwrap();
        std::fs::create_dir_all(half_made.under(&pool.incoming).join("data/half")).unwrap();
        std::fs::create_dir_all(pool.trash.join("left-1-0/data")).unwrap();
        pool.set_starting(true);
        pool.delete(&deleted).unwrap();
        pool.sweep().unwrap();
        pool.set_starting(false);
        assert_eq!(stored(dir.path()).0, BTreeSet::new());
        assert_eq!(std::fs::read_dir(&pool.incoming).unwrap().count(), 0);
        pool.create(&half_made, ALLOWED).unwrap();
        let begun = std::time::Instant::now();
        while std::fs::read_dir(&pool.trash).unwrap().count() > 0 {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "the trash stays");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_removal_without_a_trash_is_no_success() {
        let dir = tempfile::tempdir().unwrap();
        let pool = open(dir.path(), None).unwrap();
        let id = VolumeId::for_name(&VolumeName::parse("a").unwrap());
        pool.create(&id, ALLOWED).unwrap();
        std::fs::remove_dir(&pool.trash).unwrap();
        let error = pool.clear(pool.volume(&id)).unwrap_err();
        assert_eq!(error.errno(), nix::errno::Errno::ENOENT);
        pool.delete(&id).unwrap();
        assert!(!id.under(&pool.volumes).exists());
    }

    #[test]
    fn the_size_is_the_file_systems_unless_it_is_configured() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(dir.path(), None).unwrap().room().unwrap().pool_bytes > 0);
        assert_eq!(open(dir.path(), Some(5)).unwrap().room().unwrap().pool_bytes, 5);
    }
}
