//! Resolves a pod's claim name to its volume.

use std::sync::Arc;

use super::device::DeviceKey;
use super::error::Error;
use crate::objects::{ClaimPhase, PersistentVolume, PersistentVolumeClaim, Pod};
use crate::store::Store;

/// A bound, mountable volume.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) volume: Arc<PersistentVolume>,
    pub(super) key: DeviceKey,
}

/// For a pod that is starting: fails while the claim is being deleted.
pub(super) fn claim(store: &Store, pod: &Pod, claim_name: &str) -> Result<Resolved, Error> {
    if find(store, pod, claim_name)?.metadata.is_deleted() {
        return Err(Error::ClaimDeleted { claim: claim_name.to_owned() });
    }
    claim_in_use(store, pod, claim_name)
}

/// For a pod that has the volume already: a claim in deletion exists until its last pod has ended.
pub(super) fn claim_in_use(store: &Store, pod: &Pod, claim_name: &str) -> Result<Resolved, Error> {
    let claim = find(store, pod, claim_name)?;
    let name = &claim.spec.volume_name;
    let lost = || Error::ClaimLost { claim: claim_name.to_owned(), volume: name.clone() };
    match claim.status.phase {
        ClaimPhase::Pending => return Err(Error::ClaimPending { claim: claim_name.to_owned() }),
        ClaimPhase::Lost => return Err(lost()),
        ClaimPhase::Bound => {}
    }
    let volume = store.volume(name).ok_or_else(lost)?;
    let Some(csi) = &volume.spec.csi else {
        return Err(Error::VolumeField {
            volume: name.clone(),
            field: "csi",
            found: String::new(),
            expected: "only volumes of CSI drivers are mounted",
        });
    };
    let key = DeviceKey { driver: csi.driver.clone(), volume_handle: csi.volume_handle.clone() };
    Ok(Resolved { volume, key })
}

fn find(store: &Store, pod: &Pod, claim_name: &str) -> Result<Arc<PersistentVolumeClaim>, Error> {
    let found = store.claim(&pod.metadata.namespace, claim_name);
    found.ok_or_else(|| Error::ClaimMissing { claim: claim_name.to_owned() })
}
