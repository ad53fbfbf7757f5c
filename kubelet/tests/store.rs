//! The store: durability, order of changes, immutable fields.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use kubelet::manifest;
use kubelet::objects::{ClaimPhase, EventType, Kind, Object, PodPhase, PodStatus};
use kubelet::store::{Described, Outcome, Source, Store};

const CLAIM: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec:\n  \
                     accessModes: [ReadWriteMany]\n  resources: {requests: {storage: 1Gi}}\n";

fn object(text: &str) -> Described {
    let parsed = manifest::parse(text.as_bytes(), "test.yaml");
    assert_eq!(parsed.errors, []);
    parsed.manifests.into_iter().next().unwrap().described()
}

fn pod(image: &str) -> Described {
    object(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  - {{name: c, image: {image}}}\n"
    ))
}

/// Manifests cannot have the longest names that a store may have from an earlier version.
fn pod_named(namespace: &str, name: &str) -> Described {
    let mut described = pod("i");
    let kubelet::store::AnyObject::Pod(pod) = &mut described.object else { panic!("a pod") };
    namespace.clone_into(&mut pod.metadata.namespace);
    name.clone_into(&mut pod.metadata.name);
    described
}

/// The same pod with another command.
fn commanded(command: &str) -> Described {
    object(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  \
         - {{name: c, image: demo:1, command: [{command}]}}\n"
    ))
}

fn file(name: &str) -> Source {
    Source::File(format!("/manifests/{name}").into())
}

struct Fixture {
    root: tempfile::TempDir,
    store: Store,
}

impl Fixture {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        Self { root, store }
    }

    /// Simulates `kill -9`.
    fn reopen(self) -> Self {
        let store = Store::open(self.root.path(), "node").unwrap();
        Self { root: self.root, store }
    }
}

/// `get pvc -o yaml`, delete, edit, `apply`: the note is about the deleted claim.
#[test]
fn a_claim_gets_no_note_of_a_begun_volume_from_its_manifest() {
    let noted = CLAIM.replace(
        "{name: data}",
        "{name: data, annotations: {team: red, hawser.dev/volume-being-created: \"{}\"}}",
    );
    let fixture = Fixture::new();
    let keys = |fixture: &Fixture| {
        let claim = fixture.store.claim("default", "data").unwrap();
        let document = fixture.store.document(Kind::PersistentVolumeClaim, "default", "data").unwrap();
        let shown = document.value()["metadata"]["annotations"].as_object().unwrap().clone();
        assert_eq!(shown.keys().collect::<Vec<_>>(), claim.metadata.annotations.keys().collect::<Vec<_>>());
        claim.metadata.annotations.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(fixture.store.apply(object(&noted), file("c.yaml")).unwrap(), Outcome::Created);
    assert_eq!(keys(&fixture), ["team"]);
    assert_eq!(fixture.store.apply(object(&noted), file("c.yaml")).unwrap(), Outcome::Unchanged);
    let larger = noted.replace("1Gi", "2Gi");
    assert_eq!(fixture.store.apply(object(&larger), file("c.yaml")).unwrap(), Outcome::Configured);
    assert_eq!(keys(&fixture), ["team"]);
    assert_eq!(keys(&fixture.reopen()), ["team"]);
}

#[test]
fn claims_survive_with_uid_binding_and_source() {
    let fixture = Fixture::new();
    assert_eq!(fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap(), Outcome::Created);
    let mut claim = (*fixture.store.claim("default", "data").unwrap()).clone();
    assert_eq!(claim.metadata.uid.len(), 36, "a random uid");
    claim.spec.volume_name = "pvc-1".to_owned();
    claim.status.phase = ClaimPhase::Bound;
    fixture.store.put_claim(claim.clone()).unwrap();

    let fixture = fixture.reopen();
    assert_eq!(*fixture.store.claim("default", "data").unwrap(), claim);
    assert_eq!(fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap(), Outcome::Unchanged);
    assert_eq!(*fixture.store.claim("default", "data").unwrap(), claim);
    assert_eq!(fixture.store.declared_by_files().len(), 1);
}

#[test]
fn a_bound_claim_keeps_its_spec() {
    let fixture = Fixture::new();
    fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap();
    let mut claim = (*fixture.store.claim("default", "data").unwrap()).clone();
    let uid = claim.metadata.uid.clone();

    // The claim is not bound yet, so a correction is applied.
    let corrected = CLAIM.replace("1Gi", "2Gi");
    assert_eq!(fixture.store.apply(object(&corrected), file("c.yaml")).unwrap(), Outcome::Configured);
    assert_eq!(fixture.store.claim("default", "data").unwrap().metadata.uid, uid);

    claim.spec.volume_name = "pvc-1".to_owned();
    fixture.store.put_claim(claim).unwrap();
    let err = fixture.store.apply(object(&CLAIM.replace("1Gi", "9Gi")), file("c.yaml")).unwrap_err();
    assert_eq!(
        err.to_string(),
        "PersistentVolumeClaim \"data\" is invalid: spec.resources.requests.storage: Forbidden: only dynamically \
         provisioned pvc can be resized and the storageclass that provisions the pvc must support resize \
         (allowVolumeExpansion: true)"
    );
}

#[test]
fn a_withdrawn_description_marks_a_claim_and_deletes_a_pod() {
    let fixture = Fixture::new();
    fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap();
    fixture.store.apply(pod("demo:1"), file("p.yaml")).unwrap();
    for declared in fixture.store.declared_by_files() {
        fixture.store.withdraw(&declared).unwrap();
    }
    assert_eq!(fixture.store.declared_by_files(), []);
    let claim = fixture.store.claim("default", "data").unwrap();
    assert_eq!(claim.metadata.annotations["hawser.dev/source"], "missing");
    assert!(fixture.store.pod("default", "web").unwrap().metadata.is_deleted());
    let event = fixture.store.events().pop().unwrap();
    assert_eq!((event.reason.as_str(), event.event_type), ("ManifestMissing", EventType::Warning));

    // The file exists again: same claim, without the mark.
    fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap();
    let back = fixture.store.claim("default", "data").unwrap();
    assert_eq!((back.metadata.uid.clone(), back.metadata.annotations.len()), (claim.metadata.uid.clone(), 0));
}

#[test]
fn a_changed_pod_follows_once_its_predecessor_is_forgotten() {
    let fixture = Fixture::new();
    fixture.store.apply(commanded("old"), file("p.yaml")).unwrap();
    let first = fixture.store.pod("default", "web").unwrap();
    assert_eq!(fixture.store.apply(commanded("old"), file("p.yaml")).unwrap(), Outcome::Unchanged);

    assert_eq!(fixture.store.apply(commanded("new"), file("p.yaml")).unwrap(), Outcome::Configured);
    let terminating = fixture.store.pod("default", "web").unwrap();
    assert_eq!(terminating.metadata.uid, first.metadata.uid);
    assert!(terminating.metadata.is_deleted());

    let fixture = fixture.reopen();
    fixture.store.forget_pod(&first.metadata.uid).unwrap();
    let second = fixture.store.pod("default", "web").unwrap();
    assert_ne!(second.metadata.uid, first.metadata.uid);
    assert!(!second.metadata.is_deleted());
    assert_eq!(second.spec.containers[0].command, ["new"]);

    fixture.store.mark_pod_deleted("default", "web", Some(3)).unwrap();
    fixture.store.mark_pod_deleted("default", "web", Some(9)).unwrap();
    let deleted = fixture.store.pod("default", "web").unwrap();
    assert_eq!(deleted.metadata.deletion_grace_period_seconds, Some(3), "the grace only gets shorter");
    fixture.store.forget_pod(&second.metadata.uid).unwrap();
    assert!(fixture.store.pods().is_empty());
    assert!(fixture.reopen().store.pods().is_empty());
}

#[test]
fn a_running_pod_takes_over_a_new_image_and_keeps_its_command() {
    for source in [file("p.yaml"), Source::Api] {
        let fixture = Fixture::new();
        fixture.store.apply(pod("demo:1"), source.clone()).unwrap();
        let first = fixture.store.pod("default", "web").unwrap();
        let running = PodStatus { phase: PodPhase::Running, ..first.status.clone() };
        fixture.store.set_pod_status(&first.metadata.uid, running);
        assert_eq!(fixture.store.apply(pod("demo:2"), source.clone()).unwrap(), Outcome::Configured);
        let changed = fixture.store.pod("default", "web").unwrap();
        assert_eq!(
            (changed.metadata.uid.as_str(), changed.metadata.is_deleted()),
            (&*first.metadata.uid, false)
        );
        assert_eq!(
            (changed.spec.containers[0].image.as_str(), changed.status.phase),
            ("demo:2", PodPhase::Running)
        );
        let fixture = fixture.reopen();
        assert_eq!(fixture.store.apply(pod("demo:2"), source).unwrap(), Outcome::Unchanged);
    }
}

/// metadata.generation: 1, and one more for each change of the spec and for the deletion.
#[test]
fn the_generation_of_a_pod_counts_changes_of_its_spec() {
    let given = |image: &str, metadata: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web{metadata}}}\nspec:\n  containers:\n  \
             - {{name: c, image: {image}, resources: {{limits: {{memory: 64Mi}}}}}}\n"
        );
        object(&text)
    };
    let fixture = Fixture::new();
    let generation = |store: &Store| store.pod("default", "web").unwrap().metadata.generation;
    for (image, metadata, expected) in [
        ("demo:1", "", 1),
        ("demo:1", ", generation: 99", 1),
        ("demo:2", "", 2),
        ("demo:2", ", labels: {a: b}", 2),
        ("demo:3", "", 3),
    ] {
        fixture.store.apply(given(image, metadata), Source::Api).unwrap();
        assert_eq!(generation(&fixture.store), expected, "{image} {metadata}");
    }
    let fixture = fixture.reopen();
    assert_eq!(generation(&fixture.store), 3);
    let uid = fixture.store.pod("default", "web").unwrap().metadata.uid.clone();
    fixture.store.mark_pod_deleted("default", "web", Some(20)).unwrap();
    assert_eq!(generation(&fixture.store), 4);
    fixture.store.mark_pod_deleted("default", "web", Some(10)).unwrap();
    assert_eq!(generation(&fixture.store), 4, "a shorter grace period is no change");
    fixture.store.apply(given("demo:1", ""), Source::Api).unwrap();
    fixture.store.forget_pod(&uid).unwrap();
    assert_eq!(generation(&fixture.store), 1, "another pod");
}

#[test]
fn a_client_cannot_change_the_command_of_a_running_pod() {
    let fixture = Fixture::new();
    fixture.store.apply(commanded("old"), Source::Api).unwrap();
    let error = fixture.store.apply(commanded("new"), Source::Api).unwrap_err().to_string();
    let said = "pod \"web\" is invalid: spec.containers[0].command[0]: Forbidden: a running pod keeps it \
                (\"old\"; wanted: \"new\")";
    assert!(error.starts_with(said), "{error}");
    assert_eq!(fixture.store.pod("default", "web").unwrap().spec.containers[0].command, ["old"]);
    // One that has ended makes room.
    let first = fixture.store.pod("default", "web").unwrap();
    let ended = PodStatus { phase: PodPhase::Succeeded, ..first.status.clone() };
    fixture.store.set_pod_status(&first.metadata.uid, ended);
    assert_eq!(fixture.store.apply(commanded("new"), Source::Api).unwrap(), Outcome::Configured);
    assert!(fixture.store.pod("default", "web").unwrap().metadata.is_deleted());
}

#[test]
fn a_file_restored_while_its_pod_ends_creates_a_pod_without_a_status() {
    let fixture = Fixture::new();
    fixture.store.apply(pod("demo:1"), file("p.yaml")).unwrap();
    let first = fixture.store.pod("default", "web").unwrap();
    fixture.store.mark_pod_deleted("default", "web", None).unwrap();
    let ended = PodStatus { phase: PodPhase::Failed, ..first.status.clone() };
    fixture.store.set_pod_status(&first.metadata.uid, ended);
    fixture.store.apply(pod("demo:1"), file("p.yaml")).unwrap();
    fixture.store.forget_pod(&first.metadata.uid).unwrap();
    let second = fixture.store.pod("default", "web").unwrap();
    assert_eq!(second.metadata.uid, first.metadata.uid);
    assert!(!second.metadata.is_deleted());
    assert_eq!(second.status.phase, PodPhase::Pending);
}

#[test]
fn the_same_file_is_the_same_pod_and_another_file_another() {
    let uid = |source: Source| {
        let fixture = Fixture::new();
        fixture.store.apply(pod("demo:1"), source).unwrap();
        fixture.store.pods()[0].metadata.uid.clone()
    };
    assert_eq!(uid(file("a.yaml")), uid(file("a.yaml")));
    assert_ne!(uid(file("a.yaml")), uid(file("b.yaml")));
    assert_ne!(uid(Source::Api), uid(Source::Api));
}

#[test]
fn a_client_cannot_replace_the_object_of_a_file() {
    let fixture = Fixture::new();
    fixture.store.apply(pod("demo:1"), file("p.yaml")).unwrap();
    let err = fixture.store.apply(pod("demo:2"), Source::Api).unwrap_err();
    assert_eq!(err.to_string(), "Pod \"web\" is already described by /manifests/p.yaml");
}

#[test]
fn damaged_objects_are_set_aside_with_an_event_and_the_rest_is_loaded() {
    for damage in ["", "{", "\u{0}\u{0}\u{0}"] {
        let fixture = Fixture::new();
        fixture.store.apply(object(CLAIM), Source::Api).unwrap();
        fixture.store.apply(pod("demo:1"), Source::Api).unwrap();
        let objects = fixture.root.path().join("hawser/objects");
        let path = objects.join("PersistentVolumeClaim/default_data.json");
        std::fs::write(&path, damage).unwrap();
        let store = Store::open(fixture.root.path(), "node").unwrap();
        assert_eq!((store.claims().len(), store.pods().len()), (0, 1), "{damage:?}");
        let events = store.events();
        let [event] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(event.reason, "UnreadableRecord");
        let kept = fixture.root.path().join("hawser/unreadable/PersistentVolumeClaim_default_data.json");
        assert!(event.message.contains(path.to_str().unwrap()), "{}", event.message);
        assert!(event.message.contains(kept.to_str().unwrap()), "{}", event.message);
        assert_eq!(std::fs::read_to_string(kept).unwrap(), damage);
        drop(store);
        assert!(Store::open(fixture.root.path(), "node").unwrap().events().is_empty(), "once");
    }
}

#[tokio::test]
async fn every_change_is_announced() {
    let fixture = Fixture::new();
    let mut changes = fixture.store.subscribe();
    fixture.store.apply(object(CLAIM), Source::Api).unwrap();
    fixture.store.remove_claim("default", "data").unwrap();
    for _ in 0..2 {
        let change = changes.recv().await.unwrap();
        assert_eq!(
            (change.kind, change.namespace.as_str(), change.name.as_str()),
            (Kind::PersistentVolumeClaim, "default", "data")
        );
    }
    let subject =
        fixture.store.apply(pod("demo:1"), Source::Api).map(|_| fixture.store.pods()[0].reference()).unwrap();
    assert_eq!((subject.kind.as_str(), subject.name.as_str()), ("Pod", "web"));
}

#[test]
fn an_events_message_is_cut() {
    let fixture = Fixture::new();
    fixture.store.apply(pod("demo:1"), file("p.yaml")).unwrap();
    let web = fixture.store.pod("default", "web").unwrap().reference();
    fixture.store.record(&web, EventType::Warning, "Failed", &"x".repeat(3 << 20));
    let message = fixture.store.events().pop().unwrap().message.clone();
    assert!(message.len() <= 1027 && message.ends_with("x..."), "{}", message.len());
}

/// A pod with a field that the kubelet ignores, and one that Kubernetes does not have.
fn probed(port: u16) -> Described {
    object(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  - name: c\n    image: demo:1\n    \
         restartPolicyRules: [{{port: {port}}}, 1, null]\n"
    ))
}

fn document(store: &Store) -> serde_json::Value {
    store.document(Kind::Pod, "default", "web").unwrap().value()
}

#[test]
fn a_document_is_kept_whole_and_survives() {
    let fixture = Fixture::new();
    fixture.store.apply(probed(80), file("p.yaml")).unwrap();
    let whole = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [{
            "name": "c", "image": "demo:1", "restartPolicyRules": [{"port": 80}, 1, null],
        }]},
    });
    assert_eq!(document(&fixture.store), whole);
    assert_eq!(document(&fixture.reopen().store), whole);
}

#[test]
fn a_change_of_an_ignored_field_is_kept_and_the_pod_keeps_running() {
    let fixture = Fixture::new();
    fixture.store.apply(probed(80), file("p.yaml")).unwrap();
    let uid = fixture.store.pod("default", "web").unwrap().metadata.uid.clone();
    assert_eq!(fixture.store.apply(probed(81), file("p.yaml")).unwrap(), Outcome::Configured);
    assert_eq!(fixture.store.apply(probed(81), file("p.yaml")).unwrap(), Outcome::Unchanged);
    let fixture = fixture.reopen();
    let pod = fixture.store.pod("default", "web").unwrap();
    assert!(pod.metadata.uid == uid && !pod.metadata.is_deleted());
    assert_eq!(document(&fixture.store)["spec"]["containers"][0]["restartPolicyRules"][0]["port"], 81);
}

/// A record of a build without documents, from the same manifest.
const OLD_POD: &str = r#"{
  "current": {
    "source": {"file": "/manifests/p.yaml"},
    "digest": "DIGEST",
    "object": {
      "apiVersion": "v1",
      "kind": "Pod",
      "metadata": {
        "name": "web", "namespace": "default", "uid": "of-the-older-build",
        "creationTimestamp": "2026-11-20T17:53:02Z"
      },
      "spec": {
        "containers": [{"name": "c", "image": "demo:1", "imagePullPolicy": "IfNotPresent"}],
        "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
        "securityContext": {}, "nodeName": "node"
      },
      "status": {"phase": "Pending", "conditions": []}
    }
  }
}"#;

#[test]
fn records_of_builds_without_documents_are_read_and_completed() {
    let fixture = Fixture::new();
    fixture.store.apply(probed(80), file("p.yaml")).unwrap();
    let path = fixture.root.path().join("hawser/objects/Pod/default_web.json");
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let digest = record["current"]["digest"].as_str().unwrap();
    std::fs::write(&path, OLD_POD.replace("DIGEST", digest)).unwrap();

    let fixture = fixture.reopen();
    assert!(fixture.store.events().is_empty(), "nothing is set aside");
    assert!(fixture.store.document(Kind::Pod, "default", "web").is_none());
    assert_eq!(fixture.store.apply(probed(80), file("p.yaml")).unwrap(), Outcome::Unchanged);
    let pod = fixture.store.pod("default", "web").unwrap();
    assert_eq!((pod.metadata.uid.as_str(), pod.metadata.generation), ("of-the-older-build", 1));
    assert!(!pod.metadata.is_deleted(), "it runs on");
    assert_eq!(document(&fixture.reopen().store)["spec"]["containers"][0]["restartPolicyRules"][1], 1);
}

#[test]
fn the_kubelets_changes_to_a_claim_keep_its_document() {
    let fixture = Fixture::new();
    fixture.store.apply(object(CLAIM), file("c.yaml")).unwrap();
    let mut claim = (*fixture.store.claim("default", "data").unwrap()).clone();
    claim.spec.volume_name = "pvc-1".to_owned();
    fixture.store.put_claim(claim).unwrap();
    let document = fixture.store.document(Kind::PersistentVolumeClaim, "default", "data").unwrap().value();
    assert_eq!(document["spec"]["resources"]["requests"]["storage"], "1Gi");
    assert!(document["spec"].get("volumeName").is_none());
}

const SECRET: &str = "apiVersion: v1\nkind: Secret\nmetadata: {name: token}\nstringData: {password: hush}\n";

#[test]
fn a_secret_lies_in_a_file_that_only_root_can_read() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    fixture.store.apply(object(SECRET), file("s.yaml")).unwrap();
    let records = fixture.root.path().join("hawser/objects/Secret");
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&records), 0o700);
    assert_eq!(mode(&records.join("default_token.json")), 0o600);
    let fixture = fixture.reopen();
    let secret = fixture.store.secret("default", "token").unwrap();
    assert_eq!(secret.entries()["password"], b"hush");
    assert_eq!(secret.secret_type, "Opaque");
}

#[test]
fn a_secret_and_a_config_map_go_with_their_file() {
    let fixture = Fixture::new();
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {a: b}\n";
    for text in [SECRET, map] {
        fixture.store.apply(object(text), file("s.yaml")).unwrap();
    }
    for declared in fixture.store.declared_by_files() {
        fixture.store.withdraw(&declared).unwrap();
    }
    let fixture = fixture.reopen();
    assert_eq!((fixture.store.secrets().len(), fixture.store.config_maps().len()), (0, 0));
}

#[test]
fn what_is_marked_immutable_stays_as_it_is() {
    let fixture = Fixture::new();
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\nimmutable: true\ndata: {a: b}\n";
    fixture.store.apply(object(map), Source::Api).unwrap();
    let refused = |text: &str| fixture.store.apply(object(text), Source::Api).unwrap_err().to_string();
    let rule = "Forbidden: field is immutable when `immutable` is set";
    assert_eq!(
        refused(&map.replace("a: b", "a: c")),
        format!("ConfigMap \"settings\" is invalid: data: {rule}")
    );
    assert_eq!(
        refused(&map.replace("true", "false")),
        format!("ConfigMap \"settings\" is invalid: immutable: {rule}")
    );
    let labelled = map.replace("{name: settings}", "{name: settings, labels: {x: z}}");
    assert_eq!(fixture.store.apply(object(&labelled), Source::Api).unwrap(), Outcome::Configured);
    fixture.store.apply(object(SECRET), Source::Api).unwrap();
    assert_eq!(
        refused(&format!("{SECRET}type: example.com/other\n")),
        "Secret \"token\" is invalid: type: Forbidden: field is immutable after creation"
    );
}

#[test]
fn a_bound_claim_grows_if_its_class_allows_it_and_never_shrinks() {
    let Fixture { root: _root, store } = Fixture::new();
    let claim = |size: &str, mode: &str| {
        object(&format!(
            "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: data}}\nspec: {{storageClassName: fast, \
             accessModes: [{mode}], resources: {{requests: {{storage: {size}}}}}}}\n"
        ))
    };
    let class = |expands: bool| {
        object(&format!(
            "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\n\
             provisioner: csi.example.com\nallowVolumeExpansion: {expands}\n"
        ))
    };
    let volume = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: v}\nspec: {storageClassName: fast, \
                  accessModes: [ReadWriteOnce], capacity: {storage: 1Gi}, \
                  csi: {driver: csi.example.com, volumeHandle: h}}\n";
    store.apply(object(volume), Source::Api).unwrap();
    store.apply(claim("1Gi", "ReadWriteOnce"), Source::Api).unwrap();
    let mut bound = (*store.claim("default", "data").unwrap()).clone();
    bound.spec.volume_name = "v".to_owned();
    bound.status.phase = ClaimPhase::Bound;
    bound.status.capacity = bound.spec.resources.requests.clone();
    store.put_claim(bound).unwrap();

    let refused = |described| store.apply(described, Source::Api).unwrap_err().to_string();
    assert!(refused(claim("2Gi", "ReadWriteOnce")).contains("must support resize"));
    store.apply(class(false), Source::Api).unwrap();
    assert!(refused(claim("2Gi", "ReadWriteOnce")).contains("must support resize"));
    store.apply(class(true), Source::Api).unwrap();
    assert!(refused(claim("512Mi", "ReadWriteOnce")).contains("less than status.capacity"));
    assert!(refused(claim("2Gi", "ReadWriteMany")).contains("spec is immutable"));
    store.apply(claim("2Gi", "ReadWriteOnce"), Source::Api).unwrap();
    let grown = store.claim("default", "data").unwrap();
    assert_eq!(grown.spec.resources.requests["storage"].to_string(), "2Gi");
    assert_eq!((grown.spec.volume_name.as_str(), grown.status.phase), ("v", ClaimPhase::Bound));
    // As in Kubernetes, an expansion may be taken back, down to the volume's size.
    store.apply(claim("1Gi", "ReadWriteOnce"), Source::Api).unwrap();
}

#[test]
fn a_snapshot_survives_its_file_and_a_restart_and_keeps_its_source() {
    let fixture = Fixture::new();
    let snapshot = |claim: &str| {
        object(&format!(
            "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {{name: snap}}\n\
             spec: {{source: {{persistentVolumeClaimName: {claim}}}}}\n"
        ))
    };
    assert_eq!(fixture.store.apply(snapshot("data"), file("s.yaml")).unwrap(), Outcome::Created);
    let error = fixture.store.apply(snapshot("other"), file("s.yaml")).unwrap_err().to_string();
    assert!(error.contains("spec.source: Forbidden"), "{error}");
    let declared = fixture.store.declared_by_files();
    fixture.store.withdraw(&declared[0]).unwrap();
    let fixture = fixture.reopen();
    let kept = fixture.store.snapshot("default", "snap").unwrap();
    assert_eq!(kept.metadata.annotations["hawser.dev/source"], "missing");
    assert!(!kept.metadata.is_deleted());
}

#[test]
fn a_file_names_no_other_node_when_it_changes_in_place() {
    let fixture = Fixture::new();
    let placed = |image: &str| {
        object(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  nodeName: elsewhere\n  containers:\n  \
             - {{name: c, image: {image}}}\n"
        ))
    };
    fixture.store.apply(placed("demo:1"), file("web.yaml")).unwrap();
    let first = fixture.store.pod("default", "web").unwrap();
    assert_eq!(fixture.store.apply(placed("demo:2"), file("web.yaml")).unwrap(), Outcome::Configured);
    let second = fixture.store.pod("default", "web").unwrap();
    assert_eq!((&second.metadata.uid, second.spec.node_name.as_str()), (&first.metadata.uid, "node"));
    assert_eq!(second.spec.containers[0].image, "demo:2");
    assert!(!second.metadata.is_deleted());
}

fn records(fixture: &Fixture, kind: &str) -> Vec<std::path::PathBuf> {
    let dir = fixture.root.path().join("hawser/objects").join(kind);
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn objects_with_the_longest_names_survive_and_go() {
    let namespace = "n".repeat(63);
    let names = ["a", "b"].map(|end| format!("{}{end}", "n".repeat(252)));
    let fixture = Fixture::new();
    for name in &names {
        let metadata = format!("{{namespace: {namespace}, name: {name}}}");
        let claim = CLAIM.replace("{name: data}", &metadata);
        fixture.store.apply(object(&claim), Source::Api).unwrap();
        fixture.store.apply(pod_named(&namespace, name), file("p.yaml")).unwrap();
    }
    let fixture = fixture.reopen();
    for name in &names {
        let pod = fixture.store.pod(&namespace, name).unwrap();
        fixture.store.mark_pod_deleted(&namespace, name, None).unwrap();
        fixture.store.forget_pod(&pod.metadata.uid).unwrap();
        assert!(fixture.store.claim(&namespace, name).is_some());
        fixture.store.remove_claim(&namespace, name).unwrap();
    }
    assert_eq!((records(&fixture, "Pod"), records(&fixture, "PersistentVolumeClaim")), (vec![], vec![]));
}

/// Earlier versions wrote such a record, and could not remove it.
#[test]
fn a_record_whose_name_is_too_long_is_read_and_removed() {
    let name = "n".repeat(237);
    let fixture = Fixture::new();
    fixture.store.apply(pod_named("default", &name), file("p.yaml")).unwrap();
    let uid = fixture.store.pod("default", &name).unwrap().metadata.uid.clone();
    let [record] = &records(&fixture, "Pod")[..] else { panic!("one pod") };
    std::fs::rename(record, record.with_file_name(format!("default_{name}.json"))).unwrap();

    let fixture = fixture.reopen();
    assert_eq!(fixture.store.pod("default", &name).unwrap().metadata.uid, uid);
    fixture.store.forget_pod(&uid).unwrap();
    assert_eq!(records(&fixture, "Pod"), [] as [std::path::PathBuf; 0]);
}

#[test]
fn a_client_changes_the_reclaim_policy_of_a_volume_that_was_made_for_a_claim_and_no_other_field() {
    let fixture = Fixture::new();
    let text = |policy: &str, size: &str| {
        format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: v, labels: {{app: web}}, annotations: {{own: note}}}}\n\
             spec: {{capacity: {{storage: {size}}}, accessModes: [ReadWriteOnce], \
             persistentVolumeReclaimPolicy: {policy}, csi: {{driver: d, volumeHandle: h}}}}\n"
        )
    };
    let kubelet::store::AnyObject::Volume(mut made) = object(&text("Delete", "1Gi")).object else {
        panic!("a volume")
    };
    let own = ("pv.kubernetes.io/provisioned-by".to_owned(), "d".to_owned());
    made.metadata.annotations = [own.clone()].into();
    made.metadata.uid = "u".to_owned();
    made.spec.claim_ref = Some(kubelet::objects::ObjectRef {
        namespace: "default".to_owned(),
        name: "data".to_owned(),
        uid: "c".to_owned(),
        ..kubelet::objects::ObjectRef::default()
    });
    fixture.store.put_volume(*made).unwrap();
    let apply = |text: &str, source| fixture.store.apply(object(text), source);

    assert_eq!(apply(&text("Retain", "1Gi"), Source::Api).unwrap(), Outcome::Configured);
    assert_eq!(apply(&text("Retain", "1Gi"), Source::Api).unwrap(), Outcome::Unchanged);
    let error = apply(&text("Retain", "2Gi"), Source::Api).unwrap_err().to_string();
    assert!(error.contains("only persistentVolumeReclaimPolicy can change"), "{error}");
    let error = apply(&text("Delete", "1Gi"), file("v.yaml")).unwrap_err().to_string();
    assert_eq!(error, "PersistentVolume \"v\" is already described by the kubelet");
    let fixture = fixture.reopen();
    let volume = fixture.store.volume("v").unwrap();
    assert_eq!(volume.spec.persistent_volume_reclaim_policy, kubelet::objects::ReclaimPolicy::Retain);
    assert_eq!(volume.metadata.annotations, [("own".to_owned(), "note".to_owned()), own].into());
    assert_eq!((volume.metadata.uid.as_str(), volume.metadata.labels.len()), ("u", 1));
    assert_eq!(volume.spec.claim_ref.as_ref().unwrap().uid, "c");
}
