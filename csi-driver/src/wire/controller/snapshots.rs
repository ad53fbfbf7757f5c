//! Snapshots and the content sources of new volumes, the gRPC side.

use std::collections::HashMap;
use std::sync::Arc;

use proto::csi::list_snapshots_response::Entry;
use proto::csi::{
    CreateSnapshotRequest, CreateSnapshotResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
    GetSnapshotRequest, GetSnapshotResponse, ListSnapshotsRequest, ListSnapshotsResponse, Snapshot,
    VolumeContentSource, volume_content_source,
};
use tonic::{Response, Status};

use super::{required_id, wire_bytes};
use crate::engine::driver::Driver;
use crate::engine::locks::Lock;
use crate::engine::snapshots::SnapshotSpec;
use crate::error::{Error, Result};
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::name::VolumeName;
use crate::model::parameters::{KUBERNETES_PREFIX, parse_snapshot_mode};
use crate::model::records::{SnapshotPhase, SnapshotRecord, Source};
use crate::model::sizes;
use crate::model::snapshot_mode::SnapshotMode;
use crate::wire::call::{refused, refused_creation, run, run_creation};
use crate::wire::pages;

type Reply<T> = std::result::Result<Response<T>, Status>;

pub(super) async fn create(
    driver: &Arc<Driver>,
    request: CreateSnapshotRequest,
) -> Reply<CreateSnapshotResponse> {
    let name = "csi.CreateSnapshot";
    let created = request.name.clone();
    let spec = parse_create(request).map_err(|e| refused_creation(name, &created, &e))?;
    let id = SnapshotId::for_name(&spec.name);
    let snapshot_id = id.clone();
    let make = move |driver: &Arc<Driver>| driver.snapshots.create_snapshot(&snapshot_id, spec);
    let record = run_creation(driver, name, (Lock::Snapshot(id.as_str()), &created), make).await?;
    Ok(Response::new(CreateSnapshotResponse { snapshot: Some(wire_snapshot(&id, &record)) }))
}

pub(super) async fn delete(
    driver: &Arc<Driver>,
    request: DeleteSnapshotRequest,
) -> Reply<DeleteSnapshotResponse> {
    let name = "csi.DeleteSnapshot";
    let parse = || {
        sizes::bounded_map("secrets", &request.secrets)?;
        required_id("snapshot_id", request.snapshot_id)
    };
    let snapshot_id = parse().map_err(|e| refused(name, &e))?;
    // An id that this driver never issued does not exist: deleted.
    if let Some(id) = SnapshotId::parse(&snapshot_id) {
        run(driver, name, Lock::Snapshot(&snapshot_id), move |driver| driver.snapshots.delete_snapshot(&id))
            .await?;
    }
    Ok(Response::new(DeleteSnapshotResponse {}))
}

pub(super) fn list(driver: &Driver, request: &ListSnapshotsRequest) -> Reply<ListSnapshotsResponse> {
    driver.list_snapshots(request).map(Response::new).map_err(|e| refused("csi.ListSnapshots", &e))
}

pub(super) fn get(driver: &Driver, request: GetSnapshotRequest) -> Reply<GetSnapshotResponse> {
    driver.get_snapshot(request).map(Response::new).map_err(|e| refused("csi.GetSnapshot", &e))
}

impl Driver {
    fn list_snapshots(&self, request: &ListSnapshotsRequest) -> Result<ListSnapshotsResponse> {
        sizes::bounded_map("secrets", &request.secrets)?;
        let page = pages::page(request.max_entries, &request.starting_token, SnapshotId::parse)?;
        let mut snapshots = self.journal.snapshots().list();
        snapshots.retain(|(id, record)| {
            let wanted = |filter: &str, value: &str| filter.is_empty() || filter == value;
            is_shown(record)
                && wanted(&request.snapshot_id, id.as_str())
                && wanted(&request.source_volume_id, record.source.as_str())
        });
        let (entries, next_token) = page.cut(snapshots);
        let entry =
            |(id, record): &(SnapshotId, SnapshotRecord)| Entry { snapshot: Some(wire_snapshot(id, record)) };
        Ok(ListSnapshotsResponse { entries: entries.iter().map(entry).collect(), next_token })
    }

    fn get_snapshot(&self, request: GetSnapshotRequest) -> Result<GetSnapshotResponse> {
        sizes::bounded_map("secrets", &request.secrets)?;
        let snapshot_id = required_id("snapshot_id", request.snapshot_id)?;
        let unknown = || Error::UnknownSnapshot { snapshot_id: snapshot_id.clone() };
        let id = SnapshotId::parse(&snapshot_id).ok_or_else(unknown)?;
        let record = self.journal.snapshots().get(&id)?;
        record.check_not_failed(&id)?;
        if !is_shown(&record) {
            return Err(unknown());
        }
        Ok(GetSnapshotResponse { snapshot: Some(wire_snapshot(&id, &record)) })
    }
}

/// CreateSnapshot has answered it, and DeleteSnapshot has not begun.
fn is_shown(record: &SnapshotRecord) -> bool {
    !record.deleting && record.phase != SnapshotPhase::Begun
}

fn wire_snapshot(id: &SnapshotId, record: &SnapshotRecord) -> Snapshot {
    Snapshot {
        // The smallest capacity of a volume that is made from it.
        size_bytes: wire_bytes(record.source_capacity_bytes),
        snapshot_id: id.to_string(),
        source_volume_id: record.source.to_string(),
        creation_time: Some(record.created.into()),
        ready_to_use: record.phase == SnapshotPhase::Ready,
        ..Default::default()
    }
}

fn parse_create(request: CreateSnapshotRequest) -> Result<SnapshotSpec> {
    let source = required_id("source_volume_id", request.source_volume_id)?;
    let name = VolumeName::parse(&request.name)?;
    sizes::bounded("source_volume_id", &source)?;
    sizes::bounded_map("secrets", &request.secrets)?;
    let mode = parse_parameters(&request.parameters)?;
    Ok(SnapshotSpec { name, source, mode })
}

const SNAPSHOT_MODE: &str = "snapshotMode";

/// VolumeSnapshotClass parameters; the snapshotter passes them to CreateSnapshot.
fn parse_parameters(parameters: &HashMap<String, String>) -> Result<Option<SnapshotMode>> {
    sizes::bounded_map("parameters", parameters)?;
    let mut mode = None;
    for (name, value) in parameters {
        match name.as_str() {
            SNAPSHOT_MODE => mode = Some(parse_snapshot_mode("parameters.snapshotMode", value)?),
            name if name.starts_with(KUBERNETES_PREFIX) => {}
            _ => {
                return Err(Error::UnknownParameter { name: name.clone(), known: SNAPSHOT_MODE.to_owned() });
            }
        }
    }
    Ok(mode)
}

/// The source in the request; whether it exists is checked later.
pub(super) fn parse_source(source: VolumeContentSource) -> Result<Source> {
    match source.r#type {
        Some(volume_content_source::Type::Snapshot(snapshot)) => {
            let id = required_id("volume_content_source.snapshot.snapshot_id", snapshot.snapshot_id)?;
            SnapshotId::parse(&id).map(Source::Snapshot).ok_or(Error::UnknownSnapshot { snapshot_id: id })
        }
        Some(volume_content_source::Type::Volume(volume)) => {
            let id = required_id("volume_content_source.volume.volume_id", volume.volume_id)?;
            VolumeId::parse(&id).map(Source::Volume).ok_or(Error::UnknownVolume { volume_id: id })
        }
        None => Err(Error::MissingField { field: "volume_content_source.type" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(change: impl FnOnce(&mut CreateSnapshotRequest)) -> Result<SnapshotSpec> {
        let mut request = CreateSnapshotRequest {
            source_volume_id: "vol-x".into(),
            name: "s".into(),
            ..Default::default()
        };
        change(&mut request);
        parse_create(request)
    }

    #[test]
    fn what_is_missing_or_wrong_in_a_request_is_named() {
        let with = |name: &str, value: &str| {
            request(|r| drop(r.parameters.insert(name.to_owned(), value.to_owned())))
        };
        for (refused, message) in [
            (request(|r| r.source_volume_id.clear()), "source_volume_id is required"),
            (request(|r| r.name.clear()), "name is required"),
            (
                with("snapshotMode", "copy"),
                "parameters.snapshotMode: \"copy\": known are reflink and blocking-copy",
            ),
            (
                with("snapshotmode", "reflink"),
                "parameters: unknown parameter \"snapshotmode\": known are snapshotMode",
            ),
        ] {
            assert_eq!(refused.unwrap_err().to_string(), message);
        }
        let accepted = with("csi.storage.k8s.io/volumesnapshot/name", "x").unwrap();
        assert_eq!(accepted.mode, None);
        assert_eq!(with("snapshotMode", "blocking-copy").unwrap().mode, Some(SnapshotMode::BlockingCopy));
    }
}
