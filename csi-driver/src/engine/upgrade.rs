//! Upgrade: a daemon of the program that this driver is configured with replaces one that serves.
//!
//! The new daemon starts and checks all that it gets while the earlier one serves. Until it is ready,
//! nothing has changed, and any error leaves the earlier daemon as it was. Then the earlier one is
//! killed, and the new one continues as in any takeover: users see the pause of a takeover for which all
//! is prepared. If the new one does not serve then, a daemon of the earlier program follows.
//!
//! The journal calls the new daemon the serving one once it has answered. A driver that is killed before
//! leaves either the earlier daemon, which serves, or one that has ended: the next start takes over, or
//! the keeper does. A new daemon that waits for its turn ends with its driver.

mod next;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, StatxFlags};

use self::next::Next;
use crate::daemon::keeper::NextDaemon;
use crate::daemon::launcher::program::Program;
use crate::engine::daemons::Start;
use crate::engine::hang::own_mount;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::kernel::bounded;
use crate::kernel::mounts::{self, ConnectionMount};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{Serving, StageRecord, Timestamp, VolumeRecord};

/// What came of a volume's upgrade.
#[derive(Debug)]
pub(crate) struct Upgrade {
    /// The program of the daemon before, with its release if it reports one.
    pub(crate) from: Option<String>,
    pub(crate) to: Option<String>,
    pub(crate) outcome: Outcome,
}

#[derive(Debug)]
pub(crate) enum Outcome {
    /// The daemon runs this program already.
    Current,
    /// The pauses begin with the end of the earlier daemon.
    Upgraded { pause: Duration },
    /// The earlier daemon serves as before, and was not stopped.
    Refused { cause: Error },
    /// A daemon of the earlier program serves.
    RolledBack { pause: Duration, cause: Error },
    /// No daemon serves yet, and the driver goes on starting one.
    Failed { cause: Error },
}

/// As [`Upgrade`] shows them.
#[derive(Default)]
struct Programs {
    from: Option<String>,
    to: Option<String>,
}

/// The daemon that is to be replaced.
struct Earlier {
    stage: StageRecord,
    serving: Serving,
    program: Program,
}

impl Stages {
    /// Replaces the volume's daemon, with `force` also by one of the same program. The volume's lock is
    /// held. Must be called in a tokio context.
    pub(crate) fn upgrade(&self, volume_id: &VolumeId, force: bool) -> Upgrade {
        let mut programs = Programs::default();
        let tried = self.try_upgrade(volume_id, force, &mut programs);
        let outcome = tried.unwrap_or_else(|cause| Outcome::Refused { cause });
        let Programs { from, to } = programs;
        let (old, new) = (from.as_deref(), to.as_deref());
        match &outcome {
            Outcome::Current => {}
            Outcome::Upgraded { pause } => {
                self.counts.upgrades.inc();
                let pause_ms = pause.as_millis();
                tracing::info!(%volume_id, from = old, to = new, pause_ms, "another daemon has replaced the volume's");
            }
            Outcome::Refused { cause } => {
                tracing::warn!(%volume_id, from = old, to = new, error = chain(cause), "the volume's daemon is not replaced");
            }
            Outcome::RolledBack { pause, cause } => {
                self.counts.failed_upgrades.inc();
                let pause_ms = pause.as_millis();
                tracing::error!(%volume_id, from = old, to = new, pause_ms, error = chain(cause), "a daemon of the earlier program serves again");
            }
            Outcome::Failed { cause } => {
                self.counts.failed_upgrades.inc();
                tracing::error!(%volume_id, from = old, to = new, error = chain(cause), "no daemon serves the volume yet");
            }
        }
        Upgrade { from, to, outcome }
    }

    /// On an error, the earlier daemon was not stopped.
    fn try_upgrade(&self, volume_id: &VolumeId, force: bool, programs: &mut Programs) -> Result<Outcome> {
        let mut record = self.journal.get(volume_id)?;
        let earlier = self.earlier(volume_id, &record)?;
        programs.from = Some(earlier.program.to_string());
        let configured = self.daemons.launcher.configured_program().step("look at the configured program")?;
        programs.to = Some(configured.to_string());
        // One that does not answer is for the detection of hung daemons.
        let release = self.daemons.control(volume_id, limits::STATISTICS)?.release()?;
        programs.from = Some(named(&release, &earlier.program));
        if !force && earlier.program.is_same(&configured) {
            programs.to.clone_from(&programs.from);
            return Ok(Outcome::Current);
        }
        self.locks.check_not_copied(volume_id)?;
        let start = self
            .successor(volume_id, &record, &earlier.stage, earlier.serving)?
            .ok_or_else(|| cannot(volume_id, "neither the keeper nor the driver holds its connection"))?;
        let ahead = self.daemons.ahead(&start, &configured)?;
        programs.to = Some(named(&ahead.dialled.release, &configured));
        let next = self.daemons.prepare(ahead, &start)?;
        Ok(self.replace(volume_id, &mut record, &earlier, &start, next))
    }

    fn earlier(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<Earlier> {
        let stage = record.stage.clone().filter(|stage| !stage.aborted);
        let (stage, serving) = stage
            .and_then(|stage| stage.serving.map(|serving| (stage, serving)))
            .ok_or_else(|| cannot(volume_id, "the volume is not staged: its next stage starts a new one"))?;
        if !self.daemons.keeper.keeps_connections() {
            return Err(cannot(volume_id, "this driver has no keeper"));
        }
        if serving.is_sole_holder {
            return Err(cannot(volume_id, "this kernel is older than Linux 6.9"));
        }
        if !serving.daemon.is_alive().step("look at daemon")? {
            return Err(cannot(volume_id, "it has ended"));
        }
        let launch = stage.launch.as_ref();
        let program = launch.map(|launch| self.daemons.launcher.program_of(launch, serving.daemon));
        let program = program.transpose().step("look at daemon's program")?.flatten();
        let unknown = || cannot(volume_id, "this driver's --launcher could not start its program again");
        Ok(Earlier { stage, serving, program: program.ok_or_else(unknown)? })
    }

    /// From here on the keeper gives the volume to no daemon, and the earlier one ends.
    fn replace(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        earlier: &Earlier,
        start: &Start<'_>,
        next: Next,
    ) -> Outcome {
        let disarmed = self.note_next(volume_id, record, earlier, &next);
        let disarmed = disarmed.and_then(|()| self.disarm(volume_id, earlier.serving, &next));
        let (keeper_socket, pidfd) = match disarmed {
            Ok(disarmed) => disarmed,
            Err(cause) => {
                self.daemons.end_unwanted(volume_id, &next.launch());
                self.arm_again(volume_id, record);
                return Outcome::Refused { cause };
            }
        };
        self.daemons.watch.stop(volume_id);
        let begun = Instant::now();
        if let Err(cause) = self.end_earlier(volume_id, earlier.serving) {
            // Killed, but in an uninterruptible wait: the driver takes over once it has ended.
            self.daemons.end_unwanted(volume_id, &next.launch());
            self.daemons.watch.start(volume_id, earlier.serving.daemon, pidfd);
            return Outcome::Failed { cause };
        }
        let launch = next.launch();
        match self.follow(volume_id, record, earlier, start, (next, keeper_socket), begun) {
            Ok(pause) => Outcome::Upgraded { pause },
            Err(cause) => {
                let ended = self.daemons.end_next(volume_id, &launch);
                let rolled_back = ended.and_then(|()| self.roll_back(volume_id, record, earlier));
                match rolled_back {
                    Ok(()) => Outcome::RolledBack { pause: begun.elapsed(), cause },
                    Err(rollback) => {
                        // The earlier daemon has ended: so the driver takes over.
                        self.daemons.watch.start(volume_id, earlier.serving.daemon, pidfd);
                        self.daemons.watch.report(volume_id, earlier.serving.daemon);
                        Outcome::Failed { cause: Error::rolled_back(cause, Err(rollback)) }
                    }
                }
            }
        }
    }

    /// Journals the next daemon. On a full or read-only disk, the earlier one is not stopped.
    fn note_next(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        earlier: &Earlier,
        next: &Next,
    ) -> Result<()> {
        self.update_stage(volume_id, record, |stage| {
            stage.handed_to = Some(next.daemon());
            // For a driver that starts after this one: the manifest that names the image goes.
            if let Program::Image(image) = &earlier.program {
                stage.earlier_image = Some(image.clone());
            }
        })
    }

    /// Returns the next daemon's socket to the keeper, which gives the volume to no daemon from here on,
    /// and the earlier daemon's pidfd.
    fn disarm(&self, volume_id: &VolumeId, earlier: Serving, next: &Next) -> Result<(OwnedFd, OwnedFd)> {
        let pidfd = earlier.daemon.open().step("look at daemon")?;
        let pidfd = pidfd.ok_or_else(|| cannot(volume_id, "it has ended"))?;
        let socket = self.daemons.keeper.daemon_socket(volume_id, NextDaemon::Continues);
        let socket = socket.step("connect daemon to keeper")?;
        let socket = socket.ok_or_else(|| cannot(volume_id, "this driver has no keeper"))?;
        next.check_waits(volume_id)?;
        Ok((socket, pidfd))
    }

    /// Undoes [`Self::disarm`]: the earlier daemon gets a socket to the keeper again.
    fn arm_again(&self, volume_id: &VolumeId, record: &VolumeRecord) {
        if let Err(error) = self.renew_keeper(volume_id) {
            tracing::error!(
                %volume_id,
                error = chain(&error),
                "the keeper does not hold all of the volume: if its daemon ends, its pods may get errors"
            );
        }
        self.stand_by_again(volume_id, record);
    }

    fn end_earlier(&self, volume_id: &VolumeId, serving: Serving) -> Result<()> {
        match serving.daemon.end(Duration::ZERO).step("end daemon")? {
            true => Ok(()),
            false => Err(Error::DaemonLives { volume_id: volume_id.clone(), pid: serving.daemon.pid }),
        }
    }

    /// Has the next daemon serve, and returns the pause of users.
    fn follow(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        earlier: &Earlier,
        start: &Start<'_>,
        (next, keeper_socket): (Next, OwnedFd),
        begun: Instant,
    ) -> Result<Duration> {
        self.update_stage(volume_id, record, |stage| {
            (stage.launch_key, stage.launch) = (Some(next.key.clone()), Some(next.id.clone()));
        })?;
        let proceeded = self.daemons.proceed(volume_id, next, keeper_socket);
        let pause = begun.elapsed();
        if let Err(error) = self.daemons.end_previous(volume_id, &earlier.stage) {
            tracing::warn!(%volume_id, error = chain(&error), "the launch of the volume's earlier daemon is left");
        }
        let (served, sockets) = proceeded?;
        self.check_answers(volume_id, earlier.serving.connection_minor)?;
        let assignment = start.whole_assignment();
        // Before the journal's record: a driver that starts gives the volume to no other daemon after that, and does not
        // know which daemon's sockets the keeper has.
        self.daemons.keep_for_standby(volume_id, start.settings, assignment, sockets);
        self.update_stage(volume_id, record, |stage| {
            let since = Some(Timestamp::now().seconds);
            stage.serve(Serving { daemon: served.daemon, since, ..earlier.serving });
            stage.takeovers = stage.takeovers.saturating_add(1);
            stage.needs_new_stage = served.needs_new_stage;
        })?;
        self.deaths.served(volume_id);
        self.daemons.hangs.found(volume_id, None);
        self.daemons.stand_by(volume_id, &served.pidfd);
        self.daemons.watch.start(volume_id, served.daemon, served.pidfd);
        Ok(pause)
    }

    /// Whether the daemon answers the driver, and a request to the volume.
    fn check_answers(&self, volume_id: &VolumeId, connection_minor: u32) -> Result<()> {
        self.daemons.control(volume_id, limits::FOLLOWS)?.release()?;
        let ConnectionMount::At(mount) = mounts::connection_mount(volume_id, connection_minor)? else {
            // No path leads to the volume.
            return Ok(());
        };
        let asking = self.daemons.hangs.asking(volume_id);
        let ask = move || {
            let _until_answered = asking;
            let volume = own_mount(&mount.mount_point, connection_minor)?;
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
            rustix::fs::statx(&volume, "", flags, StatxFlags::BASIC_STATS)
                .map(drop)
                .map_err(|e| linux::Error::at("statx", &mount.mount_point, e))
        };
        let what = format!("a request to volume {volume_id}");
        bounded::within(what, limits::FOLLOWS, ask)?.step("ask the volume's new daemon")
    }

    /// Starts a daemon of the earlier program. The one that was to follow has ended.
    fn roll_back(&self, volume_id: &VolumeId, record: &mut VolumeRecord, earlier: &Earlier) -> Result<()> {
        let start = self.successor(volume_id, record, &earlier.stage, earlier.serving)?;
        let start = start.ok_or_else(|| cannot(volume_id, "the volume is not mounted any more"))?;
        let start = Start { program: Some(&earlier.program), ..start };
        let keeper_socket = self.daemons.keeper_socket(&start)?;
        self.start_successor(volume_id, record, earlier.serving, start, keeper_socket, &mut true)?;
        self.deaths.served(volume_id);
        Ok(())
    }
}

fn cannot(volume_id: &VolumeId, reason: &str) -> Error {
    Error::CannotUpgrade { volume_id: volume_id.clone(), reason: reason.to_owned() }
}

/// `0.2.0 (/usr/bin/hawser-volume)`.
fn named(release: &str, program: &Program) -> String {
    if release.is_empty() { program.to_string() } else { format!("{release} ({program})") }
}
