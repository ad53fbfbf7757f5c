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
use crate::error::{Result, chain};
use crate::model::ids::VolumeId;
use crate::model::records::{StageRecord, VolumeRecord};
use crate::wire::pages;

impl Driver {
    /// Pages of all volumes by id, from the journal alone: without access to volumes, pool or mount
    /// table.
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
                    volume_condition: Some(listed_condition(record)),
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

    pub(super) fn get_volume(&self, id: &VolumeId) -> Result<ControllerGetVolumeResponse> {
        let record = self.journal.get(id)?;
        let condition = match &record.stage {
            Some(stage) => match health(id, stage)? {
                Health::Serving(staged) => match self.statistics.problem(id, stage, &staged)? {
                    None => normal("served"),
                    Some(message) => abnormal(message),
                },
                Health::DaemonDead => daemon_ended(),
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

fn listed_condition(record: &VolumeRecord) -> VolumeCondition {
    match &record.stage {
        None => normal(UNSTAGED),
        Some(StageRecord { serving: None, .. }) => being_staged(),
        Some(StageRecord { serving: Some(serving), .. }) => match serving.daemon.is_alive() {
            Ok(true) => normal("served"),
            Ok(false) => daemon_ended(),
            Err(e) => abnormal(format!("look at daemon: {}", chain(&e))),
        },
    }
}

fn daemon_ended() -> VolumeCondition {
    abnormal("the volume's daemon ended: reads and writes fail with ENOTCONN")
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
