//! A claim's data source: a snapshot, or another claim whose volume is cloned (external-provisioner,
//! pkg/controller: `getVolumeContentSource`).

use std::collections::HashSet;
use std::sync::Arc;

use super::begun::{Begun, Handle, is_noted};
use crate::clients::csi::ControllerCapabilities;
use crate::objects::{
    ClaimPhase, CsiVolumeSource, DataSource, PersistentVolumeClaim, Quantity, StorageClass, VolumeSnapshot,
    VolumeSnapshotContent,
};
use crate::store::Store;

/// A source that can be used now.
enum Found {
    Snapshot { snapshot: Arc<VolumeSnapshot>, content: Arc<VolumeSnapshotContent> },
    Claim { name: String, driver: String, volume_handle: String, bytes: u64 },
}

/// Returns what the claim has to wait for: its source does not exist yet, or is not ready.
pub(super) fn check(claim: &PersistentVolumeClaim, store: &Store) -> Result<(), String> {
    find(claim, store).map(drop)
}

/// The source for CreateVolume; `None` for an empty volume.
pub(super) fn handle(
    store: &Store,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    can: ControllerCapabilities,
) -> Result<Option<Handle>, String> {
    let Some(found) = find(claim, store)? else { return Ok(None) };
    let requested = claim.spec.resources.requests.get("storage").map_or(0, Quantity::value);
    let provisioner = &class.provisioner;
    Ok(Some(match found {
        Found::Snapshot { snapshot, content } => {
            let name = &snapshot.metadata.name;
            if !can.snapshot {
                return Err(format!("driver {provisioner} does not support snapshots"));
            }
            if content.spec.driver != *provisioner {
                let driver = &content.spec.driver;
                return Err(format!(
                    "snapshot {name} is of driver {driver}, the class of driver {provisioner}"
                ));
            }
            let least = snapshot.status.restore_size.as_ref().map_or(0, Quantity::value);
            if requested < least {
                return Err(format!(
                    "requested volume size {requested} is less than the size {least} for the source snapshot {name}"
                ));
            }
            Handle::Snapshot(content.status.snapshot_handle.clone())
        }
        Found::Claim { name, driver, volume_handle, bytes } => {
            if !can.clone {
                return Err(format!("driver {provisioner} does not support clones of volumes"));
            }
            if driver != *provisioner {
                return Err(format!(
                    "the source PVC {name} is of driver {driver}, the class of driver {provisioner}"
                ));
            }
            if requested < bytes {
                return Err(format!(
                    "new PVC request must be greater than or equal in size to the specified PVC data source, \
                     requested {requested} but source is {bytes}"
                ));
            }
            Handle::Volume(volume_handle)
        }
    }))
}

fn find(claim: &PersistentVolumeClaim, store: &Store) -> Result<Option<Found>, String> {
    let Some(source) = claim.spec.source() else { return Ok(None) };
    let namespace = &claim.metadata.namespace;
    let found = match source.kind.as_str() {
        "VolumeSnapshot" => snapshot(store, namespace, &source.name)?,
        _ => source_claim(store, namespace, &source.name)?,
    };
    Ok(Some(found))
}

fn snapshot(store: &Store, namespace: &str, name: &str) -> Result<Found, String> {
    let waiting = |why: &str| format!("waiting for the data source: snapshot {name} {why}");
    let snapshot = store.snapshot(namespace, name).ok_or_else(|| waiting("not found"))?;
    // A deleted snapshot is kept for the claim, which may use it.
    let content = store.snapshot_content(&snapshot.status.bound_volume_snapshot_content_name);
    let content = content.ok_or_else(|| waiting("is not bound"))?;
    if content.spec.volume_snapshot_ref.uid != snapshot.metadata.uid {
        return Err(waiting("is bound to the content of another snapshot"));
    }
    if snapshot.status.ready_to_use != Some(true) || content.status.snapshot_handle.is_empty() {
        return Err(waiting("is not ready"));
    }
    Ok(Found::Snapshot { snapshot, content })
}

fn source_claim(store: &Store, namespace: &str, name: &str) -> Result<Found, String> {
    let waiting = |why: &str| format!("waiting for the data source: PVC {name} {why}");
    let claim = store.claim(namespace, name).ok_or_else(|| waiting("not found"))?;
    if claim.metadata.is_deleted() {
        return Err(waiting("is currently being deleted"));
    }
    if claim.status.phase != ClaimPhase::Bound {
        return Err(waiting("is not bound"));
    }
    let volume = store.volume(&claim.spec.volume_name).ok_or_else(|| waiting("has lost its volume"))?;
    let csi = volume.spec.csi.clone().ok_or_else(|| waiting("is not of a CSI driver"))?;
    let bytes = volume.spec.capacity.get("storage").map_or(0, Quantity::value);
    let CsiVolumeSource { driver, volume_handle, .. } = csi;
    Ok(Found::Claim { name: name.to_owned(), driver, volume_handle, bytes })
}

/// The claims that are about to be made from this source. It is kept until they are: a deleted claim
/// too, if its CreateVolume may have begun, because it is among the `running` or its outcome is not known.
pub(super) fn claims_from(
    store: &Store,
    kind: &str,
    namespace: &str,
    name: &str,
    running: &HashSet<String>,
) -> Vec<Arc<PersistentVolumeClaim>> {
    let is_it = |source: Option<&DataSource>| source.is_some_and(|s| s.kind == kind && s.name == name);
    let mut claims = store.claims();
    claims.retain(|claim| {
        // A claim may have another source by now than its CreateVolume.
        let uses =
            is_it(claim.spec.source()) || Begun::of(claim).is_some_and(|begun| is_it(begun.data_source()));
        uses && claim.metadata.namespace == namespace
            && claim.status.phase == ClaimPhase::Pending
            && (!claim.metadata.is_deleted() || running.contains(&claim.metadata.uid) || is_noted(claim))
    });
    claims
}
