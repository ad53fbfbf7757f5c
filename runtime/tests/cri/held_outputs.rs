//! Containers that hold the kernel's lock on their output pipe: the shim, which reads it,
//! waits for the lock in state D, and answers nothing.

use std::time::Duration;

use proto::cri::{ContainerState, StopContainerRequest};
use rustix::process::{Pid, Signal, kill_process};
use tests::cri::{Cri, Host, IMAGE, container, eventually};

/// For calls that must not wait for the shim.
const DEADLINE: Duration = Duration::from_secs(30);

/// A pod that has kept its shim waiting: its id and its container's.
async fn hold_output(host: &Host, cri: &mut Cri) -> (String, String) {
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "hold-output"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let shim = host.shims()[0];
    eventually("the shim waits", || {
        let stat = std::fs::read_to_string(format!("/proc/{shim}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.starts_with('D').then_some(())
    })
    .await;
    (pod, id)
}

#[tokio::test]
async fn a_container_that_keeps_its_shim_waiting_is_stopped_and_removed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = hold_output(&host, &mut cri).await;
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 1 };
    let stopped = tokio::time::timeout(DEADLINE, cri.runtime.stop_container(stop)).await;
    stopped.expect("it does not wait for the shim").unwrap();
    let status = cri.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_runtime_that_starts_serves_though_a_shim_waits_and_hears_it_later() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = hold_output(&host, &mut cri).await;
    let later = cri.create(&pod, container("later", &["/demo-app", "print", "later"])).await.unwrap();
    host.kill();
    let mut cri = host.start().await;
    assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning);
    assert_eq!(cri.status(&later).await.state(), ContainerState::ContainerCreated);
    cri.start(&later).await.unwrap_err();
    let shim = host.shims()[0];
    let program = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    kill_process(Pid::from_raw(program.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    assert_eq!(cri.ended(&id).await.exit_code, 137);
    eventually("the shim is heard", || host.log().contains("the pod's shim answers").then_some(())).await;
    cri.start(&later).await.unwrap();
    assert_eq!(cri.ended(&later).await.exit_code, 0);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_that_was_taken_over_from_a_silent_shim_is_removed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, _id) = hold_output(&host, &mut cri).await;
    host.kill();
    let mut cri = host.start().await;
    tokio::time::timeout(DEADLINE, cri.remove_pod(&pod)).await.expect("it does not wait for the shim");
    host.assert_clean();
}
