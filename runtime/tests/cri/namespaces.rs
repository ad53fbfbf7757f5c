//! Whose processes, ipc objects, names and settings a container has.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::cri::{
    ContainerConfig, ContainerState, ContainerStatusRequest, DnsConfig, ExecSyncRequest, NamespaceMode,
    NamespaceOption, PodSandboxConfig, PodSandboxState, PodSandboxStatusRequest, StopContainerRequest,
    UserNamespace,
};
use tests::cri::{Cri, Host, IMAGE, container, eventually, eventually_within};
use tonic::Code;

use super::containers::with_context;
use super::exec::children;

pub(crate) const SLEEP: [&str; 3] = ["/demo-app", "sleep", "forever"];

pub(crate) fn options(pid: NamespaceMode) -> NamespaceOption {
    NamespaceOption { pid: pid.into(), ..Default::default() }
}

/// A container with these processes in sight.
pub(crate) fn seeing(name: &str, pid: NamespaceMode, command: &[&str]) -> ContainerConfig {
    with_context(container(name, command), |context| context.namespace_options = Some(options(pid)))
}

pub(crate) fn pod_with(host: &Host, options: NamespaceOption) -> PodSandboxConfig {
    let mut config = host.pod("p");
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options = Some(options);
    config
}

async fn started(cri: &mut Cri, pod: &str, config: ContainerConfig) -> String {
    let id = cri.create(pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    id
}

async fn pid_of(cri: &mut Cri, id: &str) -> i32 {
    let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
    let info = cri.runtime.container_status(request).await.unwrap().into_inner().info;
    let info: serde_json::Value = serde_json::from_str(&info["info"]).unwrap();
    i32::try_from(info["pid"].as_i64().unwrap()).unwrap()
}

async fn exec(cri: &Cri, id: &str, cmd: &[&str]) -> String {
    let cmd = cmd.iter().map(|word| (*word).to_owned()).collect();
    let request = ExecSyncRequest { container_id: id.to_owned(), cmd, timeout: 10 };
    let said = cri.runtime.clone().exec_sync(request).await.unwrap().into_inner();
    String::from_utf8(said.stdout).unwrap()
}

fn namespace(pid: i32, kind: &str) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap()
}

/// The value of a line in /proc/PID/status.
fn status(pid: i32, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t").map(str::to_owned));
    found.unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// The child of the shim that is process 1 of the namespace of `pid`.
fn holder(host: &Host, pid: i32) -> i32 {
    let is_first = |child: &i32| {
        namespace(*child, "pid") == namespace(pid, "pid") && status(*child, "NSpid").ends_with("\t1")
    };
    children(host).into_iter().find(is_first).unwrap()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Also as a zombie.
fn is_there(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Its parent, which may be another process now, reaps it or does not.
fn has_ended(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.contains("State:") || status.contains("State:\tZ")
}

#[tokio::test]
async fn containers_that_share_a_pods_processes_see_each_other_and_end_alone() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&pod_with(&host, options(NamespaceMode::Pod))).await.unwrap();
    let first = started(&mut cri, &pod, seeing("first", NamespaceMode::Pod, &SLEEP)).await;
    let second = started(&mut cri, &pod, seeing("second", NamespaceMode::Pod, &SLEEP)).await;
    let alone = started(&mut cri, &pod, seeing("alone", NamespaceMode::Container, &SLEEP)).await;
    let (one, two) = (pid_of(&mut cri, &first).await, pid_of(&mut cri, &second).await);
    assert_eq!(namespace(one, "pid"), namespace(two, "pid"));
    assert_ne!(namespace(pid_of(&mut cri, &alone).await, "pid"), namespace(one, "pid"));
    let holder = holder(&host, one);
    // The second one as the first one sees it.
    let seen = status(two, "NSpid").rsplit_once('\t').unwrap().1.to_owned();
    let name = exec(&cri, &first, &["/demo-app", "cat", &format!("/proc/{seen}/comm")]).await;
    assert_eq!(name, "demo-app\n");
    assert!(exec(&cri, &first, &["/demo-app", "status"]).await.contains("NSpid:"));

    // What an exec leaves behind becomes a child of the holder, which reaps it.
    exec(&cri, &second, &["/demo-app", "leave"]).await;
    let children_of_holder = || {
        let text = std::fs::read_to_string(format!("/proc/{holder}/task/{holder}/children")).unwrap();
        text.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()).collect::<Vec<_>>()
    };
    let orphan = eventually("an orphan", || children_of_holder().first().copied()).await;
    kill(orphan);
    eventually("the orphan is reaped", || (!is_there(orphan)).then_some(())).await;

    // Its processes end with a container, and the others go on.
    exec(&cri, &second, &["/demo-app", "leave"]).await;
    let orphan = eventually("an orphan", || children_of_holder().first().copied()).await;
    let stop = StopContainerRequest { container_id: second.clone(), timeout: 20 };
    cri.runtime.stop_container(stop).await.unwrap();
    assert_eq!(cri.status(&second).await.exit_code, 143);
    eventually("the orphan has ended", || (!is_there(orphan)).then_some(())).await;
    for id in [&first, &alone] {
        assert_eq!(cri.status(id).await.state(), ContainerState::ContainerRunning);
    }

    // A runtime that starts later finds the same namespace.
    host.kill();
    let mut cri = host.start().await;
    let third = started(&mut cri, &pod, seeing("third", NamespaceMode::Pod, &SLEEP)).await;
    let three = pid_of(&mut cri, &third).await;
    assert_eq!(namespace(three, "pid"), namespace(one, "pid"));
    cri.remove_pod(&pod).await;
    eventually("the holder has ended", || has_ended(holder).then_some(())).await;
    host.assert_clean();
}

/// A container with CAP_SYS_PTRACE may use everything that it has.
#[tokio::test]
async fn the_holder_of_a_pods_processes_has_no_privilege_and_no_file() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&pod_with(&host, options(NamespaceMode::Pod))).await.unwrap();
    let id = started(&mut cri, &pod, seeing("c", NamespaceMode::Pod, &SLEEP)).await;
    let one = pid_of(&mut cri, &id).await;
    let holder = holder(&host, one);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(holder, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(holder, "Uid"), "65535\t65535\t65535\t65535");
    assert_eq!(status(holder, "Groups").trim(), "");
    assert_eq!((status(holder, "NoNewPrivs"), status(holder, "Seccomp")), ("1".into(), "2".into()));
    let entries = std::fs::read_dir(format!("/proc/{holder}/root/")).unwrap().count();
    assert_eq!(entries, 0, "its root directory is empty");
    let mounts = std::fs::read_to_string(format!("/proc/{holder}/mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    assert!(mounts.contains(" ro,nosuid,nodev,noexec"), "{mounts}");
    let descriptors = std::fs::read_dir(format!("/proc/{holder}/fd")).unwrap();
    let descriptors: Vec<_> =
        descriptors.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap()).collect();
    assert_eq!(descriptors.len(), 3);
    assert!(descriptors.iter().all(|fd| fd.to_string_lossy().starts_with("pipe:")), "{descriptors:?}");
    for kind in ["net", "ipc", "uts"] {
        assert_eq!(namespace(holder, kind), namespace(one, kind), "{kind}");
    }
    let [shim] = host.shims()[..] else { panic!("one shim") };
    for kind in ["cgroup", "mnt", "net"] {
        assert_ne!(namespace(holder, kind), namespace(shim, kind), "{kind}");
    }
    let groups = std::fs::read_to_string(format!("/proc/{holder}/cgroup")).unwrap();
    let own = format!("{}/{pod}", host.cgroup);
    assert!(groups.lines().all(|line| line.ends_with(&own)), "{groups}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn when_the_holder_of_a_pods_processes_is_killed_the_pod_ends_and_leaves_nothing() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&pod_with(&host, options(NamespaceMode::Pod))).await.unwrap();
    let sharing = started(&mut cri, &pod, seeing("sharing", NamespaceMode::Pod, &SLEEP)).await;
    let alone = started(&mut cri, &pod, seeing("alone", NamespaceMode::Container, &SLEEP)).await;
    let one = pid_of(&mut cri, &sharing).await;
    kill(holder(&host, one));
    let mut codes = Vec::new();
    for id in [&sharing, &alone] {
        codes.push(cri.ended(id).await.exit_code);
    }
    assert_eq!(codes, [137, 137]);
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let state = async |cri: &mut Cri| {
        let found = cri.runtime.pod_sandbox_status(request.clone()).await.unwrap().into_inner();
        found.status.unwrap().state()
    };
    eventually_within(Duration::from_secs(30), "the pod's end", async || {
        (state(&mut cri).await == PodSandboxState::SandboxNotready).then_some(())
    })
    .await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_holder_ends_with_its_shim() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&pod_with(&host, options(NamespaceMode::Pod))).await.unwrap();
    let id = started(&mut cri, &pod, seeing("c", NamespaceMode::Pod, &SLEEP)).await;
    let one = pid_of(&mut cri, &id).await;
    let holder = holder(&host, one);
    let [shim] = host.shims()[..] else { panic!("one shim") };
    kill(shim);
    assert_eq!(cri.ended(&id).await.exit_code, 137);
    eventually("the holder has ended", || has_ended(holder).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_container_sees_the_nodes_processes_or_those_of_a_target_in_its_pod() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let node = started(&mut cri, &pod, seeing("node", NamespaceMode::Node, &SLEEP)).await;
    let own = std::process::id().cast_signed();
    assert_eq!(namespace(pid_of(&mut cri, &node).await, "pid"), namespace(own, "pid"));

    let target = started(&mut cri, &pod, container("target", &SLEEP)).await;
    let aiming_at = |name: &str, id: &str| {
        let mut config = seeing(name, NamespaceMode::Target, &SLEEP);
        let context = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
        id.clone_into(&mut context.namespace_options.as_mut().unwrap().target_id);
        config
    };
    let debug = started(&mut cri, &pod, aiming_at("debug", &target)).await;
    let of_target = pid_of(&mut cri, &target).await;
    assert_eq!(namespace(pid_of(&mut cri, &debug).await, "pid"), namespace(of_target, "pid"));
    assert_eq!(exec(&cri, &debug, &["/demo-app", "cat", "/proc/1/comm"]).await, "demo-app\n");

    let other = cri.run_pod(&host.pod("other")).await.unwrap();
    let refused = cri.create(&other, aiming_at("spy", &target)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    let words = format!("target_id: container {target:?} is in another pod");
    assert!(refused.message().ends_with(&words), "{refused}");
    let refused = cri.create(&pod, aiming_at("none", "")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    let refused = cri.create(&pod, aiming_at("absent", "absent")).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound, "{refused}");

    // A target that ends takes those along that share its processes. Another process may have its
    // number then.
    let late = cri.create(&pod, aiming_at("late", &target)).await.unwrap();
    let stop = StopContainerRequest { container_id: target.clone(), timeout: 0 };
    cri.runtime.stop_container(stop).await.unwrap();
    assert_eq!(cri.ended(&debug).await.exit_code, 137);
    let refused = cri.start(&late).await.unwrap_err();
    assert!(refused.message().contains("the process whose PID namespace it shares has ended"), "{refused}");
    let refused = cri.create(&pod, aiming_at("later", &target)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert_eq!(cri.status(&node).await.state(), ContainerState::ContainerRunning);
    cri.remove_pod(&pod).await;
    cri.remove_pod(&other).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_has_ipc_objects_of_its_own_or_the_nodes() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let own = namespace(std::process::id().cast_signed(), "ipc");
    for (mode, is_nodes) in [(NamespaceMode::Pod, false), (NamespaceMode::Node, true)] {
        let options =
            NamespaceOption { ipc: mode.into(), pid: NamespaceMode::Container.into(), ..Default::default() };
        let pod = cri.run_pod(&pod_with(&host, options)).await.unwrap();
        let id = started(&mut cri, &pod, container("c", &SLEEP)).await;
        let beside = started(&mut cri, &pod, container("beside", &SLEEP)).await;
        let (one, two) = (pid_of(&mut cri, &id).await, pid_of(&mut cri, &beside).await);
        assert_eq!(namespace(one, "ipc"), namespace(two, "ipc"));
        assert_eq!(namespace(one, "ipc") == own, is_nodes);
        // /dev/shm is that of the same namespace.
        let shm = |pid: i32| PathBuf::from(format!("/proc/{pid}/root/dev/shm"));
        let name = format!("hawser-test-{pod}");
        std::fs::write(shm(one).join(&name), "x").unwrap();
        assert!(shm(two).join(&name).exists());
        assert_eq!(Path::new("/dev/shm").join(&name).exists(), is_nodes);
        std::fs::remove_file(shm(one).join(&name)).unwrap();
        cri.remove_pod(&pod).await;
    }
    host.assert_clean();
}

#[tokio::test]
async fn settings_of_the_pods_namespaces_are_set_and_those_of_the_node_refused() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let mut config = host.pod("p");
    let sysctls =
        [("kernel.shm_rmid_forced", "1"), ("fs.mqueue.msg_max", "100"), ("net.ipv4.ip_forward", "1")];
    config.linux.as_mut().unwrap().sysctls =
        sysctls.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let pod = cri.run_pod(&config).await.unwrap();
    let id = started(&mut cri, &pod, container("c", &SLEEP)).await;
    for (name, value) in sysctls {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        assert_eq!(exec(&cri, &id, &["/demo-app", "cat", &path]).await.trim(), value, "{name}");
    }
    cri.remove_pod(&pod).await;

    config.linux.as_mut().unwrap().sysctls = [("vm.swappiness".to_owned(), "1".to_owned())].into();
    let refused = cri.run_pod(&config).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            Code::InvalidArgument,
            "config.linux.sysctls: sysctl vm.swappiness: it is not a setting of a namespace but of the whole node"
        )
    );
    let users = UserNamespace { mode: NamespaceMode::Pod.into(), ..Default::default() };
    let options = NamespaceOption { userns_options: Some(users), ..options(NamespaceMode::Container) };
    let refused = cri.run_pod(&pod_with(&host, options)).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unimplemented, "RunPodSandbox: namespace_options.userns_options.mode: POD is not supported")
    );
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_has_its_hostname_and_its_name_servers() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let mut config = host.pod("p");
    config.hostname = "test-hostname".to_owned();
    config.dns_config = Some(DnsConfig {
        servers: vec!["10.10.10.10".to_owned()],
        searches: vec!["google.com".to_owned()],
        options: vec!["ndots:8".to_owned()],
    });
    let pod = cri.run_pod(&config).await.unwrap();
    let id = started(&mut cri, &pod, container("c", &SLEEP)).await;
    let cat = async |path: &str| exec(&cri, &id, &["/demo-app", "cat", path]).await;
    assert_eq!(cat("/etc/resolv.conf").await, "search google.com\nnameserver 10.10.10.10\noptions ndots:8\n");
    assert_eq!(cat("/etc/hostname").await, "test-hostname\n");
    assert_eq!(cat("/proc/sys/kernel/hostname").await, "test-hostname\n");
    assert!(cat("/etc/hosts").await.contains("localhost"));
    let mounts = cat("/proc/self/mountinfo").await;
    let shm = mounts.lines().find(|line| line.contains(" /dev/shm ")).unwrap();
    assert!(shm.contains("nosuid,nodev,noexec") && shm.contains("size=65536k"), "{shm}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
