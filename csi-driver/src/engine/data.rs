//! Whether a volume's daemon serves the directory that the pool has of it. A pool that is
//! restored or moved under a running daemon leaves that daemon with the old directory: what
//! its pods write there is lost.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::stat::{FileStat, lstat};

use crate::backend::pool::{Pool, open_usage_file};
use crate::error::{Error, Result, Step};
use crate::kernel::bounded::{self, Shared};
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{DataId, StageRecord};

#[derive(Debug)]
pub(crate) struct DataOfVolumes {
    pool: Arc<Pool>,
    /// Looks at volumes' directories in the pool, which may not answer.
    looks: Shared<VolumeId, nix::Result<FileStat>>,
}

/// What of the pool a volume's daemon gets.
pub(crate) struct Data {
    /// The volume's directory, as a mount of its own that no path leads to.
    pub(crate) tree: OwnedFd,
    pub(crate) id: DataId,
    pub(crate) usage: OwnedFd,
}

impl DataOfVolumes {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { pool, looks: Shared::default() }
    }

    /// A pool that does not answer costs its caller no more than the limit.
    pub(crate) fn open(&self, volume_id: &VolumeId) -> Result<Data> {
        self.pool.check_present()?;
        let (dir, usage) = (self.pool.data_dir(volume_id), self.pool.usage_path(volume_id));
        let open = move || {
            let tree = linux::mount::open_tree_clone(&dir)?;
            let found = rustix::fs::fstat(&tree).map_err(|e| linux::Error::at("stat", &dir, e))?;
            let id = DataId { device: found.st_dev, inode: found.st_ino };
            Ok(Data { tree, id, usage: open_usage_file(&usage)? })
        };
        bounded::within(format!("open volume {volume_id} in the pool"), limits::POOL, open)?
            .step("open volume")
    }

    /// The directory that the pool has of the volume, whichever one a daemon serves.
    pub(crate) fn id(&self, volume_id: &VolumeId) -> Result<DataId> {
        self.find(volume_id)?.step("look at volume")
    }

    /// An error where a daemon that serves has another directory than the pool. What
    /// cannot be known, as of a pool that is away or of an earlier version's stage, is
    /// none: what is served goes on without its pool's path.
    pub(crate) fn check(&self, volume_id: &VolumeId, stage: &StageRecord) -> Result<()> {
        let Some(served) = stage.data else { return Ok(()) };
        let is_another = match self.find(volume_id) {
            // As long as the daemon holds its directory, no other has these numbers.
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
    fn find(&self, volume_id: &VolumeId) -> Result<linux::Result<DataId>> {
        let dir = self.pool.data_dir(volume_id);
        let (what, looked_at) = (format!("look at volume {volume_id} in the pool"), dir.clone());
        let found = self.looks.within(volume_id, what, limits::POOL_LOOK, move || lstat(&looked_at))?;
        Ok(found
            .map(|found| DataId { device: found.st_dev, inode: found.st_ino })
            .map_err(|e| linux::Error::at("stat", &dir, e)))
    }
}
