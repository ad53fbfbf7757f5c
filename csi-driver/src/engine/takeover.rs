//! Takeover: another daemon continues the connection of one that has died, while applications wait
//! for their requests.
//!
//! The volume's mounts, its connection and its directory stay the same. The keeper holds what the
//! successor needs; the journal records the successor's launch before it starts. So a driver that is
//! killed in between takes the connection over at its next start.
//!
//! A volume whose daemons die again and again is given up: its users get ENOTCONN, which is better
//! than to wait without an end.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mount::FuseConnections;
use proto::handover::{Assignment, Role};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;

use crate::backend::Assigned;
use crate::daemon::keeper::Role as Kept;
use crate::daemon::launcher::program::Program;
use crate::daemon::watch::Ended;
use crate::engine::daemons::Start;
use crate::engine::deaths::MOST_DEATHS;
use crate::engine::locks::Lock;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::ProcessId;
use crate::model::records::{Serving, StageRecord, Timestamp, VolumeRecord};

/// Pauses before the third, fourth, … daemon in such a row.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
];
/// After an error that is not a daemon's.
const ERROR_RETRY: Duration = Duration::from_secs(1);
/// After a start that failed: a NodeUnpublishVolume that waits gets the volume's lock.
const START_RETRY: Duration = Duration::from_millis(100);
/// Retry interval while another operation holds the volume's lock.
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// What came of one attempt to continue a volume's connection.
#[derive(Debug)]
pub(crate) enum Takeover {
    /// There is nothing to continue, or the volume was given up.
    Nothing,
    Done,
    /// The daemon that was started does not serve. [`serve`] starts another one.
    Failed(Error),
}

/// What [`after`] does next.
#[derive(Debug)]
enum Next {
    /// Too many daemons have died at once, one after the other: another one is started after this pause.
    Pause(Duration),
    Attempted(Takeover),
}

impl Stages {
    /// Starts another daemon for a volume whose daemon has died, if the keeper holds its connection.
    /// False if there is nothing to continue, or if the volume was given up; then the stage is as it
    /// was, but for `aborted`. After an error, [`serve`] tries again. The volume's lock is held. Must be
    /// called in a tokio context.
    pub(crate) fn take_over(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<bool> {
        match self.attempt_takeover(volume_id, record)? {
            Takeover::Nothing => Ok(false),
            Takeover::Done => Ok(true),
            Takeover::Failed(error) => Err(error),
        }
    }

    /// [`Self::take_over`] for a caller that continues without a daemon after other errors.
    pub(crate) fn attempt_takeover(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
    ) -> Result<Takeover> {
        // The journal may fail to take the next one.
        let died = record.stage.as_ref().and_then(|stage| stage.serving);
        let taken = self.try_take_over(volume_id, record);
        if let (Err(_) | Ok(Takeover::Failed(_)), Some(died)) = (&taken, died) {
            self.daemons.watch.report(volume_id, died.daemon);
        }
        taken
    }

    /// The stage whose daemon has died, if another one may follow.
    pub(crate) fn orphaned(&self, record: &VolumeRecord) -> Result<Option<(StageRecord, Serving)>> {
        if !self.daemons.keeper.keeps_connections() {
            return Ok(None);
        }
        let Some(stage) = record.stage.clone().filter(|stage| !stage.aborted) else { return Ok(None) };
        let Some(serving) = stage.serving else { return Ok(None) };
        let is_alive = serving.daemon.is_alive().step("look at daemon")?;
        Ok((!is_alive).then_some((stage, serving)))
    }

    /// Starts one daemon: other calls get the volume's lock before the next one is started.
    fn try_take_over(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<Takeover> {
        let Some((stage, serving)) = self.orphaned(record)? else { return Ok(Takeover::Nothing) };
        self.daemons.watch.stop(volume_id);
        let begun = Instant::now();
        let Some(start) = self.successor(volume_id, record, &stage, serving)? else {
            return Ok(Takeover::Nothing);
        };
        // First: that the keeper does not answer is no death of a daemon.
        let keeper_socket = self.daemons.keeper_socket(&start)?;
        let program = self.deaths.next_program(volume_id, serving.daemon, || {
            self.earlier_program(volume_id, record, serving.daemon)
        })?;
        let death = self.deaths.count(volume_id, serving.daemon);
        if death.in_a_row > MOST_DEATHS {
            self.give_up(volume_id, record, serving)?;
            return Ok(Takeover::Nothing);
        }
        self.deaths.starts(volume_id);
        let start = Start { program: program.as_deref(), ..start };
        if let Some(program) = &program {
            tracing::warn!(%volume_id, %program, "the configured program did not serve: starting a daemon of the one before");
        }
        let mut is_journaled = true;
        match self.start_successor(volume_id, record, serving, start, keeper_socket, &mut is_journaled) {
            Ok(()) => {
                self.deaths.served(volume_id);
                self.counts.takeovers.inc();
                let pause_ms = begun.min(death.at).elapsed().as_millis();
                tracing::warn!(%volume_id, died = serving.daemon.pid, pause_ms, "another daemon has taken the volume over");
                Ok(Takeover::Done)
            }
            // The driver stops, or the volume is being unstaged.
            Err(abandoned @ Error::Abandoned { .. }) => Err(abandoned),
            // No daemon got the volume.
            Err(error) if !is_journaled || matches!(error, Error::Launch { .. }) => {
                self.deaths.take_back(volume_id);
                Err(error)
            }
            Err(error) => Ok(Takeover::Failed(error)),
        }
    }

    /// What a daemon that has ended has executed, if it is not what the driver is configured with now. `None` too
    /// if it is not known or cannot be started again. An image is journaled: the successor's pod takes the place
    /// of the one that names it.
    fn earlier_program(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        dead: ProcessId,
    ) -> Result<Option<Program>> {
        let Some(stage) = &record.stage else { return Ok(None) };
        let launcher = &self.daemons.launcher;
        let find = || -> linux::Result<Option<Program>> {
            let earlier = match (&stage.earlier_image, &stage.launch) {
                (Some(image), _) => Some(Program::Image(image.clone())),
                (None, Some(launch)) => launcher.program_of(launch, dead)?,
                (None, None) => None,
            };
            let configured = launcher.configured_program()?;
            Ok(earlier.filter(|earlier| !earlier.is_same(&configured)))
        };
        let earlier = find().unwrap_or_else(|error| {
            tracing::debug!(%volume_id, error = linux::chain(&error), "the program of the volume's earlier daemon is not known");
            None
        });
        if let Some(Program::Image(image)) = &earlier
            && stage.earlier_image.is_none()
        {
            self.update_stage(volume_id, record, |stage| stage.earlier_image = Some(image.clone()))?;
        }
        Ok(earlier)
    }

    /// Whether the keeper holds all that a successor needs ([`Self::successor`]).
    pub(crate) fn has_successor(&self, volume_id: &VolumeId) -> Result<bool> {
        let held = self.daemons.keeper.list(volume_id).step("ask keeper")?;
        let needed = [Kept::Connection, Kept::StateTable, Kept::Directory, Kept::UsageFile];
        Ok(needed.iter().all(|role| held.contains(role)))
    }

    /// What the keeper holds for a successor; `None` if it does not hold all of it.
    pub(super) fn successor<'a>(
        &self,
        volume_id: &'a VolumeId,
        record: &VolumeRecord,
        stage: &'a StageRecord,
        serving: Serving,
    ) -> Result<Option<Start<'a>>> {
        let waiting = FuseConnections::open().and_then(|all| all.waiting(serving.connection_minor));
        if waiting.step("look at connection")?.is_none() {
            // Unmounted: it has no users.
            return Ok(None);
        }
        let get = |role| self.daemons.keeper.get(volume_id, role).step("ask keeper");
        let (connection, state_table) = (get(Kept::Connection)?, get(Kept::StateTable)?);
        let (directory, usage_file) = (get(Kept::Directory)?, get(Kept::UsageFile)?);
        let (Some(fuse_device), Some(state_table), Some(directory), Some(usage_file)) =
            (connection, state_table, directory, usage_file)
        else {
            return Ok(None);
        };
        let Some(data_id) = stage.data else { return Ok(None) };
        let assignment =
            Assignment { continues: true, ..self.assignment(record, stage.access, &stage.settings) };
        let assigned = Assigned {
            id: data_id,
            backend: self.backend.assignment(),
            descriptors: vec![(Role::Directory, directory), (Role::UsageFile, usage_file)],
        };
        let (settings, state_table, program) = (&stage.settings, Some(state_table), None);
        Ok(Some(Start { volume_id, settings, assignment, fuse_device, assigned, state_table, program }))
    }

    /// `is_journaled` becomes false if the journal does not take the daemon, which gets nothing then.
    pub(super) fn start_successor(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        serving: Serving,
        start: Start<'_>,
        keeper_socket: Option<OwnedFd>,
        is_journaled: &mut bool,
    ) -> Result<()> {
        let previous = record.stage.clone();
        let served = self.daemons.start(start, keeper_socket, previous.as_ref(), |key, launch, daemon| {
            let journaled = self.update_stage(volume_id, record, |stage| {
                (stage.launch_key, stage.launch) = (Some(key.clone()), Some(launch));
                stage.handed_to = daemon;
            });
            *is_journaled = journaled.is_ok();
            journaled
        })?;
        self.update_stage(volume_id, record, |stage| {
            let since = Some(Timestamp::now().seconds);
            stage.serve(Serving { daemon: served.daemon, since, ..serving });
            stage.takeovers = stage.takeovers.saturating_add(1);
            stage.needs_new_stage = served.needs_new_stage;
        })?;
        self.daemons.stand_by(volume_id, &served.pidfd);
        self.daemons.watch.start(volume_id, served.daemon, served.pidfd);
        Ok(())
    }

    /// Ends the connection of a volume whose daemons die again and again.
    fn give_up(&self, volume_id: &VolumeId, record: &mut VolumeRecord, serving: Serving) -> Result<()> {
        tracing::error!(
            %volume_id,
            deaths = MOST_DEATHS + 1,
            "the volume's daemons die at once, again and again: its pods get ENOTCONN; the next stage or publish \
             starts anew"
        );
        self.update_stage(volume_id, record, |stage| stage.aborted = true)?;
        self.deaths.forget(volume_id);
        self.abort(volume_id, serving)
    }

    /// Aborts the connection of a volume that was given up: the driver that decided it may have been
    /// killed before it did.
    pub(crate) fn end_given_up(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        let Some(stage) = record.stage.as_ref().filter(|stage| stage.aborted) else { return Ok(()) };
        let Some(serving) = stage.serving else { return Ok(()) };
        self.abort(volume_id, serving)
    }

    /// Aborts the volume's connection, so that each request to it fails at once.
    fn abort(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        self.daemons.release_connection(volume_id);
        let minor = serving.connection_minor;
        mounts::abort_connection(minor, || mounts::is_connection_of(volume_id, minor))
    }

    /// The users of a volume whose daemon has ended get errors.
    fn report_lost(&self, ended: &Ended) {
        tracing::error!(
            volume_id = %ended.volume_id,
            pid = ended.daemon.pid,
            "the volume's daemon ended: its pods get ENOTCONN; the next stage or publish starts another"
        );
    }

    /// The volume's lock is held; its daemon may be another one by now.
    fn take_over_after(&self, ended: &Ended) -> Result<Next> {
        let nothing = Ok(Next::Attempted(Takeover::Nothing));
        let Some(mut record) = self.journal.find(&ended.volume_id)? else { return nothing };
        let is_it = |stage: &StageRecord| stage.serving.is_some_and(|serving| serving.daemon == ended.daemon);
        if !record.stage.as_ref().is_some_and(is_it) {
            return nothing;
        }
        if self.orphaned(&record)?.is_some() {
            let death = self.deaths.count(&ended.volume_id, ended.daemon);
            if let Some(pause) = pause_after(death.in_a_row).filter(|_| death.is_new) {
                return Ok(Next::Pause(pause));
            }
        }
        let was_aborted = record.stage.as_ref().is_some_and(|stage| stage.aborted);
        let taken = self.try_take_over(&ended.volume_id, &mut record)?;
        if matches!(taken, Takeover::Nothing) && !was_aborted {
            self.report_lost(ended);
        }
        Ok(Next::Attempted(taken))
    }
}

/// The pause before another daemon, after this many in a row that died at once.
fn pause_after(deaths: u32) -> Option<Duration> {
    let more = deaths.checked_sub(3).filter(|_| deaths <= MOST_DEATHS)?;
    let last = PAUSES.len() - 1;
    Some(PAUSES[usize::try_from(more).unwrap_or(last).min(last)])
}

/// Takes over the connections of daemons that end, each in a task of its own.
pub(crate) async fn serve(stages: Arc<Stages>, mut ended: UnboundedReceiver<Ended>) {
    let mut under_way: HashMap<VolumeId, (ProcessId, JoinHandle<()>)> = HashMap::new();
    while let Some(ended) = ended.recv().await {
        if !stages.daemons.keeper.keeps_connections() {
            stages.report_lost(&ended);
            continue;
        }
        under_way.retain(|_, (_, task)| !task.is_finished());
        let (volume_id, daemon) = (ended.volume_id.clone(), ended.daemon);
        // Each call that finds the daemon dead reports it again.
        if under_way.get(&volume_id).is_none_or(|(of, _)| *of != daemon) {
            let task = tokio::spawn(after(stages.clone(), ended));
            under_way.insert(volume_id, (daemon, task));
        }
    }
}

/// Until the volume has another daemon, or is given up, or another operation has seen to it.
async fn after(stages: Arc<Stages>, ended: Ended) {
    let _under_way = stages.daemons.waits.take_over(&ended.volume_id);
    loop {
        let (error, pause) = match attempt(&stages, &ended).await {
            Ok(Next::Pause(pause)) => {
                // Other calls get the volume's lock.
                tokio::time::sleep(pause).await;
                continue;
            }
            Ok(Next::Attempted(Takeover::Nothing | Takeover::Done)) => return,
            Ok(Next::Attempted(Takeover::Failed(error))) => (error, START_RETRY),
            Err(error) => (error, ERROR_RETRY),
        };
        tracing::error!(volume_id = %ended.volume_id, error = chain(&error), "could not take the volume over yet");
        tokio::time::sleep(pause).await;
    }
}

async fn attempt(stages: &Arc<Stages>, ended: &Ended) -> Result<Next> {
    let guard = loop {
        match stages.locks.hold(Lock::Volume(ended.volume_id.as_str())) {
            Ok(guard) => break guard,
            Err(Error::Pending { .. } | Error::Copying { .. }) => {
                // What holds the lock may wait for an answer of the daemon, which only its successor can give.
                stages.flushes.interrupt(&ended.volume_id);
                tokio::time::sleep(LOCK_RETRY).await;
            }
            Err(error) => return Err(error),
        }
    };
    let (stages, ended) = (stages.clone(), ended.clone());
    let work = tokio::task::spawn_blocking(move || {
        let _guard = guard;
        stages.take_over_after(&ended)
    });
    work.await.unwrap_or(Err(Error::Panicked { operation: "takeover" }))
}
