//! Takeovers that the keeper serves while no driver runs.
//!
//! A driver prepares them: for each volume that a waiting daemon suits, the keeper has the daemon's
//! listening sockets, the packet for a successor, and the daemon's pidfd. The next driver finds the
//! daemons that the keeper has given volumes to, before it looks for launches that the journal does not know. If that
//! keeper has ended too, the daemon is found by the connection that it has open.
//!
//! Invariant: the keeper has the pidfd of a volume's daemon only while the journal calls that daemon the
//! serving one. So no two daemons get one connection, whenever a driver is killed.

use std::os::fd::OwnedFd;

use proto::handover::Assignment;

use crate::daemon::dial::ServingSockets;
use crate::daemon::handover;
use crate::daemon::keeper::{Role as Kept, Takeover};
use crate::daemon::launcher::Launched;
use crate::daemon::warm::WarmDaemons;
use crate::engine::daemons::Daemons;
use crate::engine::stage::Stages;
use crate::error::{Result, Step, chain};
use crate::kernel::mounts;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey, ProcessId};
use crate::model::limits;
use crate::model::records::{Serving, StageRecord, VolumeRecord};
use crate::model::settings::LaunchSettings;

impl Daemons {
    /// Gives the keeper what it needs besides the connection, if a waiting daemon suits the volume.
    pub(crate) fn keep_for_standby(
        &self,
        volume_id: &VolumeId,
        settings: &LaunchSettings,
        assignment: Assignment,
        sockets: ServingSockets,
    ) {
        let ServingSockets { control, metrics } = sockets;
        // Last: without it, what is left of an earlier daemon is of no use.
        let put = || -> linux::Result<()> {
            for role in [Kept::Assignment, Kept::ControlListener, Kept::MetricsListener] {
                if self.keeper.get(volume_id, role)?.is_some() {
                    self.keeper.forget(volume_id, role)?;
                }
            }
            if self.is_for_standby(settings, &assignment) {
                self.keeper.put(volume_id, Kept::ControlListener, control)?;
                self.keeper.put(volume_id, Kept::MetricsListener, metrics)?;
                self.put_assignment(volume_id, assignment)?;
            }
            Ok(())
        };
        if let Err(error) = put() {
            report_unprepared(volume_id, &linux::chain(&error));
        }
    }

    fn is_for_standby(&self, settings: &LaunchSettings, assignment: &Assignment) -> bool {
        self.warm.are_wanted() && WarmDaemons::suits(settings, assignment.inode_limit)
    }

    fn put_assignment(&self, volume_id: &VolumeId, assignment: Assignment) -> linux::Result<()> {
        let too_large = || linux::Error::new("encode", "an assignment", nix::errno::Errno::E2BIG);
        let assignment = handover::for_keeper(assignment).ok_or_else(too_large)?;
        let memfd = linux::shared_memory::sealed("hawser-assignment", &assignment.encode())?;
        self.keeper.put(volume_id, Kept::Assignment, memfd).map(drop)
    }

    /// From here on the keeper gives the volume to a waiting daemon if this one ends while no driver
    /// runs. The journal must call it the serving one.
    pub(crate) fn stand_by(&self, volume_id: &VolumeId, daemon: &OwnedFd) {
        let put = || -> linux::Result<()> {
            if !self.warm.are_wanted() || self.keeper.get(volume_id, Kept::Assignment)?.is_none() {
                return Ok(());
            }
            let failed = |e| linux::Error::new("duplicate", "a daemon's pidfd", e);
            self.keeper.put(volume_id, Kept::Daemon, daemon.try_clone().map_err(failed)?).map(drop)
        };
        if let Err(error) = put() {
            report_unprepared(volume_id, &linux::chain(&error));
        }
    }
}

impl Stages {
    /// As [`Daemons::stand_by`], for a daemon that serves since an earlier driver, or has other limits
    /// now. The volume's lock is held.
    pub(crate) fn stand_by_again(&self, volume_id: &VolumeId, record: &VolumeRecord) {
        if let Err(error) = self.try_stand_by_again(volume_id, record) {
            report_unprepared(volume_id, &chain(&error));
        }
    }

    fn try_stand_by_again(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        let keeper = &self.daemons.keeper;
        let Some(stage) = record.stage.as_ref().filter(|stage| !stage.aborted) else { return Ok(()) };
        let Some(serving) = stage.serving.filter(|_| keeper.keeps_connections()) else { return Ok(()) };
        let backend = Some(self.backend.assignment());
        let assignment = Assignment { backend, ..self.assignment(record, stage.access, &stage.settings) };
        let has = |role| keeper.get(volume_id, role).map(|held| held.is_some()).step("ask keeper");
        let is_ready = self.daemons.is_for_standby(&stage.settings, &assignment)
            && has(Kept::ControlListener)?
            && has(Kept::MetricsListener)?;
        if !is_ready {
            return keeper.forget(volume_id, Kept::Daemon).step("prepare keeper");
        }
        self.daemons.put_assignment(volume_id, assignment).step("prepare keeper")?;
        if let Some(daemon) = serving.daemon.open().step("look at daemon")? {
            self.daemons.stand_by(volume_id, &daemon);
        }
        Ok(())
    }

    /// Journals the daemons that the keeper has given volumes to while no driver ran, and ends waiting
    /// daemons of an earlier driver. Before launches that the journal does not know are ended.
    pub(crate) fn adopt_takeovers(&self) -> Result<()> {
        // Without the keeper's list, the daemons that serve are found by the connections that they hold.
        let takeovers = self.daemons.keeper.takeovers().unwrap_or_else(|error| {
            tracing::error!(error = linux::chain(&error), "the keeper does not list its takeovers");
            Vec::new()
        });
        for takeover in takeovers {
            if let Err(error) = self.adopt_takeover(&takeover) {
                let volume_id = &takeover.volume_id;
                tracing::error!(%volume_id, error = chain(&error), "could not adopt the volume's daemon");
            }
        }
        let mut daemons = None;
        for (volume_id, record) in self.journal.list() {
            if let Err(error) = self.adopt_holder(&volume_id, record, &mut daemons) {
                tracing::error!(%volume_id, error = chain(&error), "could not look for a daemon that serves the volume");
            }
        }
        if let Err(error) = self.daemons.keeper.reclaim_all() {
            tracing::warn!(error = linux::chain(&error), "daemons wait for an earlier driver");
        }
        Ok(())
    }

    fn adopt_takeover(&self, takeover: &Takeover) -> Result<()> {
        let Takeover { volume_id, launch: key, count, since } = takeover;
        let Some(pidfd) = self.daemons.keeper.get(volume_id, Kept::Daemon).step("ask keeper")? else {
            return Ok(());
        };
        // One that has ended is followed by another one like any other.
        let Some(daemon) = ProcessId::behind(&pidfd).step("look at daemon")? else { return Ok(()) };
        self.record_launch(volume_id, key)?;
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        let is_served = |stage: &&StageRecord| stage.serving.is_some() && !stage.aborted;
        let Some(previous) = record.stage.as_ref().filter(is_served).cloned() else { return Ok(()) };
        if previous.serving.is_none_or(|serving| serving.daemon == daemon) {
            return Ok(());
        }
        let Some(launch) = self.daemons.launcher.launch_of(key, daemon).step("find launch")? else {
            return end_unknown(volume_id, daemon);
        };
        let found = Found { key, launch, daemon, since: i64::try_from(*since).ok(), count: *count };
        self.adopt_daemon(volume_id, &mut record, &previous, found)
    }

    /// Adopts a daemon that serves although the journal calls another one the serving one, which has ended: the keeper
    /// that gave it the volume has ended too. A later keeper may hold the connection again. `daemons` are listed once.
    fn adopt_holder(
        &self,
        volume_id: &VolumeId,
        mut record: VolumeRecord,
        daemons: &mut Option<Vec<ProcessId>>,
    ) -> Result<()> {
        let Some((previous, serving)) = self.orphaned(&record)? else { return Ok(()) };
        let minor = serving.connection_minor;
        // The number of a connection that has ended may be another volume's.
        if !mounts::is_connection_of(volume_id, minor)? {
            return Ok(());
        }
        let daemons = match daemons {
            Some(daemons) => daemons,
            None => daemons.insert(self.daemons.launcher.daemons().step("list daemons")?),
        };
        for daemon in daemons.iter().copied() {
            let is_holder = linux::mount::has_fuse_connection(daemon.pid, minor).step("look at daemon")?;
            // Checked afterwards: only then the pid was still the daemon's.
            if !is_holder || !daemon.is_alive().step("look at daemon")? {
                continue;
            }
            // One that a killed driver was starting may never serve. If it can be followed, it is ended first.
            let is_journaled = previous.handed_to == Some(daemon)
                || previous.launch.as_ref().and_then(LaunchId::process) == Some(daemon);
            // A keeper that does not answer gives none now, and this daemon may be the last process that has the connection.
            let has_successor = self.has_successor(volume_id).unwrap_or(false);
            if is_journaled && has_successor {
                return Ok(());
            }
            let launched = self.daemons.launcher.launch_by(daemon).step("find launch")?;
            match launched {
                // A process names its launch in its arguments, which a compromised one may have changed.
                Some(Launched { key, id }) if !self.is_known_to_another(volume_id, &key, daemon) => {
                    self.record_launch(volume_id, &key)?;
                    let found = Found { key: &key, launch: id, daemon, since: None, count: 1 };
                    return self.adopt_daemon(volume_id, &mut record, &previous, found);
                }
                Some(_) => {}
                // Before another one gets the volume too.
                None if has_successor => return end_unknown(volume_id, daemon),
                None => {}
            }
        }
        Ok(())
    }

    /// Whether the journal calls the launch, or the process, another volume's.
    fn is_known_to_another(&self, volume_id: &VolumeId, key: &LaunchKey, daemon: ProcessId) -> bool {
        self.journal.list().iter().filter(|(other, _)| other != volume_id).any(|(other, record)| {
            record.stage_or_parked().is_some_and(|stage| {
                stage.launch_key(other) == *key
                    || stage.serving.is_some_and(|serving| serving.daemon == daemon)
            })
        })
    }

    /// Also for a driver without its journal.
    fn record_launch(&self, volume_id: &VolumeId, key: &LaunchKey) -> Result<()> {
        let dial = self.daemons.dial(volume_id);
        if dial.path().is_dir() { dial.record_launch(key).step("record launch") } else { Ok(()) }
    }

    fn adopt_daemon(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        previous: &StageRecord,
        found: Found<'_>,
    ) -> Result<()> {
        let Some(serving) = previous.serving else { return Ok(()) };
        let Found { key, launch, daemon, since, count } = found;
        // The journal has it already, but for the record that it serves.
        let is_its_launch = previous.launch.as_ref() == Some(&launch);
        let handed_to = previous.handed_to.filter(|other| *other != daemon);
        let previous = &StageRecord { handed_to, ..previous.clone() };
        self.update_stage(volume_id, record, |stage| {
            (stage.launch_key, stage.launch) = (Some(key.clone()), Some(launch));
            stage.serve(Serving { daemon, since, ..serving });
            stage.takeovers = stage.takeovers.saturating_add(count);
        })?;
        self.counts.takeovers.inc_by(u64::from(count));
        tracing::warn!(%volume_id, died = serving.daemon.pid, pid = daemon.pid, count, "while no driver ran, another daemon has taken the volume over");
        let ended = if is_its_launch {
            // A driver that was killed may have journaled it and left the launch before it. Unlike others, that of the
            // volume's own key is not unknown to a driver that starts.
            self.daemons.clear_own_launch(volume_id, key)
        } else {
            self.daemons.end_previous(volume_id, previous)
        };
        if let Err(error) = ended {
            tracing::warn!(%volume_id, error = chain(&error), "the launch of the volume's earlier daemon is left");
        }
        Ok(())
    }
}

/// A daemon that serves a volume, and that the journal does not know.
struct Found<'a> {
    key: &'a LaunchKey,
    launch: LaunchId,
    daemon: ProcessId,
    /// Unix time, if it is known.
    since: Option<i64>,
    /// How many daemons have followed each other.
    count: u32,
}

fn report_unprepared(volume_id: &VolumeId, error: &str) {
    tracing::warn!(%volume_id, error, "while no driver runs, no daemon can follow the volume's");
}

/// A daemon of no launch that this driver finds, or whose pod is being removed. Another one can follow it only
/// once it has ended.
fn end_unknown(volume_id: &VolumeId, daemon: ProcessId) -> Result<()> {
    tracing::error!(%volume_id, pid = daemon.pid, "the keeper gave the volume to a daemon of no launch: it is killed");
    daemon.kill().step("end daemon")?;
    if !daemon.is_gone_within(limits::CLOSING).step("end daemon")? {
        tracing::error!(%volume_id, pid = daemon.pid, "it still runs after SIGKILL");
    }
    Ok(())
}
