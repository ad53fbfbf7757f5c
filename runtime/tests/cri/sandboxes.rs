//! Sandboxes: made, stopped, removed, and nothing left.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::cri::{
    ContainerEventType, ListPodSandboxRequest, PodSandboxState, PodSandboxStatusRequest,
    RemoveContainerRequest, RemovePodSandboxRequest, RunPodSandboxRequest, StopContainerRequest,
    StopPodSandboxRequest,
};
use tests::cri::{Host, IMAGE, container, eventually};
use tonic::Code;

#[tokio::test]
async fn a_sandbox_is_ready_then_stopped_then_gone() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("a")).await.unwrap();
    let status = |id: &str| PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
    let found = cri.runtime.pod_sandbox_status(status(&pod)).await.unwrap().into_inner().status.unwrap();
    assert_eq!(found.state(), PodSandboxState::SandboxReady);
    for _twice in 0..2 {
        let stop = StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
        cri.runtime.stop_pod_sandbox(stop).await.unwrap();
    }
    let found = cri.runtime.pod_sandbox_status(status(&pod)).await.unwrap().into_inner().status.unwrap();
    assert_eq!(found.state(), PodSandboxState::SandboxNotready);
    cri.remove_pod(&pod).await;
    // Without it, a kubelet must look at all its pods.
    let removed = cri.event(&pod, ContainerEventType::ContainerDeletedEvent).await;
    let metadata =
        removed.pod_sandbox_status.and_then(|status| status.metadata).expect("of which pod it was");
    assert_eq!((metadata.name.as_str(), metadata.uid.as_str()), ("a", "uid-a"));
    assert_eq!(cri.runtime.pod_sandbox_status(status(&pod)).await.unwrap_err().code(), Code::NotFound);
    let list = cri.runtime.list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap().into_inner();
    assert_eq!(list.items.len(), 0);
    host.assert_clean();
}

#[tokio::test]
async fn removing_a_sandbox_kills_what_runs_in_it() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("busy")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_shim_that_has_ended_is_reaped() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    for is_killed in [false, true] {
        let pod = cri.run_pod(&host.pod("one")).await.unwrap();
        let shim = host.shims()[0];
        if is_killed {
            kill(Pid::from_raw(shim), Signal::SIGKILL).unwrap();
        }
        cri.remove_pod(&pod).await;
        let is_there = || std::path::Path::new(&format!("/proc/{shim}")).exists();
        eventually("not even a zombie is left", || (!is_there()).then_some(())).await;
    }
    host.assert_clean();
}

#[tokio::test]
async fn stop_and_remove_of_the_unknown_succeed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let id = "0123456789abcdef".to_owned();
    cri.runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: id.clone() }).await.unwrap();
    cri.runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: id.clone() }).await.unwrap();
    cri.runtime.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 1 }).await.unwrap();
    cri.runtime.remove_container(RemoveContainerRequest { container_id: id }).await.unwrap();
}

#[tokio::test]
async fn a_second_sandbox_of_the_same_attempt_is_refused() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("twin")).await.unwrap();
    let error = cri.run_pod(&host.pod("twin")).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    assert_eq!(error.message(), format!("pod sandbox \"twin_test_uid-twin_0\" already exists as {pod}"));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn of_equal_calls_at_the_same_time_one_makes_the_sandbox() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    for round in 0..10 {
        let config = Some(host.pod(&format!("twin-{round}")));
        let request = RunPodSandboxRequest { config, runtime_handler: String::new() };
        let (mut one, mut two) = (cri.runtime.clone(), cri.runtime.clone());
        let calls = tokio::join!(one.run_pod_sandbox(request.clone()), two.run_pod_sandbox(request));
        let (made, refused) = match calls {
            (Ok(made), Err(refused)) | (Err(refused), Ok(made)) => (made, refused),
            others => panic!("{others:?}"),
        };
        assert_eq!(refused.code(), Code::AlreadyExists, "{refused}");
        cri.remove_pod(&made.into_inner().pod_sandbox_id).await;
    }
    host.assert_clean();
}

#[tokio::test]
async fn an_incomplete_request_names_its_field() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let mut config = host.pod("x");
    config.metadata.as_mut().unwrap().uid.clear();
    let error = cri.run_pod(&config).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::InvalidArgument, "config.metadata.uid: empty"));
    host.assert_clean();
}

#[tokio::test]
async fn a_handler_that_the_runtime_does_not_have_is_refused() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let request =
        RunPodSandboxRequest { config: Some(host.pod("sandboxed")), runtime_handler: "runsc".to_owned() };
    let error = cri.runtime.run_pod_sandbox(request).await.unwrap_err();
    let message = "runtime_handler: \"runsc\": this runtime has only the default one, \"\"";
    assert_eq!((error.code(), error.message()), (Code::InvalidArgument, message));
    // The refused call has not taken the pod's name.
    let pod = cri.run_pod(&host.pod("sandboxed")).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn network_none_is_an_empty_namespace_with_lo_down() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("alone")).await.unwrap();
    let netns = linux::netns::NetNs::open(&host.path("root/netns").join(&pod)).unwrap();
    let (links, lo) = netns
        .run(|| {
            let read = |p: &str| std::fs::read_to_string(p).unwrap();
            (read("/proc/thread-self/net/dev").lines().count() - 2, read("/proc/thread-self/net/if_inet6"))
        })
        .unwrap();
    // lo that is up would have ::1.
    assert_eq!((links, lo.as_str()), (1, ""));
    drop(netns);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_program_that_a_container_may_come_by_cannot_be_written_to() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let [shim] = host.shims()[..] else { panic!("one shim") };
    let mount = rustix::fs::statvfs(format!("/proc/{shim}/exe")).unwrap();
    assert!(mount.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
