//! Volumes whose FUSE daemon answers nothing, not even INIT, or nothing but INIT.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};
use proto::cri::{ContainerConfig, ContainerState, ListContainersRequest, Mount};
use tests::cri::{Cri, Host, IMAGE, container, eventually};

use super::containers::container_pid;
use super::restart::container_dir;

const DEADLINE: Duration = Duration::from_secs(30);

/// A mounted volume whose requests are answered only by the end of the connection, with errors.
struct Unserved {
    path: PathBuf,
    connection: File,
}

impl Unserved {
    fn mount(host: &Host) -> Self {
        let path = host.path("volume");
        std::fs::create_dir(&path).unwrap();
        let connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", connection.as_raw_fd());
        mount_fs("fuse", "unserved", &path, MountFlags::default(), &options).unwrap();
        Self { path, connection }
    }

    /// A container that has the volume at /data.
    fn user(&self, command: &[&str]) -> ContainerConfig {
        let mount = Mount {
            container_path: "/data".into(),
            host_path: self.path.display().to_string(),
            ..Default::default()
        };
        ContainerConfig { mounts: vec![mount], ..container("user", command) }
    }

    /// Answers INIT (linux/fuse.h: fuse_out_header, fuse_init_out).
    fn answer_init(&self) {
        const FUSE_INIT: u32 = 26;
        let mut request = vec![0; 128 << 10];
        let length = (&self.connection).read(&mut request).unwrap();
        assert!(length >= 40, "{length}");
        assert_eq!(request[4..8], FUSE_INIT.to_ne_bytes());
        let mut answer = Vec::new();
        answer.extend(80_u32.to_ne_bytes());
        answer.extend(0_u32.to_ne_bytes());
        answer.extend(&request[8..16]);
        answer.extend([7_u32, 31].into_iter().flat_map(u32::to_ne_bytes));
        answer.resize(80, 0);
        assert_eq!((&self.connection).write(&answer).unwrap(), 80);
        rustix::fs::fcntl_setfl(&self.connection, rustix::fs::OFlags::NONBLOCK).unwrap();
    }

    /// Reads a request and does not answer it. From then on, SIGKILL does not end the process that waits for
    /// the answer (request_wait_answer() in fs/fuse/dev.c).
    async fn take_request(&self) {
        let mut request = vec![0; 128 << 10];
        eventually("a request", || (&self.connection).read(&mut request).ok()).await;
    }

    fn unmount(self) {
        unmount(&self.path, UnmountMode::Detach).unwrap();
        drop(self.connection);
    }
}

/// Root code that asked it would wait, and with it calls of other pods and the runtime's end.
#[tokio::test]
async fn a_container_starts_and_ends_though_the_daemon_of_its_volume_answers_nothing() {
    let mut host = Host::new();
    let volume = Unserved::mount(&host);
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = volume.user(&["/demo-app", "print", "works"]);
    let ended = tokio::time::timeout(DEADLINE, cri.run(&pod, config)).await;
    if ended.is_err() {
        // Its end answers all requests with an error, so that the runtime can be ended.
        drop(volume.connection);
        panic!("the container has not ended within {DEADLINE:?}");
    }
    assert_eq!(ended.unwrap().exit_code, 0);
    cri.remove_pod(&pod).await;
    volume.unmount();
    host.assert_clean();
}

/// execve(2) waits for the program's file; the runtime gives the start up after a minute.
#[tokio::test]
async fn a_start_that_is_given_up_leaves_no_process() {
    let mut host = Host::new();
    let volume = Unserved::mount(&host);
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, volume.user(&["/data/program"])).await.unwrap();
    let Ok(started) = tokio::time::timeout(3 * DEADLINE, cri.start(&id)).await else {
        drop(volume.connection);
        panic!("the start was not given up");
    };
    started.unwrap_err();
    let shim = host.shims()[0];
    let children = format!("/proc/{shim}/task/{shim}/children");
    // The shim reaps it after the runtime has seen its end.
    eventually("no process is left", || std::fs::read_to_string(&children).unwrap().is_empty().then_some(()))
        .await;
    cri.remove_pod(&pod).await;
    volume.unmount();
    host.assert_clean();
}

/// Two containers in the order in which a runtime that starts finds them: the first one uses the volume.
async fn create_in_order(cri: &mut Cri, pod: &str, volume: &Unserved) -> (String, String) {
    for attempt in 0.. {
        let mut user = volume.user(&["/demo-app", "cat", "/data/file"]);
        user.metadata.as_mut().unwrap().attempt = attempt;
        let mut other = container("other", &["/demo-app", "sleep", "forever"]);
        other.metadata.as_mut().unwrap().attempt = attempt;
        let ids = (cri.create(pod, user).await.unwrap(), cri.create(pod, other).await.unwrap());
        if ids.0 < ids.1 {
            return ids;
        }
    }
    unreachable!("ids are random")
}

/// A start that was given up may leave such a container.
#[tokio::test]
async fn a_container_that_cannot_be_killed_hides_no_other_of_its_pod_from_a_runtime_that_starts() {
    let mut host = Host::new();
    let volume = Unserved::mount(&host);
    volume.answer_init();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let (stuck, other) = create_in_order(&mut cri, &pod, &volume).await;
    cri.start(&stuck).await.unwrap();
    cri.start(&other).await.unwrap();
    volume.take_request().await;
    let pid = container_pid(&host, &pod, &other).unwrap();
    host.kill();
    let record = container_dir(&host, &pod, &stuck).join("container.json");
    let mut content: serde_json::Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    content["ended"] = serde_json::json!({
        "started_at": 0, "finished_at": 1, "code": 128, "reason": "StartError", "message": "no answer"
    });
    std::fs::write(&record, content.to_string()).unwrap();

    let mut cri = host.start().await;
    let listed = cri.runtime.list_containers(ListContainersRequest::default()).await.unwrap().into_inner();
    let listed: Vec<String> = listed.containers.into_iter().map(|container| container.id).collect();
    assert!(listed.contains(&stuck) && listed.contains(&other), "{listed:?}");
    assert_eq!(cri.status(&other).await.state(), ContainerState::ContainerRunning);
    assert_eq!(container_pid(&host, &pod, &other), Some(pid));
    assert!(host.log().contains("kill the processes of a lost container"), "it cannot be killed");
    volume.unmount();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
