//! Rewrites a vol_data.json that is unreadable while its volume is mounted: the disk has corrupted
//! it, since a power cut would have ended all mounts. The PersistentVolume has the same data.

use std::ffi::OsStr;
use std::path::Path;

use serde::Serialize;

use super::layout::{self, PublishData, StageData};
use super::{Error, Shared};
use crate::objects::{EventType, ObjectRef};
use crate::store::UNREADABLE_RECORD;

impl Shared {
    /// [`layout::read_vol_data`] of a pod's volume; rewrites an unreadable file.
    pub(super) fn publish_data(&self, dir: &Path) -> Result<Option<PublishData>, Error> {
        let unreadable = match layout::read_vol_data(dir) {
            Err(error) => error,
            found => return found,
        };
        let volume = dir.file_name().and_then(OsStr::to_str).and_then(|name| self.store.volume(name));
        let Some((name, csi)) = volume.and_then(|v| Some((v.metadata.name.clone(), v.spec.csi.clone()?)))
        else {
            return Err(unreadable);
        };
        let node_name = self.store.node_name().to_owned();
        let data = PublishData {
            spec_vol_id: name,
            attachment_id: layout::attachment_id(&csi.volume_handle, &csi.driver, &node_name),
            volume_handle: csi.volume_handle,
            driver_name: csi.driver,
            node_name,
            volume_lifecycle_mode: "Persistent".to_owned(),
        };
        self.write_anew(dir, &data, &unreadable)?;
        Ok(Some(data))
    }

    /// The same for a staged volume; also `None` if no PersistentVolume is staged there. A pod that
    /// wants it stages it again.
    pub(super) fn stage_data(&self, dir: &Path) -> Result<Option<StageData>, Error> {
        let unreadable = match layout::read_vol_data(dir) {
            Err(error) => error,
            found => return found,
        };
        let staged_here = self.store.volumes().into_iter().find_map(|volume| {
            let csi = volume.spec.csi.clone()?;
            (self.layout.stage_dir(&csi.driver, &csi.volume_handle) == dir).then_some(csi)
        });
        let Some(csi) = staged_here else { return Err(unreadable) };
        let data = StageData { volume_handle: csi.volume_handle, driver_name: csi.driver };
        self.write_anew(dir, &data, &unreadable)?;
        Ok(Some(data))
    }

    fn write_anew(&self, dir: &Path, data: &impl Serialize, unreadable: &Error) -> Result<(), Error> {
        // Four path components identify the pod or the driver.
        let mut names: Vec<_> = dir.iter().rev().take(4).map(OsStr::to_string_lossy).collect();
        names.reverse();
        names.push(layout::VOL_DATA.into());
        let kept = self.store.keep_unreadable(&dir.join(layout::VOL_DATA), &names.join("_"));
        layout::write_vol_data(dir, data)?;
        self.report_unreadable(unreadable, &format!("rewritten from its PersistentVolume; {kept}"));
        Ok(())
    }

    pub(super) fn report_unreadable(&self, error: &Error, outcome: &str) {
        let message = format!("{}: {outcome}", error.text());
        tracing::warn!(message);
        let node = ObjectRef::node(self.store.node_name());
        self.sinks.record(&node, EventType::Warning, UNREADABLE_RECORD, &message);
    }
}
