//! Devices of the host in containers.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use proto::cri::ContainerConfig;
use tests::cri::{Host, IMAGE, container};

use super::containers::container_pid;

#[tokio::test]
async fn a_device_has_the_owner_and_the_mode_that_it_has_on_the_host() {
    let mut host = Host::new();
    let node = host.path("node");
    let null = rustix::fs::makedev(1, 3);
    rustix::fs::mknodat(rustix::fs::CWD, &node, rustix::fs::FileType::CharacterDevice, 0.into(), null)
        .unwrap();
    std::os::unix::fs::chown(&node, Some(12), Some(34)).unwrap();
    std::fs::set_permissions(&node, std::fs::Permissions::from_mode(0o640)).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let device = proto::cri::Device {
        host_path: node.display().to_string(),
        container_path: "/dev/dri/card".to_owned(),
        permissions: "rw".to_owned(),
    };
    let config =
        ContainerConfig { devices: vec![device], ..container("c", &["/demo-app", "sleep", "forever"]) };
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    let pid = container_pid(&host, &pod, &id).unwrap();
    let found = std::fs::symlink_metadata(format!("/proc/{pid}/root/dev/dri/card")).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777, found.rdev()), (12, 34, 0o640, null));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// Such as /dev/snd or /dev/dri.
#[tokio::test]
async fn a_directory_stands_for_the_devices_in_it() {
    let mut host = Host::new();
    let dir = host.path("devices");
    std::fs::create_dir_all(dir.join("by-path")).unwrap();
    std::fs::create_dir(dir.join("pts")).unwrap();
    for (name, minor) in [("null", 3), ("by-path/zero", 5), ("pts/0", 7), ("console", 7)] {
        let kind = rustix::fs::FileType::CharacterDevice;
        let number = rustix::fs::makedev(1, minor);
        rustix::fs::mknodat(rustix::fs::CWD, dir.join(name), kind, 0o666.into(), number).unwrap();
    }
    std::fs::write(dir.join("file"), "no device").unwrap();
    std::os::unix::fs::symlink("missing", dir.join("dangling")).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.join("not-in-it")).unwrap();
    std::os::unix::fs::symlink("..", dir.join("by-path/above")).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let device = proto::cri::Device {
        host_path: dir.display().to_string(),
        container_path: "/dev/all".to_owned(),
        permissions: "r".to_owned(),
    };
    let config =
        ContainerConfig { devices: vec![device], ..container("c", &["/demo-app", "sleep", "forever"]) };
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    let all = format!("/proc/{}/root/dev/all", container_pid(&host, &pod, &id).unwrap());
    let names = |dir: &str| {
        let entries = std::fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(
        (names(&all), names(&format!("{all}/by-path"))),
        (vec!["by-path".into(), "null".into()], vec!["zero".into()])
    );
    let found = std::fs::symlink_metadata(format!("{all}/by-path/zero")).unwrap();
    assert_eq!(found.rdev(), rustix::fs::makedev(1, 5));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
