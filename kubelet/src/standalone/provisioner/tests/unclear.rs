//! Calls without a clear answer: the driver may have, or may still use, a volume or snapshot.

use std::sync::Arc;

use linux::mount::{UnmountMode, unmount};
use tonic::Status;

use super::{Fixture, POD, SNAPSHOT, TIMEOUT, claim, plain_class, secret, snapshot_class};
use crate::objects::{ClaimPhase, Object, PersistentVolumeClaim, VolumePhase};
use crate::store::{Store, VOLUME_BEING_CREATED};

/// A claim `copy` of class `fast` from the snapshot `snap` or the claim `data`.
fn copy(source: &str) -> String {
    claim("1Gi")
        .replace("name: data", "name: copy")
        .replace("spec: {", &format!("spec: {{dataSource: {source}, "))
}

const FROM_SNAPSHOT: &str = "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}";
const FROM_CLAIM: &str = "{kind: PersistentVolumeClaim, name: data}";

fn is_gone<'a>(name: &'a str) -> impl FnMut(&Store) -> Option<()> + use<'a> {
    move |store| store.claim("default", name).is_none().then_some(())
}

fn is_noted(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.annotations.contains_key(VOLUME_BEING_CREATED)
}

impl Fixture {
    async fn copy_is_bound(&self) -> Arc<PersistentVolumeClaim> {
        let bound = |claim: &Arc<PersistentVolumeClaim>| claim.status.phase == ClaimPhase::Bound;
        self.until("it is bound", |store| store.claim("default", "copy").filter(bound)).await
    }

    /// The methods in their order, without the driver's other calls.
    fn order_of(&self, methods: [&str; 2]) -> Vec<&'static str> {
        let calls = self.driver.calls.lock().unwrap();
        calls.iter().map(|call| call.method).filter(|method| methods.contains(method)).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_changes_before_the_answer_gets_what_was_begun_for_it() {
    let fixture = Fixture::start();
    fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
    fixture.apply(&class_of("gold"));
    fixture.apply(&claim("1Gi"));
    fixture.event("ProvisioningFailed", "the copy goes on").await;
    fixture.apply(&class_of("silver"));
    fixture.apply(&claim("2Gi").replace("ReadWriteOncePod", "ReadWriteMany"));
    fixture.driver.fail("CreateVolume", Some(Status::aborted("it goes on yet")));
    fixture.event("ProvisioningFailed", "it goes on yet").await;
    fixture.store.remove_class("fast").unwrap();
    fixture.driver.fail("CreateVolume", None);
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    let made = fixture.driver.of("CreateVolume").pop().unwrap().request;
    assert!(made.contains("gold") && made.contains("1073741824"), "{made}");
    assert_eq!((is_noted(&bound), bound.status.capacity["storage"].value()), (false, 1 << 30));

    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_with_other_parameters_is_not_forgotten() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.driver.fail("CreateVolume", Some(Status::already_exists("with another size")));
    fixture.apply(&claim("1Gi"));
    fixture.event("ProvisioningFailed", "with another size").await;
    assert!(is_noted(&fixture.store.claim("default", "data").unwrap()));
    fixture.driver.fail("CreateVolume", Some(Status::unavailable("it restarts")));
    fixture.event("ProvisioningFailed", "it restarts").await;
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("ProvisioningFailed", "the claim is kept until driver csi.example.com reports").await;
    fixture.driver.fail("CreateVolume", None);
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 1);
}

fn class_of(tier: &str) -> String {
    format!("{}parameters: {{tier: {tier}}}\n", plain_class())
}

/// The driver has made a volume of 1Gi and the tier gold for the claim. Then it gives an answer that ends
/// the note, and claim and class ask for 2Gi and silver.
async fn claim_with_a_wrong_note() -> Fixture {
    let fixture = Fixture::start();
    fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
    fixture.apply(&class_of("gold"));
    fixture.apply(&claim("1Gi"));
    fixture.event("ProvisioningFailed", "the copy goes on").await;
    fixture.driver.fail("CreateVolume", Some(Status::internal("a bug")));
    fixture.event("ProvisioningFailed", "a bug").await;
    fixture.apply(&class_of("silver"));
    fixture.apply(&claim("2Gi"));
    // The next attempt after this one has the new parameters.
    fixture.driver.fail("CreateVolume", Some(Status::internal("another bug")));
    fixture.event("ProvisioningFailed", "another bug").await;
    fixture.driver.fail("CreateVolume", None);
    let name = format!("pvc-{}", fixture.store.claim("default", "data").unwrap().metadata.uid);
    let words =
        format!("driver csi.example.com has a volume with the name {name}, made with other parameters");
    fixture.event("ProvisioningFailed", &words).await;
    fixture
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_volume_has_other_parameters_gets_it_after_a_correction() {
    let fixture = claim_with_a_wrong_note().await;
    fixture.driver.fail("CreateVolume", Some(Status::invalid_argument("too large")));
    fixture.event("ProvisioningFailed", "too large").await;
    let words = "too large: driver csi.example.com has a volume with the name pvc-";
    fixture.event("ProvisioningFailed", words).await;
    assert!(is_noted(&fixture.store.claim("default", "data").unwrap()), "the volume is there all the same");
    fixture.apply(&class_of("gold"));
    fixture.apply(&claim("1Gi"));
    fixture.driver.fail("CreateVolume", None);
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    assert_eq!((is_noted(&bound), bound.status.capacity["storage"].value()), (false, 1 << 30));
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_claim_whose_volume_has_other_parameters_goes_and_names_the_volume() {
    let fixture = claim_with_a_wrong_note().await;
    let name = format!("pvc-{}", fixture.store.claim("default", "data").unwrap().metadata.uid);
    fixture.store.remove_class("fast").unwrap();
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("it is gone", is_gone("data")).await;
    let words =
        format!("driver csi.example.com has a volume with the name {name}, made with other parameters");
    fixture.event("VolumeFailedDelete", &words).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_claim_gets_the_volume_that_was_made_as_it_is_now() {
    let fixture = Fixture::start();
    fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    fixture.event("ProvisioningFailed", "the copy goes on").await;
    let claim = fixture.store.claim("default", "data").unwrap();
    let note = claim.metadata.annotations[VOLUME_BEING_CREATED].replace("1Gi", "2Gi");
    fixture.driver.fail("CreateVolume", Some(Status::unavailable("it restarts")));
    fixture.event("ProvisioningFailed", "it restarts").await;
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("ProvisioningFailed", "the claim is kept until driver csi.example.com reports").await;
    assert!(fixture.store.note_creation(&claim, Some(note)).unwrap());
    fixture.driver.fail("CreateVolume", None);
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_annotation_that_names_the_secret_does_not_keep_the_claim() {
    let fixture = Fixture::start();
    fixture.driver.fail("CreateVolume", Some(Status::deadline_exceeded("slow")));
    fixture.apply(&format!(
        "{}parameters:\n  csi.storage.k8s.io/provisioner-secret-name: \"${{pvc.annotations['team']}}-data\"\n  \
         csi.storage.k8s.io/provisioner-secret-namespace: vault\n",
        plain_class()
    ));
    fixture.apply(&secret("red"));
    let annotated = claim("1Gi").replace("{name: data}", "{name: data, annotations: {team: red}}");
    fixture.apply(&annotated);
    fixture.event("ProvisioningFailed", "slow").await;
    fixture.apply(&claim("1Gi"));
    fixture.driver.fail("CreateVolume", Some(Status::deadline_exceeded("slow again")));
    fixture.event("ProvisioningFailed", "slow again").await;
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.driver.fail("CreateVolume", None);
    fixture.until("it is gone", is_gone("data")).await;
    let secrets = fixture.secrets_of("DeleteVolume");
    assert_eq!(secrets, ["hush-red"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_room_may_ask_for_less_or_go() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.driver.fail("CreateVolume", Some(Status::resource_exhausted("no room")));
    fixture.apply(&claim("9Gi"));
    fixture.event("ProvisioningFailed", "no room").await;
    fixture.apply(&claim("9Gi").replace("name: data", "name: other"));
    fixture
        .until("it has failed", |store| {
            let of_other = |name: &str| name == "other";
            store
                .events()
                .iter()
                .any(|e| of_other(&e.involved_object.name) && e.message.contains("no room"))
                .then_some(())
        })
        .await;
    fixture.store.mark_claim_deleted("default", "other").unwrap();
    fixture.until("it is gone", is_gone("other")).await;
    // First: a repeated call could succeed for the larger claim.
    fixture.apply(&claim("1Gi"));
    fixture.driver.fail("CreateVolume", None);
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
    assert!(bound.status.capacity["storage"].value() >= 1 << 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_snapshot_stays_until_the_claims_that_wait_for_it_have_their_volumes() {
    for has_begun in [true, false] {
        let fixture = Fixture::start();
        fixture.apply(&plain_class());
        fixture.apply(&claim("1Gi"));
        fixture.apply(&secret("snap"));
        fixture.apply(&snapshot_class("Delete"));
        fixture.apply(SNAPSHOT);
        fixture.snapshot("ready", |s| s.status.ready_to_use == Some(true)).await;
        if has_begun {
            fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
        } else {
            fixture.store.remove_class("fast").unwrap();
        }
        fixture.apply(&copy(FROM_SNAPSHOT));
        fixture.event("ProvisioningFailed", if has_begun { "the copy goes on" } else { "not found" }).await;
        fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
        fixture.event("SnapshotDeletePending", "claim copy").await;
        fixture.driver.fail("CreateVolume", None);
        fixture.apply(&plain_class());
        fixture.copy_is_bound().await;
        let made = fixture.driver.of("CreateVolume").pop().unwrap().request;
        assert!(made.contains("id-of-snapshot-"), "{made}");
        fixture.until("it is gone", |store| store.snapshots().is_empty().then_some(())).await;
        assert_eq!(fixture.driver.of("DeleteSnapshot").len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_claim_stays_while_its_clone_may_be_made() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
    fixture.apply(&copy(FROM_CLAIM));
    fixture.event("ProvisioningFailed", "the copy goes on").await;
    // Between two attempts.
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("ClaimDeletePending", "its clone, claim copy, is done").await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
    fixture.driver.fail("CreateVolume", None);
    fixture.copy_is_bound().await;
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(
        fixture.order_of(["CreateVolume", "DeleteVolume"]),
        ["CreateVolume", "CreateVolume", "DeleteVolume"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_claim_stays_while_its_deleted_snapshot_may_be_taken() {
    let fixture = Fixture::start();
    let uncertain = (0..100).map(|_| Err(Status::deadline_exceeded("slow"))).collect();
    *fixture.driver.snapshots.lock().unwrap() = uncertain;
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    fixture.apply(&secret("snap"));
    fixture.apply(&snapshot_class("Delete"));
    fixture.apply(SNAPSHOT);
    fixture.event("SnapshotCreationFailed", "slow").await;
    fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
    fixture.event("SnapshotDeleteError", "slow").await;
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("ClaimDeletePending", "snapshot snap is deleted, which needs its driver").await;
    fixture.driver.snapshots.lock().unwrap().clear();
    fixture.until("it is gone", is_gone("data")).await;
    let order = fixture.order_of(["DeleteSnapshot", "DeleteVolume"]);
    assert_eq!(order, ["DeleteSnapshot", "DeleteVolume"]);
}

/// An earlier kubelet ended between NodeUnpublishVolume and NodeUnstageVolume, and the claim is deleted.
async fn claim_with_a_staged_volume() -> Fixture {
    let mut fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    fixture.apply(POD);
    let pod = fixture.store.pod("default", "web").unwrap();
    tokio::time::timeout(TIMEOUT, fixture.volumes.mount_pod(&pod)).await.unwrap();
    fixture.driver.fail("NodeUnstageVolume", Some(Status::unavailable("busy")));
    let unmounting = tokio::spawn({
        let (volumes, pod) = (fixture.volumes.clone(), pod.reference());
        async move { volumes.unmount_pod(&pod).await }
    });
    fixture.event("FailedUnmount", "busy").await;
    unmounting.abort();
    fixture.store.forget_pod(&pod.metadata.uid).unwrap();
    fixture.restart();
    fixture.volumes.unstage_unused();

    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("VolumeFailedDelete", "is not deleted yet: this node has not unstaged it").await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
    fixture
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_unstaged_before_it_is_deleted() {
    let fixture = claim_with_a_staged_volume().await;
    fixture.driver.fail("NodeUnstageVolume", None);
    fixture.until("it is gone", is_gone("data")).await;
    let order = fixture.order_of(["NodeUnstageVolume", "DeleteVolume"]);
    assert_eq!(order, ["NodeUnstageVolume", "DeleteVolume"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_of_a_volume_counts_while_it_is_staged() {
    let fixture = claim_with_a_staged_volume().await;
    let name = fixture.store.claim("default", "data").unwrap().spec.volume_name.clone();
    retain(&fixture, &name);
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.store.volume(&name).unwrap().status.phase, VolumePhase::Released);
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
}

fn retain(fixture: &Fixture, volume: &str) {
    let shown = serde_json::to_string(&*fixture.store.volume(volume).unwrap()).unwrap();
    let policy = "\"persistentVolumeReclaimPolicy\":";
    fixture.apply(&shown.replace(&format!("{policy}\"Delete\""), &format!("{policy}\"Retain\"")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_event_of_a_failed_mount_has_the_drivers_error_also_over_another_mount() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    fixture.apply(POD);
    let pod = fixture.store.pod("default", "web").unwrap();
    let dir = fixture.volumes.pod_dir(&pod.metadata.uid).join("volumes/kubernetes.io~csi");
    let dir = dir.join(&bound.spec.volume_name);
    std::fs::create_dir_all(&dir).unwrap();
    let _connection = crate::volumes::mount_silent_at(&dir.join("mount"));
    fixture.driver.fail("NodePublishVolume", Some(Status::internal("the disk has failed")));
    let mounting = tokio::spawn({
        let (volumes, pod) = (fixture.volumes.clone(), Arc::clone(&pod));
        async move { volumes.mount_pod(&pod).await }
    });
    fixture.event("FailedMount", "the disk has failed").await;
    mounting.abort();
    unmount(&dir.join("mount"), UnmountMode::Detach).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_volume_of_a_claim_stays_if_its_policy_is_changed() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    let name = &bound.spec.volume_name;
    retain(&fixture, name);
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("it is gone", is_gone("data")).await;
    assert_eq!(fixture.store.volume(name).unwrap().status.phase, VolumePhase::Released);
    fixture.store.mark_volume_deleted(name).unwrap();
    fixture.until("it is gone", |store| store.volumes().is_empty().then_some(())).await;
    assert_eq!(fixture.driver.of("DeleteVolume").len(), 0);
}
