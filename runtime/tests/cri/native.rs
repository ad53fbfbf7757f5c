//! What only the runtime's own launcher does. With `HAWSER_TEST_OCI_RUNTIME` these tests fail, unless they
//! are left out by name: `--skip native::`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::cri::{ContainerState, NamespaceMode, StopContainerRequest};
use tests::cri::{Cri, Host, IMAGE, eventually};

use super::exec::children;
use super::namespaces::{SLEEP, options, pod_with, seeing};

/// An OCI runtime starts its containers with processes of its own, which would be frozen too.
fn require_native() {
    assert!(
        std::env::var_os("HAWSER_TEST_OCI_RUNTIME").is_none(),
        "this is a test of the runtime's own launcher: leave it out with --skip native::"
    );
}

/// A container that was not started, and its pod. Process 1 of a pod would need a handler before a signal arrives;
/// the container's process is another.
async fn created() -> (Host, Cri, String, String) {
    created_for(&SLEEP).await
}

/// For this program.
async fn created_for(command: &[&str]) -> (Host, Cri, String, String) {
    require_native();
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&pod_with(&host, options(NamespaceMode::Pod))).await.unwrap();
    let id = cri.create(&pod, seeing("c", NamespaceMode::Pod, command)).await.unwrap();
    (host, cri, pod, id)
}

/// The directory, file and values that freeze and thaw what is in the pod's group, on either version.
fn freezer(host: &Host) -> (PathBuf, [&'static str; 2]) {
    let hierarchies = linux::cgroup::Hierarchies::detect().unwrap();
    let group = Path::new(&host.cgroup);
    match hierarchies.dir("freezer", group) {
        Some(dir) => (dir.join("freezer.state"), ["FROZEN", "THAWED"]),
        None => (hierarchies.dir("pids", group).unwrap().join("cgroup.freeze"), ["1", "0"]),
    }
}

type Calling<T> = tokio::task::JoinHandle<Result<tonic::Response<T>, tonic::Status>>;

/// Starts a container whose process is frozen before its program runs, until the text is written to the file.
async fn start_frozen(
    host: &Host,
    cri: &Cri,
    id: &str,
) -> (Calling<proto::cri::StartContainerResponse>, PathBuf, &'static str) {
    let before = children(host).len();
    let (file, [frozen, thawed]) = freezer(host);
    std::fs::write(&file, frozen).unwrap();
    let (mut runtime, container_id) = (cri.runtime.clone(), id.to_owned());
    let starting = tokio::spawn(async move {
        runtime.start_container(proto::cri::StartContainerRequest { container_id }).await
    });
    eventually("its process", || (children(host).len() > before).then_some(())).await;
    (starting, file, thawed)
}

fn stop(cri: &Cri, id: &str) -> Calling<proto::cri::StopContainerResponse> {
    let (mut runtime, container_id) = (cri.runtime.clone(), id.to_owned());
    tokio::spawn(
        async move { runtime.stop_container(StopContainerRequest { container_id, timeout: 60 }).await },
    )
}

/// Between clone and execve, a process has no handler of its program, and as process 1 it would lose
/// the signal.
#[tokio::test]
async fn a_stop_that_comes_while_the_container_starts_is_delivered_to_its_program() {
    let (host, mut cri, pod, id) = created().await;
    let (starting, file, thawed) = start_frozen(&host, &cri, &id).await;
    let mut stopping = stop(&cri, &id);
    let early = tokio::time::timeout(Duration::from_millis(500), &mut stopping).await;
    assert!(early.is_err() && !starting.is_finished(), "it is not stopped before it runs: {early:?}");
    std::fs::write(&file, thawed).unwrap();
    starting.await.unwrap().unwrap();
    let stopped = tokio::time::timeout(Duration::from_secs(20), stopping).await;
    stopped.expect("the signal arrives long before SIGKILL").unwrap().unwrap();
    let status = cri.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 143));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The runtime that asked for the start is gone; the next one sees a container that runs.
#[tokio::test]
async fn a_stop_after_a_restart_of_the_runtime_waits_for_the_program_too() {
    let (mut host, cri, pod, id) = created().await;
    let (starting, file, thawed) = start_frozen(&host, &cri, &id).await;
    host.kill();
    starting.await.unwrap().unwrap_err();
    let mut cri = host.start().await;
    let mut stopping = stop(&cri, &id);
    let early = tokio::time::timeout(Duration::from_millis(500), &mut stopping).await;
    assert!(early.is_err(), "{early:?}");
    std::fs::write(&file, thawed).unwrap();
    let stopped = tokio::time::timeout(Duration::from_secs(20), stopping).await;
    stopped.expect("the signal arrives long before SIGKILL").unwrap().unwrap();
    assert_eq!(cri.status(&id).await.exit_code, 143);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_start_that_fails_after_a_restart_of_the_runtime_is_the_containers_end() {
    let (mut host, cri, pod, id) = created_for(&["/nope"]).await;
    let (starting, file, thawed) = start_frozen(&host, &cri, &id).await;
    host.kill();
    starting.await.unwrap().unwrap_err();
    let mut cri = host.start().await;
    assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning);
    std::fs::write(&file, thawed).unwrap();
    let mut status = cri.ended(&id).await;
    for restart in [false, true] {
        if restart {
            host.kill();
            cri = host.start().await;
            status = cri.status(&id).await;
        }
        assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 128), "{restart}");
        assert_eq!(status.reason, "StartError");
        assert_eq!(status.message, "exec: \"/nope\": no such file or directory");
        assert!(status.started_at == 0 && status.finished_at > 0, "{status:?}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
