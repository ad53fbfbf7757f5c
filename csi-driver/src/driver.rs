//! What all services share, and how every operation runs.

use std::sync::Arc;
use std::time::Duration;

use tonic::Status;
use tracing::Instrument;

use crate::config::{Config, LauncherKind};
use crate::error::{Error, Result, chain};
use crate::journal::Journal;
use crate::keeper::{FdKeeper, LetGo};
use crate::launcher::Launcher;
use crate::launcher::manifest::ManifestLauncher;
use crate::launcher::process::ProcessLauncher;
use crate::pool::Pool;
use crate::status::status;
use crate::volume_lock::VolumeLocks;
use crate::waits::Waits;
use crate::watch::DaemonWatch;

/// kubelet gives up after 120 s; an answer before that says more than its silence.
const OPERATION_LIMIT: Duration = Duration::from_secs(110);
/// statvfs of a volume whose daemon is stuck does not return.
const STATISTICS_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: Config,
    pub(crate) journal: Journal,
    pub(crate) pool: Pool,
    pub(crate) launcher: Box<dyn Launcher>,
    pub(crate) keeper: Box<dyn FdKeeper>,
    pub(crate) watch: DaemonWatch,
    pub(crate) waits: Waits,
    locks: VolumeLocks,
}

impl Driver {
    /// Opens pool and journal. Nothing is repaired yet: that is [`Self::reconcile`].
    pub(crate) fn open(config: Config) -> Result<Self> {
        let journal = Journal::open(&config.journal_dir())?;
        let pool = Pool::open(&config.pool, config.pool_capacity_bytes)?;
        let launcher: Box<dyn Launcher> = match config.launcher.clone() {
            LauncherKind::Process { volume_binary } => Box::new(ProcessLauncher {
                volume_binary,
                run_dir: config.run_dir.clone(),
                patience: config.start_timeout,
            }),
            LauncherKind::Manifest { manifests, mount_image } => Box::new(ManifestLauncher {
                manifests,
                mount_image,
                run_dir: config.run_dir.clone(),
                patience: config.start_timeout,
            }),
        };
        Ok(Self {
            config,
            journal,
            pool,
            launcher,
            keeper: Box::new(LetGo),
            watch: DaemonWatch::default(),
            waits: Waits::default(),
            locks: VolumeLocks::default(),
        })
    }
}

/// One RPC: `operation` runs on a thread where it may block, with `lock` held,
/// and to its end even when the caller goes away or the limit passes. `name` is
/// the span's: `csi.NodeStageVolume`.
pub(crate) async fn run<T: Send + 'static>(
    driver: &Arc<Driver>,
    name: &'static str,
    lock: Lock<'_>,
    operation: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
) -> std::result::Result<T, Status> {
    let span = tracing::info_span!("csi", span = name, volume_id = lock.volume_id());
    let result = locked(driver, name, lock, operation).instrument(span.clone()).await;
    result.map_err(|error| span.in_scope(|| refused(name, &error)))
}

/// What an operation excludes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lock<'a> {
    /// Everything that changes this volume.
    Volume(&'a str),
    /// Other looks at this volume's use: one that is stuck is not followed by more.
    Statistics(&'a str),
}

impl Lock<'_> {
    fn volume_id(&self) -> &str {
        match self {
            Self::Volume(id) | Self::Statistics(id) => id,
        }
    }

    fn key(&self) -> String {
        match self {
            Self::Volume(id) => format!("volume {id}"),
            Self::Statistics(id) => format!("statistics {id}"),
        }
    }

    fn limit(&self) -> Duration {
        match self {
            Self::Volume(_) => OPERATION_LIMIT,
            Self::Statistics(_) => STATISTICS_LIMIT,
        }
    }
}

/// The reply to a refused request; logged here and nowhere else.
pub(crate) fn refused(name: &'static str, error: &Error) -> Status {
    let status = status(error);
    tracing::warn!(rpc = name, code = ?status.code(), error = chain(error), "refused");
    status
}

async fn locked<T: Send + 'static>(
    driver: &Arc<Driver>,
    name: &'static str,
    lock: Lock<'_>,
    operation: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
) -> Result<T> {
    let guard = driver
        .locks
        .try_lock(&lock.key())
        .ok_or_else(|| Error::Pending { volume_id: lock.volume_id().to_owned() })?;
    let (driver, span, limit) = (driver.clone(), tracing::Span::current(), lock.limit());
    let work = tokio::task::spawn_blocking(move || {
        let _guard = guard;
        span.in_scope(|| operation(&driver))
    });
    match tokio::time::timeout(limit, work).await {
        Ok(Ok(result)) => result,
        Ok(Err(_panic)) => Err(Error::Panicked { operation: name }),
        Err(_elapsed) => Err(Error::Deadline { what: name.to_owned(), limit }),
    }
}
