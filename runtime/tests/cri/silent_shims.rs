//! Shims that do not answer a runtime that starts: they end with their pods.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::cri::ContainerState;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use tests::cri::{Host, IMAGE, container, eventually};

use super::containers::container_pid;
use super::restart::container_dir;

/// The host's only shim.
fn stop_shim(host: &Host) {
    let [shim] = host.shims()[..] else { panic!("one shim") };
    kill(Pid::from_raw(shim), Signal::SIGSTOP).unwrap();
}

/// Ends the runtime's connection to its only shim, as the runtime itself does a minute later.
fn end_connection_to_shim(host: &Host) {
    let runtime = host.runtime.as_ref().unwrap().id();
    let pid = rustix::process::Pid::from_raw(runtime.cast_signed()).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    let descriptors = std::fs::read_dir(format!("/proc/{runtime}/fd")).unwrap().flatten();
    let descriptors = descriptors.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_to_shim = |stream: &UnixStream| {
        let peer = stream.peer_addr().ok();
        peer.is_some_and(|peer| peer.as_pathname().is_some_and(|path| path.ends_with("shim.sock")))
    };
    let copies = descriptors.filter_map(|fd| pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()).ok());
    let connections: Vec<UnixStream> =
        copies.map(|copy: OwnedFd| UnixStream::from(copy)).filter(is_to_shim).collect();
    assert_eq!(connections.len(), 1);
    connections[0].shutdown(std::net::Shutdown::Both).unwrap();
}

#[tokio::test]
async fn a_shim_that_stays_silent_ends_with_its_pod() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    host.kill();
    stop_shim(&host);
    let mut cri = host.start().await;
    end_connection_to_shim(&host);
    assert_eq!(cri.ended(&id).await.exit_code, 137);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The status is then the only source, and nothing may be on record before the shim answers or ends.
#[tokio::test]
async fn a_silent_shim_and_a_damaged_status_keep_no_runtime_from_starting_and_no_process_runs_on() {
    let mut host = Host::new();
    for answers in [true, false] {
        let mut cri = host.start().await;
        cri.pull(IMAGE).await.unwrap();
        let pod = cri.run_pod(&host.pod("p")).await.unwrap();
        let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
        cri.start(&id).await.unwrap();
        let pid = container_pid(&host, &pod, &id).unwrap();
        host.kill();
        stop_shim(&host);
        let status = container_dir(&host, &pod, &id).join("status.json");
        let content = std::fs::read(&status).unwrap();
        std::fs::write(&status, &content[..content.len() / 2]).unwrap();

        let mut cri = host.start().await;
        assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning, "as far as is known");
        assert_eq!(std::fs::read(&status).unwrap().len(), content.len() / 2, "the next start finds the same");
        if answers {
            let [shim] = host.shims()[..] else { panic!("one shim") };
            kill(Pid::from_raw(shim), Signal::SIGCONT).unwrap();
            eventually("the shim answers", || host.log().contains("the pod's shim answers").then_some(()))
                .await;
            assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning);
            assert!(Path::new(&format!("/proc/{pid}/ns/pid")).exists());
        } else {
            end_connection_to_shim(&host);
            assert_eq!(cri.ended(&id).await.exit_code, 137);
            // Its parent is the stopped shim, which does not reap it.
            assert!(linux::process::is_killed(pid));
        }
        cri.remove_pod(&pod).await;
        host.assert_clean();
        host.kill();
    }
}

/// A runtime that is killed just after it has started the shim leaves such a record.
#[tokio::test]
async fn a_silent_shim_that_no_record_names_ends_with_its_incomplete_pod() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    host.kill();
    stop_shim(&host);
    let dir = host.path("root/sandboxes").join(&pod);
    let record = dir.join("sandbox.json");
    let mut content: serde_json::Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    (content["phase"], content["shim"]) = ("Creating".into(), serde_json::Value::Null);
    std::fs::write(&record, content.to_string()).unwrap();

    let _cri = host.start().await;
    eventually("the pod is undone", || (!dir.exists()).then_some(())).await;
    host.assert_clean();
}
