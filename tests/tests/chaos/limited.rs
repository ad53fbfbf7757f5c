//! Applications in a volume that the kernel limits, with the data path that the driver chooses for it:
//! all passes through to a quota group of Btrfs.
//!
//! `HAWSER_CHAOS_POOL=ext4` or `=xfs` takes a project quota of this file system instead. The laboratory
//! does so, whose kernels have them.

use std::fs::File;
use std::num::NonZeroU32;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use linux::btrfs::quota;
use linux::btrfs::subvolume::{self as subvolumes, SubvolumeId};
use linux::project_quota;
use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use tests::csi::snapshots::data;
use tests::csi::{data_path, scene};
use tests::loop_device::{FileSystem, LoopMount};
use tests::{Sandbox, eventually, subvolume};

use crate::suite::{Class, Suite, Volume};
use crate::{TIMEOUT, kills, situations};

const POOL: &str = "HAWSER_CHAOS_POOL";
const POOL_BYTES: u64 = 1 << 30;
/// More than what the applications write.
const VOLUME_BYTES: u64 = 96 << 20;
/// Where a file system counts names and its own blocks too, this much of a volume is data nevertheless.
const LEAST_DATA: u64 = 64 << 20;

#[test]
fn names_files_and_databases_are_whole_in_a_volume_that_the_kernel_limits() {
    killed_under(&["names", "file", "sqlite-wal"], 10);
}

#[test]
fn fio_and_tar_find_no_difference_in_a_volume_that_the_kernel_limits() {
    killed_under(&["fio-direct", "fio-mapped", "archive", "sqlite-journal"], 10);
}

#[test]
fn a_volume_that_the_kernel_limits_grows_although_something_is_killed() {
    let (mut suite, volume) = limited(wanted_pool());
    let limit = Limit::of(&data(&suite.scene, &volume.id)).unwrap();
    situations::grow(&mut suite, &volume, i64::try_from(VOLUME_BYTES).unwrap() + (1 << 20));
    suite.end_applications();
    assert!(limit.bytes().unwrap() > Some(VOLUME_BYTES), "{limit:?}");
    finish(suite, &limit);
}

/// Only Btrfs makes a snapshot of files that are open for writing.
#[test]
fn a_snapshot_of_a_volume_that_btrfs_limits_is_cut_although_something_is_killed() {
    let (mut suite, volume) = limited(FileSystem::Btrfs);
    let limit = Limit::of(&data(&suite.scene, &volume.id)).unwrap();
    situations::cut_snapshots(&mut suite, &volume, &[]);
    finish(suite, &limit);
}

/// In a pool of its own on this file system.
fn limited(kind: FileSystem) -> (Suite, Volume) {
    let sandbox = Sandbox::new();
    new_pool(&sandbox, kind);
    let mut suite = Suite::start_in(sandbox);
    suite.class = Class::Limited;
    let volume = suite.volume_of(i64::try_from(VOLUME_BYTES).unwrap());
    (suite, volume)
}

fn killed_under(names: &[&str], short: usize) {
    let (mut suite, volume) = limited(wanted_pool());
    let limit = Limit::of(&data(&suite.scene, &volume.id)).unwrap();
    assert_eq!(limit.bytes().unwrap(), Some(VOLUME_BYTES));
    passes_through(&suite, &volume);
    suite.applications(&volume, names);
    suite.progress();
    for _ in 0..kills(short) {
        suite.kill();
    }
    suite.end_applications();
    suite.have_keeper();

    // As before the first kill.
    passes_through(&suite, &volume);
    assert_eq!(limit.bytes().unwrap(), Some(VOLUME_BYTES));
    is_filled(&suite, &volume);
    finish(suite, &limit);
}

fn finish(mut suite: Suite, limit: &Limit) {
    suite.empty();
    if let Limit::Group(..) = limit {
        subvolume::begin_clean_up(&suite.scene.sandbox.path("pool")).unwrap();
    }
    let ended = eventually("the volume's limit has ended with it", TIMEOUT, || {
        let left = limit.bytes()?;
        ensure!(left.is_none(), "{limit:?} is left: {left:?}");
        Ok(())
    });
    ended.unwrap_or_else(|error| suite.fail(&format!("{error:#}")));
    suite.finish();
}

fn wanted_pool() -> FileSystem {
    let wanted = std::env::var(POOL).unwrap_or_else(|_| FileSystem::Btrfs.name().to_owned());
    let kinds = [FileSystem::Btrfs, FileSystem::Ext4, FileSystem::Xfs];
    let kind = kinds.into_iter().find(|kind| kind.name() == wanted);
    kind.unwrap_or_else(|| panic!("{POOL}={wanted}: not one of btrfs, ext4, xfs"))
}

/// At the pool's place.
fn new_pool(sandbox: &Sandbox, kind: FileSystem) {
    match kind {
        FileSystem::Btrfs => {
            let pool = LoopMount::new(sandbox, "pool", kind, POOL_BYTES).unwrap();
            subvolume::enable_quotas(pool.dir()).unwrap();
        }
        FileSystem::Ext4 | FileSystem::Xfs => {
            LoopMount::with_project_quotas(sandbox, "pool", kind, POOL_BYTES).unwrap();
        }
    }
}

/// What limits a volume, in the pool that it is in.
#[derive(Debug)]
enum Limit {
    Group(File, SubvolumeId),
    Project(File, NonZeroU32),
}

impl Limit {
    /// `root`: of the volume's data in the pool.
    fn of(root: &Path) -> Result<Self> {
        let data = File::open(root).with_context(|| root.display().to_string())?;
        // The driver removes the volume's directory, and never the one above.
        let volumes = root.ancestors().nth(2).context("a directory of volumes")?;
        let pool = File::open(volumes).with_context(|| volumes.display().to_string())?;
        if let Some(id) = subvolumes::with_root(&data)? {
            return Ok(Self::Group(pool, id));
        }
        let project = project_quota::project_of(&data)?;
        Ok(Self::Project(pool, project.context("neither a subvolume nor a project")?))
    }

    /// `None` once there is no such group or project.
    fn bytes(&self) -> Result<Option<u64>> {
        Ok(match self {
            Self::Group(pool, id) => {
                quota::group(pool, *id)?.map(|group| group.limit_bytes.unwrap_or_default())
            }
            Self::Project(pool, id) => project_quota::find(pool, *id)?.map(|known| known.limits.bytes),
        })
    }
}

/// Another process may wait for a daemon, and this one must not.
fn on_volume(suite: &Suite, what: &str, work: impl FnOnce() -> Result<()> + Send + 'static) {
    suite.on_volume(what, work).unwrap_or_else(|error| suite.fail(&format!("{what}: {error:#}")));
}

fn passes_through(suite: &Suite, volume: &Volume) {
    let (metrics, dir) = (suite.scene.daemon_metrics(&volume.id), volume.path.clone());
    on_volume(suite, "see the data path", move || data_path::ensure_it_passes(&metrics, &dir));
}

/// What the applications have left and a new file are within the size that statfs(2) shows, and no more
/// fits.
fn is_filled(suite: &Suite, volume: &Volume) {
    let path = volume.path.clone();
    on_volume(suite, "fill the volume", move || {
        let (written, refusal) = data_path::fill(&path.join("filling"), POOL_BYTES)?;
        // By the daemon's way, which an open may take, all file systems answer like XFS.
        let is_full = [Errno::EDQUOT, Errno::ENOSPC].map(|full| Some(full as i32)).contains(&refusal);
        ensure!(is_full, "{refusal:?} after {written} bytes");
        ensure!((LEAST_DATA..=VOLUME_BYTES).contains(&written), "refused after {written} bytes");
        eventually("statfs shows the use", scene::TIMEOUT, || is_shown(&path, written))
    });
}

fn is_shown(path: &Path, written: u64) -> Result<()> {
    let shown = statvfs(path)?;
    let total = shown.blocks() * shown.fragment_size();
    let used = (shown.blocks() - shown.blocks_free()) * shown.fragment_size();
    ensure!(total == VOLUME_BYTES && (written..=total).contains(&used), "{used} of {total} bytes");
    Ok(())
}
