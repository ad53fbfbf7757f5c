//! The commands against a real API socket, as transcripts. No engine runs: the tests change the
//! store in its place.

mod files;
mod keyboard;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tokio::sync::watch;

use super::{ask, describe_error};
use crate::config::{Cli, ClientCommand, Command, socket_in};
use crate::engine::{self, RuntimeEndpoint};
use crate::node::Node;
use crate::objects::{
    ClaimPhase, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, EventType, Object, ObjectRef, PodIp, PodPhase, PodStatus, now,
};
use crate::sink::Sinks;
use crate::source::ObjectSource;
use crate::standalone::api::{self, Api, ClientSocket, Stopping};
use crate::store::{Source, Store};

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers:\n  - name: c\n    \
                   image: demo:1\n  overhead: {cpu: 1m}\n";
const CLAIM: &str = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec:\n  \
                     accessModes: [ReadWriteMany]\n  storageClassName: fast\n  \
                     resources: {requests: {storage: 1Gi}}\n";

struct Fixture {
    dir: tempfile::TempDir,
    store: Store,
    engine: Option<engine::Engine>,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let node = Node::claim(&root).unwrap();
        let store = Store::open(&root, "node").unwrap();
        let config = engine::Config {
            node,
            node_name: "node".to_owned(),
            runtime: RuntimeEndpoint::Remote(dir.path().join("none.sock")),
            log_dir: dir.path().join("logs"),
            cgroup_root: "/none".to_owned(),
            max_pods: 110,
            pod_pids_limit: None,
            seccomp_default: false,
            logs: crate::engine::log_rotation::Limits { max_size: 1 << 20, max_files: 2 },
            image_gc: crate::engine::eviction::ImageGc {
                high_percent: 100,
                low_percent: 100,
                min_age: Duration::ZERO,
            },
            pressure: crate::capacity::pressure::PressureLimits::default(),
        };
        let (engine, handle) = engine::new(config, store.clone(), Sinks::new(store.clone(), Vec::new()));
        let (listener, _socket) = api::listen(&socket_in(&root)).unwrap();
        let api = Api { store: store.clone(), engine: handle, stopping: watch::Sender::new(Stopping::No) };
        let clients = Box::new(ClientSocket::new(api, listener));
        tokio::spawn(clients.follow(Box::pin(std::future::pending())));
        Self { dir, store, engine: Some(engine) }
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    /// A command; blanks separate its words.
    fn command(&self, words: &str) -> ClientCommand {
        let root = self.dir.path().join("root").display().to_string();
        let words = ["hawser-kubelet"].into_iter().chain(words.split(' ')).chain(["--root-dir", &root]);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Client(command) => *command,
            Command::Run(_) => panic!("a client command"),
        }
    }

    /// Runs a command; returns its output, and its error as the user sees it.
    async fn both(&self, words: &str) -> (String, Option<String>) {
        let mut out = Vec::new();
        let error = ask(self.command(words), &mut out).await.err();
        (String::from_utf8(out).unwrap(), error.map(|error| self.shown(&error)))
    }

    /// Runs a command; returns its output, or its error as the user sees it.
    async fn run(&self, words: &str) -> Result<String, String> {
        let command = self.command(words);
        let mut out = Vec::new();
        match ask(command, &mut out).await {
            Ok(()) => Ok(String::from_utf8(out).unwrap()),
            Err(error) => Err(self.shown(&error)),
        }
    }

    /// Runs a command that ends, with a change at its first output; returns the output.
    async fn run_and(&self, words: &str, change: impl FnOnce()) -> String {
        let mut out = Output { text: Vec::new(), change: Some(change) };
        let ended = tokio::time::timeout(Duration::from_secs(30), ask(self.command(words), &mut out)).await;
        ended.expect("the command ends").unwrap();
        String::from_utf8(out.text).unwrap()
    }

    fn shown(&self, error: &super::Error) -> String {
        describe_error(error).replace(self.dir.path().to_str().unwrap(), "DIR")
    }

    fn set_status(&self, name: &str, status: PodStatus) {
        let uid = self.store.pod("default", name).unwrap().metadata.uid.clone();
        self.store.set_pod_status(&uid, status);
    }
}

impl Drop for Fixture {
    /// Also unmounts the root directory's mount on itself.
    fn drop(&mut self) {
        drop(self.engine.take());
        let root = self.dir.path().join("root");
        linux::mount::unmount(&root, linux::mount::UnmountMode::Detach).unwrap();
    }
}

/// Makes a change when the first output comes.
struct Output<F> {
    text: Vec<u8>,
    change: Option<F>,
}

impl<F: FnOnce()> Write for Output<F> {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.text.extend_from_slice(text);
        self.change.take().into_iter().for_each(|change| change());
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn container(name: &str, state: ContainerState) -> ContainerStatus {
    ContainerStatus {
        name: name.to_owned(),
        ready: matches!(state, ContainerState::Running(_)),
        state,
        last_state: None,
        restart_count: 0,
        image: "demo:1".to_owned(),
        image_id: String::new(),
        container_id: "hawser://1".to_owned(),
        started: None,
        resources: None,
        stop_signal: None,
    }
}

fn running() -> PodStatus {
    PodStatus {
        phase: PodPhase::Running,
        pod_ip: "10.0.0.2".to_owned(),
        pod_ips: vec![PodIp { ip: "10.0.0.2".to_owned() }],
        container_statuses: vec![container("c", ContainerState::Running(ContainerStateRunning::default()))],
        ..PodStatus::default()
    }
}

#[tokio::test]
async fn apply_reports_the_outcome_of_each_object() {
    let fixture = Fixture::new();
    let file = fixture.file("all.yaml", &format!("{POD}---\n{CLAIM}"));
    let apply = format!("apply -f {file}");
    assert_eq!(fixture.run(&apply).await.unwrap(), "pod/web created\npersistentvolumeclaim/data created\n");
    assert_eq!(
        fixture.run(&apply).await.unwrap(),
        "pod/web unchanged\npersistentvolumeclaim/data unchanged\n"
    );
    fixture.file("all.yaml", &format!("{}---\n{CLAIM}", POD.replace("demo:1", "demo:2")));
    assert_eq!(
        fixture.run(&apply).await.unwrap(),
        "pod/web configured\npersistentvolumeclaim/data unchanged\n"
    );
    let events = fixture.run("get events --no-headers").await.unwrap();
    assert!(events.contains("UnsupportedField") && events.contains("spec.overhead"), "{events}");
}

#[tokio::test]
async fn one_bad_object_does_not_keep_the_others_from_being_applied() {
    let fixture = Fixture::new();
    let text = format!("{CLAIM}---\n{}---\n{POD}", POD.replace("name: c", "name: C"));
    let file = fixture.file("bad.yaml", &text);
    let (output, error) = fixture.both(&format!("apply -f {file}")).await;
    assert_eq!(output, "persistentvolumeclaim/data created\npod/web created\n");
    let error = error.unwrap();
    assert!(
        error.starts_with(
            "error: DIR/bad.yaml:14:11: Pod \"web\" is invalid: spec.containers[0].name: Invalid value: \"C\""
        ),
        "{error}"
    );
    let missing = fixture.run("apply -f /none.yaml").await.unwrap_err();
    assert_eq!(missing, "error: the path \"/none.yaml\" does not exist");
}

#[tokio::test]
async fn pods_are_listed_as_kubectl_lists_them() {
    let fixture = Fixture::new();
    for name in ["web", "worker-with-a-long-name"] {
        let file = fixture.file("pod.yaml", &POD.replace("web", name));
        fixture.run(&format!("apply -f {file}")).await.unwrap();
    }
    fixture.set_status("web", running());
    let waiting =
        ContainerStateWaiting { reason: "CrashLoopBackOff".to_owned(), message: "back-off 10s".to_owned() };
    let ended = ContainerStateTerminated { finished_at: Some(now()), exit_code: 1, ..Default::default() };
    let mut crashing = container("c", ContainerState::Waiting(waiting));
    crashing.restart_count = 3;
    crashing.last_state = Some(ContainerState::Terminated(ended));
    fixture.set_status(
        "worker-with-a-long-name",
        PodStatus { phase: PodPhase::Running, container_statuses: vec![crashing], ..PodStatus::default() },
    );
    // A second may pass while the test runs.
    let table = fixture.run("get pods").await.unwrap().replace("1s", "0s");
    assert_eq!(
        table,
        "NAME                      READY   STATUS             RESTARTS     AGE\n\
         web                       1/1     Running            0            0s\n\
         worker-with-a-long-name   0/1     CrashLoopBackOff   3 (0s ago)   0s\n"
    );
    let wide = fixture.run("get po web -o wide --no-headers").await.unwrap();
    let cells: Vec<&str> = wide.split_whitespace().collect();
    assert_eq!(cells[5..], ["10.0.0.2", "node", "<none>", "<none>"]);
    let all = fixture.run("get pods -A").await.unwrap();
    assert!(all.starts_with("NAMESPACE   NAME "), "{all}");
    assert_eq!(fixture.run("get pods -n other").await.unwrap(), "");
    assert_eq!(
        fixture.run("get pod gone").await.unwrap_err(),
        "Error from server (NotFound): pods \"gone\" not found"
    );
    assert_eq!(
        fixture.run("get gadgets").await.unwrap_err(),
        "error: the server doesn't have a resource type \"gadgets\""
    );
    let service = fixture.run("get svc").await.unwrap_err();
    let begin = "error: the server doesn't have a resource type \"svc\": there are no addresses of services";
    assert!(service.starts_with(begin), "{service}");
}

#[tokio::test]
async fn storage_is_listed_as_kubectl_lists_it() {
    let fixture = Fixture::new();
    let class = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: fast}\nprovisioner: csi.hawser.dev\n";
    let volume = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: vol}\nspec:\n  capacity: {storage: 1Gi}\n  \
                  accessModes: [ReadWriteMany]\n  storageClassName: fast\n  csi: {driver: csi.hawser.dev, volumeHandle: v1}\n";
    let file = fixture.file("all.yaml", &format!("{CLAIM}---\n{class}---\n{volume}"));
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let mut claim = (*fixture.store.claim("default", "data").unwrap()).clone();
    claim.spec.volume_name = "vol".to_owned();
    claim.status.phase = ClaimPhase::Bound;
    claim.status.capacity = claim.spec.resources.requests.clone();
    claim.status.access_modes = claim.spec.access_modes.clone();
    fixture.store.put_claim(claim).unwrap();

    let stable = |text: String| text.replace("1s\n", "0s\n");
    assert_eq!(
        stable(fixture.run("get pvc").await.unwrap()),
        "NAME   STATUS   VOLUME   CAPACITY   ACCESS MODES   STORAGECLASS   AGE\n\
         data   Bound    vol      1Gi        RWX            fast           0s\n"
    );
    assert_eq!(
        stable(fixture.run("get pv").await.unwrap()),
        "NAME   CAPACITY   ACCESS MODES   RECLAIM POLICY   STATUS      CLAIM   STORAGECLASS   REASON   AGE\n\
         vol    1Gi        RWX            Retain           Available           fast                    0s\n"
    );
    assert_eq!(
        stable(fixture.run("get sc").await.unwrap()),
        "NAME   PROVISIONER      RECLAIMPOLICY   VOLUMEBINDINGMODE   ALLOWVOLUMEEXPANSION   AGE\n\
         fast   csi.hawser.dev   Delete          Immediate           false                  0s\n"
    );
    assert_eq!(
        fixture.run("get sc,pvc -o name").await.unwrap(),
        "storageclass.storage.k8s.io/fast\npersistentvolumeclaim/data\n"
    );
    let json: serde_json::Value =
        serde_json::from_str(&fixture.run("get pvc data -o json").await.unwrap()).unwrap();
    assert_eq!((&json["kind"], &json["status"]["phase"]), (&"PersistentVolumeClaim".into(), &"Bound".into()));
    let list = fixture.run("get pv -A -o yaml").await.unwrap();
    assert!(list.contains("kind: List") && list.contains("volumeHandle: v1"), "{list}");
}

#[tokio::test]
async fn describe_shows_state_and_events() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", POD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    fixture.set_status("web", running());
    let pod = fixture.store.pod("default", "web").unwrap();
    for _ in 0..2 {
        fixture.store.record(&pod.reference(), EventType::Warning, "FailedMount", "no driver yet");
    }
    let earlier = ObjectRef { uid: "earlier".to_owned(), ..pod.reference() };
    fixture.store.record(&earlier, EventType::Warning, "Failed", "of the pod before");
    let text = fixture.run("describe pod web").await.unwrap();
    assert!(!text.contains("of the pod before"), "{text}");
    for line in [
        "Name:             web\n",
        "Status:           Running\n",
        "IP:               10.0.0.2\n",
        "    Image:        demo:1\n",
        "    State:        Running\n",
        "  Type     Reason            Age",
        "  Warning  FailedMount",
        "no driver yet\n",
    ] {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&text).contains(&words(line)), "{line} in\n{text}");
    }
    assert!(text.contains("(x2 over "), "{text}");
}

#[tokio::test]
async fn describe_node_shows_who_takes_what_of_it() {
    let fixture = Fixture::new();
    let asking = POD.replace("web", "asks").replace(
        "    image: demo:1",
        "    image: demo:1\n    resources: {requests: {cpu: 250m, memory: 64Mi}, limits: {memory: 128Mi}}",
    );
    assert_ne!(asking, POD.replace("web", "asks"));
    for (name, manifest) in [("pod.yaml", POD), ("asks.yaml", &asking)] {
        let file = fixture.file(name, manifest);
        fixture.run(&format!("apply -f {file}")).await.unwrap();
    }
    let node = ObjectRef::node(fixture.store.node_name());
    fixture.store.record(&node, EventType::Warning, "ManifestDirectoryMissing", "it is gone");
    let text = fixture.run("describe node").await.unwrap();
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in [
        "Ready False KubeletNotReady container runtime status check may not have completed yet",
        "Capacity:",
        "Non-terminated Pods (2 in total):",
    ] {
        assert!(lines.iter().any(|found| found == line), "{line} in\n{text}");
    }
    for beginning in [
        "InternalIP: ",
        "default asks 250m 0 64Mi 128Mi ",
        "default web 0 0 0 0 ",
        "cpu 250m (",
        "memory 64Mi (",
        "Warning ManifestDirectoryMissing",
    ] {
        assert!(lines.iter().any(|found| found.starts_with(beginning)), "{beginning} in\n{text}");
    }
    let unknown = fixture.run("describe node other").await.unwrap_err();
    assert_eq!(unknown, "Error from server (NotFound): nodes \"other\" not found");
}

#[tokio::test]
async fn describe_pvc_shows_the_pods_that_use_it() {
    let fixture = Fixture::new();
    let user = |name: &str, claim: &str, namespace: &str| {
        let metadata = format!("{{name: {name}, namespace: {namespace}}}");
        let pod = POD.replace("{name: web}", &metadata);
        assert!(pod.contains(&metadata), "{pod}");
        format!("{pod}  volumes:\n  - name: v\n    persistentVolumeClaim: {{claimName: {claim}}}\n")
    };
    let claim = fixture.file("claim.yaml", CLAIM);
    fixture.run(&format!("apply -f {claim}")).await.unwrap();
    let used_by = async || {
        let text = fixture.run("describe pvc data").await.unwrap();
        let (_, users) = text.split_once("Used By:").unwrap();
        let (users, _) = users.split_once("Events:").unwrap();
        users.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(used_by().await, ["<none>"]);
    let pods = [
        user("a", "data", "default"),
        user("b", "other", "default"),
        user("c", "data", "shop"),
        user("d", "data", "default"),
    ];
    let pods = fixture.file("pods.yaml", &pods.join("---\n"));
    fixture.run(&format!("apply -f {pods}")).await.unwrap();
    assert_eq!(used_by().await, ["a", "d"]);
}

#[tokio::test]
async fn get_nodes_shows_age_address_and_kernel() {
    let fixture = Fixture::new();
    let cells = |text: &str| -> Vec<Vec<String>> {
        text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let narrow = cells(&fixture.run("get nodes").await.unwrap());
    assert_eq!(narrow[0], ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]);
    assert_eq!(narrow[1][..3], ["node", "NotReady", "<none>"]);
    // The filesystem of the test may not record when a directory was made.
    let age = &narrow[1][3];
    match fixture.store.node_created() {
        Some(created) => {
            assert!(age.ends_with('s'), "{age}");
            assert!((0..=60).contains(&(now().as_second() - created.as_second())), "{created}");
        }
        None => assert_eq!(age, "<unknown>"),
    }
    let wide = cells(&fixture.run("get nodes -o wide").await.unwrap());
    assert_eq!(wide[0][5..], ["INTERNAL-IP", "KERNEL-VERSION"]);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let address = fixture.run("get node -o jsonpath={.items[0].status.addresses[0].address}").await.unwrap();
    assert_eq!(wide[1][5..], [address.trim(), kernel.trim()]);
}

#[tokio::test]
async fn delete_waits_until_the_object_is_gone() {
    let fixture = Arc::new(Fixture::new());
    let file = fixture.file("pod.yaml", POD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let pod = fixture.store.pod("default", "web").unwrap();

    let mut changes = fixture.store.subscribe();
    let store = fixture.store.clone();
    let engine = tokio::spawn(async move {
        changes.recv().await.unwrap();
        assert!(store.pod("default", "web").unwrap().metadata.is_deleted());
        store.forget_pod(&pod.metadata.uid).unwrap();
    });
    assert_eq!(fixture.run("delete pod web").await.unwrap(), "pod \"web\" deleted\n");
    assert!(fixture.store.pods().is_empty());
    engine.await.unwrap();
    assert_eq!(
        fixture.run("delete pod/web").await.unwrap_err(),
        "Error from server (NotFound): pods \"web\" not found"
    );
    assert_eq!(fixture.run("delete pod web --ignore-not-found").await.unwrap(), "");
}

#[tokio::test]
async fn control_characters_of_a_container_are_escaped_on_a_terminal() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", POD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let message = "\u{1b}[2J\0done\n    Exit Code:    0\r\u{9b}1m".to_owned();
    let ended =
        ContainerState::Terminated(ContainerStateTerminated { message, exit_code: 3, ..Default::default() });
    fixture.set_status("web", PodStatus { container_statuses: vec![container("c", ended)], ..running() });
    let pod = fixture.store.pod("default", "web").unwrap();
    fixture.store.record(&pod.reference(), EventType::Warning, "Failed", "\u{1b}]0;title\u{7}\nx");
    for command in [
        "describe pod web",
        "get events",
        "get pods -o wide",
        "get pod web -o yaml",
        "get pod web -o json",
        "events -o json",
    ] {
        let text = fixture.run(command).await.unwrap();
        let bad: Vec<char> = text.chars().filter(|letter| letter.is_control() && *letter != '\n').collect();
        assert_eq!(bad, [], "{command}: {text}");
    }
    let text = fixture.run("describe pod web").await.unwrap();
    assert!(text.contains("      Message:          ^[[2J^@done\n"), "{text}");
    let codes: Vec<&str> = text.lines().filter(|line| line.starts_with("      Exit Code:")).collect();
    assert_eq!(codes.len(), 1, "{text}");
}

#[tokio::test]
async fn an_object_described_by_a_manifest_is_not_deleted() {
    let fixture = Fixture::new();
    let file = fixture.file("claim.yaml", CLAIM);
    let claim = crate::manifest::parse(CLAIM.as_bytes(), "claim.yaml").manifests.remove(0).described();
    fixture.store.apply(claim, Source::File(PathBuf::from(&file))).unwrap();
    assert_eq!(
        fixture.run("delete pvc data").await.unwrap_err(),
        "error: PersistentVolumeClaim \"data\" is described by DIR/claim.yaml, which would bring it back: remove it there"
    );
    std::fs::remove_file(&file).unwrap();
    assert_eq!(
        fixture.run("delete pvc data --wait=false").await.unwrap(),
        "persistentvolumeclaim \"data\" deleted\n"
    );
    assert!(fixture.store.claim("default", "data").unwrap().metadata.is_deleted());
}

#[tokio::test]
async fn logs_have_no_prefixes_and_follow_until_the_container_ends() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", POD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    assert_eq!(
        fixture.run("logs web").await.unwrap_err(),
        "error: container \"c\" in pod \"web\" is waiting to start: it has no log yet"
    );
    for (reason, message, why) in [
        ("ImagePullBackOff", "Back-off", "trying and failing to pull image"),
        ("PodInitializing", "", "PodInitializing"),
        ("CreateContainerConfigError", "no key x", "CreateContainerConfigError: no key x"),
    ] {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        let waiting = ContainerState::Waiting(ContainerStateWaiting { reason, message });
        let status = ContainerStatus { container_id: String::new(), ..container("c", waiting) };
        fixture.set_status("web", PodStatus { container_statuses: vec![status], ..running() });
        let error = fixture.run("logs web").await.unwrap_err();
        assert!(error.ends_with(&format!("is waiting to start: {why}")), "{error}");
    }
    fixture.set_status("web", running());
    let pod = fixture.store.pod("default", "web").unwrap();
    let log =
        fixture.dir.path().join("logs").join(format!("default_web_{}", pod.metadata.uid)).join("c/0.log");
    std::fs::create_dir_all(log.parent().unwrap()).unwrap();
    append(&log, "2026-11-20T17:53:02.5Z stdout F one\n");
    assert_eq!(fixture.run("logs web").await.unwrap(), "one\n");

    let ends = async {
        append(&log, "2026-11-20T17:53:03.5Z stderr P tw");
        append(&log, "o\n2026-11-20T17:53:03.6Z stderr F !\n");
        let ended = ContainerState::Terminated(ContainerStateTerminated::default());
        fixture.set_status("web", PodStatus { container_statuses: vec![container("c", ended)], ..running() });
    };
    let (followed, ()) = tokio::join!(fixture.run("logs -f web"), ends);
    assert_eq!(followed.unwrap(), "one\ntwo!\n");
}

#[tokio::test]
async fn logs_follow_one_instance_of_a_container() {
    const INIT: &str = "  initContainers:\n  - name: i\n    image: demo:1\n    restartPolicy: Always\n";
    let fixture = Fixture::new();
    let text = format!("{POD}{INIT}");
    let file = fixture.file("pod.yaml", &text);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let instance = |name, restart_count| {
        let running = ContainerState::Running(ContainerStateRunning::default());
        vec![ContainerStatus { restart_count, ..container(name, running) }]
    };
    let status = |of_i, of_c| PodStatus {
        init_container_statuses: instance("i", of_i),
        container_statuses: instance("c", of_c),
        ..running()
    };
    fixture.set_status("web", status(0, 0));
    let pod = fixture.store.pod("default", "web").unwrap();
    let logs = fixture.dir.path().join("logs").join(format!("default_web_{}", pod.metadata.uid));
    for (log, text) in [("c/0.log", "first"), ("c/1.log", "second"), ("i/0.log", "init")] {
        std::fs::create_dir_all(logs.join(log).parent().unwrap()).unwrap();
        append(&logs.join(log), &format!("2026-11-20T17:53:02.5Z stdout F {text}\n"));
    }
    // Both containers run all the time: only their instances change.
    let followed = fixture.run_and("logs -f web -c c", || fixture.set_status("web", status(0, 1))).await;
    assert_eq!(followed, "first\n");
    assert_eq!(fixture.run_and("logs -p -f web -c c", || ()).await, "first\n");
    let followed = fixture.run_and("logs -f web -c i", || fixture.set_status("web", status(1, 1))).await;
    assert_eq!(followed, "init\n");
    let replace = || {
        fixture.store.forget_pod(&pod.metadata.uid).unwrap();
        let pod = crate::manifest::parse(text.as_bytes(), "pod.yaml").manifests.remove(0).described();
        fixture.store.apply(pod, Source::Api).unwrap();
        fixture.set_status("web", status(0, 1));
    };
    assert_eq!(fixture.run_and("logs -f web -c c", replace).await, "second\n");
    assert_ne!(fixture.store.pod("default", "web").unwrap().metadata.uid, pod.metadata.uid);
}

#[tokio::test]
async fn followed_logs_have_every_file_of_several_rotations_at_once() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", POD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    fixture.set_status("web", running());
    let pod = fixture.store.pod("default", "web").unwrap();
    let dir = fixture.dir.path().join("logs").join(format!("default_web_{}", pod.metadata.uid)).join("c");
    std::fs::create_dir_all(&dir).unwrap();
    let log = dir.join("0.log");
    append(&log, "2026-11-20T17:53:02.5Z stdout F one\n");
    let rotations = || {
        for (number, next) in [(1, "two"), (2, "three"), (3, "four")] {
            std::fs::rename(&log, dir.join(format!("0.log.20261120-18000{number}"))).unwrap();
            append(&log, &format!("2026-11-20T18:00:0{number}.5Z stdout F {next}\n"));
        }
        for number in [1, 2] {
            let rotated = dir.join(format!("0.log.20261120-18000{number}"));
            let compressed = std::fs::File::create(format!("{}.gz", rotated.display())).unwrap();
            let mut encoder = flate2::write::GzEncoder::new(compressed, flate2::Compression::default());
            encoder.write_all(&std::fs::read(&rotated).unwrap()).unwrap();
            encoder.finish().unwrap();
            std::fs::remove_file(rotated).unwrap();
        }
        let ended = ContainerState::Terminated(ContainerStateTerminated::default());
        fixture.set_status("web", PodStatus { container_statuses: vec![container("c", ended)], ..running() });
    };
    assert_eq!(fixture.run_and("logs -f web", rotations).await, "one\ntwo\nthree\nfour\n");
    assert_eq!(fixture.run("logs web").await.unwrap(), "one\ntwo\nthree\nfour\n");
    assert_eq!(fixture.run("logs web --tail 3").await.unwrap(), "two\nthree\nfour\n");
}

fn append(path: &Path, text: &str) {
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

const EVERY_FIELD: &str = r#"apiVersion: v1
kind: Pod
metadata:
  name: web
  generateName: web-
  creationTimestamp: null
  uid: of-another-cluster
  deletionTimestamp: "2020-01-01T00:00:00Z"
spec:
  hostNetwork: false
  nodeSelector: {disk: ssd}
  affinity: {list: [1, 0.5, true, null, yes], big: 18446744073709551615, odd: .inf}
  containers:
  - name: c
    image: demo:1
    livenessProbe: {tcpSocket: {port: 80}}
    securityContext: {windowsOptions: {runAsUserName: u}}
    volumeMounts: []
  - name: d
    image: demo:1
    stdin: true
status: {phase: Running, podIP: 192.0.2.7}
"#;

#[tokio::test]
async fn get_returns_every_applied_field() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", EVERY_FIELD);
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let pod: serde_json::Value =
        serde_json::from_str(&fixture.run("get pod web -o json").await.unwrap()).unwrap();
    let containers = &pod["spec"]["containers"];
    for (given, expected) in [
        (&pod["metadata"]["generateName"], serde_json::json!("web-")),
        (&pod["spec"]["hostNetwork"], false.into()),
        (&pod["spec"]["nodeSelector"], serde_json::json!({"disk": "ssd"})),
        (
            &pod["spec"]["affinity"],
            serde_json::json!({"list": [1, 0.5, true, null, true], "big": u64::MAX, "odd": "inf"}),
        ),
        (&containers[0]["livenessProbe"], serde_json::json!({"tcpSocket": {"port": 80}})),
        (&containers[0]["securityContext"]["windowsOptions"]["runAsUserName"], "u".into()),
        (&containers[0]["volumeMounts"], serde_json::json!([])),
        (&containers[1]["stdin"], true.into()),
        // The kubelet still sets these.
        (&pod["spec"]["terminationGracePeriodSeconds"], 30.into()),
        (&pod["status"]["phase"], "Pending".into()),
        (&pod["metadata"]["deletionTimestamp"], serde_json::Value::Null),
    ] {
        assert_eq!(*given, expected, "{pod:#}");
    }
    assert_ne!(pod["metadata"]["uid"], "of-another-cluster");
    assert!(pod["status"].get("podIP").is_none());

    let yaml = fixture.run("get pod web -o yaml").await.unwrap();
    assert!(yaml.contains("    livenessProbe:\n      tcpSocket:\n        port: 80\n"), "{yaml}");
    assert!(yaml.contains("  nodeSelector:\n    disk: ssd\n"), "{yaml}");
    assert!(fixture.run("get pod").await.unwrap().contains("web"));
    assert_eq!(fixture.run(&format!("apply -f {file}")).await.unwrap(), "pod/web unchanged\n");
    let edited = fixture.file("edited.yaml", &EVERY_FIELD.replace("ssd", "nvme"));
    assert_eq!(fixture.run(&format!("apply -f {edited}")).await.unwrap(), "pod/web configured\n");
    assert!(fixture.run("get pod web -o yaml").await.unwrap().contains("disk: nvme"));
}

#[tokio::test]
async fn describe_shows_how_long_a_secret_is_and_not_what_it_is() {
    let fixture = Fixture::new();
    let map =
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {greeting: \"good\\nday\\n\"}\n";
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: token}\nstringData: {password: hush}\n";
    let file = fixture.file("all.yaml", &format!("{map}---\n{secret}"));
    assert_eq!(
        fixture.run(&format!("apply -f {file}")).await.unwrap(),
        "configmap/settings created\nsecret/token created\n"
    );
    let stable = |text: String| text.replace("1s\n", "0s\n");
    assert_eq!(
        stable(fixture.run("get cm,secret").await.unwrap()),
        "NAME                 DATA   AGE\nconfigmap/settings   1      0s\n\n\
         NAME           TYPE     DATA   AGE\nsecret/token   Opaque   1      0s\n"
    );
    let shown = fixture.run("describe cm settings").await.unwrap();
    assert!(shown.contains("\nData\n====\ngreeting:\n----\ngood\nday\n"), "{shown}");
    let shown = fixture.run("describe secret token").await.unwrap();
    assert!(shown.contains("\nData\n====\npassword:  4 bytes\n"), "{shown}");
    assert!(!shown.contains("hush") && !shown.contains("aHVzaA"), "{shown}");
    let written = fixture.run("get secret token -o yaml").await.unwrap();
    assert!(
        written.contains("password: \"aHVzaA==\"") || written.contains("password: aHVzaA=="),
        "{written}"
    );
    assert!(!written.contains("stringData"), "{written}");
    assert_eq!(fixture.run("delete secret token").await.unwrap(), "secret \"token\" deleted\n");
    assert!(fixture.store.secrets().is_empty());
}
