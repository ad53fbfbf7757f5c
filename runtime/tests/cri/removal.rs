//! The removal of containers, beside that of their layers.

use linux::mount::{MountFlags, UnmountMode, mount_fs, unmount};
use proto::cri::RemoveContainerRequest;
use tests::cri::{Host, IMAGE, container, eventually};

use super::restart::container_dir;

/// A mount keeps the layer from its removal, as many files do for a time.
#[tokio::test]
async fn a_container_is_removed_before_its_layer() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app"])).await.unwrap();
    let dir = container_dir(&host, &pod, &id);
    let busy = dir.join("upper/busy");
    std::fs::create_dir(&busy).unwrap();
    mount_fs("tmpfs", "busy", &busy, MountFlags::default(), "size=4k").unwrap();
    let request = RemoveContainerRequest { container_id: id.clone() };
    let removed = cri.runtime.remove_container(request).await;
    let left = std::fs::read_dir(host.path("root/trash")).unwrap();
    let mut places: Vec<_> = left.map(|entry| entry.unwrap().path().join("upper/busy")).collect();
    places.push(busy);
    places.retain(|place| place.exists());
    for place in &places {
        unmount(place, UnmountMode::Detach).unwrap();
    }
    removed.unwrap();
    assert!(!dir.exists(), "{}", dir.display());
    let request = RemoveContainerRequest { container_id: id };
    cri.runtime.remove_container(request).await.expect("it is done already");
    cri.remove_pod(&pod).await;
    host.assert_clean();

    // What a runtime has left, the next one removes.
    host.kill();
    let _cri = host.start().await;
    eventually("an empty trash", || {
        std::fs::read_dir(host.path("root/trash")).unwrap().next().is_none().then_some(())
    })
    .await;
}
