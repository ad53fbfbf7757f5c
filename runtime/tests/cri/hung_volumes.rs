//! Volumes whose FUSE daemon answers nothing, not even INIT.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};
use proto::cri::{ContainerConfig, Mount};
use tests::cri::{Host, IMAGE, container, eventually};

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
