//! What all services share, and how every operation runs.

use std::convert::Infallible;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use nix::sys::stat::FileStat;
use nix::sys::statvfs::Statvfs;
use tokio::runtime::Handle;

use crate::backend::pool::Pool;
use crate::config::{Config, LauncherKind};
use crate::daemon::keeper::{FdKeeper, LetGo};
use crate::daemon::launcher::Launcher;
use crate::daemon::launcher::daemon_log::DaemonLogs;
use crate::daemon::launcher::group::GroupParent;
use crate::daemon::launcher::manifest::ManifestLauncher;
use crate::daemon::launcher::process::ProcessLauncher;
use crate::daemon::notes::Hangs;
use crate::daemon::waits::Waits;
use crate::daemon::watch::DaemonWatch;
use crate::engine::admission::Admission;
use crate::engine::jobs::Jobs;
use crate::engine::parking::Parking;
use crate::engine::ready::Unready;
use crate::engine::volume_lock::{VolumeGuard, VolumeLocks};
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::bounded::{OneEach, Shared};
use crate::kernel::host_path::HostPaths;
use crate::model::capacity::{InodeRoom, Room};
use crate::model::counts::Counts;
use crate::model::ids::VolumeId;

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: Config,
    pub(crate) journal: Journal,
    pub(crate) pool: Pool,
    pub(crate) paths: HostPaths,
    pub(crate) launcher: Box<dyn Launcher>,
    pub(crate) keeper: Box<dyn FdKeeper>,
    pub(crate) watch: DaemonWatch,
    pub(crate) parking: Parking,
    pub(crate) hangs: Arc<Hangs>,
    pub(crate) waits: Waits,
    /// Looks at volumes' use, which a daemon that is stuck does not answer.
    pub(crate) measures: Shared<VolumeId, nix::Result<Statvfs>>,
    /// Whether all that the next calls need is there.
    pub(crate) probes: Shared<(), std::result::Result<(), Unready>>,
    pub(crate) counts: Arc<Counts>,
    /// Copies that go on when their calls are over.
    pub(crate) jobs: Jobs,
    /// syncfs of volumes, which a daemon that is stuck does not answer.
    pub(crate) flushes: OneEach<VolumeId>,
    /// Looks at volumes' directories in the pool, which may not answer.
    pub(crate) data_looks: Shared<VolumeId, nix::Result<FileStat>>,
    /// Held from the count of a node's attachments until one more is journaled.
    pub(crate) attaching: Mutex<()>,
    locks: VolumeLocks,
    pub(crate) admission: Admission,
}

impl Driver {
    /// Opens pool and journal. Nothing is repaired yet: that is [`Self::reconcile`].
    pub(crate) fn open(config: Config) -> Result<Self> {
        let journal = Journal::open(&config.state_dir)?;
        let pool = Pool::open(&config.pool, config.pool_capacity_bytes, &config.state_dir)?;
        let paths = HostPaths::new(&config)?;
        let launcher = launcher(&config);
        let counts: Arc<Counts> = Arc::default();
        Ok(Self {
            config,
            journal,
            pool,
            paths,
            launcher,
            keeper: Box::new(LetGo),
            watch: DaemonWatch::new(counts.clone()),
            parking: Parking::default(),
            hangs: Arc::default(),
            waits: Waits::default(),
            measures: Shared::default(),
            probes: Shared::default(),
            jobs: Jobs::new(counts.copied_bytes()),
            counts,
            flushes: OneEach::default(),
            data_looks: Shared::default(),
            attaching: Mutex::default(),
            locks: VolumeLocks::default(),
            admission: Admission::default(),
        })
    }

    /// Held until dropped; ABORTED while another operation holds it. For an
    /// operation that needs a second object besides its own.
    pub(crate) fn hold(&self, lock: Lock<'_>) -> Result<VolumeGuard> {
        let key = lock.what();
        self.locks.try_lock(&key).ok_or_else(|| match self.jobs.copying(lock.id()) {
            Some(job) => job.under_way(key),
            None => Error::Pending { what: key },
        })
    }

    /// Does `work` on each volume, side by side: on a thread of its own, with the volume's lock.
    /// True once all of it has ended. False at `deadline`: the rest goes on, and calls for
    /// its volumes are ABORTED until it has ended. Needs the runtime's context.
    pub(crate) fn work_on_each(
        self: &Arc<Self>,
        volume_ids: impl IntoIterator<Item = VolumeId>,
        deadline: Instant,
        work: fn(&Self, &VolumeId) -> Result<()>,
    ) -> bool {
        // Nothing is sent: it closes when the last thread ends.
        let (running, all_ended) = mpsc::channel::<Infallible>();
        for volume_id in volume_ids {
            if let Err(error) = self.work_beside(&volume_id, running.clone(), work) {
                tracing::warn!(%volume_id, error = chain(&error), "could not be put in order");
            }
        }
        drop(running);
        let left = deadline.saturating_duration_since(Instant::now());
        all_ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }

    /// Starts `work`, and keeps `running` until it has ended.
    fn work_beside(
        self: &Arc<Self>,
        volume_id: &VolumeId,
        running: impl Send + 'static,
        work: fn(&Self, &VolumeId) -> Result<()>,
    ) -> Result<()> {
        let guard = self.hold(Lock::Volume(volume_id.as_str()))?;
        let (driver, runtime, id) = (self.clone(), Handle::current(), volume_id.clone());
        let started = std::thread::Builder::new().name("volume".to_owned()).spawn(move || {
            let _context = runtime.enter();
            if let Err(error) = work(&driver, &id) {
                tracing::warn!(volume_id = %id, error = chain(&error), "could not be put in order");
            }
            // First: at the end of the wait the volume is free.
            drop(guard);
            drop(running);
        });
        started
            .map(drop)
            .map_err(|e| linux::Error::new("start thread for", volume_id, e))
            .step("start thread")
    }

    /// What the pool has, and what of it may be claimed.
    pub(crate) fn room(&self) -> Result<Room> {
        let pool_bytes = self.pool.capacity_bytes()?;
        let overcommit = self.config.overcommit;
        let inodes = self.pool.inodes()?.map(|inodes| InodeRoom {
            promised: overcommit.of(inodes.claimable_by(pool_bytes)),
            bytes_each: inodes.bytes_each(),
        });
        Ok(Room { pool_bytes, promised_bytes: overcommit.of(pool_bytes), inodes })
    }
}

/// The one that the configuration names.
pub(crate) fn launcher(config: &Config) -> Box<dyn Launcher> {
    let (run_dir, patience) = (config.run_dir.clone(), config.start_timeout);
    match config.launcher.clone() {
        LauncherKind::Process { volume_binary, cgroup_root } => {
            let groups = cgroup_root.as_deref().map(GroupParent::new);
            let logs = DaemonLogs::new(&run_dir);
            Box::new(ProcessLauncher { volume_binary, run_dir, logs, groups, patience })
        }
        LauncherKind::Manifest { manifests, mount_image } => {
            Box::new(ManifestLauncher { manifests, mount_image, run_dir, patience })
        }
    }
}

/// What an operation excludes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lock<'a> {
    /// Everything that changes this volume.
    Volume(&'a str),
    /// Everything that changes this snapshot.
    Snapshot(&'a str),
    /// Nothing: this volume is only looked at.
    Nothing(&'a str),
}

impl Lock<'_> {
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Volume(id) | Self::Snapshot(id) | Self::Nothing(id) => id,
        }
    }

    fn what(&self) -> String {
        match self {
            Self::Volume(id) | Self::Nothing(id) => format!("volume {id}"),
            Self::Snapshot(id) => format!("snapshot {id}"),
        }
    }
}
