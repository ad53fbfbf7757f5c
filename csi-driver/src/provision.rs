//! CreateVolume and DeleteVolume: what is decided and done, without the wire.

use crate::capacity::WantedCapacity;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::journal::VolumeRecord;
use crate::node::stage::Health;
use crate::parameters::Parameters;
use crate::volume::{VolumeId, VolumeName};

#[derive(Debug)]
pub(crate) struct VolumeWish {
    pub(crate) name: VolumeName,
    pub(crate) capacity: WantedCapacity,
    pub(crate) parameters: Parameters,
}

impl Driver {
    /// Creates the volume, or finds the one of that name if it is what is wanted.
    pub(crate) fn create(&self, volume_id: &VolumeId, wish: VolumeWish) -> Result<VolumeRecord> {
        if let Some(found) = self.journal.find(volume_id)? {
            if found.deleting {
                return Err(Error::BeingDeleted { volume_id: volume_id.clone() });
            }
            check_same(&found, &wish)?;
            // Its creation may have been cut short.
            return self.pool.ensure(volume_id).map(|()| found);
        }
        let record = VolumeRecord::new(wish.name, wish.capacity.choose(), wish.parameters);
        self.journal.admit(volume_id, &record, self.pool.capacity_bytes()?)?;
        self.pool.ensure(volume_id).map(|()| record).map_err(|cause| match self.delete(volume_id) {
            Ok(()) => cause,
            Err(rollback) => Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
        })
    }

    /// Deletes the volume with its data; one that does not exist is a success.
    pub(crate) fn delete(&self, volume_id: &VolumeId) -> Result<()> {
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        self.forget_unmounted_targets(volume_id, &mut record)?;
        if let Some(path) = record.targets.keys().next() {
            return Err(Error::StillPublished { volume_id: volume_id.clone(), path: path.clone() });
        }
        if let Some(stage) = record.stage.clone() {
            match self.health(volume_id, &stage)? {
                // Left by a reboot or by a killed stage: nobody uses it.
                Health::HalfDone | Health::Unmounted => self.tear_down(volume_id, &mut record)?,
                Health::Serving(_) | Health::DaemonDead => {
                    let path = stage.staging_path;
                    return Err(Error::StillStaged { volume_id: volume_id.clone(), path });
                }
            }
        }
        if !record.deleting {
            record.deleting = true;
            self.journal.put(volume_id, &record)?;
        }
        self.finish_deletion(volume_id)
    }

    pub(crate) fn finish_deletion(&self, volume_id: &VolumeId) -> Result<()> {
        self.pool.remove(volume_id)?;
        self.journal.remove(volume_id)
    }
}

fn check_same(found: &VolumeRecord, wish: &VolumeWish) -> Result<()> {
    let otherwise = |what, found_value: String, wanted: String| {
        let name = found.name.as_str().to_owned();
        Err(Error::ExistsOtherwise { name, what, found: found_value, wanted })
    };
    if !wish.capacity.admits(found.capacity_bytes) {
        return otherwise(
            "a capacity of",
            format!("{} bytes", found.capacity_bytes),
            wish.capacity.to_string(),
        );
    }
    if found.parameters != wish.parameters {
        return otherwise("the parameters", found.parameters.to_string(), wish.parameters.to_string());
    }
    Ok(())
}
