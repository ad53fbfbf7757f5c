//! Provisioner and volumes against a driver that records its calls: it serves CSI on a socket, and
//! mounts nothing.

mod unclear;

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use linux::mount::UnmountMode;
use proto::csi::controller_server::{Controller, ControllerServer};
use proto::csi::node_server::{Node, NodeServer};
use proto::csi::{self, controller_service_capability as controller, node_service_capability as node};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Request, Response, Status};

use super::Provisioner;
use crate::clients::csi::Driver;
use crate::clients::plugins::Plugins;
use crate::manifest;
use crate::objects::{ClaimPhase, PersistentVolumeClaim, Pod, VolumePhase, VolumeSnapshot};
use crate::sink::Sinks;
use crate::store::{Source, Store, VOLUME_BEING_CREATED};
use crate::volumes::Volumes;

const DRIVER: &str = "csi.example.com";
const TIMEOUT: Duration = Duration::from_secs(20);

/// A call: its method, the request's text without its secrets, and the secrets.
#[derive(Debug, Clone)]
struct Call {
    method: &'static str,
    request: String,
    secrets: HashMap<String, String>,
}

#[derive(Debug, Default)]
struct Recorded {
    calls: Mutex<Vec<Call>>,
    /// The answers to the next CreateSnapshot calls: an error, or whether the snapshot is ready.
    snapshots: Mutex<Vec<Result<bool, Status>>>,
    /// What the volumes are made of, by their names.
    made: Mutex<HashMap<String, csi::CreateVolumeRequest>>,
    /// It has no CREATE_DELETE_SNAPSHOT.
    takes_no_snapshots: AtomicBool,
    /// The methods that fail, and how.
    failing: Mutex<HashMap<&'static str, Status>>,
    failed_at: Mutex<Vec<Instant>>,
}

impl Recorded {
    /// `None`: the method succeeds again.
    fn fail(&self, method: &'static str, answer: Option<Status>) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing.remove(method);
        failing.extend(answer.map(|answer| (method, answer)));
    }

    fn answer(&self, method: &str) -> Result<(), Status> {
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(answer) = failing.get(method) else { return Ok(()) };
        self.failed_at.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        Err(answer.clone())
    }

    fn add(&self, method: &'static str, request: impl std::fmt::Debug, secrets: HashMap<String, String>) {
        let call = Call { method, request: format!("{request:?}"), secrets };
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    fn of(&self, method: &str) -> Vec<Call> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.iter().filter(|call| call.method == method).cloned().collect()
    }
}

#[derive(Debug, Clone)]
struct Service(Arc<Recorded>);

/// Takes the secrets out of a request and records both.
macro_rules! record {
    ($self:ident, $method:literal, $request:ident) => {{
        let mut request = $request.into_inner();
        let secrets = std::mem::take(&mut request.secrets);
        $self.0.add($method, &request, secrets);
        request
    }};
}

#[tonic::async_trait]
impl Controller for Service {
    async fn controller_get_capabilities(
        &self,
        _request: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::ControllerGetCapabilitiesResponse>, Status> {
        use controller::rpc::Type;
        let offered =
            [Type::CreateDeleteSnapshot, Type::CloneVolume, Type::ExpandVolume, Type::SingleNodeMultiWriter];
        let capability = |kind: Type| csi::ControllerServiceCapability {
            r#type: Some(controller::Type::Rpc(controller::Rpc { r#type: kind.into() })),
        };
        let lacks = self.0.takes_no_snapshots.load(Ordering::Relaxed).then_some(Type::CreateDeleteSnapshot);
        let offered = offered.into_iter().filter(|kind| Some(*kind) != lacks);
        let capabilities = offered.map(capability).collect();
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Result<Response<csi::CreateVolumeResponse>, Status> {
        let answer = self.0.answer("CreateVolume");
        let mut asked = request.get_ref().clone();
        asked.secrets.clear();
        let mut made = self.0.made.lock().unwrap_or_else(PoisonError::into_inner);
        // After ABORTED it goes on.
        if answer.as_ref().err().is_none_or(|status| status.code() == Code::Aborted)
            && *made.entry(asked.name.clone()).or_insert_with(|| asked.clone()) != asked
        {
            return Err(Status::already_exists("it was made with other parameters"));
        }
        drop(made);
        answer?;
        let request = record!(self, "CreateVolume", request);
        let volume = csi::Volume {
            volume_id: format!("id-of-{}", request.name),
            capacity_bytes: request.capacity_range.map_or(0, |range| range.required_bytes),
            content_source: request.volume_content_source,
            ..csi::Volume::default()
        };
        Ok(Response::new(csi::CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Result<Response<csi::DeleteVolumeResponse>, Status> {
        self.0.answer("DeleteVolume")?;
        record!(self, "DeleteVolume", request);
        Ok(Response::new(csi::DeleteVolumeResponse {}))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Result<Response<csi::ControllerExpandVolumeResponse>, Status> {
        let request = record!(self, "ControllerExpandVolume", request);
        let capacity_bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
        let node_expansion_required = true;
        Ok(Response::new(csi::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required }))
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> Result<Response<csi::CreateSnapshotResponse>, Status> {
        let request = record!(self, "CreateSnapshot", request);
        let mut answers = self.0.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        let ready_to_use = if answers.is_empty() { true } else { answers.remove(0)? };
        let snapshot = csi::Snapshot {
            snapshot_id: format!("id-of-{}", request.name),
            source_volume_id: request.source_volume_id,
            size_bytes: 1 << 20,
            creation_time: Some(csi::Timestamp { seconds: 1_000_000, nanos: 5 }),
            ready_to_use,
            ..csi::Snapshot::default()
        };
        Ok(Response::new(csi::CreateSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> Result<Response<csi::DeleteSnapshotResponse>, Status> {
        record!(self, "DeleteSnapshot", request);
        Ok(Response::new(csi::DeleteSnapshotResponse {}))
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_get_capabilities(
        &self,
        _request: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        use node::rpc::Type;
        let offered = [
            Type::StageUnstageVolume,
            Type::ExpandVolume,
            Type::SingleNodeMultiWriter,
            Type::GetVolumeStats,
            Type::VolumeCondition,
        ];
        let capability = |kind: Type| csi::NodeServiceCapability {
            r#type: Some(node::Type::Rpc(node::Rpc { r#type: kind.into() })),
        };
        let capabilities = offered.into_iter().map(capability).collect();
        Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        record!(self, "NodeStageVolume", request);
        Ok(Response::new(csi::NodeStageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        self.0.answer("NodePublishVolume")?;
        record!(self, "NodePublishVolume", request);
        Ok(Response::new(csi::NodePublishVolumeResponse {}))
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        record!(self, "NodeExpandVolume", request);
        Ok(Response::new(csi::NodeExpandVolumeResponse { capacity_bytes: 0 }))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        self.0.add("NodeGetVolumeStats", request.into_inner(), HashMap::new());
        let unit = csi::volume_usage::Unit::Bytes.into();
        let usage = vec![csi::VolumeUsage { unit, total: 4096, available: 1024, used: 3072 }];
        let condition = csi::VolumeCondition { abnormal: true, message: "the disk is slow".to_owned() };
        Ok(Response::new(csi::NodeGetVolumeStatsResponse { usage, volume_condition: Some(condition) }))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.0.add("NodeUnpublishVolume", &request, HashMap::new());
        // Most tests mount nothing there.
        let _unmounted = linux::mount::unmount(Path::new(&request.target_path), UnmountMode::Detach);
        Ok(Response::new(csi::NodeUnpublishVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        self.0.answer("NodeUnstageVolume")?;
        self.0.add("NodeUnstageVolume", request.into_inner(), HashMap::new());
        Ok(Response::new(csi::NodeUnstageVolumeResponse {}))
    }
}

struct Fixture {
    root: tempfile::TempDir,
    store: Store,
    plugins: Plugins,
    volumes: Volumes,
    driver: Arc<Recorded>,
    provisioner: JoinHandle<()>,
}

impl Fixture {
    /// The provisioner runs, and the driver is registered.
    fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("csi.sock");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let driver = Arc::new(Recorded::default());
        let serve = tonic::transport::Server::builder()
            .add_service(ControllerServer::new(Service(Arc::clone(&driver))))
            .add_service(NodeServer::new(Service(Arc::clone(&driver))))
            .serve_with_incoming(UnixListenerStream::new(listener));
        tokio::spawn(serve);
        let store = Store::open(root.path(), "node").unwrap();
        let plugins = Plugins::new();
        plugins.add(Driver::new(DRIVER, &socket), &socket);
        let sinks = Sinks::new(store.clone(), Vec::new());
        let volumes = Volumes::new(root.path(), store.clone(), sinks, plugins.clone());
        let provisioner = Provisioner::new(store.clone(), plugins.clone(), volumes.clone());
        let provisioner = tokio::spawn(provisioner.run());
        Self { root, store, plugins, volumes, driver, provisioner }
    }

    /// Another kubelet has the store and the files.
    fn restart(&mut self) {
        self.provisioner.abort();
        let (store, plugins) = (self.store.clone(), self.plugins.clone());
        let sinks = Sinks::new(store.clone(), Vec::new());
        self.volumes = Volumes::new(self.root.path(), store.clone(), sinks, plugins.clone());
        self.volumes.reconstruct().unwrap();
        self.provisioner = tokio::spawn(Provisioner::new(store, plugins, self.volumes.clone()).run());
    }

    fn apply(&self, text: &str) {
        let parsed = manifest::parse(text.as_bytes(), "test");
        assert!(parsed.errors.is_empty(), "{:?}", parsed.errors);
        for manifest in parsed.manifests {
            self.store.apply(manifest.described(), Source::Api).unwrap();
        }
    }

    async fn until<T>(&self, what: &str, mut look: impl FnMut(&Store) -> Option<T>) -> T {
        let mut changes = self.store.subscribe();
        let found = async {
            loop {
                if let Some(found) = look(&self.store) {
                    return found;
                }
                // A lagging receiver looks again too.
                drop(changes.recv().await);
            }
        };
        let found = tokio::time::timeout(TIMEOUT, found).await;
        found.unwrap_or_else(|_| panic!("{what}: {:#?}\n{:#?}", self.store.events(), self.driver.calls))
    }

    async fn claim(
        &self,
        what: &str,
        is_so: impl Fn(&PersistentVolumeClaim) -> bool,
    ) -> Arc<PersistentVolumeClaim> {
        self.until(what, |store| store.claim("default", "data").filter(|claim| is_so(claim))).await
    }

    async fn snapshot(&self, what: &str, is_so: impl Fn(&VolumeSnapshot) -> bool) -> Arc<VolumeSnapshot> {
        self.until(what, |store| store.snapshot("default", "snap").filter(|snapshot| is_so(snapshot))).await
    }

    async fn event(&self, reason: &str, words: &str) {
        self.until(&format!("event {reason} with {words:?}"), |store| {
            store.events().iter().any(|e| e.reason == reason && e.message.contains(words)).then_some(())
        })
        .await;
    }

    fn secrets_of(&self, method: &str) -> Vec<String> {
        let calls = self.driver.of(method);
        let last = calls.last().unwrap_or_else(|| panic!("{method} was not called"));
        last.secrets.values().cloned().collect()
    }
}

/// A class whose calls have a secret each; the Secret of a call has its name as the value.
fn class() -> String {
    let words = ["provisioner", "node-stage", "node-publish", "controller-expand", "node-expand"];
    let secret = |word: &str| {
        format!(
            "  csi.storage.k8s.io/{word}-secret-name: {word}-${{pvc.name}}\n  csi.storage.k8s.io/{word}-secret-namespace: vault\n"
        )
    };
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n\
         allowVolumeExpansion: true\nparameters:\n  tier: gold\n{}",
        words.map(secret).concat()
    )
}

fn secret(word: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {word}-data, namespace: vault}}\n\
         stringData: {{key: hush-{word}}}\n---\n"
    )
}

fn claim(size: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: data}}\nspec: {{storageClassName: fast, \
         accessModes: [ReadWriteOncePod], resources: {{requests: {{storage: {size}}}}}}}\n"
    )
}

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: i}]\n  \
                   volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]\n";

/// Every file below `dir` except the store's Secrets has none of the values.
fn assert_no_secret_on_disk(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("objects/Secret") {
            assert_no_secret_on_disk(&path);
        } else if path.is_file() {
            let content = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            // "hush-", also in base64.
            assert!(!content.contains("hush-") && !content.contains("aHVzaC"), "{}", path.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_has_the_secrets_that_the_class_names_and_nothing_else_has_them() {
    let fixture = Fixture::start();
    fixture.apply(&class());
    fixture.apply(&claim("1Gi"));
    fixture.event("ProvisioningFailed", "secret \"vault/provisioner-data\" of the CSI call not found").await;
    assert!(fixture.driver.of("CreateVolume").is_empty());
    fixture.apply(&secret("provisioner"));
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    assert_eq!(fixture.secrets_of("CreateVolume"), ["hush-provisioner"]);
    let request = &fixture.driver.of("CreateVolume")[0].request;
    assert!(request.contains("\"tier\": \"gold\"") && !request.contains("csi.storage.k8s.io"), "{request}");
    assert!(request.contains("mode: SingleNodeSingleWriter"), "{request}");

    // The pod waits for the Secrets of its calls.
    fixture.apply(POD);
    let pod: Arc<Pod> = fixture.store.pod("default", "web").unwrap();
    let mounting = tokio::spawn({
        let (volumes, pod) = (fixture.volumes.clone(), Arc::clone(&pod));
        async move { volumes.mount_pod(&pod).await }
    });
    fixture.event("FailedMount", "secret \"vault/node-stage-data\" of the CSI call not found").await;
    fixture.apply(&secret("node-stage"));
    fixture.event("FailedMount", "secret \"vault/node-publish-data\" of the CSI call not found").await;
    fixture.apply(&secret("node-publish"));
    tokio::time::timeout(TIMEOUT, mounting).await.unwrap().unwrap();
    assert_eq!(fixture.secrets_of("NodeStageVolume"), ["hush-node-stage"]);
    assert_eq!(fixture.secrets_of("NodePublishVolume"), ["hush-node-publish"]);

    // The volume grows while the pod has it.
    for word in ["controller-expand", "node-expand"] {
        fixture.apply(&secret(word));
    }
    fixture.apply(&claim("2Gi"));
    let grown = |claim: &PersistentVolumeClaim| {
        claim.status.capacity.get("storage").is_some_and(|size| size.value() == 2 << 30)
    };
    let claim = fixture.claim("expanded", grown).await;
    assert!(claim.status.conditions.is_empty(), "{:?}", claim.status);
    assert_eq!(fixture.secrets_of("ControllerExpandVolume"), ["hush-controller-expand"]);
    assert_eq!(fixture.secrets_of("NodeExpandVolume"), ["hush-node-expand"]);
    assert!(fixture.driver.of("NodeExpandVolume")[0].request.contains("kubernetes.io~csi"));

    let volume = fixture.store.volume(&bound.spec.volume_name).unwrap();
    let shown = serde_json::to_string(&*volume).unwrap();
    assert!(shown.contains("node-stage-data") && !shown.contains("hush-"), "{shown}");
    assert!(!format!("{:?}", fixture.store.events()).contains("hush-"));
    assert_no_secret_on_disk(fixture.root.path());

    use crate::objects::Object;
    fixture.volumes.unmount_pod(&pod.reference()).await;
    fixture.store.forget_pod(&pod.metadata.uid).unwrap();
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("the claim is gone", |store| store.claim("default", "data").is_none().then_some(())).await;
    assert_eq!(fixture.secrets_of("DeleteVolume"), ["hush-provisioner"]);
}

/// A class whose calls have no secrets.
fn plain_class() -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n\
         allowVolumeExpansion: true\n"
    )
}

/// The file of a pod is removed and comes back while the pod is torn down: both pods have one uid.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_pod_of_an_unchanged_file_waits_for_a_new_volume_of_its_own() {
    use crate::objects::Object;
    const FILE: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: i}]\n  \
        volumes: [{name: v, ephemeral: {volumeClaimTemplate: {spec: {storageClassName: fast, \
        accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}}}]\n";
    let fixture = Fixture::start();
    let (store, volumes) = (&fixture.store, &fixture.volumes);
    let put = || {
        let parsed = manifest::parse(FILE.as_bytes(), "web.yaml");
        assert!(parsed.errors.is_empty(), "{:?}", parsed.errors);
        let described = parsed.manifests.into_iter().next().unwrap().described();
        store.apply(described, Source::File("web.yaml".into())).unwrap();
        store.pod("default", "web").unwrap()
    };
    let claim = || store.claim("default", "web-v");
    fixture.apply(&plain_class());
    let first = put();
    tokio::time::timeout(TIMEOUT, volumes.mount_pod(&first)).await.unwrap();
    let before = claim().unwrap();

    fixture.driver.fail("DeleteVolume", Some(Status::unavailable("busy")));
    store.mark_pod_deleted("default", "web", None).unwrap();
    assert!(put().metadata.is_deleted(), "the first pod is torn down yet");
    volumes.unmount_pod(&first.reference()).await;
    store.forget_pod(&first.metadata.uid).unwrap();
    let next = store.pod("default", "web").unwrap();
    assert_eq!((&next.metadata.uid, next.metadata.is_deleted()), (&first.metadata.uid, false));
    let mounting = tokio::spawn({
        let (volumes, next) = (volumes.clone(), Arc::clone(&next));
        async move { volumes.mount_pod(&next).await }
    });
    fixture.event("FailedMount", "persistentvolumeclaim \"web-v\" is being deleted").await;
    assert_eq!(claim().unwrap().metadata.uid, before.metadata.uid);
    fixture.driver.fail("DeleteVolume", None);
    tokio::time::timeout(TIMEOUT, mounting).await.unwrap().unwrap();
    let after = claim().unwrap();
    assert!(after.metadata.uid != before.metadata.uid && after.has_owner(&next.metadata.uid));
    assert!(store.volume(&before.spec.volume_name).is_none(), "the first pod's data is gone");
    assert_eq!(fixture.driver.of("NodePublishVolume").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_no_pod_has_grows_when_it_is_mounted() {
    let fixture = Fixture::start();
    fixture.apply(&plain_class());
    fixture.apply(&claim("1Gi"));
    fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    fixture.apply(&claim("2Gi"));
    let pending = fixture.claim("waits", |claim| claim.has_condition("FileSystemResizePending")).await;
    assert_eq!(pending.status.capacity["storage"].value(), 1 << 30);
    assert_eq!(
        fixture.store.volume(&pending.spec.volume_name).unwrap().spec.capacity["storage"].value(),
        2 << 30
    );
    fixture.apply(POD);
    let pod = fixture.store.pod("default", "web").unwrap();
    tokio::time::timeout(TIMEOUT, fixture.volumes.mount_pod(&pod)).await.unwrap();
    let claim = fixture.store.claim("default", "data").unwrap();
    assert_eq!(claim.status.capacity["storage"].value(), 2 << 30);
    assert_eq!((claim.status.conditions.len(), fixture.driver.of("NodeExpandVolume").len()), (0, 1));
    assert_eq!(fixture.driver.of("ControllerExpandVolume").len(), 1);
}

/// A pod's fsGroup is given to a volume whose file system does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn the_other_pods_of_a_volume_do_not_wait_for_a_walk_and_its_own_pod_does() {
    use crate::objects::Object;
    let fixture = Fixture::start();
    let claim = |size: &str| claim(size).replace("ReadWriteOncePod", "ReadWriteMany");
    fixture.apply(&plain_class());
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {DRIVER}}}\n\
         spec: {{attachRequired: false, fsGroupPolicy: File}}\n"
    ));
    fixture.apply(&claim("1Gi"));
    let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    fixture.apply(POD);
    fixture.apply(
        &POD.replace("name: web", "name: walker")
            .replace("spec:", "spec:\n  securityContext: {fsGroup: 2000}"),
    );
    let pod = |name| fixture.store.pod("default", name).unwrap();
    let (other, walker) = (pod("web"), pod("walker"));
    let volumes = &fixture.volumes;
    tokio::time::timeout(TIMEOUT, volumes.mount_pod(&other)).await.unwrap();

    let dir = volumes.pod_dir(&walker.metadata.uid).join("volumes/kubernetes.io~csi");
    let dir = dir.join(&bound.spec.volume_name);
    std::fs::create_dir_all(&dir).unwrap();
    let connection = crate::volumes::mount_silent_at(&dir.join("mount"));
    let mounting = tokio::spawn({
        let (volumes, walker) = (volumes.clone(), Arc::clone(&walker));
        async move { volumes.mount_pod(&walker).await }
    });
    let deadline = Instant::now() + TIMEOUT;
    while fixture.driver.of("NodePublishVolume").len() < 2 && Instant::now() < deadline {
        tokio::task::yield_now().await;
    }
    fixture.apply(&claim("2Gi"));
    let grown = |claim: &PersistentVolumeClaim| claim.status.capacity["storage"].value() == 2 << 30;
    fixture.claim("expanded during the walk", grown).await;
    let unmounted = tokio::time::timeout(TIMEOUT, volumes.unmount_pod(&other.reference())).await;
    unmounted.expect("it does not wait for the walk");
    assert_eq!(fixture.driver.of("NodeUnstageVolume").len(), 0, "the walker has it");
    assert!(!mounting.is_finished());

    // As a worker does it: the operation itself goes on.
    mounting.abort();
    let begun = Instant::now();
    let unmounting = tokio::spawn({
        let (volumes, walker) = (volumes.clone(), walker.reference());
        async move { volumes.unmount_pod(&walker).await }
    });
    while fixture.driver.of("NodeUnpublishVolume").len() < 2 && begun.elapsed() < TIMEOUT {
        tokio::task::yield_now().await;
    }
    let waited = begun.elapsed();
    drop(connection);
    tokio::time::timeout(TIMEOUT, unmounting).await.unwrap().unwrap();
    assert!(Duration::from_secs(5) <= waited && waited < TIMEOUT, "{waited:?}: the walk was given up");
    assert_eq!(fixture.driver.of("NodeUnstageVolume").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_answer_about_a_volume_has_its_condition_and_its_figures() {
    let fixture = Fixture::start();
    let class = format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    );
    fixture.apply(&class);
    fixture.apply(&claim("1Gi"));
    fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    fixture.apply(POD);
    let pod = fixture.store.pod("default", "web").unwrap();
    tokio::time::timeout(TIMEOUT, fixture.volumes.mount_pod(&pod)).await.unwrap();
    assert!(fixture.volumes.figures().is_empty());
    let asking = tokio::spawn(fixture.volumes.clone().ask_drivers());
    fixture.event("VolumeConditionAbnormal", "the disk is slow").await;
    asking.abort();
    let figures = fixture.volumes.figures();
    let [volume] = &*figures[&pod.metadata.uid] else { panic!("{figures:?}") };
    assert_eq!((volume.name.as_str(), volume.claim.as_deref()), ("v", Some("data")));
    assert_eq!((volume.space.used, volume.space.inodes, volume.is_abnormal), (Some(3072), None, Some(true)));
    assert_eq!(fixture.driver.of("NodeGetVolumeStats").len(), 1);
}

fn snapshot_class(policy: &str) -> String {
    format!(
        "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotClass\ndriver: {DRIVER}\n\
         metadata: {{name: quick, annotations: {{snapshot.storage.kubernetes.io/is-default-class: \"true\"}}}}\n\
         deletionPolicy: {policy}\nparameters:\n  mode: crash\n  \
         csi.storage.k8s.io/snapshotter-secret-name: ${{volumesnapshot.name}}-data\n  \
         csi.storage.k8s.io/snapshotter-secret-namespace: vault\n"
    )
}

const SNAPSHOT: &str = "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: snap}\n\
                        spec: {source: {persistentVolumeClaimName: data}}\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_retried_until_it_is_complete_and_deleted_by_its_policy() {
    let fixture = Fixture::start();
    *fixture.driver.snapshots.lock().unwrap() =
        vec![Err(Status::internal("no space")), Err(Status::unavailable("restarting")), Ok(false), Ok(true)];
    fixture.apply(SNAPSHOT);
    fixture.event("SnapshotContentCreationFailed", "the source PVC data not found").await;
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    ));
    fixture.apply(&claim("1Gi"));
    fixture.event("GetSnapshotClassFailed", "no default VolumeSnapshotClass of driver csi.example.com").await;
    fixture.apply(&secret("snap"));
    fixture.apply(&snapshot_class("Delete"));
    let failed = fixture.snapshot("its error shows", |s| {
        s.status.error.as_ref().is_some_and(|error| error.message.contains("no space"))
    });
    assert_eq!(failed.await.status.ready_to_use, Some(false));
    let ready = fixture.snapshot("ready", |s| s.status.ready_to_use == Some(true)).await;
    assert_eq!(
        (ready.status.error.clone(), ready.spec.volume_snapshot_class_name.as_deref()),
        (None, Some("quick"))
    );
    assert_eq!(ready.status.restore_size.as_ref().map(|size| size.value()), Some(1 << 20));
    let calls = fixture.driver.of("CreateSnapshot");
    assert_eq!(calls.len(), 4, "{calls:?}");
    let expected = format!("snapshot-{}", ready.metadata.uid);
    assert!(calls.iter().all(|call| call.request.contains(&expected) && call.secrets["key"] == "hush-snap"));
    assert!(
        calls[0].request.contains("mode") && !calls[0].request.contains("csi.storage.k8s.io"),
        "{calls:?}"
    );

    fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
    fixture.until("it is gone", |store| store.snapshot("default", "snap").is_none().then_some(())).await;
    assert!(fixture.store.snapshot_contents().is_empty());
    assert_eq!(fixture.secrets_of("DeleteSnapshot"), ["hush-snap"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_may_exist_is_looked_for_before_its_content_goes() {
    let fixture = Fixture::start();
    let uncertain = (0..100).map(|_| Err(Status::deadline_exceeded("slow"))).collect();
    *fixture.driver.snapshots.lock().unwrap() = uncertain;
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    ));
    fixture.apply(&claim("1Gi"));
    fixture.apply(&secret("snap"));
    fixture.apply(&snapshot_class("Delete"));
    fixture.apply(SNAPSHOT);
    fixture.event("SnapshotCreationFailed", "slow").await;
    // Its claim waits, and says for what.
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.event("ClaimDeletePending", "snapshot snap").await;
    // The class may go first.
    fixture.store.remove_snapshot_class("quick").unwrap();
    fixture.driver.snapshots.lock().unwrap().clear();
    fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
    fixture.until("it is gone", |store| store.snapshot("default", "snap").is_none().then_some(())).await;
    let deleted = fixture.driver.of("DeleteSnapshot");
    assert!(deleted.len() == 1 && deleted[0].request.contains("id-of-snapshot-"), "{deleted:?}");
    fixture.until("the claim is gone", |store| store.claim("default", "data").is_none().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_the_driver_cannot_take_does_not_keep_its_claim() {
    let fixture = Fixture::start();
    fixture.driver.takes_no_snapshots.store(true, Ordering::Relaxed);
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    ));
    fixture.apply(&claim("1Gi"));
    fixture.apply(&snapshot_class("Delete"));
    fixture.apply(SNAPSHOT);
    fixture.event("SnapshotContentCreationFailed", "csi.example.com does not support snapshots").await;
    assert!(fixture.store.snapshot_contents().is_empty());
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("the claim is gone", |store| store.claim("default", "data").is_none().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_claims_that_wait_for_a_volume_one_gets_it() {
    let fixture = Fixture::start();
    for name in ["a", "b"] {
        fixture.apply(&format!(
            "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{storageClassName: \"\", \
             accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Gi}}}}}}\n"
        ));
    }
    let volume = |name: &str| {
        format!(
            "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec: {{capacity: {{storage: 1Gi}}, \
             accessModes: [ReadWriteOnce], csi: {{driver: {DRIVER}, volumeHandle: {name}}}}}\n"
        )
    };
    let bound = |store: &Store| {
        let mut claims = store.claims();
        claims.retain(|claim| claim.status.phase == ClaimPhase::Bound);
        claims
    };
    fixture.apply(&volume("v"));
    fixture.until("one is bound", |store| (bound(store).len() == 1).then_some(())).await;
    fixture.apply(&volume("w"));
    fixture.until("both are bound", |store| (bound(store).len() == 2).then_some(())).await;
    let mut volumes: Vec<String> =
        bound(&fixture.store).iter().map(|claim| claim.spec.volume_name.clone()).collect();
    volumes.sort();
    assert_eq!(volumes, ["v", "w"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retained_snapshot_is_left_to_the_driver() {
    let fixture = Fixture::start();
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    ));
    fixture.apply(&claim("1Gi"));
    fixture.apply(&secret("snap"));
    fixture.apply(&snapshot_class("Retain"));
    fixture.apply(SNAPSHOT);
    let ready = fixture.snapshot("ready", |s| s.status.ready_to_use == Some(true)).await;
    fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
    fixture.until("it is gone", |store| store.snapshot("default", "snap").is_none().then_some(())).await;
    let content = &ready.status.bound_volume_snapshot_content_name;
    assert!(fixture.store.snapshot_content(content).is_some());
    fixture.store.mark_snapshot_content_deleted(content).unwrap();
    fixture
        .until("the content is gone", |store| store.snapshot_content(content).is_none().then_some(()))
        .await;
    assert!(fixture.driver.of("DeleteSnapshot").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_lost_with_its_volume_and_found_with_it() {
    let fixture = Fixture::start();
    let volume = format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: v}}\nspec: {{capacity: {{storage: 1Gi}}, \
         accessModes: [ReadWriteOncePod], storageClassName: fast, csi: {{driver: {DRIVER}, volumeHandle: v}}}}\n"
    );
    fixture.apply(&volume);
    fixture.apply(&claim("1Gi"));
    fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
    // The store keeps a bound volume; only its record can be lost.
    fixture.store.remove_volume("v").unwrap();
    fixture.claim("lost", |claim| claim.status.phase == ClaimPhase::Lost).await;
    fixture.event("ClaimLost", "Bound claim has lost its PersistentVolume").await;

    fixture.apply(POD);
    let pod: Arc<Pod> = fixture.store.pod("default", "web").unwrap();
    let mounting = tokio::spawn({
        let (volumes, pod) = (fixture.volumes.clone(), Arc::clone(&pod));
        async move { volumes.mount_pod(&pod).await }
    });
    let words = "persistentvolumeclaim \"data\" bound to non-existent persistentvolume \"v\"";
    fixture.event("FailedMount", words).await;
    assert!(fixture.driver.of("NodeStageVolume").is_empty());

    fixture.apply(&volume);
    let found = fixture.claim("found", |claim| claim.status.phase == ClaimPhase::Bound).await;
    assert_eq!(found.status.capacity["storage"].value(), 1 << 30);
    tokio::time::timeout(TIMEOUT, mounting).await.unwrap().unwrap();
    assert_eq!(fixture.driver.of("NodeStageVolume").len(), 1);
    assert!(fixture.driver.of("CreateVolume").is_empty(), "a lost claim gets no other volume");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_whose_claim_is_gone_follows_its_policy() {
    let fixture = Fixture::start();
    let bound = |name: &str, policy: &str, made_by: &str| {
        format!(
            "apiVersion: v1\nkind: PersistentVolume\n\
             metadata: {{name: {name}, annotations: {{pv.kubernetes.io/provisioned-by: \"{made_by}\"}}}}\n\
             spec: {{capacity: {{storage: 1Gi}}, accessModes: [ReadWriteOnce], csi: {{driver: {DRIVER}, \
             volumeHandle: {name}}}, persistentVolumeReclaimPolicy: {policy}}}\n---\n\
             apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec: {{volumeName: {name}, \
             storageClassName: \"\", accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Gi}}}}}}\n"
        )
    };
    fixture.apply(&bound("kept", "Retain", DRIVER));
    fixture.apply(&bound("made", "Delete", DRIVER));
    let by_hand =
        bound("by-hand", "Delete", "").replace(", annotations: {pv.kubernetes.io/provisioned-by: \"\"}", "");
    fixture.apply(&by_hand);
    let all_bound = |store: &Store| {
        store.claims().iter().all(|claim| claim.status.phase == ClaimPhase::Bound).then_some(())
    };
    fixture.until("bound", all_bound).await;
    for name in ["kept", "made", "by-hand"] {
        fixture.store.mark_claim_deleted("default", name).unwrap();
    }
    fixture.until("no claim is left", |store| store.claims().is_empty().then_some(())).await;
    let phases: Vec<(String, VolumePhase)> =
        fixture.store.volumes().iter().map(|v| (v.metadata.name.clone(), v.status.phase)).collect();
    let expected = [("by-hand", VolumePhase::Failed), ("kept", VolumePhase::Released)];
    assert_eq!(phases, expected.map(|(name, phase)| (name.to_owned(), phase)));
    fixture.event("VolumeFailedDelete", "volume by-hand is kept: it was not made for a claim").await;
    let deleted = fixture.driver.of("DeleteVolume");
    assert!(deleted.len() == 1 && deleted[0].request.contains("\"made\""), "{deleted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_applied_for_a_claim_that_does_not_exist_is_not_available_and_keeps_its_data() {
    let fixture = Fixture::start();
    fixture.apply(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: other}\nspec: {storageClassName: \"\", \
         accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}\n",
    );
    for (name, policy, annotation, claim) in [
        ("by-hand", "Delete", "note", "gone"),
        ("kept", "Retain", "pv.kubernetes.io/provisioned-by", "other"),
        ("made", "Delete", "pv.kubernetes.io/provisioned-by", "gone"),
    ] {
        fixture.apply(&format!(
            "apiVersion: v1\nkind: PersistentVolume\n\
             metadata: {{name: {name}, annotations: {{{annotation}: \"{DRIVER}\"}}}}\n\
             spec: {{capacity: {{storage: 1Gi}}, accessModes: [ReadWriteOnce], csi: {{driver: {DRIVER}, \
             volumeHandle: {name}}}, persistentVolumeReclaimPolicy: {policy}, \
             claimRef: {{namespace: default, name: {claim}, uid: old}}}}\n"
        ));
    }
    let expected = [VolumePhase::Failed, VolumePhase::Released, VolumePhase::Failed];
    let phases = |store: &Store| store.volumes().iter().map(|v| v.status.phase).collect::<Vec<_>>();
    fixture.until("none is available", |store| (phases(store) == expected).then_some(())).await;
    fixture.event("VolumeFailedDelete", "volume made is kept: it was applied for claim default/gone").await;
    fixture.event("VolumeFailedDelete", "volume by-hand is kept: it was not made for a claim").await;
    assert_eq!(fixture.store.claim("default", "other").unwrap().status.phase, ClaimPhase::Pending);
    for name in ["by-hand", "kept", "made"] {
        fixture.store.mark_volume_deleted(name).unwrap();
    }
    fixture.until("no volume is left", |store| store.volumes().is_empty().then_some(())).await;
    assert!(fixture.driver.of("DeleteVolume").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_goes_with_its_claim_is_deleted_by_the_driver_before_its_record_goes() {
    for loses_its_claim in [false, true] {
        let fixture = Fixture::start();
        fixture.apply(&format!(
            "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
        ));
        fixture.apply(&claim("1Gi"));
        let bound = fixture.claim("bound", |claim| claim.status.phase == ClaimPhase::Bound).await;
        let volume = &bound.spec.volume_name;
        fixture.driver.fail("DeleteVolume", Some(Status::internal("still in use")));
        fixture.store.mark_claim_deleted("default", "data").unwrap();
        fixture.event("VolumeFailedDelete", "still in use").await;
        if loses_its_claim {
            fixture.store.remove_claim("default", "data").unwrap();
        }
        fixture.store.mark_volume_deleted(volume).unwrap();
        let failures = |store: &Store| {
            let events = store.events().into_iter();
            let of_volume = events.filter(|e| e.involved_object.kind == "PersistentVolume");
            of_volume.filter(|e| e.reason == "VolumeFailedDelete").map(|e| e.count).sum::<u32>()
        };
        let (before, is_gone) =
            (failures(&fixture.store), |store: &Store| store.volume(volume).is_none().then_some(()));
        let tried_again = |store: &Store| is_gone(store).or((failures(store) > before).then_some(()));
        fixture.until("it is tried again", tried_again).await;
        fixture.driver.fail("DeleteVolume", None);
        fixture.until("the volume is gone", is_gone).await;
        let deleted = fixture.driver.of("DeleteVolume");
        assert!(deleted.len() == 1 && deleted[0].request.contains("id-of-pvc-"), "{deleted:?}");
        fixture.until("the claim is gone", |store| store.claims().is_empty().then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_may_exist_is_looked_for_before_its_claim_goes() {
    let fixture = Fixture::start();
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n\
         parameters: {{tier: gold}}\n"
    ));
    fixture.apply(&claim("1Gi"));
    fixture.apply(&secret("snap"));
    fixture.apply(&snapshot_class("Delete"));
    fixture.apply(SNAPSHOT);
    fixture.snapshot("ready", |s| s.status.ready_to_use == Some(true)).await;

    fixture.driver.fail("CreateVolume", Some(Status::aborted("the copy goes on")));
    fixture.apply(&claim("1Gi").replace("name: data", "name: copy").replace(
        "spec: {",
        "spec: {dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}, ",
    ));
    fixture.event("ProvisioningFailed", "the copy goes on").await;
    let copy = fixture.store.claim("default", "copy").unwrap();
    // The class may go first; the source waits.
    fixture.store.remove_class("fast").unwrap();
    fixture.store.mark_claim_deleted("default", "copy").unwrap();
    fixture.store.mark_snapshot_deleted("default", "snap").unwrap();
    fixture.event("ProvisioningFailed", "the claim is kept until driver csi.example.com reports").await;
    fixture.event("SnapshotDeletePending", "claim copy").await;
    fixture.driver.fail("CreateVolume", None);
    let is_gone = |store: &Store| store.claim("default", "copy").is_none().then_some(());
    fixture.until("the claim is gone", is_gone).await;
    let made = fixture.driver.of("CreateVolume").pop().unwrap().request;
    assert!(made.contains("id-of-snapshot-") && made.contains("\"tier\": \"gold\""), "{made}");
    let deleted = fixture.driver.of("DeleteVolume");
    let id = format!("id-of-pvc-{}", copy.metadata.uid);
    assert!(deleted.len() == 1 && deleted[0].request.contains(&id), "{deleted:?}");
    assert_eq!(fixture.store.volumes().len(), 1);
    fixture.until("it is gone", |store| store.snapshot("default", "snap").is_none().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_the_driver_refuses_keeps_its_back_off_and_goes_without_the_driver() {
    let fixture = Fixture::start();
    fixture.driver.fail("CreateVolume", Some(Status::invalid_argument("no such tier")));
    fixture.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: fast}}\nprovisioner: {DRIVER}\n"
    ));
    fixture.apply(&claim("1Gi"));
    let failed_at = || fixture.driver.failed_at.lock().unwrap().clone();
    fixture.until("one call", |_| (!failed_at().is_empty()).then_some(())).await;
    // Errors of snapshots are no reason to try again.
    fixture.apply(SNAPSHOT);
    fixture.until("four calls", |_| (failed_at().len() >= 4).then_some(())).await;
    // 500 ms and 1 s, even if the claim's own change ended the first pause.
    let pauses = failed_at()[3] - failed_at()[1];
    assert!(pauses >= Duration::from_millis(1500), "{pauses:?}");

    fixture.store.remove_class("fast").unwrap();
    fixture.event("ProvisioningFailed", "\"fast\" not found").await;
    let refused = fixture.store.claim("default", "data").unwrap();
    assert!(!refused.metadata.annotations.contains_key(VOLUME_BEING_CREATED), "{:?}", refused.metadata);
    let calls = failed_at().len();
    fixture.store.mark_claim_deleted("default", "data").unwrap();
    fixture.until("the claim is gone", |store| store.claims().is_empty().then_some(())).await;
    assert_eq!((failed_at().len(), fixture.driver.of("DeleteVolume").len()), (calls, 0));
}
