//! The CSI driver of Hawser: volumes from a pool on this node, each served to
//! all its pods by one FUSE daemon.
//!
//! The layers, from the callers down to the kernel; each uses only those below it
//! (`xtask/tests/modules.rs` tests that):
//!
//! - `wire`: the gRPC services of CSI and of plugin registration. It checks requests and
//!   chooses status codes. Beside it `operations`: the command line, metrics, views and
//!   `doctor`.
//! - `engine`: what a call does, step by step, and how a step is undone.
//! - `journal`: what survives the driver. `backend`: where the data of volumes are.
//!   `daemon`: the processes that serve volumes.
//! - `kernel`: mounts, paths and sockets, and system calls that may not return.
//! - `model`: records, parameters, ids and limits. It does no I/O.

mod backend;
pub mod config;
mod daemon;
pub mod engine;
pub mod error;
mod journal;
mod kernel;
mod model;
pub mod operations;
mod wire;

/// Entry points of the fuzz targets in `fuzz/`.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    pub use crate::daemon::control::fuzzing::control_reply;
    pub use crate::daemon::handover::fuzzing::hello_and_answer;
    pub use crate::journal::fuzzing::journal_entry;
    pub use crate::wire::server::fuzzing::{frames, header_blocks};
}

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::lock::FileLock;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

use config::{Config, ConfigError};
use engine::driver::{Driver, Notices};
use kernel::socket::{Socket, SocketError};
use model::calls::Calls;

const PRIVATE_DIR_MODE: u32 = 0o750;

/// Why the driver does not start, or why it ended.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("not root: mounting and serving volumes needs it")]
    NotRoot,
    #[error("{} is locked: another hawser-csi runs with this --state-dir", path.display())]
    Locked { path: PathBuf },
    #[error(transparent)]
    Config(ConfigError),
    #[error(transparent)]
    OtherNode(engine::node_of_state::OtherNode),
    #[error("start")]
    Driver(#[source] error::Error),
    #[error("socket")]
    Socket(#[source] SocketError),
    #[error("{op}")]
    Kernel {
        op: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error("{op}")]
    Runtime {
        op: &'static str,
        #[source]
        source: std::io::Error,
    },
}

/// Runs the driver until SIGTERM or SIGINT. Volumes and daemons continue.
pub async fn run(config: Config) -> Result<(), StartError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(StartError::NotRoot);
    }
    daemon::launcher::needs::check(&config.launcher, &config.keeper).map_err(StartError::Config)?;
    let backend = engine::driver::backend(&config).map_err(StartError::Driver)?;
    engine::driver::check_mode(config.mode, backend.topology()).map_err(StartError::Config)?;
    make_directories(&config)?;
    let lock_path = config.state_dir.join("lock");
    let _lock = lock(&lock_path).await?;

    // First: if another driver answers, nothing may be changed.
    let sockets = Sockets::bind(&config).await.map_err(StartError::Socket)?;
    let (driver, notices) = Driver::open(config, backend).map_err(StartError::Driver)?;
    let driver = Arc::new(driver);
    ensure_node(&driver)?;
    reconcile(&driver).await?;

    let (stop, stopped) = channel::channel(false);
    let signals =
        await_signals(stop).map_err(|source| StartError::Runtime { op: "await signals", source })?;
    let background = background(&driver, notices);
    let served = serve(&driver, sockets, stopped).await;
    drop(background);
    signals.abort();
    let ending = tokio::task::spawn_blocking(move || {
        driver.daemons.warm.close();
        driver.stages.end_all_parked();
    });
    // A panic there is in the log, and the next start ends the rest.
    let _ended_or_not = ending.await;
    served.map_err(StartError::Socket)
}

fn make_directories(config: &Config) -> Result<(), StartError> {
    // Sockets, journal and logs are for root only; code that needs another mode sets it.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let [volumes, snapshots] = journal::dirs(&config.state_dir);
    let keeper_dir = config::keeper_dir(&config.run_dir);
    for dir in [&config.state_dir, &volumes, &snapshots, &config.run_dir, &keeper_dir] {
        kernel::private_dir::private_dir_all(dir)
            .map_err(|source| StartError::Kernel { op: "create directory", source })?;
    }
    Ok(())
}

struct Sockets {
    csi: Socket,
    metrics: Socket,
    admin: Socket,
}

impl Sockets {
    async fn bind(config: &Config) -> Result<Self, SocketError> {
        Ok(Self {
            csi: Socket::bind(&config.csi_socket(), PRIVATE_DIR_MODE).await?,
            metrics: Socket::bind(&config.metrics_socket(), PRIVATE_DIR_MODE).await?,
            admin: Socket::bind(&config::admin_socket(&config.run_dir), PRIVATE_DIR_MODE).await?,
        })
    }
}

/// Tasks without an end of their own: dropping the set ends them.
fn background(driver: &Arc<Driver>, notices: Notices) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(driver.hang_watch.clone().run());
    tasks.spawn(driver.daemons.warm.clone().run());
    tasks.spawn(engine::takeover::serve(driver.stages.clone(), notices.ended_daemons));
    tasks.spawn(engine::renewal::serve(driver.stages.clone(), notices.renewed_keepers));
    let (keeper, waiting) = (driver.daemons.keeper.clone(), driver.daemons.warm.clone());
    tasks.spawn(engine::keeper_pod::settle(driver.config.clone(), keeper, waiting));
    tasks
}

/// Serves until `stopped` or an error of a socket.
async fn serve(
    driver: &Arc<Driver>,
    sockets: Sockets,
    stopped: channel::Receiver<bool>,
) -> Result<(), SocketError> {
    tracing::info!(socket = %driver.config.csi_socket().display(), driver = driver.config.driver_name, "serving");
    let calls: Arc<Calls> = Arc::default();
    let csi = wire::server::serve_csi(driver.clone(), calls.clone(), sockets.csi, stopped.clone());
    let metrics = operations::metrics::serve(driver.clone(), calls.clone(), sockets.metrics, stopped.clone());
    let admin = operations::admin::serve(driver.clone(), sockets.admin, stopped.clone());
    let registration = wire::registration::serve(driver.clone(), calls, stopped.clone());
    let forgetting = engine::forgetting::serve(driver.mount_point_lists.clone(), stopped.clone());
    let kernel_use =
        engine::kernel_use::serve(driver.journal.clone(), driver.backend.clone(), stopped.clone());
    let waits = async {
        let mut stopped = stopped;
        // An error means that the sender is gone, which also means stop.
        let _sender_gone = stopped.wait_for(|stop| *stop).await;
        driver.daemons.waits.close();
    };
    let others = async { tokio::join!(metrics, admin, forgetting, kernel_use, waits) };
    tokio::try_join!(csi, registration, async { Ok(others.await) }).map(|_| ())
}

/// If a driver is killed while it starts a daemon, the forked child keeps its lock and sockets
/// until it executes the daemon's program.
pub(crate) const PREDECESSOR_EXIT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(20);

async fn lock(path: &Path) -> Result<FileLock, StartError> {
    let deadline = Instant::now() + PREDECESSOR_EXIT;
    loop {
        let attempt = FileLock::try_exclusive_after_kill(path, 0o600);
        match attempt.map_err(|source| StartError::Kernel { op: "lock state directory", source })? {
            Some(lock) => return Ok(lock),
            None if Instant::now() < deadline => tokio::time::sleep(RETRY).await,
            None => return Err(StartError::Locked { path: path.to_owned() }),
        }
    }
}

fn ensure_node(driver: &Driver) -> Result<(), StartError> {
    let (state_dir, node_id) = (&driver.config.state_dir, &driver.config.node_id);
    let own = driver.config.own_segment();
    let other = engine::node_of_state::find_other(state_dir, &own, &driver.journal);
    if let Some(other) = other.map_err(StartError::Driver)? {
        return Err(StartError::OtherNode(other));
    }
    // Its volumes are bound to an id that it has had before.
    if engine::node_of_state::is_recorded(state_dir, node_id).map_err(StartError::Driver)? {
        return Ok(());
    }
    config::check_named("--node-id", node_id).map_err(StartError::Config)?;
    engine::node_of_state::record(state_dir, node_id).map_err(StartError::Driver)
}

async fn reconcile(driver: &Arc<Driver>) -> Result<(), StartError> {
    let driver = driver.clone();
    let work = tokio::task::spawn_blocking(move || {
        driver.backend.set_starting(true);
        let reconciled = driver.reconciler.reconcile(model::limits::START);
        driver.backend.set_starting(false);
        reconciled
    });
    let result = work.await.unwrap_or(Err(error::Error::Panicked { operation: "reconcile" }));
    result.map_err(StartError::Driver)
}

/// Turns `stop` true at SIGTERM or SIGINT.
fn await_signals(stop: channel::Sender<bool>) -> std::io::Result<tokio::task::JoinHandle<()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping; volumes and their daemons stay");
        // Fails if the servers have ended already.
        let _all_ended = stop.send(true);
    }))
}
