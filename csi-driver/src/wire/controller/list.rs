//! ListVolumes and ControllerGetVolume: the volumes in the journal, and whether staged ones are
//! still served.

use proto::csi::list_volumes_response::{Entry, VolumeStatus};
use proto::csi::{
    ControllerGetVolumeResponse, ListVolumesRequest, ListVolumesResponse, Volume, VolumeCondition,
    controller_get_volume_response,
};

use super::wire_volume;
use crate::engine::driver::Driver;
use crate::engine::health::{Health, health};
use crate::engine::statistics::WAITS;
use crate::error::{Result, chain};
use crate::model::ids::VolumeId;
use crate::model::records::VolumeRecord;
use crate::wire::pages;

impl Driver {
    /// Pages of all volumes by id, from journal and keeper alone: without access to volumes, pool or
    /// mount table.
    pub(super) fn list_volumes(&self, request: &ListVolumesRequest) -> Result<ListVolumesResponse> {
        let page = pages::page(request.max_entries, &request.starting_token, VolumeId::parse)?;
        let mut entries = self.journal.entries();
        entries.retain(|(_, record)| record.as_ref().map_or(true, is_shown));
        let (entries, next_token) = page.cut(entries);
        let entries = entries.into_iter().map(|(id, record)| self.entry(&id, &record)).collect();
        Ok(ListVolumesResponse { entries, next_token })
    }

    fn entry(&self, id: &VolumeId, record: &Result<VolumeRecord>) -> Entry {
        match record {
            Ok(record) => Entry {
                volume: Some(wire_volume(id, record, self)),
                status: Some(VolumeStatus {
                    published_node_ids: record.attachments.keys().cloned().collect(),
                    volume_condition: Some(self.listed_condition(id, record)),
                }),
            },
            Err(unreadable) => Entry {
                volume: Some(Volume { volume_id: id.to_string(), ..Default::default() }),
                status: Some(VolumeStatus {
                    published_node_ids: Vec::new(),
                    volume_condition: Some(abnormal(unreadable)),
                }),
            },
        }
    }

    fn listed_condition(&self, id: &VolumeId, record: &VolumeRecord) -> VolumeCondition {
        let Some(stage) = &record.stage else { return normal(UNSTAGED) };
        let Some(serving) = stage.serving else { return being_staged() };
        match serving.daemon.is_alive() {
            Ok(true) => normal("served"),
            // A takeover may be under way, which takes moments.
            Ok(false) if self.statistics.is_followed(id, stage) => normal(WAITS),
            Ok(false) => abnormal(self.statistics.why_dead(id)),
            Err(e) => abnormal(format!("look at daemon: {}", chain(&e))),
        }
    }

    pub(super) fn get_volume(&self, id: &VolumeId) -> Result<ControllerGetVolumeResponse> {
        let record = self.journal.get(id)?;
        let condition = match &record.stage {
            Some(stage) => match health(id, stage)? {
                Health::Serving(staged) => match self.statistics.problem(id, stage, &staged)? {
                    None => normal("served"),
                    Some(message) => abnormal(message),
                },
                Health::DaemonDead => abnormal(self.statistics.after_end(id, stage)),
                Health::Displaced(_) => abnormal("served, and not mounted where it is staged any more"),
                Health::Unmounted => abnormal("staged, and not mounted any more"),
                Health::HalfDone => being_staged(),
            },
            None => normal(UNSTAGED),
        };
        Ok(ControllerGetVolumeResponse {
            volume: Some(wire_volume(id, &record, self)),
            status: Some(controller_get_volume_response::VolumeStatus {
                published_node_ids: record.attachments.keys().cloned().collect(),
                volume_condition: Some(condition),
            }),
        })
    }
}

const UNSTAGED: &str = "not staged";

/// CreateVolume has answered it, and DeleteVolume has not begun.
fn is_shown(record: &VolumeRecord) -> bool {
    !record.deleting && record.filled
}

fn being_staged() -> VolumeCondition {
    normal("being staged")
}

fn normal(message: &str) -> VolumeCondition {
    VolumeCondition { abnormal: false, message: message.to_owned() }
}

fn abnormal(message: impl ToString) -> VolumeCondition {
    VolumeCondition { abnormal: true, message: message.to_string() }
}
