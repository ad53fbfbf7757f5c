//! CreateSnapshot and DeleteSnapshot, and what they write (kubernetes-csi/external-snapshotter,
//! pkg/sidecar-controller).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::csi;
use tracing::warn;

use super::{Failure, Shared};
use crate::backoff::Backoff;
use crate::clients::csi::Driver;
use crate::clients::csi_secrets::{self, Purpose, Secrets, Tokens};
use crate::objects::{
    EventType, Kind, Object, ObjectMeta, Quantity, ReclaimPolicy, SecretReference, SnapshotError, Time,
    VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, VolumeSnapshotContentSource,
    VolumeSnapshotContentSpec, VolumeSnapshotContentStatus, VolumeSnapshotStatus, new_uid, now,
};
use crate::store::{self, CLASS_PARAMETERS, Store};

/// The Secret of DeleteSnapshot: the class may be gone by then.
const DELETION_SECRET_NAME: &str = "snapshot.storage.kubernetes.io/deletion-secret-name";
const DELETION_SECRET_NAMESPACE: &str = "snapshot.storage.kubernetes.io/deletion-secret-namespace";
/// CreateSnapshot was called, and the driver may have made a snapshot whose id is not known.
const BEING_CREATED: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";
/// How soon to ask again whether a snapshot is complete.
const READY_POLL: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(60));

fn failed(message: String) -> Failure {
    Failure { reason: "SnapshotCreationFailed", message }
}

pub(super) fn not_kept(error: store::Error) -> Failure {
    failed(linux::chain(&error))
}

/// Writes the content of a new snapshot, if the driver can take one: the snapshot keeps its claim
/// from then on.
pub(super) async fn make_content(
    shared: &Shared,
    snapshot: &VolumeSnapshot,
    class: &VolumeSnapshotClass,
    volume_handle: &str,
) -> Result<(), Failure> {
    let store = &shared.store;
    if let Some(key) = csi_secrets::unknown_snapshot_parameter(&class.parameters) {
        return Err(no_content(format!(
            "VolumeSnapshotClass \"{}\": found unknown parameter key \"{key}\" with reserved namespace \
             csi.storage.k8s.io/",
            class.metadata.name
        )));
    }
    let driver = driver(shared, &class.driver).map_err(no_content)?;
    let can = driver.controller_capabilities().await.map_err(|e| no_content(e.to_string()))?;
    if !can.snapshot {
        return Err(no_content(format!("driver {} does not support snapshots", class.driver)));
    }
    let content = new_content(snapshot, class, volume_handle)?;
    store.put_snapshot_content(content.clone()).map_err(not_kept)?;
    bind(store, snapshot, &content)?;
    let (namespace, name) = (&snapshot.metadata.namespace, &snapshot.metadata.name);
    let message = format!("Waiting for a snapshot {namespace}/{name} to be created by the CSI driver.");
    store.record(&snapshot.reference(), EventType::Normal, "CreatingSnapshot", &message);
    Ok(())
}

fn no_content(message: String) -> Failure {
    Failure { reason: "SnapshotContentCreationFailed", message }
}

/// The content of a snapshot that does not exist yet: it names the volume and no snapshot.
fn new_content(
    snapshot: &VolumeSnapshot,
    class: &VolumeSnapshotClass,
    volume_handle: &str,
) -> Result<VolumeSnapshotContent, Failure> {
    let name = format!("snapcontent-{}", snapshot.metadata.uid);
    let secret =
        csi_secrets::reference(&class.parameters, Purpose::Snapshot, &tokens(&snapshot.metadata, &name));
    let mut annotations = BTreeMap::new();
    if let Some(SecretReference { name, namespace }) = secret.map_err(|e| no_content(e.to_string()))? {
        annotations.insert(DELETION_SECRET_NAME.to_owned(), name);
        annotations.insert(DELETION_SECRET_NAMESPACE.to_owned(), namespace);
    }
    let parameters = serde_json::to_string(&class.parameters).map_err(|e| no_content(e.to_string()))?;
    annotations.insert(CLASS_PARAMETERS.to_owned(), parameters);
    Ok(VolumeSnapshotContent {
        api_version: Kind::VolumeSnapshotContent.api_version().to_owned(),
        kind: Kind::VolumeSnapshotContent.to_string(),
        metadata: ObjectMeta {
            name,
            uid: new_uid().map_err(|e| no_content(format!("generate a uid: {e}")))?,
            annotations,
            creation_timestamp: Some(now()),
            ..ObjectMeta::default()
        },
        spec: VolumeSnapshotContentSpec {
            volume_snapshot_ref: snapshot.reference(),
            deletion_policy: class.deletion_policy,
            driver: class.driver.clone(),
            volume_snapshot_class_name: Some(class.metadata.name.clone()),
            source: VolumeSnapshotContentSource {
                volume_handle: volume_handle.to_owned(),
                snapshot_handle: String::new(),
            },
            source_volume_mode: None,
        },
        status: VolumeSnapshotContentStatus::default(),
    })
}

fn tokens(snapshot: &ObjectMeta, content: &str) -> Tokens {
    let mut tokens = Tokens::default();
    for tokens in [&mut tokens.namespace, &mut tokens.name] {
        tokens.insert("volumesnapshotcontent.name".to_owned(), content.to_owned());
        tokens.insert("volumesnapshot.namespace".to_owned(), snapshot.namespace.clone());
    }
    tokens.name.insert("volumesnapshot.name".to_owned(), snapshot.name.clone());
    tokens
}

pub(super) fn is_bound(snapshot: &VolumeSnapshot, content: &VolumeSnapshotContent) -> bool {
    snapshot.status.bound_volume_snapshot_content_name == content.metadata.name
        && content.spec.volume_snapshot_ref.uid == snapshot.metadata.uid
        && (snapshot.spec.volume_snapshot_class_name.is_some()
            || content.spec.volume_snapshot_class_name.is_none())
}

/// Content first: a snapshot with a name of a content that is not its own would look ready.
pub(super) fn bind(
    store: &Store,
    snapshot: &VolumeSnapshot,
    content: &VolumeSnapshotContent,
) -> Result<(), Failure> {
    let reserve = |content: &mut VolumeSnapshotContent| {
        if content.spec.volume_snapshot_ref.uid.is_empty() {
            content.spec.volume_snapshot_ref = snapshot.reference();
        }
    };
    let content = store.update_snapshot_content(content, reserve).map_err(not_kept)?;
    let is_its_own =
        |content: &Arc<VolumeSnapshotContent>| content.spec.volume_snapshot_ref.uid == snapshot.metadata.uid;
    // Otherwise the snapshot is decided again.
    let Some(content) = content.filter(is_its_own) else { return Ok(()) };
    let bind = |snapshot: &mut VolumeSnapshot| {
        snapshot.status.bound_volume_snapshot_content_name.clone_from(&content.metadata.name);
        if snapshot.spec.volume_snapshot_class_name.is_none() {
            snapshot.spec.volume_snapshot_class_name.clone_from(&content.spec.volume_snapshot_class_name);
        }
    };
    store.update_snapshot(snapshot, bind).map(drop).map_err(not_kept)
}

/// The snapshot that the content names, with the same uid.
pub(super) fn snapshot_of(store: &Store, content: &VolumeSnapshotContent) -> Option<Arc<VolumeSnapshot>> {
    let named = &content.spec.volume_snapshot_ref;
    let snapshot = store.snapshot(&named.namespace, &named.name)?;
    (!named.uid.is_empty() && snapshot.metadata.uid == named.uid).then_some(snapshot)
}

/// The snapshot's status as its content has it.
pub(super) fn status_of(snapshot: &VolumeSnapshot, content: &VolumeSnapshotContent) -> VolumeSnapshotStatus {
    let status = &content.status;
    let restore_size = status.restore_size.and_then(|bytes| u64::try_from(bytes).ok());
    VolumeSnapshotStatus {
        bound_volume_snapshot_content_name: snapshot.status.bound_volume_snapshot_content_name.clone(),
        creation_time: status
            .creation_time
            .and_then(|nanoseconds| Time::from_second(nanoseconds / 1_000_000_000).ok()),
        ready_to_use: status.ready_to_use,
        restore_size: restore_size.map(Quantity::from_bytes),
        error: status.error.clone(),
    }
}

pub(super) fn copy_status(
    store: &Store,
    snapshot: &VolumeSnapshot,
    content: &VolumeSnapshotContent,
) -> Result<(), Failure> {
    let copy = |snapshot: &mut VolumeSnapshot| snapshot.status = status_of(snapshot, content);
    let Some(copied) = store.update_snapshot(snapshot, copy).map_err(not_kept)? else { return Ok(()) };
    if copied.status.ready_to_use == Some(true) && snapshot.status.ready_to_use != Some(true) {
        let message =
            format!("Snapshot {}/{} is ready to use.", snapshot.metadata.namespace, snapshot.metadata.name);
        store.record(&snapshot.reference(), EventType::Normal, "SnapshotReady", &message);
    }
    Ok(())
}

/// Shows the error in the status of snapshot and content. Writes only a new message.
pub(super) fn note_error(store: &Store, snapshot: &VolumeSnapshot, message: &str) {
    if let Err(error) = write_error(store, snapshot, message) {
        let name = &snapshot.metadata.name;
        warn!(snapshot = name, error = linux::chain(&error), "the error of a snapshot is not on record");
    }
}

fn write_error(store: &Store, snapshot: &VolumeSnapshot, message: &str) -> Result<(), store::Error> {
    let note = |snapshot: &mut VolumeSnapshot| {
        set_error(&mut snapshot.status.error, &mut snapshot.status.ready_to_use, message);
    };
    let Some(snapshot) = store.update_snapshot(snapshot, note)? else { return Ok(()) };
    let content = store.snapshot_content(&snapshot.status.bound_volume_snapshot_content_name);
    let is_its_own =
        |content: &Arc<VolumeSnapshotContent>| content.spec.volume_snapshot_ref.uid == snapshot.metadata.uid;
    content.filter(is_its_own).map_or(Ok(()), |content| write_content_error(store, &content, message))
}

/// Shows the error in the status of a content; its snapshot copies that.
pub(super) fn note_content_error(store: &Store, content: &VolumeSnapshotContent, message: &str) {
    if let Err(error) = write_content_error(store, content, message) {
        let name = &content.metadata.name;
        warn!(content = name, error = linux::chain(&error), "the error of a content is not on record");
    }
}

fn write_content_error(
    store: &Store,
    content: &VolumeSnapshotContent,
    message: &str,
) -> Result<(), store::Error> {
    let note = |content: &mut VolumeSnapshotContent| {
        set_error(&mut content.status.error, &mut content.status.ready_to_use, message);
    };
    store.update_snapshot_content(content, note).map(drop)
}

fn set_error(error: &mut Option<SnapshotError>, ready_to_use: &mut Option<bool>, message: &str) {
    if error.as_ref().is_none_or(|known| known.message != message) {
        *error = Some(SnapshotError { time: Some(now()), message: message.to_owned() });
        *ready_to_use = Some(false);
    }
}

/// Calls CreateSnapshot until the snapshot is complete, deleted, or an error occurs.
pub(super) async fn take(
    shared: &Shared,
    snapshot: &VolumeSnapshot,
    content: &VolumeSnapshotContent,
) -> Result<(), Failure> {
    let store = &shared.store;
    let driver = driver(shared, &content.spec.driver).map_err(failed)?;
    let mut poll = READY_POLL;
    loop {
        let Some(current) = store.snapshot_content(&content.metadata.name) else { return Ok(()) };
        let is_wanted = !current.metadata.is_deleted()
            && snapshot_of(store, &current).is_some_and(|snapshot| !snapshot.metadata.is_deleted());
        if !is_wanted {
            return Ok(());
        }
        let taken = create(store, &driver, snapshot, &current).await?;
        if taken.ready_to_use {
            let name = &snapshot.metadata.name;
            let message = format!(
                "Snapshot {}/{name} was successfully created by the CSI driver.",
                snapshot.metadata.namespace
            );
            store.record(&snapshot.reference(), EventType::Normal, "SnapshotCreated", &message);
            return Ok(());
        }
        tokio::time::sleep(poll.step()).await;
    }
}

/// One CreateSnapshot, and its answer in the content's status.
async fn create(
    store: &Store,
    driver: &Driver,
    snapshot: &VolumeSnapshot,
    content: &VolumeSnapshotContent,
) -> Result<csi::Snapshot, Failure> {
    let failed = |message: String| failed(format!("Failed to create snapshot: {message}"));
    let request = request(store, &snapshot.metadata, content).map_err(failed)?;
    let begin = |content: &mut VolumeSnapshotContent| {
        if content.status.snapshot_handle.is_empty() {
            content.metadata.annotations.insert(BEING_CREATED.to_owned(), "yes".to_owned());
        }
    };
    let begun = store.update_snapshot_content(content, begin).map_err(not_kept)?;
    let content = begun.ok_or_else(|| failed("its content is gone".to_owned()))?;
    let taken = match driver.create_snapshot(request).await {
        Ok(taken) if taken.snapshot_id.is_empty() => {
            return Err(failed(without_id(driver)));
        }
        Ok(taken) => taken,
        Err(error) => {
            if error.is_final() && content.status.snapshot_handle.is_empty() {
                let end = |content: &mut VolumeSnapshotContent| {
                    content.metadata.annotations.remove(BEING_CREATED);
                };
                store.update_snapshot_content(&content, end).map_err(not_kept)?;
            }
            return Err(failed(error.to_string()));
        }
    };
    let end = |content: &mut VolumeSnapshotContent| {
        content.metadata.annotations.remove(BEING_CREATED);
        content.status = status(&taken);
    };
    store.update_snapshot_content(&content, end).map_err(not_kept)?;
    Ok(taken)
}

fn request(
    store: &Store,
    snapshot: &ObjectMeta,
    content: &VolumeSnapshotContent,
) -> Result<csi::CreateSnapshotRequest, String> {
    let name = content.spec.volume_snapshot_class_name.as_deref().unwrap_or_default();
    let class = store.snapshot_classes().into_iter().find(|class| class.metadata.name == name);
    // The parameters of a class that is gone are those of the content's start.
    let kept = || serde_json::from_str(content.metadata.annotations.get(CLASS_PARAMETERS)?).ok();
    let parameters: Option<BTreeMap<String, String>> =
        class.map(|class| class.parameters.clone()).or_else(kept);
    let parameters =
        parameters.ok_or_else(|| format!("volumesnapshotclass \"{name}\" not found: apply it again"))?;
    let tokens = tokens(snapshot, &content.metadata.name);
    let secrets = csi_secrets::reference(&parameters, Purpose::Snapshot, &tokens)
        .and_then(|reference| Secrets::read(store, reference.as_ref()))
        .map_err(|error| error.to_string())?;
    Ok(csi::CreateSnapshotRequest {
        source_volume_id: content.spec.source.volume_handle.clone(),
        // The same name for every attempt: CreateSnapshot is idempotent by name.
        name: format!("snapshot-{}", snapshot.uid),
        secrets: secrets.into_map(),
        parameters: csi_secrets::for_driver(&parameters),
    })
}

fn status(snapshot: &csi::Snapshot) -> VolumeSnapshotContentStatus {
    let nanoseconds =
        |time: &csi::Timestamp| time.seconds.checked_mul(1_000_000_000)?.checked_add(i64::from(time.nanos));
    VolumeSnapshotContentStatus {
        snapshot_handle: snapshot.snapshot_id.clone(),
        creation_time: snapshot.creation_time.as_ref().and_then(nanoseconds),
        ready_to_use: Some(snapshot.ready_to_use),
        restore_size: Some(snapshot.size_bytes),
        error: None,
    }
}

/// Looks up a snapshot that existed before. A driver without ListSnapshots is trusted to have it.
pub(super) async fn inspect(shared: &Shared, content: &VolumeSnapshotContent) -> Result<(), Failure> {
    let failed = |message: String| Failure { reason: "SnapshotCheckandUpdateFailed", message };
    let driver = driver(shared, &content.spec.driver).map_err(failed)?;
    let can = driver.controller_capabilities().await.map_err(|e| failed(e.to_string()))?;
    let handle = &content.spec.source.snapshot_handle;
    let found = if can.list_snapshots {
        let found = driver.find_snapshot(handle).await.map_err(|e| failed(e.to_string()))?;
        found.ok_or_else(|| failed(format!("driver {} has no snapshot {handle}", driver.name())))?
    } else {
        csi::Snapshot { snapshot_id: handle.clone(), ready_to_use: true, ..csi::Snapshot::default() }
    };
    if !found.ready_to_use {
        return Err(failed(format!("snapshot {handle} is not complete yet")));
    }
    let complete = |content: &mut VolumeSnapshotContent| content.status = status(&found);
    shared.store.update_snapshot_content(content, complete).map(drop).map_err(not_kept)
}

/// Deletes the driver's snapshot if the policy says so, then the object.
pub(super) async fn delete(shared: &Shared, content: &VolumeSnapshotContent) -> Result<(), Failure> {
    let failed = |message: String| Failure {
        reason: "SnapshotDeleteError",
        message: format!("Failed to delete snapshot: {message}"),
    };
    let store = &shared.store;
    if content.spec.deletion_policy == ReclaimPolicy::Delete
        && let Some(handle) = handle_to_delete(shared, content).await.map_err(failed)?
    {
        let driver = driver(shared, &content.spec.driver).map_err(failed)?;
        let annotation = |key: &str| content.metadata.annotations.get(key).cloned();
        let secret = annotation(DELETION_SECRET_NAME)
            .zip(annotation(DELETION_SECRET_NAMESPACE))
            .map(|(name, namespace)| SecretReference { name, namespace });
        let secrets = Secrets::read(store, secret.as_ref()).map_err(|e| failed(e.to_string()))?;
        driver.delete_snapshot(&handle, secrets).await.map_err(|e| failed(e.to_string()))?;
    }
    store.remove_snapshot_content(&content.metadata.name).map_err(not_kept)
}

/// The driver's id. After an uncertain CreateSnapshot it is known only by calling it once more.
async fn handle_to_delete(
    shared: &Shared,
    content: &VolumeSnapshotContent,
) -> Result<Option<String>, String> {
    let known = [&content.status.snapshot_handle, &content.spec.source.snapshot_handle];
    if let Some(handle) = known.into_iter().find(|handle| !handle.is_empty()) {
        return Ok(Some(handle.clone()));
    }
    if !content.metadata.annotations.contains_key(BEING_CREATED) {
        return Ok(None);
    }
    let named = &content.spec.volume_snapshot_ref;
    let snapshot = ObjectMeta {
        name: named.name.clone(),
        namespace: named.namespace.clone(),
        uid: named.uid.clone(),
        ..ObjectMeta::default()
    };
    let request = request(&shared.store, &snapshot, content)?;
    let driver = driver(shared, &content.spec.driver)?;
    match driver.create_snapshot(request).await {
        Ok(taken) if taken.snapshot_id.is_empty() => Err(without_id(&driver)),
        Ok(taken) => Ok(Some(taken.snapshot_id)),
        Err(error) if error.is_final() => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether the deletion of the content calls CreateSnapshot once more, which needs the volume.
pub(super) fn is_deleted_by_a_call(content: &VolumeSnapshotContent) -> bool {
    content.spec.deletion_policy == ReclaimPolicy::Delete
        && content.status.snapshot_handle.is_empty()
        && content.metadata.annotations.contains_key(BEING_CREATED)
}

fn without_id(driver: &Driver) -> String {
    format!("driver {} gave the snapshot no id", driver.name())
}

fn driver(shared: &Shared, name: &str) -> Result<Driver, String> {
    shared.plugins.driver(name).ok_or_else(|| {
        format!("driver {name} is not registered: start it with this kubelet's root directory")
    })
}
