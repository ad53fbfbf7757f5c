//! CreateVolume for a claim, and the binding of claim and volume.

use proto::csi;
use tracing::{Instrument, info_span};

use super::Failure;
use crate::csi::Driver;
use crate::objects::{
    ClaimPhase, CsiVolumeSource, EventType, Object, ObjectMeta, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeSpec, Quantity, StorageClass, VolumePhase, new_uid, now,
};
use crate::standalone::store::{self, Store};
use crate::volumes::capabilities_of_claim;

pub(super) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Prefix of parameters for the provisioner, which the driver does not get.
const RESERVED_PREFIX: &str = "csi.storage.k8s.io/";
const FS_TYPE_PARAMETER: &str = "csi.storage.k8s.io/fstype";

pub(super) async fn provision(
    store: &Store,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    driver: &Driver,
) -> Result<(), Failure> {
    let span = info_span!("provision", claim = claim.metadata.name, driver = driver.name());
    let request = request(claim, class);
    let name = request.name.clone();
    let created = driver.create_volume(request).instrument(span).await;
    let created = created.map_err(|e| {
        failed(format!("failed to provision volume with StorageClass \"{}\": {e}", class.metadata.name))
    })?;
    let volume = volume(&name, claim, class, created)?;
    store.put_volume(volume).map_err(not_kept)?;
    let message = format!("Successfully provisioned volume {name}");
    store.record(&claim.reference(), EventType::Normal, "ProvisioningSucceeded", &message);
    bind(store, claim, &name)
}

/// Updates the volume first, then the claim: the next attempt completes a partial binding.
pub(super) fn bind(store: &Store, claim: &PersistentVolumeClaim, volume: &str) -> Result<(), Failure> {
    let known = store.volume(volume).ok_or_else(|| failed(format!("volume \"{volume}\" is gone")))?;
    let mut volume = (*known).clone();
    volume.spec.claim_ref = Some(claim.reference());
    volume.status.phase = VolumePhase::Bound;
    // Read the claim again: it may have been marked deleted during CreateVolume.
    let current = store.claim(&claim.metadata.namespace, &claim.metadata.name);
    let Some(current) = current.filter(|c| c.metadata.uid == claim.metadata.uid) else {
        return Err(failed("the claim is gone".to_owned()));
    };
    let mut claim = (*current).clone();
    claim.spec.volume_name = volume.metadata.name.clone();
    claim.status.phase = ClaimPhase::Bound;
    claim.status.access_modes = volume.spec.access_modes.clone();
    claim.status.capacity = volume.spec.capacity.clone();
    // A provisioned volume names its claim from the start.
    if volume != *known {
        store.put_volume(volume).map_err(not_kept)?;
    }
    store.put_bound_claim(claim).map_err(not_kept)
}

fn request(claim: &PersistentVolumeClaim, class: &StorageClass) -> csi::CreateVolumeRequest {
    let bytes = |q: Option<&Quantity>| q.map_or(0, |q| i64::try_from(q.value()).unwrap_or(i64::MAX));
    let resources = &claim.spec.resources;
    let fs_type = class.parameters.get(FS_TYPE_PARAMETER).map_or("", String::as_str);
    let parameters = class.parameters.clone().into_iter();
    csi::CreateVolumeRequest {
        // The same name for every attempt: CreateVolume is idempotent by name.
        name: format!("pvc-{}", claim.metadata.uid),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: bytes(resources.requests.get("storage")),
            limit_bytes: bytes(resources.limits.get("storage")),
        }),
        volume_capabilities: capabilities_of_claim(&claim.spec.access_modes, fs_type, &class.mount_options),
        parameters: parameters.filter(|(key, _)| !key.starts_with(RESERVED_PREFIX)).collect(),
        ..csi::CreateVolumeRequest::default()
    }
}

fn volume(
    name: &str,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    created: csi::Volume,
) -> Result<PersistentVolume, Failure> {
    let uid = new_uid().map_err(|e| failed(format!("generate a uid: {e}")))?;
    let requested = claim.spec.resources.requests.get("storage").cloned();
    let capacity = match u64::try_from(created.capacity_bytes) {
        // CSI: 0 means "unknown".
        Ok(0) | Err(_) => requested.unwrap_or_else(|| Quantity::from_bytes(0)),
        Ok(bytes) => Quantity::from_bytes(bytes),
    };
    let metadata = ObjectMeta {
        name: name.to_owned(),
        uid,
        annotations: [(PROVISIONED_BY.to_owned(), class.provisioner.clone())].into(),
        creation_timestamp: Some(now()),
        ..ObjectMeta::default()
    };
    let csi = CsiVolumeSource {
        driver: class.provisioner.clone(),
        volume_handle: created.volume_id,
        read_only: false,
        fs_type: class.parameters.get(FS_TYPE_PARAMETER).cloned().unwrap_or_default(),
        volume_attributes: created.volume_context.into_iter().collect(),
    };
    let spec = PersistentVolumeSpec {
        capacity: [("storage".to_owned(), capacity)].into(),
        access_modes: claim.spec.access_modes.clone(),
        persistent_volume_reclaim_policy: class.reclaim_policy,
        storage_class_name: class.metadata.name.clone(),
        mount_options: class.mount_options.clone(),
        volume_mode: claim.spec.volume_mode,
        claim_ref: Some(claim.reference()),
        csi: Some(csi),
    };
    let mut volume = PersistentVolume::new(metadata, spec);
    volume.status.phase = VolumePhase::Bound;
    Ok(volume)
}

fn failed(message: String) -> Failure {
    Failure { reason: "ProvisioningFailed", message }
}

fn not_kept(error: store::Error) -> Failure {
    failed(linux::chain(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_made_as_claim_and_class_say() {
        let claim: PersistentVolumeClaim = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "uid": "c1"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Ki"}, "limits": {"storage": "2Ki"}},
            },
        }))
        .unwrap();
        let class: StorageClass = serde_json::from_value(serde_json::json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "hawser"},
            "provisioner": "csi.example.com", "reclaimPolicy": "Retain", "mountOptions": ["noatime"],
            "parameters": {"tier": "fast", "csi.storage.k8s.io/fstype": "ext4"},
        }))
        .unwrap();
        let asked = request(&claim, &class);
        let range = asked.capacity_range.unwrap();
        assert_eq!((asked.name.as_str(), range.required_bytes, range.limit_bytes), ("pvc-c1", 1024, 2048));
        assert_eq!(asked.parameters, [("tier".to_owned(), "fast".to_owned())].into());
        let Some(csi::volume_capability::AccessType::Mount(mount)) =
            asked.volume_capabilities[0].access_type.clone()
        else {
            panic!("a file system is asked for: {:?}", asked.volume_capabilities)
        };
        assert_eq!((mount.fs_type.as_str(), mount.mount_flags), ("ext4", vec!["noatime".to_owned()]));

        let created = csi::Volume { volume_id: "v1".to_owned(), ..csi::Volume::default() };
        let volume = volume("pvc-c1", &claim, &class, created).unwrap();
        assert_eq!(volume.spec.capacity["storage"], Quantity::from_bytes(1024));
        assert_eq!(volume.spec.persistent_volume_reclaim_policy, class.reclaim_policy);
        assert_eq!(
            (volume.spec.storage_class_name, volume.spec.mount_options),
            ("hawser".to_owned(), class.mount_options)
        );
        let csi = volume.spec.csi.unwrap();
        assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str()), ("csi.example.com", "v1"));
    }
}
