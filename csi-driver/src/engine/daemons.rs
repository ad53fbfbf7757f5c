//! The daemons of staged volumes: start, hand-over, requests, watch and end.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mount::FuseConnections;
use proto::handover::{Assignment, Role};

use crate::backend::Assigned;
use crate::daemon::control::Control;
use crate::daemon::dial::DialDir;
use crate::daemon::handover::{self, Offer, Served};
use crate::daemon::keeper::{self, Keeper};
use crate::daemon::launcher::{LaunchSpec, Launcher};
use crate::daemon::notes::Hangs;
use crate::daemon::waits::Waits;
use crate::daemon::watch::DaemonWatch;
use crate::error::{Error, Result, Step};
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::LaunchId;
use crate::model::limits;
use crate::model::records::{Serving, StageRecord};
use crate::model::settings::LaunchSettings;

const OWN_REQUESTS_AGAIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Daemons {
    pub(crate) run_dir: PathBuf,
    pub(crate) launcher: Box<dyn Launcher>,
    /// Limit from a daemon's launch until it dials in.
    pub(crate) start_timeout: Duration,
    pub(crate) keeper: Arc<dyn Keeper>,
    pub(crate) watch: DaemonWatch,
    pub(crate) hangs: Arc<Hangs>,
    pub(crate) waits: Waits,
}

/// What a daemon is started with.
pub(crate) struct Start<'a> {
    pub(crate) volume_id: &'a VolumeId,
    pub(crate) settings: &'a LaunchSettings,
    /// Lacks only what the backend adds.
    pub(crate) assignment: Assignment,
    /// The connection of a mount that exists already.
    pub(crate) fuse_device: OwnedFd,
    pub(crate) assigned: Assigned,
    /// What a successor of the daemon needs; `None` if there can be none.
    pub(crate) state_table: Option<OwnedFd>,
}

impl Daemons {
    /// Starts a daemon and hands the volume over. Between the two it calls `launched` with the
    /// launch, which [`Self::end`] must remove if the rest fails.
    pub(crate) fn start(
        &self,
        start: Start<'_>,
        launched: impl FnOnce(LaunchId) -> Result<()>,
    ) -> Result<Served> {
        let Start { volume_id, settings, assignment, fuse_device, assigned, state_table } = start;
        let keeper_socket = match &state_table {
            Some(_) if assignment.continues => {
                self.keeper.daemon_socket(volume_id).step("connect daemon to keeper")?
            }
            // The volume is served all the same.
            Some(_) => self.keeper.daemon_socket(volume_id).unwrap_or_else(|error| {
                tracing::error!(%volume_id, error = linux::chain(&error), "no keeper for the volume's daemon");
                None
            }),
            None => None,
        };
        let assignment = Assignment { backend: Some(assigned.backend), ..assignment };
        let span = tracing::info_span!("stage.launch").entered();
        let sockets = self.dial(volume_id).listen().step("listen for daemon")?;
        let nonce = linux::random::hexadecimal().step("draw nonce")?;
        let spec = LaunchSpec { volume_id, nonce: &nonce, settings, inode_limit: assignment.inode_limit };
        let described = self.launcher.describe(spec);
        let launch = self.launcher.ensure(spec).map_err(|source| {
            let (volume_id, launch) = (volume_id.clone(), described.clone());
            Error::Launch { volume_id, launch, source }
        })?;
        let process = launch.process();
        launched(launch)?;
        drop(span);

        let _span = tracing::info_span!("stage.hand_over").entered();
        let mut descriptors = vec![
            (Role::FuseDevice, fuse_device.as_fd()),
            (Role::ControlListener, sockets.control.as_fd()),
            (Role::MetricsListener, sockets.metrics.as_fd()),
        ];
        descriptors.extend(assigned.descriptors.iter().map(|(role, descriptor)| (*role, descriptor.as_fd())));
        if let (Some(table), Some(socket)) = (&state_table, &keeper_socket) {
            descriptors.extend([(Role::StateTable, table.as_fd()), (Role::Keeper, socket.as_fd())]);
        }
        let offer = Offer { volume_id, nonce: &nonce, launch: &described, process, assignment, descriptors };
        let wait = self.waits.begin(volume_id)?;
        let served = handover::hand_over(&sockets.dial, &offer, self.start_timeout, &wait)
            .map_err(|error| self.with_last_log_line(error))?;
        // From here on only the daemon holds its listeners and the connection.
        drop(sockets);
        self.hangs.found(volume_id, None);
        if let Some(table) = state_table.filter(|_| served.can_be_continued) {
            self.keep(volume_id, fuse_device, table, assigned.descriptors);
        }
        Ok(served)
    }

    /// The memory for what a successor of a daemon needs; `None` if there can be none.
    pub(crate) fn state_table(&self, settings: &LaunchSettings) -> Result<Option<OwnedFd>> {
        if !self.keeper.keeps_connections() {
            return Ok(None);
        }
        let bytes = proto::handover::state_table_bytes(settings.known_inodes());
        let table = linux::shared_memory::create("hawser-state", bytes);
        table.map(Some).step("make state table")
    }

    /// Gives the keeper what a successor of the volume's daemon needs. The connection last: without
    /// the rest it would only make requests to a dead daemon wait.
    fn keep(
        &self,
        volume_id: &VolumeId,
        fuse_device: OwnedFd,
        state_table: OwnedFd,
        of_backend: Vec<(Role, OwnedFd)>,
    ) {
        let of_backend = of_backend.into_iter().filter_map(|(role, descriptor)| match role {
            Role::Directory => Some((keeper::Role::Directory, descriptor)),
            Role::UsageFile => Some((keeper::Role::UsageFile, descriptor)),
            _ => None,
        });
        let first = [(keeper::Role::StateTable, state_table)].into_iter().chain(of_backend);
        let all = first.chain([(keeper::Role::Connection, fuse_device)]);
        for (role, descriptor) in all {
            if let Err(error) = self.keeper.put(volume_id, role, descriptor) {
                tracing::error!(
                    %volume_id,
                    error = linux::chain(&error),
                    "the keeper does not hold the volume's connection: if its daemon ends, its pods get ENOTCONN"
                );
                self.release_connection(volume_id);
                return;
            }
        }
    }

    /// Makes this process hold what a keeper holds since an earlier driver: either may end alone.
    pub(crate) fn copy_connection(&self, volume_id: &VolumeId) {
        use keeper::Role::{Connection, Directory, StateTable, UsageFile};
        if !self.keeper.keeps_connections() {
            return;
        }
        for role in [StateTable, Directory, UsageFile, Connection] {
            match self.keeper.get(volume_id, role) {
                Ok(Some(_copy)) => {}
                Ok(None) => {
                    tracing::warn!(%volume_id, "no keeper holds the volume's connection: if its daemon ends, its pods get ENOTCONN");
                    return;
                }
                Err(error) => {
                    tracing::error!(%volume_id, error = linux::chain(&error), "the keeper does not answer");
                    return;
                }
            }
        }
    }

    /// From here on, no other daemon can continue the volume's connection.
    pub(crate) fn release_connection(&self, volume_id: &VolumeId) {
        if let Err(error) = self.keeper.forget_connection(volume_id) {
            tracing::warn!(%volume_id, error = linux::chain(&error), "the keeper still holds the volume's connection");
        }
    }

    /// Adds the daemon's last log line to the error, if the driver itself keeps the daemon's log.
    fn with_last_log_line(&self, error: Error) -> Error {
        match error {
            Error::DaemonEnded { volume_id, launch, log: None } => {
                let log = self.launcher.last_log_line(&volume_id);
                Error::DaemonEnded { volume_id, launch, log }
            }
            other => other,
        }
    }

    pub(crate) fn dial(&self, volume_id: &VolumeId) -> DialDir {
        DialDir::of(&self.run_dir, volume_id)
    }

    /// Connects to the daemon that serves the volume. `limit` applies to the connect and to each
    /// request.
    pub(crate) fn control(&self, volume_id: &VolumeId, limit: Duration) -> Result<Control> {
        Control::connect(&self.dial(volume_id), volume_id, limit)
    }

    /// Reports the end of a running daemon from now on. If it has ended already, the next call for
    /// its volume notices that.
    pub(crate) fn watch(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        if let Some(pidfd) = serving.daemon.open().step("watch daemon")? {
            self.watch.start(volume_id, serving.daemon, pidfd);
        }
        Ok(())
    }

    /// Whether users' requests wait on the connection while the daemon does not answer the driver
    /// either: the daemon is stopped, not just slow.
    pub(crate) fn is_hung(&self, volume_id: &VolumeId, connection_minor: u32) -> Result<bool> {
        let waiting = FuseConnections::open().and_then(|all| all.waiting(connection_minor));
        let waiting = waiting.step("look at connection")?.unwrap_or_default();
        if waiting <= self.hangs.own_requests(volume_id) {
            return Ok(false);
        }
        let answer = self.control(volume_id, limits::UNMOUNT).and_then(|control| control.ping());
        Ok(matches!(answer, Err(Error::Silent { .. })))
    }

    /// Removes launch, process and dial directory of a volume that is mounted nowhere. May be
    /// repeated after any failure. A daemon that `is_served` gets its grace period.
    pub(crate) fn end(&self, volume_id: &VolumeId, stage: &StageRecord, is_served: bool) -> Result<()> {
        self.release_connection(volume_id);
        if let Some(serving) = stage.serving {
            self.end_own_requests(volume_id, serving)?;
        }
        self.end_launch(volume_id, stage, is_served)
    }

    /// Removes launch, process and dial directory of a volume, whose mounts stay. May be repeated
    /// after any failure.
    pub(crate) fn end_launch(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        is_served: bool,
    ) -> Result<()> {
        if let Some(launch) = &stage.launch {
            self.launcher.remove(launch).step("remove launch")?;
            // A daemon that never had the connection has nothing to finish.
            let grace = if is_served { stage.settings.grace_seconds } else { 0 };
            let grace = Duration::from_secs(grace.into());
            let daemon = stage.serving.map(|serving| serving.daemon);
            for process in [daemon, launch.process()].into_iter().flatten() {
                if !process.end(grace).step("end daemon")? {
                    return Err(Error::DaemonLives { volume_id: volume_id.clone(), pid: process.pid });
                }
            }
        }
        self.launcher.clear(volume_id).step("clear launch")?;
        self.dial(volume_id).remove().step("remove dial directory")
    }

    /// The driver's own waiting requests hold mounts of their own, and the daemon sees its end only
    /// when the last of them goes. Writes through mappings are flushed at that point.
    fn end_own_requests(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        let deadline = Instant::now() + limits::UNMOUNT;
        while self.hangs.own_requests(volume_id) > 0 {
            if Instant::now() >= deadline || !serving.daemon.is_alive().step("look at daemon")? {
                // A waiting request keeps the connection's number from being reused.
                let waits = || Ok(self.hangs.own_requests(volume_id) > 0);
                return mounts::abort_connection(serving.connection_minor, waits);
            }
            std::thread::park_timeout(OWN_REQUESTS_AGAIN);
        }
        Ok(())
    }
}
