//! Expands the volume of a bound claim that asks for more (kubernetes-csi/external-resizer).

use std::time::Duration;

use proto::csi;

use super::{Failure, Shared};
use crate::csi::Driver;
use crate::csi_secrets::Secrets;
use crate::objects::{
    ClaimCondition, ClaimPhase, ConditionStatus, EventType, Object, PersistentVolume, PersistentVolumeClaim,
    Quantity, Resources, now,
};
use crate::standalone::store::{self, Store};
use crate::volumes::{FILE_SYSTEM_PENDING, Volumes, capability_of_volume};

const RESIZING: &str = "Resizing";
/// A pod is mounting the volume, which expands it too.
const MOUNTING: Duration = Duration::from_secs(1);

/// Whether the claim's volume has to grow, and something can be done about it now. A file system
/// that is not mounted grows when it is.
pub(super) fn is_due(store: &Store, volumes: &Volumes, claim: &PersistentVolumeClaim) -> bool {
    if claim.status.phase != ClaimPhase::Bound
        || claim.metadata.is_deleted()
        || requested(claim) <= size(&claim.status.capacity)
    {
        return false;
    }
    let Some(volume) = store.volume(&claim.spec.volume_name) else { return false };
    let csi = volume.spec.csi.as_ref();
    needs_controller(claim, &volume)
        || csi.is_some_and(|csi| volumes.is_mounted(&csi.driver, &csi.volume_handle))
}

pub(super) async fn expand(shared: &Shared, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    let store = &shared.store;
    let Some(mut volume) = store.volume(&claim.spec.volume_name).map(|volume| (*volume).clone()) else {
        return Ok(());
    };
    if needs_controller(claim, &volume) {
        on_controller(shared, claim, &mut volume).await?;
    }
    let Some(claim) = store.claim(&claim.metadata.namespace, &claim.metadata.name) else { return Ok(()) };
    if !claim.has_condition(FILE_SYSTEM_PENDING) {
        return Ok(());
    }
    let expanded = shared.volumes.expand_file_system(&claim, &volume).await;
    if !expanded.map_err(|error| failed(error.text()))? {
        tokio::time::sleep(MOUNTING).await;
    }
    Ok(())
}

fn needs_controller(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    !claim.has_condition(FILE_SYSTEM_PENDING) || size(&volume.spec.capacity) < requested(claim)
}

async fn on_controller(
    shared: &Shared,
    claim: &PersistentVolumeClaim,
    volume: &mut PersistentVolume,
) -> Result<(), Failure> {
    let store = &shared.store;
    let name = volume.metadata.name.clone();
    let Some(csi) = volume.spec.csi.clone() else { return Ok(()) };
    let driver = shared.plugins.driver(&csi.driver).ok_or_else(|| {
        failed(format!(
            "driver {} is not registered: start it with this kubelet's root directory",
            csi.driver
        ))
    })?;
    let message = format!("External resizer is resizing volume {name}");
    shared.record_first(&claim.reference(), RESIZING, &message);
    set_status(store, claim, None, Some(RESIZING))?;
    let answer = call(shared, &driver, claim, volume).await.map_err(failed)?;
    let bytes = u64::try_from(answer.capacity_bytes).unwrap_or(0).max(requested(claim));
    volume.spec.capacity.insert("storage".to_owned(), Quantity::from_bytes(bytes));
    store.put_volume(volume.clone()).map_err(not_kept)?;
    if answer.node_expansion_required {
        let message = "Require file system resize of volume on node";
        store.record(&claim.reference(), EventType::Normal, "FileSystemResizeRequired", message);
        return set_status(store, claim, None, Some(FILE_SYSTEM_PENDING));
    }
    set_status(store, claim, Some(&volume.spec.capacity), None)?;
    store.record(&claim.reference(), EventType::Normal, "VolumeResizeSuccessful", "Resize volume succeeded");
    Ok(())
}

/// A driver that expands only on the node has nothing to do here.
async fn call(
    shared: &Shared,
    driver: &Driver,
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Result<csi::ControllerExpandVolumeResponse, String> {
    let can = driver.controller_capabilities().await.map_err(|e| e.to_string())?;
    let node = driver.node_capabilities().await.map_err(|e| e.to_string())?;
    if !can.expand && node.expand {
        let (capacity_bytes, node_expansion_required) = (0, true);
        return Ok(csi::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required });
    }
    if !can.expand {
        return Err(format!("driver {} does not support the expansion of volumes", driver.name()));
    }
    let csi = volume.spec.csi.as_ref().ok_or("it has no CSI volume")?;
    let secrets = Secrets::read(&shared.store, csi.controller_expand_secret_ref.as_ref());
    let request = csi::ControllerExpandVolumeRequest {
        volume_id: csi.volume_handle.clone(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: i64::try_from(requested(claim)).unwrap_or(i64::MAX),
            limit_bytes: 0,
        }),
        secrets: secrets.map_err(|e| e.to_string())?.into_map(),
        volume_capability: Some(capability_of_volume(volume, node, None).map_err(|e| e.text())?),
    };
    driver
        .controller_expand_volume(request)
        .await
        .map_err(|e| format!("resize volume \"{}\" by resizer: {e}", volume.metadata.name))
}

/// Sets the claim's conditions to `condition` alone, and its capacity.
fn set_status(
    store: &Store,
    claim: &PersistentVolumeClaim,
    capacity: Option<&Resources>,
    condition: Option<&str>,
) -> Result<(), Failure> {
    let metadata = &claim.metadata;
    let current = store.claim(&metadata.namespace, &metadata.name).filter(|c| c.metadata.uid == metadata.uid);
    let Some(current) = current else { return Ok(()) };
    let mut claim = (*current).clone();
    if condition.is_none_or(|condition| !claim.has_condition(condition)) {
        claim.status.conditions = condition.into_iter().map(begun).collect();
    }
    if let Some(capacity) = capacity {
        claim.status.capacity.clone_from(capacity);
    }
    if claim == *current {
        return Ok(());
    }
    store.put_bound_claim(claim).map_err(not_kept)
}

fn begun(condition: &str) -> ClaimCondition {
    let message = match condition {
        FILE_SYSTEM_PENDING => {
            "Waiting for user to (re-)start a pod to finish file system resize of volume on node."
        }
        _ => "",
    };
    ClaimCondition {
        condition_type: condition.to_owned(),
        status: ConditionStatus::True,
        last_transition_time: Some(now()),
        message: message.to_owned(),
    }
}

fn requested(claim: &PersistentVolumeClaim) -> u64 {
    size(&claim.spec.resources.requests)
}

fn size(amounts: &Resources) -> u64 {
    amounts.get("storage").map_or(0, Quantity::value)
}

fn failed(message: String) -> Failure {
    Failure { reason: "VolumeResizeFailed", message }
}

fn not_kept(error: store::Error) -> Failure {
    failed(linux::chain(&error))
}
