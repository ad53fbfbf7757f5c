//! Whether a volume's daemon serves the directory that the pool has of it. Who
//! restores or moves a pool under a daemon that goes on leaves that daemon with the old
//! directory: its pods would write where nobody looks any more.

use nix::errno::Errno;
use nix::sys::stat::lstat;

use crate::engine::driver::Driver;
use crate::error::{Error, Result, Step};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{DataId, StageRecord};

impl Driver {
    /// Which directory the pool has of the volume, whoever serves which.
    pub(crate) fn data_id(&self, volume_id: &VolumeId) -> Result<DataId> {
        self.find_data(volume_id)?.step("look at volume")
    }

    /// An error where a daemon that serves has another directory than the pool. What
    /// cannot be known, as of a pool that is away or of an earlier version's stage, is
    /// none: what is served goes on without its pool's path.
    pub(crate) fn check_data(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<()> {
        let Some(served) = stage.data else { return Ok(()) };
        let is_another = match self.find_data(volume_id) {
            // As long as the daemon holds its directory, these numbers are nobody else's.
            Ok(Ok(found)) => found != served,
            Ok(Err(e)) => e.errno() == Errno::ENOENT && self.pool.check_present().is_ok(),
            Err(_) => false,
        };
        match is_another {
            true => Err(Error::ServesAnother {
                volume_id: volume_id.clone(),
                path: self.pool.data_dir(volume_id),
            }),
            false => Ok(()),
        }
    }

    /// Refused at once while an earlier look is stuck.
    fn find_data(&self, volume_id: &VolumeId) -> Result<linux::Result<DataId>> {
        let dir = self.pool.data_dir(volume_id);
        let (what, looked_at) = (format!("look at volume {volume_id} in the pool"), dir.clone());
        let found = self.data_looks.within(volume_id, what, limits::POOL_LOOK, move || lstat(&looked_at))?;
        Ok(found
            .map(|found| DataId { device: found.st_dev, inode: found.st_ino })
            .map_err(|e| linux::Error::at("stat", &dir, e)))
    }
}
