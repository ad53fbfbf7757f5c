//! Connects to the daemon of a staged or parked volume.

use crate::daemon::control::Control;
use crate::engine::health::{Health, health, is_in_use, is_served};
use crate::engine::stage::Stages;
use crate::error::{Error, Result};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::VolumeRecord;

impl Stages {
    /// A connection to the volume's daemon, serving or parked; `None` if there is none. A parked
    /// daemon that does not answer is ended: it has no user.
    pub(crate) fn serving(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<Option<Control>> {
        if record.parked.is_some() {
            let answer = self.parked_control(volume_id);
            if answer.is_none() {
                self.end_parked(volume_id, record)?;
            }
            return Ok(answer);
        }
        // A successor must not begin to serve after its volume counted as unused.
        self.take_over(volume_id, record)?;
        let Some(stage) = &record.stage else { return Ok(None) };
        match health(volume_id, stage)? {
            // No path leads to it any more, but processes with open files still write to it.
            Health::Unmounted if !is_served(stage)? => Ok(None),
            Health::Serving(_) | Health::Displaced(_) | Health::Unmounted => {
                self.daemons.control(volume_id, limits::CONTROL).map(Some)
            }
            Health::HalfDone | Health::DaemonDead => Ok(None),
        }
    }

    /// For calls that end a stage which has no user: an error if processes may use it. The volume's lock is
    /// held.
    pub(crate) fn check_unused(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        // A successor must not begin to serve after its volume counted as unused.
        let followed = self.take_over(volume_id, record);
        let Some(stage) = &record.stage else { return Ok(()) };
        let has_users = match followed {
            Ok(_) => is_in_use(volume_id, stage)?,
            // It is tried only for users that wait.
            Err(error) => {
                let error = linux::chain(&error);
                tracing::warn!(%volume_id, error, "no other daemon follows: the volume counts as used");
                true
            }
        };
        if has_users {
            let path = stage.staging_path.clone();
            return Err(Error::StillStaged { volume_id: volume_id.clone(), path });
        }
        Ok(())
    }

    fn parked_control(&self, volume_id: &VolumeId) -> Option<Control> {
        let connect = || self.daemons.control(volume_id, limits::CONTROL);
        let control = self.parking.holds(volume_id).then(connect)?.ok()?;
        control.ping().ok().map(|()| control)
    }
}
