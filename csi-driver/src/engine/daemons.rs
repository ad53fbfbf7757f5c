//! The daemons of staged volumes: start, hand-over, requests, watch and end.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mount::FuseConnections;
use proto::handover::{Assignment, Role, VERSIONS};

use crate::backend::Assigned;
use crate::daemon::control::Control;
use crate::daemon::dial::{DialDir, DialListener, ServingSockets};
use crate::daemon::handover::{self, Expected, NoDaemon, Offer, Served};
use crate::daemon::keeper::{self, Keeper, NextDaemon};
use crate::daemon::launcher::program::Program;
use crate::daemon::launcher::{LaunchSpec, Launcher};
use crate::daemon::notes::Hangs;
use crate::daemon::waits::Waits;
use crate::daemon::warm::{WarmDaemon, WarmDaemons};
use crate::daemon::watch::DaemonWatch;
use crate::error::{Error, Result, Step, chain};
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};
use crate::model::limits;
use crate::model::records::{Serving, StageRecord};
use crate::model::settings::LaunchSettings;

const OWN_REQUESTS_AGAIN: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Daemons {
    pub(crate) run_dir: PathBuf,
    pub(crate) launcher: Arc<dyn Launcher>,
    pub(crate) warm: Arc<WarmDaemons>,
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
    /// `None`: the one that the driver is configured with.
    pub(crate) program: Option<&'a Program>,
}

impl Start<'_> {
    pub(super) fn offer<'b>(
        &'b self,
        launch: &'b str,
        sockets: &'b ServingSockets,
        keeper_socket: Option<&'b OwnedFd>,
    ) -> Offer<'b> {
        let mut descriptors = vec![
            (Role::FuseDevice, self.fuse_device.as_fd()),
            (Role::ControlListener, sockets.control.as_fd()),
            (Role::MetricsListener, sockets.metrics.as_fd()),
        ];
        let of_backend = self.assigned.descriptors.iter();
        descriptors.extend(of_backend.map(|(role, descriptor)| (*role, descriptor.as_fd())));
        if let (Some(table), Some(socket)) = (&self.state_table, keeper_socket) {
            descriptors.extend([(Role::StateTable, table.as_fd()), (Role::Keeper, socket.as_fd())]);
        }
        let backend = Some(self.assigned.backend);
        let assignment = Assignment { backend, ..self.assignment.clone() };
        Offer { volume_id: self.volume_id, launch, assignment, descriptors }
    }
}

impl Daemons {
    /// Hands the volume over to a waiting daemon, or to one that it starts. Before the daemon gets the
    /// volume, it calls `launched` with the launch and, once it is known, the daemon's process.
    /// [`Self::end`] must remove both if the rest fails.
    /// It ends the launch of `previous`, whose daemon has died. `keeper_socket` is that of
    /// [`Self::keeper_socket`].
    pub(crate) fn start(
        &self,
        start: Start<'_>,
        keeper_socket: Option<OwnedFd>,
        previous: Option<&StageRecord>,
        mut launched: impl FnMut(&LaunchKey, LaunchId, Option<ProcessId>) -> Result<()>,
    ) -> Result<Served> {
        let volume_id = start.volume_id;
        if let Some(previous) = previous {
            self.end_unjournaled(volume_id, previous)?;
        }
        let mut is_journaled = false;
        let warm = self.start_warm(&start, keeper_socket.as_ref(), &mut |key, launch, process| {
            is_journaled = true;
            launched(key, launch, process)
        });
        // From here on no record names the launch before, also if the waiting daemon has failed.
        if let Some(previous) = previous.filter(|_| is_journaled)
            && let Err(error) = self.end_previous(volume_id, previous)
        {
            tracing::warn!(%volume_id, error = chain(&error), "the launch of the volume's earlier daemon is left");
        }
        let (served, sockets) = match warm? {
            Some(served) => served,
            None => {
                previous.map_or(Ok(()), |stage| self.end_launch(volume_id, stage, Duration::ZERO))?;
                self.start_cold(&start, keeper_socket.as_ref(), &mut launched)?
            }
        };
        self.hangs.found(volume_id, None);
        if let Some(table) = start.state_table.filter(|_| served.can_be_continued) {
            let has_kept = self.keep(volume_id, start.fuse_device, table, start.assigned.descriptors);
            let assignment = Assignment { backend: Some(start.assigned.backend), ..start.assignment };
            if has_kept {
                self.keep_for_standby(volume_id, start.settings, assignment, sockets);
            }
        }
        Ok(served)
    }

    /// Continues what an earlier driver did for the volume's daemon, of any program.
    pub(crate) fn adopt_launch(&self, volume_id: &VolumeId, stage: &StageRecord) {
        if let Err(error) = self.launcher.adopt(&stage.launch_key(volume_id)) {
            tracing::warn!(%volume_id, error = chain(&error), "the log of the volume's daemon is lost");
        }
    }

    /// A driver that was killed may have handed the volume to a daemon that its journal does not yet
    /// call the serving one.
    fn end_unjournaled(&self, volume_id: &VolumeId, previous: &StageRecord) -> Result<()> {
        let launched = previous.launch.as_ref().and_then(LaunchId::process);
        for process in [launched, previous.handed_to].into_iter().flatten() {
            if process.is_alive().step("look at daemon")? {
                return self.end_process(volume_id, previous, Duration::ZERO);
            }
        }
        Ok(())
    }

    /// For the files that a daemon cannot open again by name. From here on the keeper itself gives the
    /// volume to no daemon.
    pub(super) fn keeper_socket(&self, start: &Start<'_>) -> Result<Option<OwnedFd>> {
        let volume_id = start.volume_id;
        match start.state_table {
            Some(_) if start.assignment.continues => {
                self.keeper.daemon_socket(volume_id, NextDaemon::Continues).step("connect daemon to keeper")
            }
            // The volume is served all the same.
            Some(_) => Ok(self.keeper.daemon_socket(volume_id, NextDaemon::Own).unwrap_or_else(|error| {
                tracing::error!(%volume_id, error = linux::chain(&error), "no keeper for the volume's daemon");
                None
            })),
            None => Ok(None),
        }
    }

    /// `None`: no daemon waits that does for this volume.
    fn start_warm(
        &self,
        start: &Start<'_>,
        keeper_socket: Option<&OwnedFd>,
        launched: &mut impl FnMut(&LaunchKey, LaunchId, Option<ProcessId>) -> Result<()>,
    ) -> Result<Option<(Served, ServingSockets)>> {
        let is_suited = WarmDaemons::suits(start.settings, start.assignment.inode_limit);
        if !is_suited || start.program.is_some() {
            return Ok(None);
        }
        while let Some(WarmDaemon { key, launch, described, dialled }) = self.warm.take() {
            let _span = tracing::info_span!("stage.hand_over").entered();
            if let Err(error) = launched(&key, launch.clone(), Some(dialled.daemon)) {
                self.warm.end(&key, &launch, Some(&dialled));
                return Err(error);
            }
            let dial = self.dial(start.volume_id);
            let sockets = dial.make().and_then(|()| dial.record_launch(&key));
            let sockets =
                sockets.and_then(|()| dial.serving_sockets()).step("listen for daemon's callers")?;
            match handover::assign(dialled, &start.offer(&described, &sockets, keeper_socket)) {
                // It died while it waited.
                Err(Error::DaemonEnded { .. }) => self.warm.end(&key, &launch, None),
                outcome => return outcome.map(|served| Some((served, sockets))),
            }
        }
        Ok(None)
    }

    fn start_cold(
        &self,
        start: &Start<'_>,
        keeper_socket: Option<&OwnedFd>,
        launched: &mut impl FnMut(&LaunchKey, LaunchId, Option<ProcessId>) -> Result<()>,
    ) -> Result<(Served, ServingSockets)> {
        let Start { volume_id, settings, .. } = *start;
        let span = tracing::info_span!("stage.launch").entered();
        let dial = self.dial(volume_id);
        let listener = dial.listen().step("listen for daemon")?;
        let sockets = dial.serving_sockets().step("listen for daemon's callers")?;
        let nonce = linux::random::hexadecimal().step("draw nonce")?;
        let key = LaunchKey::from(volume_id);
        let spec = LaunchSpec {
            key: &key,
            volume_id: Some(volume_id),
            nonce: &nonce,
            settings,
            inode_limit: start.assignment.inode_limit,
            program: start.program,
        };
        let described = self.launcher.describe(spec);
        let launch = self.launcher.ensure(spec).map_err(|source| {
            let (volume_id, launch) = (volume_id.clone(), described.clone());
            Error::Launch { volume_id, launch, source }
        })?;
        let process = launch.process();
        launched(&key, launch.clone(), process)?;
        drop(span);

        let _span = tracing::info_span!("stage.hand_over").entered();
        let expected = Expected { nonce: &nonce, process, time_limit: self.start_timeout };
        let wait = self.waits.begin(volume_id)?;
        let no_daemon = |reason| no_daemon(reason, volume_id, &listener, &described);
        let dialled = handover::wait_for_daemon(&listener, expected, wait.as_fd()).map_err(no_daemon);
        let offer = start.offer(&described, &sockets, keeper_socket);
        let served = dialled.and_then(|dialled| {
            if start.program.is_none() {
                self.warm.note_tried();
            }
            if process.is_none() {
                launched(&key, launch, Some(dialled.daemon))?;
            }
            handover::assign(dialled, &offer)
        });
        served.map(|served| (served, sockets)).map_err(|error| self.with_last_log_line(error))
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
    /// the rest it would only make requests to a dead daemon wait. Returns false if it does not hold it.
    fn keep(
        &self,
        volume_id: &VolumeId,
        fuse_device: OwnedFd,
        state_table: OwnedFd,
        of_backend: Vec<(Role, OwnedFd)>,
    ) -> bool {
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
                return false;
            }
        }
        true
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
                let log = self.launcher.last_log_line(&LaunchKey::from(&volume_id));
                Error::DaemonEnded { volume_id, launch, log }
            }
            other => other,
        }
    }

    pub(crate) fn dial(&self, volume_id: &VolumeId) -> DialDir {
        DialDir::of(&self.run_dir, volume_id)
    }

    pub(crate) fn launch_dir(&self, key: &LaunchKey) -> DialDir {
        DialDir::of(&self.run_dir, key)
    }

    /// Connects to the daemon that serves the volume. `limit` applies to the connect and to each
    /// request.
    pub(crate) fn control(&self, volume_id: &VolumeId, limit: Duration) -> Result<Control> {
        Control::connect(&self.dial(volume_id), volume_id, limit)
    }

    /// Reports the end of the daemon from now on, also if it has ended already.
    pub(crate) fn watch(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        match serving.daemon.open().step("watch daemon")? {
            Some(pidfd) => self.watch.start(volume_id, serving.daemon, pidfd),
            None => self.watch.report(volume_id, serving.daemon),
        }
        Ok(())
    }

    /// As [`Self::watch`], unless the daemon of the volume is watched: an earlier operation may have failed half-way.
    pub(crate) fn watch_if_unwatched(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<()> {
        match stage.serving {
            Some(serving) if !self.watch.is_watched(volume_id) => self.watch(volume_id, serving),
            Some(_) | None => Ok(()),
        }
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
    /// repeated after any failure. The daemon has `grace` to end by itself.
    pub(crate) fn end(&self, volume_id: &VolumeId, stage: &StageRecord, grace: Duration) -> Result<()> {
        self.release_connection(volume_id);
        if let Some(serving) = stage.serving {
            self.end_own_requests(volume_id, serving)?;
        }
        self.end_launch(volume_id, stage, grace)
    }

    /// Removes launch, process and dial directory of a volume, whose mounts stay. May be repeated
    /// after any failure. The daemon has `grace` to end by itself.
    pub(crate) fn end_launch(
        &self,
        volume_id: &VolumeId,
        stage: &StageRecord,
        grace: Duration,
    ) -> Result<()> {
        self.end_process(volume_id, stage, grace)?;
        let key = stage.launch_key(volume_id);
        self.clear_launch(volume_id, &key, &processes_of(stage))?;
        self.dial(volume_id).remove().step("remove dial directory")
    }

    /// Removes what a daemon of the volume's own key has left, while that of `key` serves.
    pub(crate) fn clear_own_launch(&self, volume_id: &VolumeId, key: &LaunchKey) -> Result<()> {
        let own = LaunchKey::from(volume_id);
        if own == *key { Ok(()) } else { self.launcher.clear(&own).step("clear launch") }
    }

    /// Removes the launch of a daemon that has died, while another one serves the volume.
    pub(crate) fn end_previous(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<()> {
        self.end_process(volume_id, stage, Duration::ZERO)?;
        let key = stage.launch_key(volume_id);
        self.launcher.clear(&key).step("clear launch")?;
        if key == LaunchKey::from(volume_id) {
            return Ok(());
        }
        self.launch_dir(&key).remove().step("remove dial directory")
    }

    /// Removes what the launch made. The control group of a daemon that cannot end stays, with the directory by which
    /// the next driver finds it: the volume's own group is used again.
    pub(super) fn clear_launch(
        &self,
        volume_id: &VolumeId,
        key: &LaunchKey,
        daemons: &[ProcessId],
    ) -> Result<()> {
        for daemon in daemons {
            if daemon.cannot_end().step("look at daemon")? {
                tracing::warn!(%volume_id, %key, pid = daemon.pid, "the launch of a killed daemon is left");
                return Ok(());
            }
        }
        self.launcher.clear(key).step("clear launch")?;
        self.launch_dir(key).remove().step("remove dial directory")
    }

    fn end_process(&self, volume_id: &VolumeId, stage: &StageRecord, grace: Duration) -> Result<()> {
        let Some(launch) = &stage.launch else { return Ok(()) };
        self.launcher.remove(launch).step("remove launch")?;
        for process in processes_of(stage) {
            if !process.end(grace).step("end daemon")? {
                return Err(Error::DaemonLives { volume_id: volume_id.clone(), pid: process.pid });
            }
        }
        Ok(())
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

/// The daemons that have or may have a volume's connection.
fn processes_of(stage: &StageRecord) -> Vec<ProcessId> {
    let daemon = stage.serving.map(|serving| serving.daemon);
    let launched = stage.launch.as_ref().and_then(LaunchId::process);
    [daemon, stage.handed_to, launched].into_iter().flatten().collect()
}

fn no_daemon(reason: NoDaemon, volume_id: &VolumeId, listener: &DialListener, launch: &str) -> Error {
    let (volume_id, launch) = (volume_id.clone(), launch.to_owned());
    match reason {
        NoDaemon::TimedOut { limit } => {
            Error::DialTimeout { socket: listener.path().to_owned(), waited: limit, launch }
        }
        NoDaemon::Ended => Error::DaemonEnded { volume_id, launch, log: None },
        NoDaemon::Abandoned => Error::Abandoned { volume_id },
        NoDaemon::OtherVersion { daemon } => Error::DaemonVersion { volume_id, daemon, driver: VERSIONS },
        NoDaemon::Kernel(source) => Error::Kernel { step: "hand over", source },
    }
}
