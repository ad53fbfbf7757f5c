//! What a new keeper lacks: it gets each volume's descriptors, if need be from the daemon, and each
//! daemon gets a socket to it.
//!
//! The driver has copies of the descriptors of all volumes that were staged since its start, and of
//! those that an earlier keeper held at that time. If driver and keeper have died together, only the
//! daemon has them. A daemon may be an attacker's, so all that it returns is checked.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use proto::control::FIRST_WITH_KEEPERS;
use proto::handover::{Role, state_table_bytes};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;

use crate::daemon::keeper::{NextDaemon, Role as Kept};
use crate::daemon::returned::{self, Known};
use crate::engine::locks::Lock;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{Serving, VolumeRecord};

/// Retry interval while another operation holds the volume's lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);
/// Between attempts after an error; twice as long after each further one.
const RETRY: Duration = Duration::from_secs(1);
const MOST_ATTEMPTS: u32 = 8;

/// Renews all volumes when the driver starts, and whenever there is another keeper.
pub(crate) async fn serve(stages: Arc<Stages>, mut renewed: UnboundedReceiver<()>) {
    let mut round = JoinSet::new();
    while renewed.recv().await.is_some() {
        // What an earlier keeper was to get, this one gets now.
        round.abort_all();
        round = JoinSet::new();
        let asked = stages.clone();
        // They wait for the keeper.
        let unconnected = tokio::task::spawn_blocking(move || {
            asked.daemons.warm.lend_all();
            asked.unconnected()
        });
        // A panic there is in the log.
        let unconnected = unconnected.await.unwrap_or_default();
        tracing::info!(volumes_to_check = unconnected.len(), "connected to a keeper");
        for volume_id in unconnected {
            round.spawn(renew(stages.clone(), volume_id));
        }
    }
}

async fn renew(stages: Arc<Stages>, volume_id: VolumeId) {
    let mut pause = RETRY;
    for _ in 0..MOST_ATTEMPTS {
        match attempt(&stages, &volume_id).await {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(
                    %volume_id,
                    error = chain(&error),
                    "the keeper does not hold all of the volume: if its daemon ends too, its pods may get errors"
                );
                // These do not change.
                if matches!(error, Error::WrongDescriptor { .. } | Error::ControlRefused { .. }) {
                    return;
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

async fn attempt(stages: &Arc<Stages>, volume_id: &VolumeId) -> Result<()> {
    let guard = loop {
        match stages.locks.hold(Lock::Volume(volume_id.as_str())) {
            Ok(guard) => break guard,
            Err(Error::Pending { .. } | Error::Copying { .. }) => tokio::time::sleep(LOCK_RETRY).await,
            Err(error) => return Err(error),
        }
    };
    let (stages, volume_id) = (stages.clone(), volume_id.clone());
    let work = tokio::task::spawn_blocking(move || {
        let _guard = guard;
        stages.renew_keeper(&volume_id)
    });
    work.await.unwrap_or(Err(Error::Panicked { operation: "give the keeper a volume" }))
}

impl Stages {
    /// Volumes whose daemon has no socket to the keeper. A stage that still runs counts too: it may have begun before
    /// the keeper came.
    fn unconnected(&self) -> Vec<VolumeId> {
        let connected = self.daemons.keeper.daemons().unwrap_or_else(|error| {
            tracing::warn!(error = chain(&error), "the keeper does not list its daemons");
            Default::default()
        });
        let volumes = self.journal.list().into_iter();
        let unconnected = volumes.filter(|(volume_id, record)| {
            record.stage_or_parked().is_some_and(|stage| !stage.aborted) && !connected.contains(volume_id)
        });
        unconnected.map(|(volume_id, _)| volume_id).collect()
    }

    /// The volume's lock is held.
    pub(super) fn renew_keeper(&self, volume_id: &VolumeId) -> Result<()> {
        let Some(record) = self.journal.find(volume_id)? else { return Ok(()) };
        let Some(stage) = record.stage_or_parked().filter(|stage| !stage.aborted) else { return Ok(()) };
        let Some(serving) = stage.serving else { return Ok(()) };
        // Its successor gets its socket from the keeper.
        if !serving.daemon.is_alive().step("look at daemon")? {
            return Ok(());
        }
        let keeper = &self.daemons.keeper;
        let is_held = keeper.list(volume_id).step("ask keeper")?.contains(&Kept::Connection);
        if is_held && keeper.daemons().step("ask keeper")?.contains(volume_id) {
            return Ok(());
        }
        let control = self.daemons.control(volume_id, limits::CONTROL)?;
        let version = control.version()?;
        if version < FIRST_WITH_KEEPERS {
            tracing::warn!(
                %volume_id,
                version,
                "the volume's daemon is of an earlier version, which takes no other keeper: files that are removed \
                 while they are open end with it"
            );
            return Ok(());
        }
        if !is_held && !self.take_back(volume_id, &record, serving, control.descriptors()?)? {
            return Ok(());
        }
        let Some(socket) =
            keeper.daemon_socket(volume_id, NextDaemon::Own).step("connect daemon to keeper")?
        else {
            return Ok(());
        };
        control.replace_keeper(socket.as_fd())?;
        self.stand_by_again(volume_id, &record);
        tracing::info!(%volume_id, "the volume's daemon uses another keeper");
        Ok(())
    }

    /// Holds what the daemon has returned, if all of it is the volume's. False if there is nothing to
    /// hold.
    fn take_back(
        &self,
        volume_id: &VolumeId,
        record: &VolumeRecord,
        serving: Serving,
        returned: Vec<(Role, std::os::fd::OwnedFd)>,
    ) -> Result<bool> {
        let Some(stage) = record.stage_or_parked() else { return Ok(false) };
        let Some(data) = stage.data else { return Ok(false) };
        let assigned = self.backend.assign(volume_id, record.allowance())?;
        let usage_file = assigned.descriptors.iter().find(|(role, _)| *role == Role::UsageFile);
        let Some((_, usage_file)) = usage_file else { return Ok(false) };
        let known = Known {
            volume_id,
            connection_minor: serving.connection_minor,
            data,
            usage_file: usage_file.as_fd(),
            table_bytes: state_table_bytes(stage.settings.known_inodes()),
        };
        let kept = returned::check(&known, returned)?;
        let is_something = !kept.is_empty();
        for (role, descriptor) in kept {
            self.daemons.keeper.put(volume_id, role, descriptor).step("give keeper a descriptor")?;
        }
        if is_something {
            tracing::warn!(%volume_id, "neither driver nor keeper held the volume's connection: its daemon has returned it");
        }
        Ok(is_something)
    }
}
