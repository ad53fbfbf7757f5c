//! Mounts that cannot propagate are refused.

use std::path::Path;

use linux::mount::{UnmountMode, bind, make_shared, make_slave, unmount};
use proto::cri::{ContainerConfig, Mount, MountPropagation};
use tests::cri::{Cri, Host, IMAGE, container};
use tonic::{Code, Status};

const BIDIRECTIONAL: MountPropagation = MountPropagation::PropagationBidirectional;
const HOST_TO_CONTAINER: MountPropagation = MountPropagation::PropagationHostToContainer;

async fn create(cri: &mut Cri, pod: &str, source: &Path, wanted: MountPropagation) -> Result<(), Status> {
    let mount = Mount {
        container_path: "/data".into(),
        host_path: source.display().to_string(),
        propagation: wanted.into(),
        ..Default::default()
    };
    let config = ContainerConfig { mounts: vec![mount], ..container("c", &["/demo-app"]) };
    let container_id = cri.create(pod, config).await?;
    let request = proto::cri::RemoveContainerRequest { container_id };
    cri.runtime.remove_container(request).await.map(drop)
}

#[tokio::test]
async fn propagation_from_a_private_mount_is_refused_with_the_command_that_shares_it() {
    let mut host = Host::new();
    let source = host.path("source");
    std::fs::create_dir_all(source.join("below")).unwrap();
    let mount_point = linux::mountinfo::point_above(&source).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let missing = source.join("missing/part");
    for wanted in [HOST_TO_CONTAINER, BIDIRECTIONAL] {
        for (path, existing) in [(&source, &source), (&missing, &source)] {
            let error = create(&mut cri, &pod, path, wanted).await.unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
            assert_eq!(
                error.message(),
                format!(
                    "mounts \"/data\" propagation: {} has no effect, since the mount of {} is not shared: \
                     run mount --make-rshared {}",
                    wanted.as_str_name(),
                    existing.display(),
                    mount_point.display()
                )
            );
        }
    }
    assert!(!source.join("missing").exists());
    create(&mut cri, &pod, &source, MountPropagation::PropagationPrivate).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn propagation_needs_a_mount_that_sends_or_receives() {
    let mut host = Host::new();
    let (source, slave) = (host.path("source"), host.path("slave"));
    std::fs::create_dir_all(source.join("below")).unwrap();
    std::fs::create_dir(&slave).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let below = source.join("below");
    bind(&below, &below).unwrap();
    make_shared(&below).unwrap();
    bind(&below, &slave).unwrap();
    make_slave(&slave).unwrap();
    for (path, receives, sends) in [(&below, true, true), (&slave, true, false), (&source, true, false)] {
        for (wanted, works) in [(HOST_TO_CONTAINER, receives), (BIDIRECTIONAL, sends)] {
            let created = create(&mut cri, &pod, path, wanted).await.map_err(|error| error.code());
            let expected = if works { Ok(()) } else { Err(Code::FailedPrecondition) };
            assert_eq!(created, expected, "{} {wanted:?}", path.display());
        }
    }
    cri.remove_pod(&pod).await;
    for mount in [&slave, &below] {
        unmount(mount, UnmountMode::Plain).unwrap();
    }
    host.assert_clean();
}
