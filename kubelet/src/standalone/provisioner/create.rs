//! CreateVolume for a claim, and the binding of claim and volume.

use std::sync::Arc;

use proto::csi;
use tonic::Code;
use tracing::{Instrument, debug, info_span};

use super::begun::Begun;
use super::{Failure, source};
use crate::clients::csi::{self as client, ControllerCapabilities, Driver};
use crate::clients::csi_secrets::{self, FS_TYPE, Purpose, Secrets, Tokens};
use crate::clients::plugins::Plugins;
use crate::objects::{
    ClaimPhase, CsiVolumeSource, EventType, Object, ObjectMeta, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeSpec, Quantity, SecretReference, StorageClass, VolumePhase, new_uid, now,
};
use crate::store::{BindError, Store, name_of_new_volume};
use crate::volumes::capabilities_of_claim;

pub(super) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// The Secret of DeleteVolume: the class may be gone by then.
const DELETION_SECRET_NAME: &str = "volume.kubernetes.io/provisioner-deletion-secret-name";
const DELETION_SECRET_NAMESPACE: &str = "volume.kubernetes.io/provisioner-deletion-secret-namespace";

/// What the driver has for the claim after a failed CreateVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Has {
    Unknown,
    /// Certainly none.
    NoVolume,
    /// One that was made with other parameters.
    OtherVolume,
}

impl Has {
    /// RESOURCE_EXHAUSTED means that the driver has no room (CSI: "a new volume can not be provisioned"):
    /// the user may ask for less, or delete the claim.
    fn after(error: &client::Error) -> Self {
        match error.code {
            Code::AlreadyExists => Self::OtherVolume,
            Code::ResourceExhausted => Self::NoVolume,
            _ if error.is_final() => Self::NoVolume,
            _ => Self::Unknown,
        }
    }
}

struct NotCreated {
    driver_has: Has,
    message: String,
}

impl NotCreated {
    fn unknown(message: impl ToString) -> Self {
        Self { driver_has: Has::Unknown, message: message.to_string() }
    }
}

pub(super) async fn provision(
    store: &Store,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    driver: &Driver,
) -> Result<(), Failure> {
    let span = info_span!("provision", claim = claim.metadata.name, driver = driver.name());
    let in_class = |cause: String| {
        failed(format!("failed to provision volume with StorageClass \"{}\": {cause}", class.metadata.name))
    };
    let Some(claim) = current(store, claim).filter(|claim| claim.status.phase == ClaimPhase::Pending) else {
        return Ok(());
    };
    let can = driver.controller_capabilities().await.map_err(|e| in_class(e.to_string()))?;
    let begun = match Begun::of(&claim) {
        Some(begun) if !begun.is_refuted() => {
            if begun.class.provisioner != driver.name() {
                // The note is newer than the decision for this driver, so the claim is decided again.
                return Ok(());
            }
            begun
        }
        refuted => {
            let source = source::handle(store, &claim, class, can).map_err(in_class)?;
            let mut begun = Begun::new(&claim, class, source);
            let former = refuted.map(|refuted| refuted.class.provisioner);
            if let Some(former) = former.as_deref().filter(|former| *former != driver.name()) {
                record_left_volume(store, &claim, former);
            }
            begun.is_made_otherwise = former.as_deref() == Some(driver.name());
            begun
        }
    };
    let order = Order::new(&claim, &begun, can).map_err(in_class)?;
    order.create(store, driver).instrument(span).await.map_err(|error| in_class(error.message))?;
    let name = &order.name;
    let message = format!("Successfully provisioned volume {name}");
    store.record(&claim.reference(), EventType::Normal, "ProvisioningSucceeded", &message);
    bind(store, &claim, name)
}

/// The claim as it is now: an attempt may have ended after `claim` was read.
fn current(store: &Store, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolumeClaim>> {
    let current = store.claim(&claim.metadata.namespace, &claim.metadata.name);
    current.filter(|current| current.metadata.uid == claim.metadata.uid)
}

/// Only the driver's administrator can remove a volume whose id is not known.
fn record_left_volume(store: &Store, claim: &PersistentVolumeClaim, driver: &str) {
    let message = format!(
        "driver {driver} has a volume with the name {}, made with other parameters than the claim's: the kubelet \
         does not know its id, so remove it there",
        name_of_new_volume(claim)
    );
    store.record(&claim.reference(), EventType::Warning, "VolumeFailedDelete", &message);
}

/// The note for the next call: the refuted one as claim and class are now, as far as they still exist.
fn corrected(
    store: &Store,
    claim: &PersistentVolumeClaim,
    refuted: Begun,
    can: ControllerCapabilities,
) -> Begun {
    let class_name = claim.spec.storage_class_name.as_deref().unwrap_or(&refuted.class.metadata.name);
    let class = store.class(class_name).filter(|class| class.provisioner == refuted.class.provisioner);
    let class = class.as_deref().unwrap_or(&refuted.class);
    let source = source::handle(store, claim, class, can).unwrap_or_else(|_| refuted.source.clone());
    Begun::new(claim, class, source).of_deleted(refuted)
}

/// Repeats a CreateVolume whose outcome is not known, so that its volume is on record.
pub(super) async fn finish(
    store: &Store,
    plugins: &Plugins,
    claim: &PersistentVolumeClaim,
) -> Result<(), Failure> {
    let Some(claim) = current(store, claim) else { return Ok(()) };
    let Some(begun) = Begun::of(&claim) else { return Ok(()) };
    let provisioner = begun.class.provisioner.clone();
    let name = name_of_new_volume(&claim);
    if store.volume(&name).is_some() {
        return Ok(());
    }
    let unknown = |cause: String| {
        failed(format!(
            "the claim is kept until driver {provisioner} reports whether it made volume {name}: {cause}"
        ))
    };
    let driver = plugins.driver(&provisioner).ok_or_else(|| {
        unknown("the driver is not registered; start it with this kubelet's root directory".to_owned())
    })?;
    let can = driver.controller_capabilities().await.map_err(|e| unknown(e.to_string()))?;
    // The note, and then claim and class, are tried: a deleted claim cannot be corrected further.
    let is_last = begun.is_refuted();
    let begun = if is_last { corrected(store, &claim, begun, can) } else { begun };
    let order = Order::new(&claim, &begun, can).map_err(unknown)?;
    match order.create(store, &driver).await {
        Err(NotCreated { driver_has: Has::NoVolume, message }) => {
            debug!(claim = claim.metadata.name, message, "no volume was made for the deleted claim");
            Ok(())
        }
        Err(NotCreated { driver_has: Has::OtherVolume, .. }) if is_last => {
            record_left_volume(store, &claim, &provisioner);
            Ok(())
        }
        created => created.map_err(|error| unknown(error.message)),
    }
}

pub(super) fn bind(store: &Store, claim: &PersistentVolumeClaim, volume: &str) -> Result<(), Failure> {
    store.bind(claim, volume).map_err(not_bound)
}

pub(super) fn lose(store: &Store, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
    store.lose_claim(claim).map_err(|error| failed(linux::chain(&error)))
}

/// Everything about a new volume that is decided before CreateVolume.
struct Order<'a> {
    /// The same for every attempt: CreateVolume is idempotent by name.
    name: String,
    begun: &'a Begun,
    /// As it was when CreateVolume was called first.
    claim: PersistentVolumeClaim,
    can: ControllerCapabilities,
    tokens: Tokens,
    provisioner_secret: Option<SecretReference>,
}

impl<'a> Order<'a> {
    fn new(
        claim: &PersistentVolumeClaim,
        begun: &'a Begun,
        can: ControllerCapabilities,
    ) -> Result<Self, String> {
        let class = &begun.class;
        if let Some(key) = csi_secrets::unknown_parameter(&class.parameters) {
            return Err(format!(
                "found unknown parameter key \"{key}\" with reserved namespace csi.storage.k8s.io/"
            ));
        }
        let name = name_of_new_volume(claim);
        let claim = begun.claim(claim);
        let tokens = tokens(&claim, &name);
        let secret = csi_secrets::reference(&class.parameters, Purpose::Provision, &tokens);
        let provisioner_secret = secret.map_err(|e| e.to_string())?;
        let order = Self { name, begun, claim, can, tokens, provisioner_secret };
        // A mistake in the class must not show up only after CreateVolume.
        for purpose in
            [Purpose::NodeStage, Purpose::NodePublish, Purpose::ControllerExpand, Purpose::NodeExpand]
        {
            order.secret(purpose).map_err(|e| e.to_string())?;
        }
        Ok(order)
    }

    /// Calls CreateVolume, and records the volume.
    async fn create(&self, store: &Store, driver: &Driver) -> Result<(), NotCreated> {
        let request = self.request(store).map_err(NotCreated::unknown)?;
        let wanted_source = request.volume_content_source.clone();
        self.note(store, Some(self.begun))?;
        let created = match driver.create_volume(request).await {
            Ok(created) => created,
            Err(error) => return Err(self.not_made(store, &error)?),
        };
        if wanted_source.is_some() && created.content_source != wanted_source {
            // An empty volume must not pass for a copy.
            let secrets = self.secrets(store).map_err(NotCreated::unknown)?;
            driver.delete_volume(&created.volume_id, secrets).await.map_err(NotCreated::unknown)?;
            self.note(store, None)?;
            let message = "the driver made the volume without its data source".to_owned();
            return Err(NotCreated { driver_has: Has::NoVolume, message });
        }
        let volume = self.volume(created).map_err(|failure| NotCreated::unknown(failure.message))?;
        store.add_volume(volume).map_err(|error| NotCreated::unknown(not_bound(error).message))
    }

    fn not_made(&self, store: &Store, error: &client::Error) -> Result<NotCreated, NotCreated> {
        let (mut driver_has, mut message) = (Has::after(error), error.to_string());
        // It may refuse other parameters before it looks for the volume, which it has all the same.
        if driver_has == Has::NoVolume && self.begun.is_made_otherwise {
            driver_has = Has::OtherVolume;
        }
        match driver_has {
            Has::Unknown => {}
            Has::NoVolume => self.note(store, None)?,
            Has::OtherVolume => {
                self.note(store, Some(&self.begun.refuted()))?;
                message = format!(
                    "{message}: driver {} has a volume with the name {}, made with other parameters: change claim \
                     and class to what they were then, or remove the volume there",
                    self.begun.class.provisioner, self.name
                );
            }
        }
        Ok(NotCreated { driver_has, message })
    }

    /// The claim's note is on disk before CreateVolume is called.
    fn note(&self, store: &Store, begun: Option<&Begun>) -> Result<(), NotCreated> {
        let note = begun.map(serde_json::to_string).transpose().map_err(NotCreated::unknown)?;
        match store.note_creation(&self.claim, note) {
            Ok(true) => Ok(()),
            Ok(false) => Err(NotCreated::unknown("the claim is gone")),
            Err(error) => Err(NotCreated::unknown(linux::chain(&error))),
        }
    }

    fn secrets(&self, store: &Store) -> Result<Secrets, csi_secrets::Error> {
        Secrets::read(store, self.provisioner_secret.as_ref())
    }

    fn secret(&self, purpose: Purpose) -> Result<Option<SecretReference>, csi_secrets::Error> {
        csi_secrets::reference(&self.begun.class.parameters, purpose, &self.tokens)
    }

    fn fs_type(&self) -> &str {
        self.begun.class.parameters.get(FS_TYPE).map_or("", String::as_str)
    }

    fn request(&self, store: &Store) -> Result<csi::CreateVolumeRequest, csi_secrets::Error> {
        let bytes = |q: Option<&Quantity>| q.map_or(0, |q| i64::try_from(q.value()).unwrap_or(i64::MAX));
        let Self { claim, begun: Begun { class, source, .. }, .. } = self;
        let resources = &claim.spec.resources;
        Ok(csi::CreateVolumeRequest {
            name: self.name.clone(),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: bytes(resources.requests.get("storage")),
                limit_bytes: bytes(resources.limits.get("storage")),
            }),
            volume_capabilities: capabilities_of_claim(
                &claim.spec.access_modes,
                self.fs_type(),
                &class.mount_options,
                self.can.single_node_multi_writer,
            ),
            parameters: csi_secrets::for_driver(&class.parameters),
            secrets: self.secrets(store)?.into_map(),
            volume_content_source: source.clone().map(Into::into),
            ..csi::CreateVolumeRequest::default()
        })
    }

    fn volume(&self, created: csi::Volume) -> Result<PersistentVolume, Failure> {
        let Self { claim, begun: Begun { class, .. }, .. } = self;
        let uid = new_uid().map_err(|e| failed(format!("generate a uid: {e}")))?;
        let requested = claim.spec.resources.requests.get("storage").cloned();
        let capacity = match u64::try_from(created.capacity_bytes) {
            // CSI: 0 means "unknown".
            Ok(0) | Err(_) => requested.unwrap_or_else(|| Quantity::from_bytes(0)),
            Ok(bytes) => Quantity::from_bytes(bytes),
        };
        let mut annotations = std::collections::BTreeMap::new();
        annotations.insert(PROVISIONED_BY.to_owned(), class.provisioner.clone());
        if let Some(SecretReference { name, namespace }) = &self.provisioner_secret {
            annotations.insert(DELETION_SECRET_NAME.to_owned(), name.clone());
            annotations.insert(DELETION_SECRET_NAMESPACE.to_owned(), namespace.clone());
        }
        let metadata = ObjectMeta {
            name: self.name.clone(),
            uid,
            annotations,
            creation_timestamp: Some(now()),
            ..ObjectMeta::default()
        };
        let secret = |purpose| self.secret(purpose).map_err(|e| failed(e.to_string()));
        let csi = CsiVolumeSource {
            driver: class.provisioner.clone(),
            volume_handle: created.volume_id,
            read_only: false,
            fs_type: self.fs_type().to_owned(),
            volume_attributes: created.volume_context.into_iter().collect(),
            controller_publish_secret_ref: secret(Purpose::ControllerPublish)?,
            node_stage_secret_ref: secret(Purpose::NodeStage)?,
            node_publish_secret_ref: secret(Purpose::NodePublish)?,
            controller_expand_secret_ref: secret(Purpose::ControllerExpand)?,
            node_expand_secret_ref: secret(Purpose::NodeExpand)?,
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
}

fn tokens(claim: &PersistentVolumeClaim, volume: &str) -> Tokens {
    let metadata = &claim.metadata;
    let mut tokens = Tokens::default();
    for tokens in [&mut tokens.namespace, &mut tokens.name] {
        tokens.insert("pv.name".to_owned(), volume.to_owned());
        tokens.insert("pvc.namespace".to_owned(), metadata.namespace.clone());
    }
    tokens.name.insert("pvc.name".to_owned(), metadata.name.clone());
    let annotations = metadata.annotations.iter();
    tokens.name.extend(annotations.map(|(key, value)| (format!("pvc.annotations['{key}']"), value.clone())));
    tokens
}

/// The Secret of DeleteVolume.
pub(super) fn deletion_secret(volume: &PersistentVolume) -> Option<SecretReference> {
    let annotation = |key: &str| volume.metadata.annotations.get(key).cloned();
    let (name, namespace) = (annotation(DELETION_SECRET_NAME)?, annotation(DELETION_SECRET_NAMESPACE)?);
    Some(SecretReference { name, namespace })
}

fn failed(message: String) -> Failure {
    Failure { reason: "ProvisioningFailed", message }
}

fn not_bound(error: BindError) -> Failure {
    match error {
        BindError::Refused(why) => failed(why),
        BindError::Store(error) => failed(linux::chain(&error)),
    }
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
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let begun = Begun::new(&claim, &class, None);
        let order = Order::new(&claim, &begun, ControllerCapabilities::default()).unwrap();
        let asked = order.request(&store).unwrap();
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
        let volume = order.volume(created).unwrap();
        assert_eq!(volume.spec.capacity["storage"], Quantity::from_bytes(1024));
        assert_eq!(volume.spec.persistent_volume_reclaim_policy, class.reclaim_policy);
        assert_eq!(
            (volume.spec.storage_class_name, volume.spec.mount_options),
            ("hawser".to_owned(), class.mount_options.clone())
        );
        let csi = volume.spec.csi.unwrap();
        assert_eq!((csi.driver.as_str(), csi.volume_handle.as_str()), ("csi.example.com", "v1"));
    }
}
