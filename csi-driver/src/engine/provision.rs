//! CreateVolume and DeleteVolume, apart from the gRPC layer.

use std::sync::Arc;

use crate::backend::VolumeBackend;
use crate::engine::attach::Attachments;
use crate::engine::jobs::Jobs;
use crate::engine::locks::Locks;
use crate::engine::snapshots::Snapshots;
use crate::engine::stage::Stages;
use crate::error::{Error, Result};
use crate::journal::Journal;
use crate::model::capacity::WantedCapacity;
use crate::model::ids::VolumeId;
use crate::model::name::VolumeName;
use crate::model::parameters::Parameters;
use crate::model::records::{Source, VolumeRecord};

#[derive(Debug)]
pub(crate) struct VolumeSpec {
    pub(crate) name: VolumeName,
    pub(crate) capacity: WantedCapacity,
    pub(crate) parameters: Parameters,
    pub(crate) source: Option<Source>,
}

/// Creates and deletes volumes.
#[derive(Debug)]
pub(crate) struct Provisioner {
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) locks: Locks,
    pub(crate) jobs: Jobs,
    pub(crate) stages: Arc<Stages>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) attachments: Arc<Attachments>,
}

impl Provisioner {
    /// Creates the volume, or returns the existing one of that name if it matches the request.
    pub(crate) fn create(&self, volume_id: &VolumeId, spec: VolumeSpec) -> Result<VolumeRecord> {
        let found = match self.journal.find(volume_id)? {
            // No other operation is under way: a creation or deletion failed half-way.
            Some(found) if found.deleting => {
                self.finish_deletion(volume_id).map_err(|e| Error::uncleared(volume_id, e))?;
                None
            }
            // A volume from a source has data before its entry records that it is filled. This one
            // was being deleted on a disk without space for the deletion mark.
            Some(found)
                if found.filled && found.source.is_some() && self.backend.has_lost_volume(volume_id)? =>
            {
                self.delete(volume_id).map_err(|e| Error::uncleared(volume_id, e))?;
                None
            }
            found => found,
        };
        let record = match found {
            Some(found) => {
                check_same(&found, &spec)?;
                if found.filled {
                    // Its creation may have been interrupted.
                    return match self.backend.create(volume_id, found.allowance()) {
                        Ok(()) => Ok(found),
                        // The volume stays.
                        Err(e) => Err(Error::uncleared(volume_id, e)),
                    };
                }
                found
            }
            None => self.admit(volume_id, spec)?,
        };
        self.make(volume_id, record).or_else(|cause| self.undo_unless_copied(volume_id, cause))
    }

    /// Undoes what [`Self::make`] could not complete. A copy may end after its call has given up the wait.
    fn undo_unless_copied(&self, volume_id: &VolumeId, cause: Error) -> Result<VolumeRecord> {
        if self.jobs.find(volume_id.as_str()).is_some() {
            // The copy continues; the repeated call waits for it again.
            return Err(cause);
        }
        // A copy records that it is complete before it leaves the list.
        match self.journal.find(volume_id) {
            Ok(Some(made)) if made.source.is_some() && made.filled => Ok(made),
            _ => Err(Error::rolled_back(cause, self.delete(volume_id))),
        }
    }

    fn admit(&self, volume_id: &VolumeId, spec: VolumeSpec) -> Result<VolumeRecord> {
        let capacity_bytes = match &spec.source {
            None => spec.capacity.choose(),
            Some(source) => spec.capacity.choose_for(source, self.snapshots.source_bytes(source)?)?,
        };
        self.backend.check_no_volume(volume_id)?;
        let keeper = self.stages.daemons.keeper.keeps_connections();
        let policies = self.backend.policies(spec.parameters.wanted_policies(), keeper)?;
        let mut record = VolumeRecord::new(spec.name, capacity_bytes, spec.parameters);
        record.policies = Some(policies);
        record.filled = spec.source.is_none();
        record.source = spec.source;
        self.journal.admit(volume_id, &record, self.backend.room()?)?;
        Ok(record)
    }

    fn make(&self, volume_id: &VolumeId, mut record: VolumeRecord) -> Result<VolumeRecord> {
        if record.filled {
            self.backend.create(volume_id, record.allowance())?;
        } else {
            self.snapshots.fill_volume(volume_id, &mut record)?;
        }
        Ok(record)
    }

    /// Deletes the volume with its data. One that does not exist is a success.
    pub(crate) fn delete(&self, volume_id: &VolumeId) -> Result<()> {
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        self.attachments.check_detached(volume_id, &record)?;
        self.stages.forget_unmounted_targets(volume_id, &mut record)?;
        if let Some(path) = record.targets.keys().next() {
            return Err(Error::StillPublished { volume_id: volume_id.clone(), path: path.clone() });
        }
        self.locks.check_not_copied(volume_id)?;
        if record.stage.is_some() {
            self.stages.check_unused(volume_id, &mut record)?;
            self.stages.tear_down(volume_id, &mut record)?;
        }
        self.stages.end_parked(volume_id, &mut record)?;
        self.snapshots.stop_filling(volume_id)?;
        if !record.deleting {
            record.deleting = true;
            self.journal.put_deleting(volume_id, &record)?;
        }
        self.finish_deletion(volume_id)
    }

    pub(crate) fn finish_deletion(&self, volume_id: &VolumeId) -> Result<()> {
        self.backend.delete(volume_id)?;
        self.journal.remove(volume_id)
    }
}

fn check_same(found: &VolumeRecord, spec: &VolumeSpec) -> Result<()> {
    let otherwise = |what, found_value: String, wanted: String| {
        let name = found.name.as_str().to_owned();
        Err(Error::ExistsOtherwise { name, what, found: found_value, wanted })
    };
    if !spec.capacity.admits(found.capacity_bytes) {
        return otherwise(
            "a capacity of",
            format!("{} bytes", found.capacity_bytes),
            spec.capacity.to_string(),
        );
    }
    if found.source != spec.source {
        let shown = |source: &Option<Source>| source.as_ref().map_or("none".to_owned(), Source::to_string);
        return otherwise("the content source", shown(&found.source), shown(&spec.source));
    }
    if found.parameters != spec.parameters {
        return otherwise("the parameters", found.parameters.to_string(), spec.parameters.to_string());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;

    use super::*;
    use crate::config::{Config, Flags};
    use crate::engine::driver::{self, Driver};
    use crate::journal;
    use crate::model::snapshot_mode::SnapshotMode;

    fn driver_in(dir: &Path) -> Driver {
        let path = |name: &str| dir.join(name).display().to_string();
        let dirs =
            ["pool", "state-dir", "run-dir", "kubelet-dir"].map(|name| (format!("--{name}"), path(name)));
        let flags = "hawser-csi --node-id n --launcher process --volume-binary /v --keeper-binary none";
        let words =
            flags.split(' ').map(str::to_owned).chain(dirs.into_iter().flat_map(|(flag, at)| [flag, at]));
        let config = Config::check(Flags::try_parse_from(words).unwrap()).unwrap();
        let of_journal = journal::dirs(&config.state_dir);
        for dir in of_journal.iter().chain([&config.run_dir, &config.kubelet_dir]) {
            std::fs::create_dir_all(dir).unwrap();
        }
        let backend = driver::backend(&config).unwrap();
        let (driver, _notices) = Driver::open(config, backend).unwrap();
        driver
    }

    fn create(driver: &Driver, name: &str, source: Option<Source>) -> VolumeId {
        let name = VolumeName::parse(name).unwrap();
        let id = VolumeId::for_name(&name);
        let parameters =
            Parameters { snapshot_mode: Some(SnapshotMode::BlockingCopy), ..Parameters::default() };
        let capacity = WantedCapacity::parse(None).unwrap();
        driver.provisioner.create(&id, VolumeSpec { name, capacity, parameters, source }).unwrap();
        id
    }

    /// A driver with a clone, and a file that the clone's source lacks.
    fn cloned(dir: &Path) -> (Driver, VolumeId, std::path::PathBuf) {
        let driver = driver_in(dir);
        let source = create(&driver, "source", None);
        let clone = create(&driver, "clone", Some(Source::Volume(source)));
        let file = clone.under(&dir.join("pool/volumes")).join("data/file");
        std::fs::write(&file, "written after the copy").unwrap();
        (driver, clone, file)
    }

    fn timed_out(id: &VolumeId) -> Error {
        Error::Copying { what: format!("volume {id}"), done_bytes: 1, total_bytes: 2 }
    }

    #[tokio::test]
    async fn a_copy_that_ends_when_its_call_times_out_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (driver, clone, file) = cloned(dir.path());
        let made = driver.provisioner.undo_unless_copied(&clone, timed_out(&clone)).unwrap();
        assert!(made.filled && file.exists());
        assert_eq!(driver.journal.get(&clone).unwrap(), made);
    }

    #[tokio::test]
    async fn a_copy_that_fails_when_its_call_times_out_is_undone() {
        let dir = tempfile::tempdir().unwrap();
        let (driver, clone, file) = cloned(dir.path());
        let failed = VolumeRecord { filled: false, ..driver.journal.get(&clone).unwrap() };
        driver.journal.put(&clone, &failed).unwrap();
        let error = driver.provisioner.undo_unless_copied(&clone, timed_out(&clone)).unwrap_err();
        assert!(matches!(error, Error::Copying { .. }), "{error}");
        assert_eq!(driver.journal.find(&clone).unwrap(), None);
        assert!(!file.exists());
    }

    #[tokio::test]
    async fn a_copy_that_ended_since_its_record_was_read_is_not_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let (driver, clone, file) = cloned(dir.path());
        let mut read_before = VolumeRecord { filled: false, ..driver.journal.get(&clone).unwrap() };
        driver.snapshots.fill_volume(&clone, &mut read_before).unwrap();
        assert!(read_before.filled && file.exists());
    }
}
