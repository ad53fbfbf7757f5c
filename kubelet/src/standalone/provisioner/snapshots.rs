//! What a snapshot needs next, from the objects alone (kubernetes-csi/external-snapshotter,
//! pkg/common-controller).
//!
//! Invariants:
//! - DeleteSnapshot follows only an explicit deletion of the snapshot or of its content, and only
//!   if the content's deletion policy is Delete.
//! - A content is on disk before CreateSnapshot, and goes only after DeleteSnapshot.

use std::collections::HashSet;
use std::sync::Arc;

use super::begun::is_noted;
use super::source::claims_from;
use super::{Failure, Provisioner, snapshot_calls};
use crate::objects::{
    ClaimPhase, EventType, Object, PersistentVolumeClaim, ReclaimPolicy, VolumeSnapshot, VolumeSnapshotClass,
    VolumeSnapshotContent,
};
use crate::store::Store;
use tokio::time::Instant;

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// Also sets the class, if the snapshot names none.
    MakeContent {
        class: Arc<VolumeSnapshotClass>,
        /// The driver's id of the claim's volume.
        volume_handle: String,
    },
    Bind {
        content: Arc<VolumeSnapshotContent>,
    },
    TakeSnapshot {
        content: Arc<VolumeSnapshotContent>,
    },
    CopyStatus {
        content: Arc<VolumeSnapshotContent>,
    },
    DeleteContent {
        name: String,
    },
    Remove,
    Wait {
        event_type: EventType,
        reason: &'static str,
        message: String,
    },
}

impl Provisioner {
    /// Returns when the next retry is due, or `next` if that is sooner.
    pub(super) fn sync_snapshots(&self, mut next: Instant) -> Instant {
        let store = &self.shared.store;
        for snapshot in store.snapshots() {
            match self.retry_due(&snapshot.metadata.uid) {
                Some(due) => next = next.min(due),
                None if self.is_running(&snapshot.metadata.uid) => {}
                None => self.sync_snapshot(&snapshot),
            }
        }
        for content in store.snapshot_contents() {
            match self.retry_due(&content.metadata.uid) {
                Some(due) => next = next.min(due),
                None if self.is_running(&content.metadata.uid) => {}
                None => self.sync_content(&content),
            }
        }
        next
    }

    fn sync_snapshot(&self, snapshot: &Arc<VolumeSnapshot>) {
        let step = decide(snapshot, &self.shared.store, &self.running());
        let (shared, snapshot) = (Arc::clone(&self.shared), Arc::clone(snapshot));
        let subject = snapshot.reference();
        match step {
            Step::Nothing => {}
            Step::Wait { event_type: EventType::Normal, reason, message } => {
                self.record_once(&subject, reason, &message);
            }
            Step::Wait { event_type: EventType::Warning, reason, message } => {
                self.spawn(subject, async move {
                    shared.wait(Failure { reason, message }).await.inspect_err(|failure| {
                        snapshot_calls::note_error(&shared.store, &snapshot, &failure.message);
                    })
                });
            }
            Step::TakeSnapshot { content } => self.spawn(subject, async move {
                let taken = snapshot_calls::take(&shared, &snapshot, &content).await;
                taken.inspect_err(|failure| {
                    snapshot_calls::note_error(&shared.store, &snapshot, &failure.message);
                })
            }),
            Step::MakeContent { class, volume_handle } => self.spawn(subject, async move {
                let made = snapshot_calls::make_content(&shared, &snapshot, &class, &volume_handle).await;
                made.inspect_err(|failure| {
                    snapshot_calls::note_error(&shared.store, &snapshot, &failure.message);
                })
            }),
            write => self.spawn(subject, async move { apply(&write, &shared.store, &snapshot) }),
        }
    }

    fn sync_content(&self, content: &Arc<VolumeSnapshotContent>) {
        let shared = Arc::clone(&self.shared);
        let (subject, owned) = (content.reference(), Arc::clone(content));
        if content.metadata.is_deleted() {
            if is_free(content, &shared.store, &self.running()) {
                self.spawn(subject, async move { snapshot_calls::delete(&shared, &owned).await });
            }
        } else if !content.spec.source.snapshot_handle.is_empty() && content.status.ready_to_use != Some(true)
        {
            self.spawn(subject, async move {
                snapshot_calls::inspect(&shared, &owned).await.inspect_err(|failure| {
                    snapshot_calls::note_content_error(&shared.store, &owned, &failure.message);
                })
            });
        }
    }
}

/// The steps that only write objects.
fn apply(step: &Step, store: &Store, snapshot: &VolumeSnapshot) -> Result<(), Failure> {
    match step {
        Step::Bind { content } => snapshot_calls::bind(store, snapshot, content),
        Step::CopyStatus { content } => snapshot_calls::copy_status(store, snapshot, content),
        Step::DeleteContent { name } => {
            store.mark_snapshot_content_deleted(name).map_err(snapshot_calls::not_kept)
        }
        Step::Remove => {
            let metadata = &snapshot.metadata;
            store.remove_snapshot(&metadata.namespace, &metadata.name).map_err(snapshot_calls::not_kept)
        }
        Step::Nothing | Step::Wait { .. } | Step::MakeContent { .. } | Step::TakeSnapshot { .. } => Ok(()),
    }
}

/// Whether a deleted content may go: its snapshot keeps it, and so do a CreateSnapshot that runs and
/// the claims that are made from it.
fn is_free(content: &VolumeSnapshotContent, store: &Store, running: &HashSet<String>) -> bool {
    if running.contains(&content.spec.volume_snapshot_ref.uid) {
        return false;
    }
    let Some(snapshot) = snapshot_calls::snapshot_of(store, content) else { return true };
    snapshot.metadata.is_deleted() && claims_that_keep(&snapshot, Some(content), store, running).is_empty()
}

/// The claims that a deleted snapshot waits for. No volume can be made from a snapshot that is not ready or
/// whose content is gone, so such a snapshot waits only for CreateVolume calls that have begun.
fn claims_that_keep(
    snapshot: &VolumeSnapshot,
    content: Option<&VolumeSnapshotContent>,
    store: &Store,
    running: &HashSet<String>,
) -> Vec<Arc<PersistentVolumeClaim>> {
    let VolumeSnapshot { metadata, status, .. } = snapshot;
    let mut claims = claims_from(store, "VolumeSnapshot", &metadata.namespace, &metadata.name, running);
    let has_begun = |claim: &PersistentVolumeClaim| is_noted(claim) || running.contains(&claim.metadata.uid);
    let is_usable = status.ready_to_use == Some(true) && content.is_some();
    claims.retain(|claim| is_usable || has_begun(claim));
    claims
}

fn decide(snapshot: &VolumeSnapshot, store: &Store, running: &HashSet<String>) -> Step {
    let content = content_of(store, snapshot);
    if snapshot.metadata.is_deleted() {
        return decide_deletion(snapshot, content, store, running);
    }
    match content {
        None if snapshot.spec.source.volume_snapshot_content_name.is_empty() => new_content(snapshot, store),
        None => existing_content(snapshot, store),
        Some(content) if !snapshot_calls::is_bound(snapshot, &content) => Step::Bind { content },
        Some(content) if content.metadata.is_deleted() => Step::Nothing,
        Some(content) if needs_call(&content) => Step::TakeSnapshot { content },
        Some(content) if snapshot_calls::status_of(snapshot, &content) != snapshot.status => {
            Step::CopyStatus { content }
        }
        Some(_) => Step::Nothing,
    }
}

/// A snapshot that is not complete; one that existed before is looked up by its content.
fn needs_call(content: &VolumeSnapshotContent) -> bool {
    !content.spec.source.volume_handle.is_empty() && content.status.ready_to_use != Some(true)
}

fn decide_deletion(
    snapshot: &VolumeSnapshot,
    content: Option<Arc<VolumeSnapshotContent>>,
    store: &Store,
    running: &HashSet<String>,
) -> Step {
    if let Some(claim) = claims_that_keep(snapshot, content.as_deref(), store, running).first() {
        return Step::Wait {
            event_type: EventType::Normal,
            reason: "SnapshotDeletePending",
            message: format!("it is the data source of pending claim {}", claim.metadata.name),
        };
    }
    match content {
        None => Step::Remove,
        Some(content) => match content.spec.deletion_policy {
            ReclaimPolicy::Retain => Step::Remove,
            ReclaimPolicy::Delete if content.metadata.is_deleted() => Step::Nothing,
            ReclaimPolicy::Delete => Step::DeleteContent { name: content.metadata.name.clone() },
        },
    }
}

fn new_content(snapshot: &VolumeSnapshot, store: &Store) -> Step {
    let failed = |reason, message: String| Step::Wait { event_type: EventType::Warning, reason, message };
    let name = &snapshot.spec.source.persistent_volume_claim_name;
    let wait = |why: &str| failed("SnapshotContentCreationFailed", format!("the source PVC {name} {why}"));
    let Some(claim) = store.claim(&snapshot.metadata.namespace, name) else { return wait("not found") };
    if claim.metadata.is_deleted() {
        return wait("is being deleted");
    }
    if claim.status.phase != ClaimPhase::Bound {
        return wait("is not yet bound to a PV, so no snapshot is taken yet");
    }
    let csi = store.volume(&claim.spec.volume_name).and_then(|volume| volume.spec.csi.clone());
    let Some(csi) = csi else { return wait("has no volume of a CSI driver") };
    let class = match class_of(snapshot, &csi.driver, store) {
        Ok(class) => class,
        Err(message) => return failed("GetSnapshotClassFailed", message),
    };
    Step::MakeContent { class, volume_handle: csi.volume_handle }
}

fn class_of(
    snapshot: &VolumeSnapshot,
    driver: &str,
    store: &Store,
) -> Result<Arc<VolumeSnapshotClass>, String> {
    let mut classes = store.snapshot_classes();
    match &snapshot.spec.volume_snapshot_class_name {
        Some(name) => {
            classes.retain(|class| class.metadata.name == *name);
            let class = classes.pop().ok_or_else(|| {
                format!(
                    "volumesnapshotclass.snapshot.storage.k8s.io \"{name}\" not found: apply it, or correct \
                     spec.volumeSnapshotClassName"
                )
            })?;
            if class.driver != driver {
                return Err(format!("class {name} is of driver {}, the volume of {driver}", class.driver));
            }
            Ok(class)
        }
        None => {
            classes.retain(|class| class.is_default() && class.driver == driver);
            match classes.len() {
                1 => Ok(classes.remove(0)),
                0 => Err(format!(
                    "no default VolumeSnapshotClass of driver {driver}: set spec.volumeSnapshotClassName"
                )),
                _ => Err(format!("several default VolumeSnapshotClasses of driver {driver}")),
            }
        }
    }
}

/// For a snapshot that names a content which is not its own yet.
fn existing_content(snapshot: &VolumeSnapshot, store: &Store) -> Step {
    let wait = |reason, message: String| Step::Wait { event_type: EventType::Warning, reason, message };
    let name = &snapshot.spec.source.volume_snapshot_content_name;
    let Some(content) = store.snapshot_content(name) else {
        return wait("SnapshotContentMissing", format!("VolumeSnapshotContent {name} not found: apply it"));
    };
    let (wanted, metadata) = (&content.spec.volume_snapshot_ref, &snapshot.metadata);
    let names_it = wanted.namespace == metadata.namespace
        && wanted.name == metadata.name
        && (wanted.uid.is_empty() || wanted.uid == metadata.uid);
    if content.spec.source.snapshot_handle.is_empty() || !names_it || content.metadata.is_deleted() {
        let message = format!(
            "VolumeSnapshotContent {name} cannot be bound: it needs spec.source.snapshotHandle, and this snapshot \
             in spec.volumeSnapshotRef"
        );
        return wait("SnapshotContentMismatch", message);
    }
    Step::Bind { content }
}

/// The content that names this snapshot with its uid.
fn content_of(store: &Store, snapshot: &VolumeSnapshot) -> Option<Arc<VolumeSnapshotContent>> {
    let uid = &snapshot.metadata.uid;
    store.snapshot_contents().into_iter().find(|content| content.spec.volume_snapshot_ref.uid == *uid)
}

/// A snapshot of the claim that is being taken. The claim stays until it is ready, or until the driver has
/// deleted what it may have begun of a deleted one.
pub(super) fn being_taken(
    store: &Store,
    namespace: &str,
    claim: &str,
    running: &HashSet<String>,
) -> Option<Arc<VolumeSnapshot>> {
    let is_called = |snapshot: &VolumeSnapshot| {
        let Some(content) = content_of(store, snapshot) else { return false };
        if !snapshot.metadata.is_deleted() {
            return needs_call(&content);
        }
        running.contains(&snapshot.metadata.uid) || snapshot_calls::is_deleted_by_a_call(&content)
    };
    store.snapshots().into_iter().find(|snapshot| {
        snapshot.metadata.namespace == namespace
            && snapshot.spec.source.persistent_volume_claim_name == claim
            && is_called(snapshot)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::now;

    #[test]
    fn a_content_stays_while_a_claim_is_made_from_it() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let mut snapshot: VolumeSnapshot = serde_json::from_value(serde_json::json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": "s", "namespace": "default", "uid": "u"}, "spec": {"source": {}},
            "status": {"readyToUse": true},
        }))
        .unwrap();
        let content: VolumeSnapshotContent = serde_json::from_value(serde_json::json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent", "metadata": {"name": "c"},
            "spec": {
                "volumeSnapshotRef": {"namespace": "default", "name": "s", "uid": "u"}, "driver": "d",
                "deletionPolicy": "Delete", "source": {"volumeHandle": "v"},
            },
        }))
        .unwrap();
        let source = serde_json::json!({
            "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s",
        });
        let mut claim: PersistentVolumeClaim = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "default", "uid": "p"},
            "spec": {"accessModes": ["ReadWriteOnce"], "dataSource": source, "dataSourceRef": source},
        }))
        .unwrap();
        let (idle, running) = (HashSet::new(), HashSet::from(["p".to_owned()]));
        store.put_snapshot(snapshot.clone()).unwrap();
        assert!(!is_free(&content, &store, &idle));
        snapshot.metadata.deletion_timestamp = Some(now());
        store.put_snapshot(snapshot.clone()).unwrap();
        assert!(is_free(&content, &store, &idle));
        store.put_claim(claim.clone()).unwrap();
        assert!(!is_free(&content, &store, &idle));
        assert_eq!(decide(&snapshot, &store, &idle), Step::Remove, "the content is gone");
        assert!(matches!(decide(&snapshot, &store, &running), Step::Wait { .. }));
        store.put_snapshot_content(content.clone()).unwrap();
        assert!(matches!(decide(&snapshot, &store, &idle), Step::Wait { .. }));
        snapshot.status.ready_to_use = Some(false);
        store.put_snapshot(snapshot).unwrap();
        assert!(is_free(&content, &store, &idle) && !is_free(&content, &store, &running));
        claim.metadata.deletion_timestamp = Some(now());
        store.put_claim(claim).unwrap();
        assert!(is_free(&content, &store, &idle) && !is_free(&content, &store, &running));
        assert!(!is_free(&content, &store, &HashSet::from(["u".to_owned()])));
    }
}
