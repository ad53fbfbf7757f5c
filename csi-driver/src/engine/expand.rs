//! NodeExpandVolume: the daemon learns the size that ControllerExpandVolume
//! journaled. A volume that nobody serves learns it when it is staged.

use crate::engine::driver::Driver;
use crate::error::{Error, Result};
use crate::model::capacity::WantedCapacity;
use crate::model::ids::VolumeId;

impl Driver {
    /// The volume's size in bytes, which its daemon enforces from now on. The size
    /// is the controller's to change: no other can be had here.
    pub(crate) fn expand_on_node(
        &self,
        volume_id: &VolumeId,
        volume_path: &str,
        wanted: WantedCapacity,
    ) -> Result<u64> {
        self.place(volume_id, volume_path)?;
        let mut record = self.journal.get(volume_id)?;
        let size_bytes = record.capacity_bytes;
        if !wanted.admits(size_bytes) {
            let (volume_id, wanted) = (volume_id.clone(), wanted.to_string());
            return Err(Error::BeyondSize { volume_id, size_bytes, wanted });
        }
        if let Some(control) = self.serving(volume_id, &mut record)? {
            control.set_capacity(size_bytes, self.pool.inode_limit(size_bytes))?;
        }
        Ok(size_bytes)
    }
}
