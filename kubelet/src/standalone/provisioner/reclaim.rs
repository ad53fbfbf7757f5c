//! Reclaims an explicitly deleted claim: deletes or releases its volume by its reclaim policy, then
//! removes the claim.

use std::collections::BTreeMap;
use std::sync::Arc;

use tracing::{debug, warn};

use super::create::{self, PROVISIONED_BY, deletion_secret};
use super::{Failure, Shared, TIMEOUT, pods_naming};
use crate::clients::csi_secrets::Secrets;
use crate::objects::{
    CsiVolumeSource, EventType, Object, OwnerReference, PersistentVolume, PersistentVolumeClaim, Pod,
    ReclaimPolicy, VolumePhase,
};
use crate::store::{self, Store};
use crate::volumes::Volumes;

/// The pods that name the claim, and those that have its volume mounted.
pub(crate) fn users_of_claim(
    store: &Store,
    volumes: &Volumes,
    claim: &PersistentVolumeClaim,
) -> Vec<Arc<Pod>> {
    let mut users: BTreeMap<String, Arc<Pod>> = BTreeMap::new();
    for pod in pods_naming(store, claim) {
        users.insert(pod.metadata.uid.clone(), pod);
    }
    if let Some(csi) = store.volume(&claim.spec.volume_name).and_then(|v| v.spec.csi.clone()) {
        let mounted = volumes.users(&csi.driver, &csi.volume_handle);
        for pod in store.pods().into_iter().filter(|p| mounted.contains(&p.metadata.uid)) {
            users.insert(pod.metadata.uid.clone(), pod);
        }
    }
    users.into_values().collect()
}

/// Marks the claims of ephemeral volumes whose pod is gone as deleted. Returns whether all are marked.
pub(super) fn mark_ownerless(store: &Store) -> bool {
    let is_gone = |owner: &OwnerReference| !store.has_pod(&owner.uid);
    let mut are_marked = true;
    for claim in store.claims() {
        let owners = &claim.metadata.owner_references;
        if owners.is_empty() || !owners.iter().all(is_gone) {
            continue;
        }
        if let Err(error) = store.update_claim(&claim, PersistentVolumeClaim::give_up) {
            warn!(error = linux::chain(&error), "cannot delete the claim of a pod that is gone");
            are_marked = false;
        }
    }
    are_marked
}

/// Every step is idempotent: an earlier attempt may have failed after any of them.
pub(super) async fn reclaim(shared: &Arc<Shared>, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    let store = &shared.store;
    create::finish(store, &shared.plugins, claim).await?;
    for volume in volumes_of(store, claim) {
        match release(store, &volume) {
            // Only the phase is not on disk: the claim's uid in the volume excludes other claims.
            Err(error) if error.is_full_disk() => {
                warn!(error = linux::chain(&error), "cannot record the volume's phase on a full disk");
            }
            kept => kept.map_err(not_kept)?,
        }
        if goes_with_its_claim(&volume) {
            let deleted = delete(shared, &volume, &claim.metadata.uid).await;
            deleted.inspect_err(|Failure { reason, message }| {
                store.record(&volume.reference(), EventType::Warning, reason, message);
            })?;
        }
    }
    let metadata = &claim.metadata;
    store.remove_claim(&metadata.namespace, &metadata.name).map_err(not_kept)
}

/// Records that the volume's claim is gone. Like Kubernetes, a volume that was not made for a claim and asks
/// for its deletion has failed: its driver may not have made it (pv_controller.go: findDeletablePlugin).
fn release(store: &Store, volume: &PersistentVolume) -> Result<(), store::Error> {
    let may_be_deleted = volume.spec.persistent_volume_reclaim_policy == ReclaimPolicy::Delete;
    if !may_be_deleted || goes_with_its_claim(volume) {
        store.update_volume(volume, |volume| volume.status.phase = VolumePhase::Released)?;
        return Ok(());
    }
    let message = format!(
        "volume {} is kept: it was not made for a claim, so no driver is asked to delete it; \
         delete the volume, or set persistentVolumeReclaimPolicy: Retain",
        volume.metadata.name
    );
    fail(store, volume, &message)
}

/// Records that the volume was applied with the uid of a claim that does not exist. If it was made for a claim,
/// Kubernetes deletes its data. The manifest may be a copy that is to restore the volume, so its data stay here.
fn release_unclaimed(store: &Store, volume: &PersistentVolume) -> Result<(), store::Error> {
    let Some(holder) = volume.spec.claim_ref.as_ref().filter(|_| goes_with_its_claim(volume)) else {
        return release(store, volume);
    };
    let message = format!(
        "volume {} is kept: it was applied for claim {}/{} with uid {}, which does not exist; \
         to use the volume, delete it, and apply it without spec.claimRef.uid",
        volume.metadata.name, holder.namespace, holder.name, holder.uid
    );
    fail(store, volume, &message)
}

fn fail(store: &Store, volume: &PersistentVolume, message: &str) -> Result<(), store::Error> {
    let mut has_failed = false;
    let fail = |volume: &mut PersistentVolume| {
        has_failed = volume.status.phase != VolumePhase::Failed;
        volume.status.phase = VolumePhase::Failed;
        message.clone_into(&mut volume.status.message);
    };
    store.update_volume(volume, fail)?;
    if has_failed {
        store.record(&volume.reference(), EventType::Warning, "VolumeFailedDelete", message);
    }
    Ok(())
}

/// The volumes that name this claim: several, if it was bound to another one than the driver made for it.
fn volumes_of(store: &Store, claim: &PersistentVolumeClaim) -> Vec<Arc<PersistentVolume>> {
    let mut volumes = store.volumes();
    volumes.retain(|v| v.spec.claim_ref.as_ref().is_some_and(|holder| holder.uid == claim.metadata.uid));
    volumes
}

fn goes_with_its_claim(volume: &PersistentVolume) -> bool {
    let is_provisioned = volume.metadata.annotations.contains_key(PROVISIONED_BY);
    is_provisioned && volume.spec.persistent_volume_reclaim_policy == ReclaimPolicy::Delete
}

/// Volumes whose deletion began but whose claims are missing: the claims' records were lost.
pub(super) fn half_deleted(store: &Store) -> Vec<Arc<PersistentVolume>> {
    let mut volumes = store.volumes();
    volumes.retain(|v| has_begun_to_go(v) && has_lost_its_claim(store, v));
    volumes
}

/// Whether [`delete`] removes the volume, at the latest as one of [`half_deleted`].
fn has_begun_to_go(volume: &PersistentVolume) -> bool {
    let (spec, is_released) = (&volume.spec, volume.status.phase == VolumePhase::Released);
    let had_a_claim = spec.claim_ref.as_ref().is_some_and(|claim| !claim.uid.is_empty());
    is_released && had_a_claim && spec.csi.is_some() && goes_with_its_claim(volume)
}

/// Whether the volume names a claim that does not exist.
fn has_lost_its_claim(store: &Store, volume: &PersistentVolume) -> bool {
    let holder = volume.spec.claim_ref.as_ref().filter(|holder| !holder.uid.is_empty());
    holder.is_some_and(|holder| {
        let claim = store.claim(&holder.namespace, &holder.name);
        claim.is_none_or(|claim| claim.metadata.uid != holder.uid)
    })
}

/// `subject`: the uid of the claim or volume that this is an attempt for.
pub(super) async fn delete(
    shared: &Arc<Shared>,
    volume: &PersistentVolume,
    subject: &str,
) -> Result<(), Failure> {
    let (store, name) = (&shared.store, &volume.metadata.name);
    let Some(csi) = &volume.spec.csi else { return Ok(()) };
    let failed = |message: String| Failure { reason: "VolumeFailedDelete", message };
    let driver = shared.plugins.driver(&csi.driver).ok_or_else(|| {
        failed(format!(
            "volume {name} is not deleted yet: driver {} is not registered; start it with this kubelet's root directory",
            csi.driver
        ))
    })?;
    // An earlier kubelet may have ended before NodeUnstageVolume.
    let unstaged = shared.volumes.until_unstaged(&csi.driver, &csi.volume_handle);
    if tokio::time::timeout(TIMEOUT, unstaged).await.is_err() {
        retry_once_unstaged(shared, csi, subject);
        return Err(failed(format!("volume {name} is not deleted yet: this node has not unstaged it")));
    }
    // Its policy may have become Retain meanwhile.
    if store.volume(name).is_none_or(|current| !goes_with_its_claim(&current)) {
        return Ok(());
    }
    // As in Kubernetes, a missing Secret does not keep the volume: its owner may have deleted it first.
    let secrets = Secrets::read(store, deletion_secret(volume).as_ref()).unwrap_or_else(|error| {
        warn!(volume = name, %error, "the volume is deleted without secrets");
        Secrets::default()
    });
    driver
        .delete_volume(&csi.volume_handle, secrets)
        .await
        .map_err(|e| failed(format!("volume {name}: {e}")))?;
    store.remove_volume(name).map_err(not_kept)
}

/// Ends the back-off of the attempt that is about to fail as soon as the volume is unstaged. The attempt
/// itself must not wait for that: the policy may become Retain.
fn retry_once_unstaged(shared: &Arc<Shared>, csi: &CsiVolumeSource, subject: &str) {
    if !shared.progress().unstaging.insert(subject.to_owned()) {
        return;
    }
    let (shared, csi, subject) = (Arc::clone(shared), csi.clone(), subject.to_owned());
    tokio::spawn(async move {
        shared.volumes.until_unstaged(&csi.driver, &csi.volume_handle).await;
        let mut progress = shared.progress();
        progress.unstaging.remove(&subject);
        if progress.running.contains(&subject) || progress.failed.contains_key(&subject) {
            progress.unstaged.insert(subject);
        }
        drop(progress);
        shared.ended.notify_one();
    });
}

/// Removes volumes that are marked deleted once no claim is bound to them; their data stays. A volume
/// that goes with its claim is left to [`delete`]. Releases volumes of claims whose deletion on a full
/// disk was not recorded, and volumes that were applied for a claim that does not exist. Returns false while
/// the disk is still full.
pub(super) fn settle_volumes(store: &Store) -> bool {
    let mut is_settled = true;
    for volume in store.volumes() {
        let name = &volume.metadata.name;
        let claim_is_gone = has_lost_its_claim(store, &volume);
        let is_bound = volume.status.phase == VolumePhase::Bound && !claim_is_gone;
        let released = match volume.status.phase {
            _ if !claim_is_gone || volume.metadata.is_deleted() => Ok(()),
            VolumePhase::Bound if !goes_with_its_claim(&volume) => release(store, &volume),
            VolumePhase::Available | VolumePhase::Pending => release_unclaimed(store, &volume),
            VolumePhase::Bound | VolumePhase::Released | VolumePhase::Failed => Ok(()),
        };
        if let Err(error) = released {
            debug!(volume = name, error = linux::chain(&error), "volume not released yet");
            is_settled = false;
        }
        if volume.metadata.is_deleted()
            && !is_bound
            && !has_begun_to_go(&volume)
            && let Err(error) = store.remove_volume(name)
        {
            warn!(volume = name, error = linux::chain(&error), "volume object not removed");
        }
    }
    is_settled
}

fn not_kept(error: store::Error) -> Failure {
    Failure { reason: "VolumeFailedDelete", message: linux::chain(&error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_was_made_for_a_claim_goes_with_it_unless_it_is_retained() {
        let volume = |policy: &str, annotations: serde_json::Value| -> PersistentVolume {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "v1", "kind": "PersistentVolume",
                "metadata": {"name": "v", "annotations": annotations},
                "spec": {"persistentVolumeReclaimPolicy": policy},
            }))
            .unwrap()
        };
        let made = serde_json::json!({PROVISIONED_BY: "csi.example.com"});
        assert!(goes_with_its_claim(&volume("Delete", made.clone())));
        assert!(!goes_with_its_claim(&volume("Retain", made)));
        assert!(!goes_with_its_claim(&volume("Delete", serde_json::json!({}))));
    }
}
