//! Volumes whose FUSE daemon answers nothing, not even INIT.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};
use proto::cri::{ContainerConfig, Mount};

use crate::kit::{Host, IMAGE, container};

const DEADLINE: Duration = Duration::from_secs(30);

/// Root code that asked it would wait, and with it calls of other pods and the runtime's end.
#[tokio::test]
async fn a_container_starts_and_ends_though_the_daemon_of_its_volume_answers_nothing() {
    let mut host = Host::new();
    let volume = host.path("volume");
    std::fs::create_dir(&volume).unwrap();
    let connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", connection.as_raw_fd());
    mount_fs("fuse", "unserved", &volume, MountFlags::default(), &options).unwrap();

    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mount = Mount {
        container_path: "/data".into(),
        host_path: volume.display().to_string(),
        ..Default::default()
    };
    let config =
        ContainerConfig { mounts: vec![mount], ..container("user", &["/demo-app", "print", "works"]) };
    let ended = tokio::time::timeout(DEADLINE, cri.run(&pod, config)).await;
    if ended.is_err() {
        // Its end answers all requests with an error, so that the runtime can be ended.
        drop(connection);
        panic!("the container has not ended within {DEADLINE:?}");
    }
    assert_eq!(ended.unwrap().exit_code, 0);
    cri.remove_pod(&pod).await;
    unmount(&volume, UnmountMode::Detach).unwrap();
    drop(connection);
    host.assert_clean();
}

/// execve(2) waits for the program's file; the runtime gives the start up after a minute.
#[tokio::test]
async fn a_start_that_is_given_up_leaves_no_process() {
    let mut host = Host::new();
    let volume = host.path("volume");
    std::fs::create_dir(&volume).unwrap();
    let connection = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", connection.as_raw_fd());
    mount_fs("fuse", "unserved", &volume, MountFlags::default(), &options).unwrap();

    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mount = Mount {
        container_path: "/data".into(),
        host_path: volume.display().to_string(),
        ..Default::default()
    };
    let config = ContainerConfig { mounts: vec![mount], ..container("user", &["/data/program"]) };
    let id = cri.create(&pod, config).await.unwrap();
    let started = tokio::time::timeout(3 * DEADLINE, cri.start(&id)).await;
    let problem = started.map(|started| started.unwrap_err().to_string());
    let shim = host.shims()[0];
    let children = format!("/proc/{shim}/task/{shim}/children");
    let left = std::fs::read_to_string(children).unwrap();
    if problem.is_err() || !left.is_empty() {
        drop(connection);
        panic!("{problem:?}; processes {left:?}");
    }
    cri.remove_pod(&pod).await;
    unmount(&volume, UnmountMode::Detach).unwrap();
    drop(connection);
    host.assert_clean();
}
