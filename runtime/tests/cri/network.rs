//! CNI as libcni does it, with recording plugins: what they are told, in which
//! order, and what happens when one fails.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use proto::cri::{
    ListPodSandboxRequest, PodSandboxState, PodSandboxStatusRequest, PortMapping, RemovePodSandboxRequest,
    StatusRequest,
};
use serde_json::{Value, json};
use tests::binaries;
use tests::cri::{Cri, Host, IMAGE, container, eventually};
use tonic::Code;

use super::containers::container_pid;
use super::restart::{groups_gone, released};

const RESULT: &str = r#"{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.9.0.2/24","interface":0},{"address":"fd00:9::2/64","interface":0}]}"#;

/// A plugin that notes its call and answers `answer` (with `code` on ADD).
fn plugin(host: &Host, name: &str, answer: &str, code: i32) {
    let calls = host.path("calls");
    let script = format!(
        "#!/bin/sh\ninput=$(cat)\nprintf '%s %s %s %s|%s|%s\\n' {name} $CNI_COMMAND $CNI_IFNAME \"$CNI_ARGS\" \"$CNI_NETNS\" \"$input\" >> {}\n\
         [ $CNI_COMMAND = ADD ] || exit 0\necho '{answer}'\nexit {code}\n",
        calls.display()
    );
    let path = host.path("bin").join(name);
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
}

fn conflist(host: &Host, plugins: Value) {
    let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": plugins});
    std::fs::write(host.path("net.d/10-net.conflist"), list.to_string()).unwrap();
}

/// Calls for one interface: `plugin VERB`, and what was on stdin.
fn calls(host: &Host, ifname: &str) -> Vec<(String, Value)> {
    let text = std::fs::read_to_string(host.path("calls")).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, '|');
            let (head, _netns, input) = (parts.next()?, parts.next()?, parts.next()?);
            let words: Vec<&str> = head.split(' ').collect();
            (words[2] == ifname)
                .then(|| (format!("{} {}", words[0], words[1]), serde_json::from_str(input).unwrap()))
        })
        .collect()
}

fn networked(host: &Host, name: &str) -> proto::cri::PodSandboxConfig {
    let mut config = host.pod(name);
    config.annotations.clear();
    config
}

#[tokio::test]
async fn plugins_run_in_order_and_back_with_results_and_capabilities() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    plugin(&host, "second", RESULT, 0);
    conflist(&host, json!([{"type": "first"}, {"type": "second", "capabilities": {"portMappings": true}}]));
    let mut cri = host.start().await;
    let mut config = networked(&host, "p");
    config.port_mappings = vec![PortMapping { container_port: 80, host_port: 8080, ..Default::default() }];
    let pod = cri.run_pod(&config).await.unwrap();
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let network =
        cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap().network.unwrap();
    assert_eq!((network.ip.as_str(), network.additional_ips[0].ip.as_str()), ("10.9.0.2", "fd00:9::2"));
    let cached: Value =
        serde_json::from_slice(&std::fs::read(host.path(&format!("cni/results/net-{pod}-eth0"))).unwrap())
            .unwrap();
    assert_eq!((&cached["kind"], &cached["networkName"]), (&json!("cniCacheV1"), &json!("net")));
    cri.remove_pod(&pod).await;

    let calls = calls(&host, "eth0");
    let order: Vec<&str> = calls.iter().map(|c| c.0.as_str()).collect();
    assert_eq!(order, ["first ADD", "second ADD", "second DEL", "first DEL"]);
    assert_eq!(calls[0].1.get("prevResult"), None);
    assert_eq!(calls[1].1["prevResult"]["ips"][0]["address"], "10.9.0.2/24");
    assert_eq!(
        calls[1].1["runtimeConfig"]["portMappings"],
        json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}])
    );
    assert_eq!(calls[3].1["prevResult"]["ips"][0]["address"], "10.9.0.2/24");
    let args = std::fs::read_to_string(host.path("calls")).unwrap();
    assert!(args.contains(&format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=p;K8S_POD_INFRA_CONTAINER_ID={pod};K8S_POD_UID=uid-p"
    )));
    let spans = std::fs::read_to_string(host.path("trace.jsonl")).unwrap();
    for name in ["cni.first.ADD", "cni.loopback.ADD", "cri.RunPodSandbox"] {
        assert!(spans.contains(&format!("\"name\":\"{name}\"")), "{name}");
    }
    host.assert_clean();
}

/// As of a plugin with several interfaces in the pod, and of one that gives no sandbox.
#[tokio::test]
async fn the_addresses_of_a_pod_are_those_of_eth0() {
    const SEVERAL: &str = r#"{"cniVersion":"1.0.0","interfaces":[{"name":"net1","sandbox":"/x"},{"name":"eth0"}],"ips":[{"address":"10.8.0.2/24","interface":0},{"address":"10.9.0.2/24","interface":1}]}"#;
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "several", SEVERAL, 0);
    conflist(&host, json!([{"type": "several"}]));
    let mut cri = host.start().await;
    let pod = cri.run_pod(&networked(&host, "p")).await.unwrap();
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let status = cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    let network = status.network.unwrap();
    assert_eq!((network.ip.as_str(), &*network.additional_ips), ("10.9.0.2", &[][..]));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn annotations_limit_the_bandwidth_of_a_pod() {
    const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    plugin(&host, "limits", RESULT, 0);
    conflist(&host, json!([{"type": "first"}, {"type": "limits", "capabilities": {"bandwidth": true}}]));
    let mut cri = host.start().await;
    let mut config = networked(&host, "p");
    config.annotations.insert(INGRESS.to_owned(), "10".to_owned());
    let error = cri.run_pod(&config).await.unwrap_err();
    let message = format!("config.annotations[{INGRESS}]: \"10\": must be 1k to 1P bits per second");
    assert_eq!((error.code(), error.message()), (Code::InvalidArgument, &*message));
    assert!(calls(&host, "eth0").is_empty());

    config.annotations.insert(INGRESS.to_owned(), "10M".to_owned());
    let pod = cri.run_pod(&config).await.unwrap();
    cri.remove_pod(&pod).await;
    let limits = json!({"ingressRate": 10_000_000, "ingressBurst": 4_294_967_295_u32});
    let calls = calls(&host, "eth0");
    let passed: Vec<_> =
        calls.iter().map(|(call, input)| (call.as_str(), &input["runtimeConfig"]["bandwidth"])).collect();
    let nothing = &Value::Null;
    assert_eq!(
        passed,
        [("first ADD", nothing), ("limits ADD", &limits), ("limits DEL", &limits), ("first DEL", nothing)]
    );
    host.assert_clean();
}

/// kubelet ends a pod that has a network without an address.
#[tokio::test]
async fn a_pod_that_asks_for_no_network_has_none_in_its_status() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let found = cri.runtime.pod_sandbox_status(request.clone()).await.unwrap().into_inner().status.unwrap();
    assert_eq!((found.state(), found.network), (PodSandboxState::SandboxReady, None));

    host.kill();
    cri = host.start().await;
    let found = cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    assert_eq!((found.state(), found.network), (PodSandboxState::SandboxReady, None), "after a restart");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_failing_plugin_is_quoted_and_everything_is_undone() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    plugin(&host, "second", r#"{"code":11,"msg":"no room","details":"pool 10.9.0.0/24"}"#, 1);
    conflist(&host, json!([{"type": "first"}, {"type": "second"}]));
    let mut cri = host.start().await;
    let error = cri.run_pod(&networked(&host, "p")).await.unwrap_err();
    let file = host.path("net.d/10-net.conflist");
    assert_eq!(
        error.message(),
        format!(
            "cni plugin \"second\" ADD for network \"net\" ({}): code 11: no room: pool 10.9.0.0/24",
            file.display()
        )
    );
    let order: Vec<String> = calls(&host, "eth0").into_iter().map(|c| c.0).collect();
    assert_eq!(order, ["first ADD", "second ADD", "second DEL", "first DEL"]);
    host.assert_clean();
}

#[tokio::test]
async fn a_missing_plugin_is_named_and_correcting_it_heals() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    conflist(&host, json!([{"type": "late"}]));
    let mut cri = host.start().await;
    let error = cri.run_pod(&networked(&host, "p")).await.unwrap_err();
    let words = format!("failed to find plugin \"late\" in path [{}]", host.path("bin").display());
    assert!(error.message().contains(&words), "{}", error.message());
    host.assert_clean();
    plugin(&host, "late", RESULT, 0);
    let pod = cri.run_pod(&networked(&host, "p")).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The sandbox of a RunPodSandbox that could not be undone.
async fn left_sandbox(cri: &mut Cri) -> String {
    let left = cri.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap();
    let [left] = &left.into_inner().items[..] else { panic!("one sandbox") };
    left.id.clone()
}

/// Its message.
async fn refused_removal(cri: &mut Cri, pod: &str) -> String {
    let request = RemovePodSandboxRequest { pod_sandbox_id: pod.to_owned() };
    cri.runtime.remove_pod_sandbox(request).await.unwrap_err().message().to_owned()
}

#[tokio::test]
async fn correcting_a_mistake_in_the_configuration_makes_the_sandbox_removable() {
    let mut host = Host::new();
    for name in ["bridge", "host-local", "loopback"] {
        std::fs::copy(binaries::find(name).unwrap(), host.path("bin").join(name)).unwrap();
    }
    let network = |host: &Host, subnet: &str| {
        let ipam = json!({"type": "host-local", "subnet": subnet, "dataDir": host.path("leases")});
        conflist(host, json!([{"type": "bridge", "bridge": "hawser0", "ipam": ipam}]));
    };
    network(&host, "10.9.0.1/24");
    let mut cri = host.start().await;
    let error = cri.run_pod(&networked(&host, "p")).await.unwrap_err();
    assert!(error.message().contains("host bits set"), "{}", error.message());
    let left = left_sandbox(&mut cri).await;
    let error = refused_removal(&mut cri, &left).await;
    assert!(error.contains("host bits set"), "{error}");

    network(&host, "10.9.0.0/24");
    cri.remove_pod(&left).await;
    host.assert_clean();
    let pod = cri.run_pod(&networked(&host, "p")).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// A plugin that notes its call like [`plugin`], and refuses every configuration with `bad` in it.
fn plugin_that_refuses_bad(host: &Host, name: &str) {
    plugin(host, name, RESULT, 0);
    let path = host.path("bin").join(name);
    let script = std::fs::read_to_string(&path).unwrap();
    let refuse = "case \"$input\" in *bad*) echo refused >&2; exit 1;; esac\n[ $CNI_COMMAND = ADD ]";
    std::fs::write(&path, script.replace("[ $CNI_COMMAND = ADD ]", refuse)).unwrap();
}

#[tokio::test]
async fn a_refused_list_is_deleted_by_the_present_one_once_that_is_another() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    plugin_that_refuses_bad(&host, "second");
    conflist(&host, json!([{"type": "first"}, {"type": "second", "mode": "bad"}]));
    let mut cri = host.start().await;
    cri.run_pod(&networked(&host, "p")).await.unwrap_err();
    let left = left_sandbox(&mut cri).await;
    let order = || calls(&host, "eth0").into_iter().map(|c| c.0).collect::<Vec<_>>();
    assert_eq!(order(), ["first ADD", "second ADD", "second DEL", "first DEL"]);

    std::fs::remove_file(host.path("net.d/10-net.conflist")).unwrap();
    let error = refused_removal(&mut cri, &left).await;
    assert!(error.contains("refused"), "{error}");
    assert_eq!(order()[4..], ["second DEL", "first DEL"], "no configuration at all");

    conflist(&host, json!([{"type": "first"}, {"type": "second", "mode": "also bad"}]));
    let error = refused_removal(&mut cri, &left).await;
    assert_eq!(error.matches("refused").count(), 2, "{error}");

    conflist(&host, json!([{"type": "first"}, {"type": "second", "mode": "good"}]));
    cri.remove_pod(&left).await;
    assert_eq!(order()[10..], ["second DEL", "first DEL", "second DEL", "first DEL"]);
    host.assert_clean();
}

#[tokio::test]
async fn the_list_that_attached_a_pod_alone_detaches_it() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    conflist(&host, json!([{"type": "first", "mode": "bad"}]));
    let mut cri = host.start().await;
    let pod = cri.run_pod(&networked(&host, "p")).await.unwrap();

    plugin_that_refuses_bad(&host, "first");
    conflist(&host, json!([{"type": "first", "mode": "good"}]));
    let error = refused_removal(&mut cri, &pod).await;
    assert!(error.contains("refused"), "{error}");
    plugin(&host, "first", RESULT, 0);
    cri.remove_pod(&pod).await;
    let calls = calls(&host, "eth0");
    let modes: Vec<_> = calls.iter().map(|c| (c.0.as_str(), c.1["mode"].as_str().unwrap())).collect();
    assert_eq!(modes, [("first ADD", "bad"), ("first DEL", "bad"), ("first DEL", "bad")]);
    host.assert_clean();
}

/// kill -9 while a plugin works: the next runtime undoes what was begun.
#[tokio::test]
async fn a_sandbox_that_was_half_made_is_undone_by_the_next_runtime() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "first", RESULT, 0);
    conflist(&host, json!([{"type": "first"}, {"type": "slow"}]));
    // ADD hangs until the pipe is written to.
    let (pipe, begun) = (host.path("pipe"), host.path("begun"));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    plugin(&host, "slow", "{}", 0);
    let script = std::fs::read_to_string(host.path("bin/slow")).unwrap();
    let wait =
        format!("[ $CNI_COMMAND = ADD ] && touch {} && read x < {}\n", begun.display(), pipe.display());
    std::fs::write(host.path("bin/slow"), script.replacen('\n', &format!("\n{wait}"), 1)).unwrap();
    let mut cri = host.start().await;
    let config = networked(&host, "p");
    let call = tokio::spawn(async move { cri.run_pod(&config).await });
    eventually("the slow ADD", || begun.exists().then_some(())).await;
    host.kill();
    call.await.unwrap().unwrap_err();
    let mut cri = host.start().await;
    assert_eq!(
        cri.runtime
            .list_pod_sandbox(ListPodSandboxRequest::default())
            .await
            .unwrap()
            .into_inner()
            .items
            .len(),
        0
    );
    let order: Vec<String> = calls(&host, "eth0").into_iter().map(|c| c.0).collect();
    assert_eq!(order, ["first ADD", "slow DEL", "first DEL"]);
    host.assert_clean();
    // The orphan may go.
    std::fs::write(&pipe, "x\n").unwrap();
}

/// The same, when not even DEL comes back: the other pods must not wait for it.
#[tokio::test]
async fn a_plugin_that_hangs_does_not_keep_the_next_runtime_from_serving() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    conflist(&host, json!([{"type": "stuck"}]));
    let stuck = host.path("bin/stuck");
    let begun = host.path("begun");
    let script = format!("#!/bin/sh\necho $$ >> {}\nexec sleep 1000\n", begun.display());
    std::fs::write(&stuck, script).unwrap();
    std::fs::set_permissions(&stuck, PermissionsExt::from_mode(0o755)).unwrap();
    let pids = || -> Vec<i32> {
        let text = std::fs::read_to_string(&begun).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    };
    let kill = |pid: i32| {
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    };
    let config = networked(&host, "p");
    let mut cri = host.start().await;
    let running = tokio::spawn(async move { cri.run_pod(&config).await });
    let adding = eventually("ADD hangs", || pids().first().copied()).await;
    host.kill();
    running.await.unwrap().unwrap_err();
    kill(adding);

    let mut cri = host.start().await; // fails after the deadline of `connect`
    cri.pull(IMAGE).await.unwrap();
    let other = cri.run_pod(&host.pod("other")).await.unwrap();
    cri.remove_pod(&other).await;
    let half_made = cri.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap();
    let [half_made] = &half_made.into_inner().items[..] else { panic!("one sandbox") };
    assert_eq!(half_made.state(), PodSandboxState::SandboxNotready);

    plugin(&host, "stuck", RESULT, 0);
    kill(eventually("DEL hangs", || pids().get(1).copied()).await);
    cri.remove_pod(&half_made.id).await;
    // Where the runtime's own removal was first, it gives the groups back a moment later.
    groups_gone(&host).await;
    host.assert_clean();
}

/// The verbose Status.
async fn unreadable_records(cri: &mut Cri) -> String {
    let status = cri.runtime.status(StatusRequest { verbose: true }).await.unwrap().into_inner();
    status.info.get("unreadableRecords").cloned().unwrap_or_default()
}

/// A pipe whose reader must not outlive a test that fails.
struct Waiting(PathBuf);

impl Drop for Waiting {
    /// With both ends, the pipe opens whether or not a program waits for it. The directory may be gone already.
    fn drop(&mut self) {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let pipe = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(&self.0);
        if let Ok(mut pipe) = pipe {
            // A full pipe has a line already.
            let _written_or_full = pipe.write_all(b"x\n");
        }
    }
}

/// The same for a pod whose record a power cut has torn.
#[tokio::test]
async fn a_plugin_that_hangs_and_a_torn_record_do_not_keep_the_next_runtime_from_serving() {
    let mut host = Host::new();
    plugin(&host, "loopback", r#"{"cniVersion":"1.0.0"}"#, 0);
    plugin(&host, "slow", RESULT, 0);
    conflist(&host, json!([{"type": "slow"}]));
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&networked(&host, "p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let pid = container_pid(&host, &pod, &id).unwrap();
    host.kill();
    let dir = host.path("root/sandboxes").join(&pod);
    std::fs::write(dir.join("sandbox.json"), "").unwrap();
    // DEL hangs until the pipe is written to.
    let pipe = host.path("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let _freed = Waiting(pipe.clone());
    let script = format!("#!/bin/sh\nread x < {}\n", pipe.display());
    std::fs::write(host.path("bin/slow"), script).unwrap();

    let mut cri = host.start().await; // fails after the deadline of `connect`
    assert!(!Path::new(&format!("/proc/{pid}/ns/pid")).exists(), "the container's process has ended");
    let other = cri.run_pod(&host.pod("other")).await.unwrap();
    cri.remove_pod(&other).await;
    let listed = cri.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap();
    assert_eq!(listed.into_inner().items.len(), 0);
    let reported = unreadable_records(&mut cri).await;
    assert!(reported.contains("network, mounts and files of what it described"), "{reported}");
    assert!(dir.exists(), "the next start would continue");

    std::fs::write(&pipe, "x\n").unwrap();
    released(&host, &pod).await;
    assert!(host.path(&format!("root/unreadable/sandbox-{pod}.json")).exists());
    host.assert_clean();
}

#[tokio::test]
async fn without_a_configuration_the_network_is_not_ready_and_says_why() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let conditions = |r: proto::cri::StatusResponse| r.status.unwrap().conditions;
    let found = conditions(cri.runtime.status(StatusRequest::default()).await.unwrap().into_inner());
    assert_eq!((found[0].r#type.as_str(), found[0].status), ("RuntimeReady", true));
    assert_eq!((found[1].r#type.as_str(), found[1].status), ("NetworkReady", false));
    assert_eq!(
        found[1].message,
        format!("cni: no network configuration in {}", host.path("net.d").display())
    );
    let error = cri.run_pod(&networked(&host, "p")).await.unwrap_err();
    assert!(error.message().contains("no network configuration in"), "{}", error.message());
    host.assert_clean();
}
