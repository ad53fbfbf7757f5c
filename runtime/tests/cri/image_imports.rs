//! Imports at the same time: of different images side by side, of one layer
//! once; imports that a kill ends, and those on a machine that lacks control groups.

use std::path::{Path, PathBuf};

use linux::cgroup::Hierarchies;
use linux::mount::{MountFlags, UnmountMode};
use rustix::process::{Pid, Signal, kill_process};
use tests::cri::{Cri, Host, IMAGE, eventually, image_spec, layer, write_layout};

use crate::image_limits::assert_nothing_is_left;

/// Pulls `image` in the background.
pub(crate) fn pull(cri: &Cri, image: &'static str) -> tokio::task::JoinHandle<Result<String, tonic::Status>> {
    let mut images = cri.images.clone();
    let image = Some(image_spec(image));
    let request = proto::cri::PullImageRequest { image, ..Default::default() };
    tokio::spawn(async move { images.pull_image(request).await.map(|answer| answer.into_inner().image_ref) })
}

/// The processes that unpack layers for `host`. Other tests unpack the same layer.
fn unpackers(host: &Host) -> Vec<Pid> {
    let directory = host.dir.path().to_str().unwrap();
    let is_one = |pid: &i32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments).into_owned();
        arguments.starts_with("hawser-unpack\0") && arguments.contains(directory)
    };
    let names = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let pids = names.filter_map(|name| name.to_str()?.parse().ok()).filter(is_one);
    pids.filter_map(Pid::from_raw).collect()
}

/// Stops the process that unpacks `blob`, once it has opened it.
async fn stop_unpacker(host: &Host, blob: &Path) -> Pid {
    eventually("the unpacker reads the blob", || {
        let pid = *unpackers(host).first()?;
        kill_process(pid, Signal::STOP).ok()?;
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).ok()?;
        let mut files = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        if files.any(|file| file == blob) {
            return Some(pid);
        }
        kill_process(pid, Signal::CONT).ok()?;
        None
    })
    .await
}

fn large_layer() -> Vec<u8> {
    layer(&[("zeros", 0o644, &vec![0; 32 << 20])])
}

/// A runtime whose import of image `slow:1` stands still, with its process and its answer to come.
async fn stopped_import(
    host: &mut Host,
) -> (Cri, Pid, tokio::task::JoinHandle<Result<String, tonic::Status>>) {
    let blob = write_layout(&host.path("images/slow"), "slow:1", &large_layer());
    let cri = host.start().await;
    let slow = pull(&cri, "slow:1");
    let unpacker = stop_unpacker(host, &blob).await;
    (cri, unpacker, slow)
}

#[tokio::test]
async fn an_image_is_imported_while_the_import_of_another_hangs() {
    let mut host = Host::new();
    write_layout(&host.path("images/quick"), "quick:1", &layer(&[("file", 0o644, b"x")]));
    let (mut cri, unpacker, slow) = stopped_import(&mut host).await;
    cri.pull("quick:1").await.unwrap();
    assert!(!slow.is_finished());
    kill_process(unpacker, Signal::CONT).unwrap();
    slow.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_layer_that_two_imports_need_is_unpacked_once() {
    let mut host = Host::new();
    let blob = write_layout(&host.path("images/first"), "first:1", &large_layer());
    let cri = host.start().await;
    let first = pull(&cri, "first:1");
    let unpacker = stop_unpacker(&host, &blob).await;
    // Another image of the same layer.
    write_layout(&host.path("images/second"), "second:1", &large_layer());
    let second = pull(&cri, "second:1");
    // The second call has arrived when a later one is answered; it starts no process.
    cri.images.clone().list_images(proto::cri::ListImagesRequest { filter: None }).await.unwrap();
    assert_eq!(unpackers(&host), [unpacker]);
    assert!(!second.is_finished());
    // One that is unpacked again would not be.
    let layers = host.path("root/images/layers");
    let unpacked = || std::fs::read_dir(&layers).unwrap().count();
    assert_eq!(unpacked(), 1, "the one that is under way");
    kill_process(unpacker, Signal::CONT).unwrap();
    let (first, second) = (first.await.unwrap().unwrap(), second.await.unwrap().unwrap());
    assert_eq!(first, second, "the same configuration");
}

#[tokio::test]
async fn what_a_killed_runtime_has_half_unpacked_is_removed_by_the_next() {
    let mut host = Host::new();
    let (_cri, _stopped, slow) = stopped_import(&mut host).await;
    let killed = host.runtime.as_ref().unwrap().id();
    host.kill();
    slow.await.unwrap().unwrap_err();
    // As after a kill between the hierarchies, in which a group is made one after the other.
    let groups = Hierarchies::detect().unwrap();
    let name = format!("/hawser-unpack-{killed}-partial");
    std::fs::create_dir(groups.dir("memory", Path::new(&name)).unwrap()).unwrap();
    let mut cri = host.start().await;
    assert_nothing_is_left(&host, killed);
    assert_eq!(unpackers(&host), []);
    cri.pull("slow:1").await.unwrap();
}

/// The resource limits hold the unpacker then.
#[tokio::test]
async fn an_image_is_imported_where_no_cgroup_can_be_made() {
    let mut host = Host::new();
    for mount in cgroup_mounts() {
        linux::mount::remount_bind(&mount, MountFlags { read_only: true, ..MountFlags::default() }).unwrap();
    }
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    assert!(host.log().contains("unpacked without a control group"), "{}", host.log());
}

#[tokio::test]
async fn an_image_is_imported_where_no_cgroups_are_mounted() {
    let mut host = Host::new();
    for mount in cgroup_mounts() {
        linux::mount::unmount(&mount, UnmountMode::Detach).unwrap();
    }
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    assert!(host.log().contains("unpacked without a limit of its control group"), "{}", host.log());
}

/// In this test's mount namespace.
fn cgroup_mounts() -> Vec<PathBuf> {
    let mounts = linux::mountinfo::read().unwrap().into_iter();
    mounts.filter(|mount| mount.fs_type.starts_with("cgroup")).map(|mount| mount.mount_point).collect()
}
