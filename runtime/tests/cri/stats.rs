//! What containers, pods and the image store use.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};
use proto::cri::{
    ContainerConfig, ContainerStatsFilter, ContainerStatsRequest, ImageFsInfoRequest,
    LinuxContainerResources, ListContainerStatsRequest, ListMetricDescriptorsRequest,
    ListPodSandboxStatsRequest, PodSandboxStatsFilter, PodSandboxStatsRequest, StopPodSandboxRequest,
    UInt64Value,
};
use tests::cri::{Cri, Host, IMAGE, container, eventually, eventually_within};
use tonic::Code;

use super::exec::{children, running};
use super::restart::container_dir;

const LIMIT: i64 = 256 << 20;
/// A measurement of files counts for a while.
const MEASURED: Duration = Duration::from_secs(30);

fn value(value: Option<UInt64Value>) -> u64 {
    value.unwrap().value
}

async fn of_container(cri: &mut Cri, id: &str) -> proto::cri::ContainerStats {
    let request = ContainerStatsRequest { container_id: id.to_owned() };
    cri.runtime.container_stats(request).await.unwrap().into_inner().stats.unwrap()
}

async fn of_pod(cri: &mut Cri, id: &str) -> proto::cri::PodSandboxStats {
    let request = PodSandboxStatsRequest { pod_sandbox_id: id.to_owned() };
    cri.runtime.pod_sandbox_stats(request).await.unwrap().into_inner().stats.unwrap()
}

/// A container with a memory limit, and a pod of its own.
async fn limited(host: &Host, cri: &mut Cri, command: &[&str]) -> (String, String) {
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mut config = container("c", command);
    config.labels = HashMap::from([("app".to_owned(), "counter".to_owned())]);
    config.linux.as_mut().unwrap().resources =
        Some(LinuxContainerResources { memory_limit_in_bytes: LIMIT, ..Default::default() });
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    (pod, id)
}

#[tokio::test]
async fn a_running_container_has_its_use_of_processors_and_memory() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = limited(&host, &mut cri, &["/demo-app", "count"]).await;
    eventually("it counts", || (host.container_log("c").len() > 10).then_some(())).await;
    let first = of_container(&mut cri, &id).await;
    let cpu = first.cpu.unwrap();
    assert!(value(cpu.usage_core_nano_seconds) > 0 && cpu.timestamp > 0, "{cpu:?}");
    assert_eq!(cpu.usage_nano_cores, None, "a rate needs an earlier look");
    let memory = first.memory.unwrap();
    let (usage, working_set) = (value(memory.usage_bytes), value(memory.working_set_bytes));
    assert!(working_set > 0 && working_set <= usage, "{memory:?}");
    assert_eq!(value(memory.available_bytes), LIMIT.cast_unsigned() - working_set);
    assert!(value(memory.rss_bytes) <= usage && value(memory.page_faults) > 0, "{memory:?}");
    let lines = host.container_log("c").len();
    eventually("a second has passed", || (host.container_log("c").len() > lines + 110).then_some(())).await;
    let second = of_container(&mut cri, &id).await.cpu.unwrap();
    assert!(value(second.usage_core_nano_seconds) > value(cpu.usage_core_nano_seconds));
    let rate = value(second.usage_nano_cores);
    assert!(rate > 0 && rate < 1_000_000_000, "{rate}: it sleeps most of the time");

    cri.runtime
        .stop_container(proto::cri::StopContainerRequest { container_id: id.clone(), timeout: 0 })
        .await
        .unwrap();
    let ended = of_container(&mut cri, &id).await;
    assert_eq!((ended.cpu, ended.memory), (None, None));
    assert!(ended.writable_layer.is_some());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn filters_are_honoured_and_an_unknown_container_is_named() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = limited(&host, &mut cri, &["/demo-app", "sleep", "forever"]).await;
    let other = cri.run_pod(&host.pod("other")).await.unwrap();
    let beside = cri.create(&other, container("beside", &["/demo-app", "sleep", "forever"])).await.unwrap();
    let label = |value: &str| HashMap::from([("app".to_owned(), value.to_owned())]);
    let filter = |change: &dyn Fn(&mut ContainerStatsFilter)| {
        let mut filter = ContainerStatsFilter::default();
        change(&mut filter);
        ListContainerStatsRequest { filter: Some(filter) }
    };
    for (request, wanted) in [
        (ListContainerStatsRequest { filter: None }, vec![&id, &beside]),
        (filter(&|f| f.id.clone_from(&id)), vec![&id]),
        (filter(&|f| f.pod_sandbox_id.clone_from(&other)), vec![&beside]),
        (filter(&|f| f.label_selector = label("counter")), vec![&id]),
        (filter(&|f| f.label_selector = label("else")), vec![]),
    ] {
        let found = cri.runtime.list_container_stats(request).await.unwrap().into_inner().stats;
        let mut found: Vec<String> = found.into_iter().map(|stats| stats.attributes.unwrap().id).collect();
        let mut wanted: Vec<String> = wanted.into_iter().cloned().collect();
        found.sort();
        wanted.sort();
        assert_eq!(found, wanted);
    }
    let request = ContainerStatsRequest { container_id: "absent".to_owned() };
    let unknown = cri.runtime.container_stats(request).await.unwrap_err();
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "container \"absent\" not found"));
    cri.remove_pod(&pod).await;
    cri.remove_pod(&other).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_writable_layer_is_what_the_container_has_written() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let before = of_container(&mut cri, &id).await.writable_layer.unwrap();
    let root = PathBuf::from(format!("/proc/{}/root", children(&host)[0]));
    std::fs::create_dir(root.join("made")).unwrap();
    std::fs::write(root.join("made/file"), vec![b'x'; 1 << 20]).unwrap();
    // A measurement counts for a while, which depends on the time that it took.
    let grown = eventually_within(MEASURED, "the layer's growth", async || {
        let now = of_container(&mut cri, &id).await.writable_layer.unwrap();
        let grown = value(now.used_bytes) - value(before.used_bytes);
        (grown > 0).then(|| {
            assert_eq!(value(now.inodes_used) - value(before.inodes_used), 2);
            grown
        })
    })
    .await;
    assert!((1 << 20..2 << 20).contains(&grown), "{grown}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The layer is on a file system whose daemon answers nothing.
#[tokio::test]
async fn a_layer_that_cannot_be_counted_keeps_no_other_figure() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = limited(&host, &mut cri, &["/demo-app", "sleep", "forever"]).await;
    let slow = cri.create(&pod, container("slow", &["/demo-app"])).await.unwrap();
    let layer = container_dir(&host, &pod, &slow).join("upper");
    let connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", connection.as_raw_fd());
    mount_fs("fuse", "unserved", &layer, MountFlags::default(), &options).unwrap();
    let listed = tokio::time::timeout(Duration::from_secs(15), async {
        let containers = cri.runtime.list_container_stats(ListContainerStatsRequest::default()).await;
        let pods = cri.runtime.list_pod_sandbox_stats(ListPodSandboxStatsRequest::default()).await;
        (containers.unwrap().into_inner().stats, pods.unwrap().into_inner().stats)
    })
    .await;
    // Its end answers all requests with an error, so that the runtime can be ended.
    unmount(&layer, UnmountMode::Detach).unwrap();
    drop(connection);
    let (containers, pods) = listed.expect("the lists wait for the layer");
    assert_eq!((containers.len(), pods.len()), (2, 1));
    for stats in containers {
        let has_figures = stats.attributes.unwrap().id == id;
        assert_eq!((stats.cpu.is_some(), stats.memory.is_some()), (has_figures, has_figures));
        assert!(has_figures || stats.writable_layer.is_none(), "{:?}", stats.writable_layer);
    }
    assert!(pods[0].linux.as_ref().is_some_and(|linux| linux.memory.is_some()), "{pods:?}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_has_its_groups_figures_its_interfaces_and_its_containers() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = limited(&host, &mut cri, &["/demo-app", "count"]).await;
    eventually("it counts", || (host.container_log("c").len() > 10).then_some(())).await;
    let netns = linux::netns::NetNs::open(&host.path("root/netns").join(&pod)).unwrap();
    let pair = ["link", "add", "eth0", "type", "veth", "peer", "name", "net1"];
    assert!(netns.run(|| Command::new("ip").args(pair).status().unwrap()).unwrap().success());
    drop(netns);
    let stats = of_pod(&mut cri, &pod).await;
    assert_eq!(stats.attributes.unwrap().metadata.unwrap().name, "p");
    let linux = stats.linux.unwrap();
    assert!(value(linux.cpu.unwrap().usage_core_nano_seconds) > 0);
    assert!(value(linux.memory.unwrap().working_set_bytes) > 0);
    assert!(value(linux.process.unwrap().process_count) >= 1);
    let network = linux.network.unwrap();
    assert_eq!(network.default_interface.unwrap().name, "eth0");
    let others: Vec<_> = network.interfaces.iter().map(|interface| interface.name.as_str()).collect();
    assert_eq!(others, ["net1"]);
    assert_eq!(linux.containers.len(), 1);
    assert_eq!(linux.containers[0].attributes.as_ref().unwrap().id, id);

    let idle = cri.run_pod(&host.pod("idle")).await.unwrap();
    let list = |id: &str| ListPodSandboxStatsRequest {
        filter: Some(PodSandboxStatsFilter { id: id.to_owned(), ..Default::default() }),
    };
    let all = cri.runtime.list_pod_sandbox_stats(list("")).await.unwrap().into_inner().stats;
    assert_eq!(all.len(), 2);
    cri.runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: idle.clone() }).await.unwrap();
    let running = cri.runtime.list_pod_sandbox_stats(list("")).await.unwrap().into_inner().stats;
    assert_eq!(running.len(), 1);
    assert_eq!(cri.runtime.list_pod_sandbox_stats(list(&idle)).await.unwrap().into_inner().stats.len(), 0);
    assert_eq!(of_pod(&mut cri, &idle).await.linux, None);
    cri.remove_pod(&pod).await;
    cri.remove_pod(&idle).await;
    host.assert_clean();
}

/// Their parent group may be that of other pods.
#[tokio::test]
async fn a_pod_without_a_group_of_its_own_has_the_sum_of_its_containers() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let mut config = host.pod("p");
    config.linux.as_mut().unwrap().cgroup_parent.clear();
    let pod = cri.run_pod(&config).await.unwrap();
    assert_eq!(of_pod(&mut cri, &pod).await.linux.unwrap().cpu, None);
    for name in ["a", "b"] {
        let config: ContainerConfig = container(name, &["/demo-app", "sleep", "forever"]);
        let id = cri.create(&pod, config).await.unwrap();
        cri.start(&id).await.unwrap();
    }
    let linux = of_pod(&mut cri, &pod).await.linux.unwrap();
    let parts: u64 =
        linux.containers.iter().map(|stats| value(stats.memory.as_ref().unwrap().usage_bytes)).sum();
    let whole = value(linux.memory.unwrap().usage_bytes);
    assert_eq!(linux.containers.len(), 2);
    assert!(whole > 0 && whole.abs_diff(parts) < 4 << 20, "{whole} {parts}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_image_store_has_the_size_that_it_takes_on_disk() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let usage = async |cri: &mut Cri| {
        let found = cri.images.image_fs_info(ImageFsInfoRequest {}).await.unwrap().into_inner();
        let images = found.image_filesystems.into_iter().next().unwrap();
        assert_eq!(found.container_filesystems.len(), 1);
        (value(images.used_bytes), value(images.inodes_used), images.fs_id.unwrap().mountpoint)
    };
    let (_, before, _) = usage(&mut cri).await;
    cri.pull(IMAGE).await.unwrap();
    let program = tests::cri::demo_program().len() as u64;
    let bytes = eventually_within(MEASURED, "the count of the image", async || {
        let (bytes, inodes, dir) = usage(&mut cri).await;
        assert_eq!(dir, host.path("root/images").display().to_string());
        (inodes > before).then_some(bytes)
    })
    .await;
    assert!(bytes > program, "{bytes}");
}

#[tokio::test]
async fn a_call_that_is_not_built_is_named_with_the_reason() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let refused = cri.runtime.list_metric_descriptors(ListMetricDescriptorsRequest {}).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (
            Code::Unimplemented,
            "ListMetricDescriptors: the runtime has no metrics beside the figures of ListPodSandboxStats"
        )
    );
}
