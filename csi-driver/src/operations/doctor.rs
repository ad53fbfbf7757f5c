//! `hawser-csi doctor`: finds problems and proposes repairs.
//!
//! Three layers: `World::look` reads and changes nothing, `findings` decides, `--repair` acts. It
//! does what a driver does when it starts, and unmounts mounts that no journal names and no daemon
//! serves.

mod kernel_limits;
mod repair;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::mpsc::channel;
use std::time::Duration;

use clap::Args;
use linux::atomic_file::content_of;
use linux::lock::FileLock;
use linux::mountinfo::MountEntry;
use nix::errno::Errno;
use proto::admin;
use proto::admin::admin_client::AdminClient;
use tonic::Status;
use tonic::transport::Channel;

use crate::backend::{Diagnosis, VolumeBackend};
use crate::config::{self, Config, ConfigError, Flags};
use crate::daemon::keeper::Holders;
use crate::daemon::launcher::Launched;
use crate::daemon::{control, dial};
use crate::engine::driver;
use crate::engine::node_of_state;
use crate::engine::node_of_state::OtherNode;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::bounded::OneEach;
use crate::kernel::mounts;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::launch::{LaunchId, LaunchKey};
use crate::model::limits;
use crate::model::records::{SnapshotPhase, SnapshotRecord, StageRecord, VolumeRecord};
use crate::operations::admin::client::ask;
use crate::operations::sub_paths::{self, SubPath};
use crate::operations::views::{Format, NoJournal, Row};

/// Operations under way in a running driver are no finding: they are gone after this time.
const RECHECK_DELAY: Duration = Duration::from_secs(2);
const AT_START: &str = "as a driver does at its start";
const UNMOUNT: &str = "unmount it: its daemon has ended";
const BY_HAND: &str = "by hand";
const NO_FINDINGS: &str = "Nothing is left to be repaired.\n";

#[derive(Debug, Clone, Args)]
pub struct Doctor {
    /// Repair what can be repaired; no driver may run meanwhile.
    #[arg(long)]
    pub repair: bool,
    /// A table for people, or JSON.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub output: Format,
    #[command(flatten)]
    pub driver: Flags,
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    what: &'static str,
    /// A path or an id.
    object: String,
    found: String,
    /// What `--repair` does; null if an administrator must decide.
    repair: Option<&'static str>,
    unmount: Option<PathBuf>,
}

impl Finding {
    fn new(what: &'static str, object: impl ToString, found: impl Into<String>) -> Self {
        Self { what, object: object.to_string(), found: found.into(), repair: None, unmount: None }
    }

    fn at_start(self) -> Self {
        Self { repair: Some(AT_START), ..self }
    }
}

impl From<Finding> for admin::Finding {
    fn from(finding: Finding) -> Self {
        let Finding { what, object, found, repair, unmount: _ } = finding;
        Self { what: what.to_owned(), object, found, repair: repair.map(str::to_owned) }
    }
}

impl Row for admin::Finding {
    const HEADINGS: &'static [&'static str] = &["WHAT", "OBJECT", "FOUND", "REPAIR"];

    fn cells(&self) -> Vec<String> {
        let repair = self.repair.clone().unwrap_or_else(|| BY_HAND.to_owned());
        vec![self.what.clone(), self.object.clone(), self.found.clone(), repair]
    }
}

/// The findings of a running driver. `holders` tells who holds connections now.
pub(crate) fn of_running(
    config: &Config,
    backend: &dyn VolumeBackend,
    holders: &dyn Fn() -> Holders,
) -> Result<Vec<admin::Finding>> {
    let asked = Asked { is_driver_running: true, holders };
    Ok(standing(config, backend, &asked)?.into_iter().map(admin::Finding::from).collect())
}

/// What [`World::look`] does not see by itself.
struct Asked<'a> {
    is_driver_running: bool,
    holders: &'a dyn Fn() -> Holders,
}

impl Asked<'_> {
    fn holders(&self) -> Holders {
        (self.holders)()
    }
}

/// The observed state at one moment.
#[derive(Debug, Default)]
struct World {
    volumes: BTreeMap<VolumeId, Result<VolumeRecord>>,
    snapshots: BTreeMap<SnapshotId, Result<SnapshotRecord>>,
    /// Mounts of volumes, without those that another driver's paths identify.
    mounts: Vec<MountEntry>,
    /// Mounts without a journal entry that answer ENOTCONN: unmounting them harms no user.
    ended: BTreeSet<PathBuf>,
    /// Volumes whose recorded daemon runs, or that the keeper has given to another one.
    alive: BTreeSet<VolumeId>,
    /// Volumes whose daemon runs and does not answer.
    silent: BTreeSet<VolumeId>,
    /// Volumes whose users wait for another daemon if theirs has ended.
    held: BTreeSet<VolumeId>,
    launches: Vec<Launched>,
    dial_dirs: Vec<LaunchKey>,
    /// kubelet's directories of staged volumes, with the volume handle in each.
    staging_dirs: Vec<(PathBuf, std::result::Result<String, String>)>,
    data: Diagnosis,
    is_driver_running: bool,
    /// Why a driver with these flags would not start.
    other_node: Option<OtherNode>,
}

impl World {
    fn look(config: &Config, backend: &dyn VolumeBackend, asked: &Asked<'_>) -> Result<Self> {
        let journal = Journal::look(&config.state_dir)?;
        let volumes: BTreeMap<_, _> = journal.entries().into_iter().collect();
        let is_alive = |record: &VolumeRecord| {
            let serving = record.stage.as_ref().and_then(|stage| stage.serving);
            serving.is_some_and(|serving| serving.daemon.is_alive().unwrap_or(true))
        };
        let alive = volumes.iter().filter(|(_, record)| record.as_ref().is_ok_and(is_alive));
        let mut alive: BTreeSet<VolumeId> = alive.map(|(id, _)| id.clone()).collect();
        let holders = asked.holders();
        let held: BTreeSet<VolumeId> = holders.keeper.union(&holders.driver).cloned().collect();
        alive.extend(control::answering(&config.run_dir, held.difference(&alive)));
        let mut mounts = linux::mountinfo::read().step("read mountinfo")?;
        mounts.retain(|mount| mount.fs_type == mounts::FS_TYPE && !is_of_another_driver(config, mount));
        let views = other_views(&config.kubelet_dir, &mounts);
        mounts.retain(|mount| !views.iter().any(|view| mount.mount_point.starts_with(view)));
        let unknown = mounts.iter().filter(|mount| {
            mount.source.to_str().and_then(VolumeId::parse).is_some_and(|id| !volumes.contains_key(&id))
        });
        let ended = unknown.filter(|mount| has_ended(mount)).map(|mount| mount.mount_point.clone()).collect();
        let served = |id: &VolumeId| volumes.get(id)?.as_ref().ok()?.stage.as_ref()?.data;
        let served = alive.iter().filter_map(|id| Some((id.clone(), served(id)?))).collect();
        Ok(Self {
            ended,
            silent: control::silent(&config.run_dir, &alive),
            alive,
            held,
            snapshots: journal.snapshots().entries().into_iter().collect(),
            mounts,
            launches: driver::launcher(config)?.list().step("list launches")?,
            dial_dirs: dial::list(&config.run_dir).step("list dial directories")?,
            staging_dirs: staging_dirs(config),
            data: backend.diagnose(&served),
            other_node: node_of_state::find_other(&config.state_dir, &config.own_segment(), &journal)?,
            is_driver_running: asked.is_driver_running,
            volumes,
        })
    }

    fn is_unreadable(&self, id: &VolumeId) -> bool {
        matches!(self.volumes.get(id), Some(Err(_)))
    }

    /// Whether a target belongs to the connection that is served now, if there is one: a volume
    /// that was staged again has another connection than its older pods.
    fn is_served(&self, id: &VolumeId, record: &VolumeRecord, path: &Path) -> bool {
        let serving =
            record.stage.as_ref().and_then(|stage| stage.serving).filter(|_| self.alive.contains(id));
        let at = |minor| self.mounts.iter().any(|m| m.mount_point == path && m.minor == minor);
        serving.is_none_or(|serving| at(serving.connection_minor))
    }

    fn is_mounted(&self, id: &VolumeId, path: &Path) -> bool {
        self.mounts.iter().any(|m| m.mount_point == path && m.source.to_str() == Some(id.as_str()))
    }
}

/// Two drivers of this kind may serve a node under two names. kubelet's paths show whose a mount
/// is: `plugins/kubernetes.io/csi/<driver>/<hash>/globalmount` for a staged volume, and
/// `vol_data.json` beside `mount` for a published one, also for a part of it.
fn is_of_another_driver(config: &Config, mount: &MountEntry) -> bool {
    let path = &mount.mount_point;
    let staged = path.strip_prefix(staged_by_kubelet(config)).ok();
    if let Some(driver) = staged.and_then(|below| below.components().next()) {
        return driver.as_os_str() != config.driver_name.as_str();
    }
    let is_its = |dir: &PathBuf| matches!(vol_data(dir, "volumeHandle"), Some(Ok(id)) if mount.source == *id);
    let volume_dir = match SubPath::parse(path) {
        Some(part) => part.volume_dirs().find(is_its),
        None => path.parent().map(Path::to_owned),
    };
    let published = volume_dir.and_then(|dir| vol_data(&dir, "driverName"));
    matches!(published, Some(Ok(driver)) if driver != config.driver_name)
}

/// Other paths of kubelet's directory, for example after `mount --rbind`: the mounts there are
/// copies of those in the journal, and disappear with them.
fn other_views(kubelet_dir: &Path, of_volumes: &[MountEntry]) -> BTreeSet<PathBuf> {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let Some(own) = identity(kubelet_dir) else { return BTreeSet::new() };
    // Inside a volume, only its daemon could answer, and it may be stuck.
    let is_in_volume = |path: &Path| of_volumes.iter().any(|mount| path.starts_with(&mount.mount_point));
    let elsewhere = of_volumes.iter().filter(|mount| !mount.mount_point.starts_with(kubelet_dir));
    let above: BTreeSet<&Path> = elsewhere.flat_map(|mount| mount.mount_point.ancestors().skip(1)).collect();
    let views = above.into_iter().filter(|path| !is_in_volume(path) && identity(path) == Some(own));
    views.map(Path::to_owned).collect()
}

/// Whether requests to the mount fail with ENOTCONN. A mount that does not answer may have a
/// stopped daemon, which can be continued.
fn has_ended(mount: &MountEntry) -> bool {
    /// By mount: a daemon that does not answer costs one thread.
    static LOOKS: LazyLock<OneEach<u64>> = LazyLock::new(OneEach::default);
    let path = mount.mount_point.clone();
    let is_seen = linux::mountinfo::at(&path)
        .is_ok_and(|seen| seen.is_some_and(|seen| seen.mount_id == mount.mount_id));
    let look = move || nix::sys::statvfs::statvfs(&path);
    let what = || format!("statvfs {}", mount.mount_point.display());
    is_seen
        && matches!(LOOKS.within(&mount.mount_id, what(), limits::STATISTICS, look), Ok(Err(Errno::ENOTCONN)))
}

fn staged_by_kubelet(config: &Config) -> PathBuf {
    config.kubelet_dir.join("plugins/kubernetes.io/csi")
}

/// A field of kubelet's `vol_data.json` in `dir`; `None` if there is none. No link is followed,
/// since a pod may have put anything there.
fn vol_data(dir: &Path, field: &str) -> Option<std::result::Result<String, String>> {
    let text = match linux::shared_file::open(&dir.join("vol_data.json")).and_then(content_of) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
        read => read.map_err(|e| e.to_string()),
    };
    Some(text.and_then(|text| {
        let data: serde_json::Value = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
        data[field].as_str().map(str::to_owned).ok_or_else(|| format!("it has no {field}"))
    }))
}

/// kubelet's directories of this driver's volumes: `<hash>/vol_data.json` is written before a
/// volume is staged and removed after it is unstaged.
fn staging_dirs(config: &Config) -> Vec<(PathBuf, std::result::Result<String, String>)> {
    let parent = staged_by_kubelet(config).join(&config.driver_name);
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let named = |dir: PathBuf| vol_data(&dir, "volumeHandle").map(|handle| (dir, handle));
    entries.filter_map(|entry| named(entry.path())).collect()
}

/// All problems, sorted, without duplicates.
fn findings(world: &World) -> BTreeSet<Finding> {
    let mut all = BTreeSet::new();
    let other_node =
        |other: &OtherNode| Finding::new("state directory of another node", &other.found, other.to_string());
    all.extend(world.other_node.as_ref().map(other_node));
    all.extend(world.data.away.as_ref().map(|reason| Finding::new("pool is away", "pool", reason)));
    for (id, record) in &world.volumes {
        match record {
            Err(error) => all.extend([Finding::new("journal entry is unreadable", id, chain(error))]),
            Ok(record) => all.extend(of_volume(world, id, record)),
        }
    }
    for (id, record) in &world.snapshots {
        all.extend(match record {
            Err(error) => Some(Finding::new("journal entry is unreadable", id, chain(error))),
            Ok(record) => of_snapshot(world, id, record),
        });
    }
    all.extend(world.mounts.iter().filter_map(|mount| of_mount(world, mount)));
    all.extend(of_daemons(world));
    if world.data.away.is_none() {
        all.extend(of_data(world));
        all.extend(kernel_limits::of_kernel_limits(world));
    }
    all.extend(world.staging_dirs.iter().filter_map(|(dir, handle)| of_staging_dir(world, dir, handle)));
    if !world.is_driver_running {
        let left = |path: &PathBuf| Finding::new("left in the pool", path.display(), "by a killed call");
        all.extend(world.data.leftovers.iter().map(|path| left(path).at_start()));
    }
    all
}

fn of_volume(world: &World, id: &VolumeId, record: &VolumeRecord) -> Vec<Finding> {
    let mut all = Vec::new();
    if record.deleting {
        all.push(Finding::new("deletion is not finished", id, "the journal records it").at_start());
    }
    if !record.filled && !world.is_driver_running {
        let found = "its copy was interrupted: the next CreateVolume makes it anew";
        all.push(Finding::new("volume is not filled", id, found).at_start());
    }
    if record.parked.is_some() && !world.is_driver_running {
        all.push(Finding::new("parked, and no driver holds it", id, "its daemon ends").at_start());
    }
    if let Some(stage) = &record.stage {
        let at = stage.staging_path.display().to_string();
        if stage.serving.is_none() {
            all.push(Finding::new("stage is half done", id, at).at_start());
        } else if !world.is_mounted(id, &stage.staging_path) {
            all.push(Finding::new("staged volume is not mounted", id, at).at_start());
        } else if !world.alive.contains(id) && world.held.contains(id) {
            let who =
                if world.is_driver_running { "another daemon, which the driver starts" } else { "a driver" };
            let found = format!(
                "{} targets wait for {who}: their pods need not be started anew",
                record.targets.len()
            );
            all.push(Finding::new("daemon has ended", id, found).at_start());
        } else if !world.alive.contains(id) {
            let found = format!("{} targets answer ENOTCONN: start their pods anew", record.targets.len());
            all.push(Finding::new("daemon is dead", id, found));
        } else if world.silent.contains(id) {
            let pid = stage.serving.map_or(0, |serving| serving.daemon.pid);
            let found = format!("{} targets wait for process {pid}", record.targets.len());
            all.push(Finding::new("daemon does not answer", id, found));
        }
        if world.data.serving_other_data.contains(id) {
            let found = "its directory is not the one that the pool has now: take its pods down";
            all.push(Finding::new("daemon of another directory", id, found));
        }
    }
    for (path, target) in &record.targets {
        let at = path.display().to_string();
        if !target.published {
            all.push(Finding::new("publish is half done", id, at).at_start());
        } else if !world.is_mounted(id, path) {
            all.push(Finding::new("target is not mounted", id, at + ": start its pod anew"));
        } else if !world.is_served(id, record, path) {
            all.push(Finding::new("target of a daemon that died", id, at + ": start its pod anew"));
        }
    }
    all
}

fn of_snapshot(world: &World, id: &SnapshotId, record: &SnapshotRecord) -> Option<Finding> {
    match &record.phase {
        _ if record.deleting => {
            Some(Finding::new("deletion is not finished", id, "the journal records it").at_start())
        }
        SnapshotPhase::Begun | SnapshotPhase::Copying if !world.is_driver_running => {
            Some(Finding::new("snapshot is half done", id, format!("of volume {}", record.source)).at_start())
        }
        // While the data is missing, there is the finding of `of_data`.
        phase if phase.is_lost() => world
            .data
            .complete_snapshots
            .contains(id)
            .then(|| Finding::new("snapshot was lost", id, "its data is in the pool again").at_start()),
        SnapshotPhase::Failed { reason } => {
            Some(Finding::new("snapshot has failed", id, format!("{reason}: delete it")))
        }
        SnapshotPhase::Begun | SnapshotPhase::Copying | SnapshotPhase::Ready | SnapshotPhase::Lost => None,
    }
}

/// The finding for a mount that the journal does not name.
fn of_mount(world: &World, mount: &MountEntry) -> Option<Finding> {
    let id = mount.source.to_str().and_then(VolumeId::parse)?;
    let finding = Finding::new("unknown mount", mount.mount_point.display(), format!("volume {id}"));
    match world.volumes.get(&id) {
        // Unknown, so left alone.
        Some(Err(_)) => None,
        Some(Ok(record)) => {
            let is_staged = record.stage.as_ref().is_some_and(|s| s.staging_path == mount.mount_point);
            let is_named = is_staged || record.targets.contains_key(&mount.mount_point);
            let is_healthy = is_named || sub_paths::is_of_published(record, mount);
            // The volume's pods may use the same connection.
            (!is_healthy).then_some(finding)
        }
        None if world.ended.contains(&mount.mount_point) => {
            Some(Finding { repair: Some(UNMOUNT), unmount: Some(mount.mount_point.clone()), ..finding })
        }
        // From another driver, another --state-dir, or a lost journal: pods may use it.
        None => {
            Some(Finding { found: format!("volume {id}, served; the journal has no such volume"), ..finding })
        }
    }
}

fn of_daemons(world: &World) -> Vec<Finding> {
    let staged = world.volumes.iter().filter_map(|(id, record)| {
        let record = record.as_ref().ok()?;
        Some((id, record.stage.as_ref().or(record.parked.as_ref().map(|parked| &parked.stage))?))
    });
    let staged: Vec<(&VolumeId, &StageRecord)> = staged.collect();
    let launches: BTreeMap<LaunchKey, Option<&LaunchId>> =
        staged.iter().map(|(id, stage)| (stage.launch_key(id), stage.launch.as_ref())).collect();
    let is_unreadable = |key: &LaunchKey| key.volume_id().is_some_and(|id| world.is_unreadable(&id));
    // A running driver's daemons that wait for a volume have keys of their own.
    let may_wait = |key: &LaunchKey| {
        world.is_driver_running && !key.volume_id().is_some_and(|id| world.volumes.contains_key(&id))
    };
    let stray_launch = |launched: &&Launched| {
        !is_unreadable(&launched.key)
            && !may_wait(&launched.key)
            && launches.get(&launched.key) != Some(&Some(&launched.id))
    };
    let launch = |launched: &Launched| {
        Finding::new("unknown daemon", &launched.key, launched.id.to_string()).at_start()
    };
    let is_staged = |key: &LaunchKey| staged.iter().any(|(id, _)| LaunchKey::from(*id) == *key);
    let stray_dir = |key: &&LaunchKey| {
        !is_unreadable(key) && !may_wait(key) && !launches.contains_key(key) && !is_staged(key)
    };
    let dir = |key: &LaunchKey| {
        Finding::new("unused dial directory", key, "no staged or parked volume uses it").at_start()
    };
    let strays = world.launches.iter().filter(stray_launch).map(launch);
    strays.chain(world.dial_dirs.iter().filter(stray_dir).map(dir)).collect()
}

/// Data without an entry, and entries without their data.
fn of_data(world: &World) -> Vec<Finding> {
    let Diagnosis { volumes, snapshots, complete_snapshots, .. } = &world.data;
    let nobodys = |id: &dyn std::fmt::Display| {
        Finding::new("unknown data", id, "in the pool; the journal has no entry of it")
    };
    let mut all: Vec<Finding> =
        volumes.iter().filter(|id| !world.volumes.contains_key(id)).map(|id| nobodys(id)).collect();
    all.extend(snapshots.iter().filter(|id| !world.snapshots.contains_key(id)).map(|id| nobodys(id)));
    let lost = world
        .volumes
        .iter()
        .filter(|(id, record)| record.as_ref().is_ok_and(is_whole) && !volumes.contains(id));
    all.extend(lost.map(|(id, _)| {
        let advice = "call CreateVolume again if it is new; else put its data back";
        Finding::new("volume has no data", id, advice)
    }));
    let lost = world
        .snapshots
        .iter()
        .filter(|(id, record)| record.as_ref().is_ok_and(had_data) && !complete_snapshots.contains(id));
    let advice =
        "copy its data beside its place, rename(2) the copy into place and restart the driver, or delete it";
    all.extend(lost.map(|(id, _)| Finding::new("snapshot has no data", id, advice)));
    all
}

/// It was complete, and its deletion has not begun.
fn had_data(record: &SnapshotRecord) -> bool {
    !record.deleting && (record.phase == SnapshotPhase::Ready || record.phase.is_lost())
}

fn is_whole(record: &VolumeRecord) -> bool {
    record.filled && !record.deleting
}

/// kubelet removes its own directories, unless it was killed in between.
fn of_staging_dir(
    world: &World,
    dir: &Path,
    handle: &std::result::Result<String, String>,
) -> Option<Finding> {
    let finding = |found| Some(Finding::new("unused staging directory", dir.display(), found));
    match handle {
        Err(reason) => finding(format!("vol_data.json: {reason}")),
        Ok(handle) => match VolumeId::parse(handle) {
            Some(id) if world.volumes.contains_key(&id) => None,
            _ => finding(format!("volume {handle} does not exist")),
        },
    }
}

/// The output, and the number of findings that are left.
#[derive(Debug)]
pub struct Report {
    pub text: String,
    pub left: usize,
}

/// Why nothing could be read or repaired.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    NoJournal(#[from] NoJournal),
    #[error(
        "a driver runs with --state-dir {}: it repairs when it starts; restart it, or stop it first",
        state_dir.display()
    )]
    Running { state_dir: PathBuf },
    #[error(
        "a driver answers at {}, and none runs with --state-dir {}: give the driver's own --state-dir, and stop it before \
         --repair",
        socket.display(),
        state_dir.display()
    )]
    RunningElsewhere { socket: PathBuf, state_dir: PathBuf },
    #[error("see whether a driver runs")]
    Lock(#[source] linux::Error),
    #[error("look")]
    Look(#[source] Error),
    #[error("repair")]
    Repair(#[source] Error),
    #[error("ask the running driver")]
    Driver(#[source] Status),
}

impl Doctor {
    /// Must be called in a tokio context.
    pub fn run(self) -> std::result::Result<Report, DoctorError> {
        let config = Config::check(self.driver)?;
        NoJournal::check(&config.state_dir)?;
        let lock_path = config.state_dir.join("lock");
        let lock = match self.repair {
            true => Some(FileLock::try_exclusive_after_kill(&lock_path, 0o600)),
            // Looking must create no file, not even the lock.
            false => lock_path.exists().then(|| FileLock::try_exclusive(&lock_path, 0o600)),
        };
        let lock = lock.transpose().map_err(DoctorError::Lock)?;
        let is_driver_running = matches!(lock, Some(None));
        if self.repair && is_driver_running {
            return Err(DoctorError::Running { state_dir: config.state_dir });
        }
        // Only a repair keeps drivers from starting.
        let _lock = lock.filter(|_| self.repair);
        if self.repair {
            repair::check_no_driver_answers(&config)?;
        }
        let asked = is_driver_running.then(|| {
            let asked = async |mut driver: AdminClient<Channel>, state_dir| {
                driver.diagnose(admin::DiagnoseRequest { state_dir }).await
            };
            ask(&config.run_dir, &config.state_dir, asked)
        });
        let (rows, limits): (Vec<admin::Finding>, String) = match asked.flatten() {
            Some(answer) => {
                let answer = answer.map_err(DoctorError::Driver)?;
                (answer.findings, answer.limits)
            }
            None => {
                let backend = driver::backend(&config).map_err(DoctorError::Look)?;
                let holders = || Holders::of_keeper_at(&config::keeper_socket(&config.run_dir));
                let asked = Asked { is_driver_running, holders: &holders };
                let look = || standing(&config, &*backend, &asked).map_err(DoctorError::Look);
                let mut found = look()?;
                if self.repair && !found.is_empty() {
                    repair::repair(&config, &found).map_err(DoctorError::Repair)?;
                    found = look()?;
                }
                (found.into_iter().map(admin::Finding::from).collect(), backend.about_limits())
            }
        };
        let left = rows.len();
        let text = match self.output {
            // An empty table would look truncated.
            Format::Table if rows.is_empty() => format!("{NO_FINDINGS}{limits}\n"),
            Format::Table => self.output.print(&rows).map_err(DoctorError::Look)? + &limits + "\n",
            Format::Json => self.output.print(&rows).map_err(DoctorError::Look)?,
        };
        Ok(Report { text, left })
    }
}

/// The findings; with a running driver, only those that are still there a moment later.
fn standing(config: &Config, backend: &dyn VolumeBackend, asked: &Asked<'_>) -> Result<BTreeSet<Finding>> {
    let mut found = findings(&World::look(config, backend, asked)?);
    if asked.is_driver_running && !found.is_empty() {
        let (_nobody_sends, pause) = channel::<()>();
        // Nothing is sent: this is a plain pause.
        let _elapsed = pause.recv_timeout(RECHECK_DELAY);
        let again = findings(&World::look(config, backend, asked)?);
        found.retain(|finding| again.contains(finding));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_puts_in_the_place_of_vol_data_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vol_data.json");
        let read = || vol_data(dir.path(), "driverName");
        assert_eq!(read(), None);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read().unwrap().unwrap_err().contains("not a regular file"));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        read().unwrap().unwrap_err();
        std::fs::remove_file(&path).unwrap();
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read().unwrap().unwrap_err().contains("more than"));
        std::fs::write(&path, br#"{"driverName": "csi.hawser.dev"}"#).unwrap();
        assert_eq!(read(), Some(Ok("csi.hawser.dev".to_owned())));
    }
}
