//! The daemon that is to follow one that serves.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use proto::handover::{Assignment, Role, VERSIONS};

use super::cannot;
use crate::daemon::dial::ServingSockets;
use crate::daemon::handover::{self, NoDaemon, Offer, Prepared, Served};
use crate::daemon::launcher::program::Program;
use crate::daemon::warm::{NotStarted, WarmDaemon, WarmDaemons};
use crate::engine::daemons::{Daemons, Start};
use crate::error::{Error, Result, Step, chain};
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};

/// A daemon that waits for the end of the one that serves.
pub(super) struct Next {
    pub(super) key: LaunchKey,
    pub(super) id: LaunchId,
    prepared: Prepared,
    sockets: ServingSockets,
}

/// What there is to end.
pub(super) struct NextLaunch {
    key: LaunchKey,
    id: LaunchId,
    daemon: ProcessId,
}

impl Next {
    pub(super) fn launch(&self) -> NextLaunch {
        NextLaunch { key: self.key.clone(), id: self.id.clone(), daemon: self.daemon() }
    }

    pub(super) fn daemon(&self) -> ProcessId {
        self.prepared.daemon
    }

    /// An error if it has ended.
    pub(super) fn check_waits(&self, volume_id: &VolumeId) -> Result<()> {
        let has_ended = linux::process::wait_for_end(&self.prepared.pidfd, Duration::ZERO);
        match has_ended.step("look at daemon")? {
            false => Ok(()),
            true => Err(cannot(volume_id, "the new daemon ended before it could follow")),
        }
    }
}

impl Start<'_> {
    /// With the backend's part.
    pub(super) fn whole_assignment(&self) -> Assignment {
        Assignment { backend: Some(self.assigned.backend), ..self.assignment.clone() }
    }

    /// Without a socket to the keeper, which comes later.
    fn offer_to_next<'b>(&'b self, launch: &'b str, sockets: &'b ServingSockets) -> Offer<'b> {
        let mut offer = self.offer(launch, sockets, None);
        offer.descriptors.extend(self.state_table.iter().map(|table| (Role::StateTable, table.as_fd())));
        offer
    }
}

impl Daemons {
    /// A daemon of the configured program that has dialled in and has no volume yet: one that waits, if
    /// it suits, or another one.
    pub(super) fn ahead(&self, start: &Start<'_>, configured: &Program) -> Result<WarmDaemon> {
        let inode_limit = start.assignment.inode_limit;
        if WarmDaemons::suits(start.settings, inode_limit) {
            while let Some(waiting) = self.warm.take() {
                if self.executes(&waiting, configured) {
                    return Ok(waiting);
                }
                self.warm.end(&waiting.key, &waiting.launch, Some(&waiting.dialled));
            }
        }
        let wait = self.waits.begin(start.volume_id)?;
        let started = self.warm.start_ahead(Some(start.volume_id), start.settings, inode_limit, wait.as_fd());
        started.map_err(|not| not_started(start.volume_id, not))
    }

    /// The configured program may have been replaced since the daemon was started.
    fn executes(&self, waiting: &WarmDaemon, configured: &Program) -> bool {
        let program = self.launcher.program_of(&waiting.launch, waiting.dialled.daemon);
        matches!(program, Ok(Some(program)) if program.is_same(configured))
    }

    /// Gives the daemon all but the socket to the keeper, and waits until it is ready to follow. On an
    /// error, it has ended.
    pub(super) fn prepare(&self, ahead: WarmDaemon, start: &Start<'_>) -> Result<Next> {
        let WarmDaemon { key, launch: id, described, dialled } = ahead;
        let unwanted = NextLaunch { key: key.clone(), id: id.clone(), daemon: dialled.daemon };
        let prepared = || {
            let sockets =
                self.dial(start.volume_id).next_serving_sockets().step("listen for daemon's callers")?;
            let prepared = handover::prepare(dialled, start.offer_to_next(&described, &sockets))?;
            Ok(Next { key, id, prepared, sockets })
        };
        prepared().inspect_err(|_| self.end_unwanted(start.volume_id, &unwanted))
    }

    /// The earlier daemon has ended: returns once the next one serves.
    pub(super) fn proceed(
        &self,
        volume_id: &VolumeId,
        next: Next,
        keeper_socket: OwnedFd,
    ) -> Result<(Served, ServingSockets)> {
        let Next { key, prepared, sockets, .. } = next;
        let dial = self.dial(volume_id);
        dial.record_launch(&key)
            .and_then(|()| dial.use_next_sockets())
            .step("listen for daemon's callers")?;
        prepared.proceed(keeper_socket.as_fd()).map(|served| (served, sockets))
    }

    /// Ends a daemon that was to follow, and removes what its launch made.
    pub(super) fn end_next(&self, volume_id: &VolumeId, next: &NextLaunch) -> Result<()> {
        self.launcher.remove(&next.id).step("remove launch")?;
        let processes: Vec<_> = [Some(next.daemon), next.id.process()].into_iter().flatten().collect();
        for process in &processes {
            if !process.end(Duration::ZERO).step("end daemon")? {
                return Err(Error::DaemonLives { volume_id: volume_id.clone(), pid: process.pid });
            }
        }
        self.clear_launch(volume_id, &next.key, &processes)
    }

    /// As [`Self::end_next`], of a daemon that has not served. The next start removes what is left.
    pub(super) fn end_unwanted(&self, volume_id: &VolumeId, next: &NextLaunch) {
        if let Err(error) = self.end_next(volume_id, next) {
            tracing::warn!(%volume_id, key = %next.key, error = chain(&error), "a daemon that was to follow left something behind");
        }
    }
}

fn not_started(volume_id: &VolumeId, not: NotStarted) -> Error {
    let NotStarted { reason, launch, log } = not;
    let (volume_id, launch) = (volume_id.clone(), launch.unwrap_or_default());
    match reason {
        NoDaemon::TimedOut { limit } => Error::Deadline { what: format!("the start of {launch}"), limit },
        NoDaemon::Ended => Error::DaemonEnded { volume_id, launch, log },
        NoDaemon::Abandoned => Error::Abandoned { volume_id },
        NoDaemon::OtherVersion { daemon } => Error::DaemonVersion { volume_id, daemon, driver: VERSIONS },
        NoDaemon::Kernel(source) => Error::Kernel { step: "start daemon", source },
    }
}
