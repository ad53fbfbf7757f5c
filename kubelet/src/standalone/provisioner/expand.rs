//! Expands the volume of a bound claim that asks for more (kubernetes-csi/external-resizer).

use std::time::Duration;

use proto::csi;

use super::{Failure, Shared};
use crate::clients::csi::Driver;
use crate::clients::csi_secrets::Secrets;
use crate::objects::{
    ClaimCondition, ClaimPhase, ConditionStatus, EventType, Object, PersistentVolume, PersistentVolumeClaim,
    Quantity, Resources, now,
};
use crate::store::{self, Store};
use crate::volumes::{FILE_SYSTEM_PENDING, Volumes, capability_of_volume};

const RESIZING: &str = "Resizing";
/// A pod is mounting the volume, which expands it too.
const MOUNTING: Duration = Duration::from_secs(1);

/// Whether the claim's volume has to grow, and something can be done about it now, or the claim
/// gave up. A file system that is not mounted grows when it is.
pub(super) fn is_due(store: &Store, volumes: &Volumes, claim: &PersistentVolumeClaim) -> bool {
    if claim.status.phase != ClaimPhase::Bound || claim.metadata.is_deleted() {
        return false;
    }
    if has_enough(claim) {
        return claim.has_condition(RESIZING);
    }
    let Some(volume) = store.volume(&claim.spec.volume_name) else { return false };
    if needs_controller(claim, &volume) {
        store.can_expand(claim)
    } else {
        volumes.has_writable(claim, &volume)
    }
}

pub(super) async fn expand(shared: &Shared, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    let store = &shared.store;
    if has_enough(claim) {
        return set_status(store, claim, None, None);
    }
    let Some(volume) = store.volume(&claim.spec.volume_name) else { return Ok(()) };
    if needs_controller(claim, &volume) {
        on_controller(shared, claim, &volume).await?;
    }
    let current = store.claim(&claim.metadata.namespace, &claim.metadata.name);
    if !current.is_some_and(|current| current.has_condition(FILE_SYSTEM_PENDING)) {
        return Ok(());
    }
    let expanded = shared.volumes.expand_file_system(claim, &volume).await;
    if !expanded.map_err(|error| failed(error.text()))? {
        tokio::time::sleep(MOUNTING).await;
    }
    Ok(())
}

fn has_enough(claim: &PersistentVolumeClaim) -> bool {
    requested(claim) <= size(&claim.status.capacity)
}

fn needs_controller(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    !claim.has_condition(FILE_SYSTEM_PENDING) || size(&volume.spec.capacity) < requested(claim)
}

async fn on_controller(
    shared: &Shared,
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
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
    let grow = |volume: &mut PersistentVolume| {
        volume.spec.capacity.insert("storage".to_owned(), Quantity::from_bytes(bytes));
    };
    let Some(volume) = store.update_volume(volume, grow).map_err(not_kept)? else { return Ok(()) };
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
    let change = |claim: &mut PersistentVolumeClaim| {
        if condition.is_none_or(|condition| !claim.has_condition(condition)) {
            claim.status.conditions = condition.into_iter().map(begun).collect();
        }
        if let Some(capacity) = capacity {
            claim.status.capacity.clone_from(capacity);
        }
    };
    store.update_bound_claim(claim, change).map(drop).map_err(not_kept)
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
