//! Limits of running containers.

use std::path::Path;

use linux::cgroup::Hierarchies;
use proto::cri::{
    ContainerStatusRequest, HugepageLimit, LinuxContainerResources, NetworkConfig, PodSandboxStatusRequest,
    RuntimeConfig, StatusRequest, StopContainerRequest, UpdateContainerResourcesRequest,
    UpdatePodSandboxResourcesRequest, UpdateRuntimeConfigRequest,
};
use serde_json::Value;
use tests::cri::{Cri, Host, IMAGE, container};
use tonic::{Code, Status};

use super::exec::{children, running};

async fn update(cri: &mut Cri, id: &str, linux: LinuxContainerResources) -> Result<(), Status> {
    let request = UpdateContainerResourcesRequest {
        container_id: id.to_owned(),
        linux: Some(linux),
        ..Default::default()
    };
    cri.runtime.update_container_resources(request).await.map(drop)
}

async fn shown(cri: &mut Cri, id: &str) -> LinuxContainerResources {
    cri.status(id).await.resources.unwrap().linux.unwrap()
}

/// The content of a limit's file: `names` of v1 and of v2.
fn limit(host: &Host, id: &str, controller: &str, names: [&str; 2]) -> String {
    let hierarchies = Hierarchies::detect().unwrap();
    let dir = hierarchies.dir(controller, &Path::new(&host.cgroup).join(id)).unwrap();
    let name = if hierarchies.has_in_v2(controller) { names[1] } else { names[0] };
    std::fs::read_to_string(dir.join(name)).unwrap().trim().to_owned()
}

fn memory(host: &Host, id: &str) -> String {
    limit(host, id, "memory", ["memory.limit_in_bytes", "memory.max"])
}

#[tokio::test]
async fn a_running_container_has_new_limits_at_once_and_after_a_restart_of_the_runtime() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mut config = container("c", &["/demo-app", "sleep", "forever"]);
    config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        cpu_shares: 102,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        unified: [("pids.max".to_owned(), "50".to_owned())].into(),
        ..Default::default()
    });
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap().trim().parse::<i64>().unwrap();
    let score = (own + 50).min(1000);
    let wanted = LinuxContainerResources {
        memory_limit_in_bytes: 128 << 20,
        memory_swap_limit_in_bytes: 160 << 20,
        cpu_quota: 80_000,
        cpuset_cpus: "0".to_owned(),
        oom_score_adj: score,
        unified: [("pids.max".to_owned(), "60".to_owned())].into(),
        ..Default::default()
    };
    update(&mut cri, &id, wanted).await.unwrap();
    assert_eq!(memory(&host, &id), (128 << 20).to_string());
    let quota = limit(&host, &id, "cpu", ["cpu.cfs_quota_us", "cpu.max"]);
    assert!(quota == "80000" || quota == "80000 100000", "{quota}");
    let weight = limit(&host, &id, "cpu", ["cpu.shares", "cpu.weight"]);
    assert!(weight == "102" || weight == "4", "{weight}");
    assert_eq!(limit(&host, &id, "pids", ["pids.max", "pids.max"]), "60");
    let pid = children(&host)[0];
    let found = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(found.contains("Cpus_allowed_list:\t0\n"), "{found}");
    let found = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert_eq!(found.trim(), score.to_string());

    let check = |found: LinuxContainerResources| {
        let figures = (found.memory_limit_in_bytes, found.cpu_quota, found.cpu_period, found.cpu_shares);
        assert_eq!(figures, (128 << 20, 80_000, 100_000, 102));
        assert_eq!((found.memory_swap_limit_in_bytes, found.cpuset_cpus.as_str()), (160 << 20, "0"));
        assert_eq!(found.unified["pids.max"], "60");
    };
    check(shown(&mut cri, &id).await);
    host.kill();
    let mut cri = host.start().await;
    check(shown(&mut cri, &id).await);
    // Down again, with the swap that it had.
    let less = LinuxContainerResources { memory_limit_in_bytes: 96 << 20, ..Default::default() };
    update(&mut cri, &id, less).await.unwrap();
    assert_eq!(memory(&host, &id), (96 << 20).to_string());
    assert_eq!(shown(&mut cri, &id).await.memory_swap_limit_in_bytes, 128 << 20);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_container_that_has_not_started_starts_with_the_new_limits() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    let wanted = LinuxContainerResources { memory_limit_in_bytes: 96 << 20, ..Default::default() };
    update(&mut cri, &id, wanted).await.unwrap();
    cri.start(&id).await.unwrap();
    assert_eq!(memory(&host, &id), (96 << 20).to_string());
    assert_eq!(shown(&mut cri, &id).await.memory_limit_in_bytes, 96 << 20);
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    cri.runtime.stop_container(stop).await.unwrap();
    let late = update(&mut cri, &id, LinuxContainerResources::default()).await.unwrap_err();
    assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    assert_eq!(shown(&mut cri, &id).await.memory_limit_in_bytes, 96 << 20);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_refused_update_names_its_cause_and_changes_nothing() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let first = LinuxContainerResources { memory_limit_in_bytes: 96 << 20, ..Default::default() };
    update(&mut cri, &id, first).await.unwrap();
    let wrong = LinuxContainerResources {
        memory_limit_in_bytes: 128 << 20,
        cpuset_cpus: "4095".to_owned(),
        ..Default::default()
    };
    let refused = update(&mut cri, &id, wrong).await.unwrap_err();
    assert!(
        refused.message().contains("\"4095\" to /") && refused.message().contains("cpuset.cpus"),
        "{refused}"
    );
    assert_eq!(memory(&host, &id), (96 << 20).to_string(), "what was set before is undone");
    let found = shown(&mut cri, &id).await;
    assert_eq!((found.memory_limit_in_bytes, found.cpuset_cpus.as_str()), (96 << 20, ""));

    let swap = LinuxContainerResources { memory_swap_limit_in_bytes: 1, ..Default::default() };
    let refused = update(&mut cri, &id, swap).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().starts_with("linux.memory_swap_limit_in_bytes: 1 is below"), "{refused}");
    let file = LinuxContainerResources {
        unified: [("cgroup.procs".to_owned(), "0".to_owned())].into(),
        ..Default::default()
    };
    // On v1 no such file is written at all.
    if Hierarchies::detect().unwrap().has_in_v2("memory") {
        let refused = update(&mut cri, &id, file).await.unwrap_err();
        assert!(refused.message().contains("\"cgroup.procs\": not a controller's file"), "{refused}");
    }
    let nothing = UpdateContainerResourcesRequest { container_id: id.clone(), ..Default::default() };
    let refused = cri.runtime.update_container_resources(nothing).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, "linux: missing"));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn huge_pages_are_limited_where_the_machine_has_the_controller() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let hierarchies = Hierarchies::detect().unwrap();
    assert!(hierarchies.has("hugetlb"), "this test needs the controller hugetlb: {hierarchies:?}");
    let page_size = "2MB".to_owned();
    let wanted = LinuxContainerResources {
        hugepage_limits: vec![HugepageLimit { page_size: page_size.clone(), limit: 4 << 20 }],
        ..Default::default()
    };
    update(&mut cri, &id, wanted).await.unwrap();
    assert_eq!(
        limit(&host, &id, "hugetlb", ["hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.max"]),
        (4 << 20).to_string()
    );
    assert_eq!(shown(&mut cri, &id).await.hugepage_limits[0].page_size, page_size);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn limits_of_a_pod_and_the_range_of_addresses_are_accepted() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let request = |id: &str| UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: id.to_owned(),
        resources: Some(LinuxContainerResources { cpu_shares: 7, ..Default::default() }),
        overhead: None,
    };
    cri.runtime.update_pod_sandbox_resources(request(&pod)).await.unwrap();
    let unknown = cri.runtime.update_pod_sandbox_resources(request("absent")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
    let network = NetworkConfig { pod_cidr: "10.88.0.0/16".to_owned() };
    let config = RuntimeConfig { network_config: Some(network) };
    cri.runtime
        .update_runtime_config(UpdateRuntimeConfigRequest { runtime_config: Some(config) })
        .await
        .unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn verbose_statuses_have_pid_namespaces_specification_and_configuration() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let parsed = |text: &String| serde_json::from_str::<Value>(text).unwrap();
    let request = ContainerStatusRequest { container_id: id.clone(), verbose: true };
    let info = cri.runtime.container_status(request).await.unwrap().into_inner().info;
    let info = parsed(&info["info"]);
    assert_eq!(info["pid"], children(&host)[0]);
    assert_eq!(info["sandboxID"], pod.as_str());
    assert_eq!(info["runtimeSpec"]["process"]["args"][0], "/demo-app");
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
    let info = cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().info;
    let info = parsed(&info["info"]);
    assert_eq!(info["pid"], host.shims()[0]);
    let network = &info["runtimeSpec"]["linux"]["namespaces"][0];
    assert_eq!(network["type"], "network");
    assert_eq!(network["path"], host.path("root/netns").join(&pod).display().to_string());
    let status = cri.runtime.status(StatusRequest { verbose: true }).await.unwrap().into_inner();
    let config = parsed(&status.info["config"]);
    assert_eq!(config["rootDir"], host.path("root").display().to_string());
    let brief = cri.runtime.status(StatusRequest { verbose: false }).await.unwrap().into_inner();
    assert!(brief.info.is_empty());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
