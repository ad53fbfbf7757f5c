//! kill -9 of the runtime, of a shim, in the middle: adopted or undone.

use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proto::cri::{
    ContainerState, ListContainersRequest, PodSandboxState, PodSandboxStatusRequest, StopContainerRequest,
};
use tests::binaries;
use tests::cri::{Cri, Host, IMAGE, container, eventually};

use super::containers::container_pid;

/// A runtime with a pod whose container runs until it is ended: both ids.
async fn start_container(host: &mut Host) -> (Cri, String, String) {
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    (cri, pod, id)
}

/// Waits until the runtime has released a pod whose record is damaged. It serves before that if the release lasts
/// longer than 3 s.
pub(crate) async fn released(host: &Host, pod: &str) {
    let dir = host.path("root/sandboxes").join(pod);
    eventually("the sandbox is removed", || (!dir.exists()).then_some(())).await;
    groups_gone(host).await;
}

/// Waits until the runtime has removed its control groups, which it does last.
pub(crate) async fn groups_gone(host: &Host) {
    let groups = linux::cgroup::Hierarchies::detect().unwrap();
    let own = host.cgroup.trim_start_matches('/').to_owned();
    eventually("the groups are gone", || {
        (!groups.names_below(Path::new("/")).unwrap().contains(&own)).then_some(())
    })
    .await;
}

pub(crate) fn container_dir(host: &Host, pod: &str, id: &str) -> PathBuf {
    host.path("root/sandboxes").join(pod).join("containers").join(id)
}

/// `Some` once the shim has saved how the container ended.
fn recorded_exit(container_dir: &Path) -> Option<()> {
    let record = std::fs::read(container_dir.join("status.json")).ok()?;
    let record: serde_json::Value = serde_json::from_slice(&record).ok()?;
    record["exit"].is_object().then_some(())
}

#[tokio::test]
async fn a_new_runtime_adopts_what_runs_learns_what_ended_and_the_log_has_no_gap() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let counting = cri.create(&pod, container("count", &["/demo-app", "count"])).await.unwrap();
    let ending = cri.create(&pod, container("short", &["/demo-app", "sleep", "1"])).await.unwrap();
    let waiting = cri.create(&pod, container("later", &["/demo-app", "print", "later"])).await.unwrap();
    cri.start(&counting).await.unwrap();
    cri.start(&ending).await.unwrap();
    host.kill();
    let lines = host.container_log("count").len();
    // With nobody there.
    eventually("more lines", || (host.container_log("count").len() > lines + 50).then_some(())).await;
    let dir = container_dir(&host, &pod, &ending);
    eventually("the end of the short one is on record", || recorded_exit(&dir)).await;

    let mut cri = host.start().await;
    let listed = cri.runtime.list_containers(ListContainersRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.containers.len(), 3);
    assert_eq!(cri.status(&counting).await.state(), ContainerState::ContainerRunning);
    let ended = cri.status(&ending).await;
    assert_eq!((ended.state(), ended.exit_code), (ContainerState::ContainerExited, 0));
    assert_eq!(cri.status(&waiting).await.state(), ContainerState::ContainerCreated);
    cri.start(&waiting).await.unwrap();
    assert_eq!(cri.ended(&waiting).await.exit_code, 0);
    cri.runtime
        .stop_container(StopContainerRequest { container_id: counting.clone(), timeout: 0 })
        .await
        .unwrap();
    for (index, line) in host.container_log("count").iter().enumerate() {
        assert_eq!(*line, format!("stdout F {}", index + 1));
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn when_a_shim_is_killed_its_pod_ends_and_leaves_nothing() {
    let mut host = Host::new();
    let (mut cri, pod, id) = start_container(&mut host).await;
    let [shim] = host.shims()[..] else { panic!("one shim") };
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(shim).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let status = cri.ended(&id).await;
    assert_eq!(
        (status.exit_code, status.message.as_str()),
        (137, "the pod's shim ended, and its containers with it")
    );
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let found = cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    assert_eq!(found.state(), PodSandboxState::SandboxNotready);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// What a reboot leaves: records on disk, and nothing that they speak of.
#[tokio::test]
async fn after_a_reboot_pods_are_not_ready_and_can_be_removed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    host.kill();
    let [shim] = host.shims()[..] else { panic!("one shim") };
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(shim).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    let dir = host.path("root/sandboxes").join(&pod);
    for mounts in ["root/shm", "root/netns"].map(|dir| host.path(dir)) {
        for mount in [mounts.join(&pod), mounts] {
            linux::mount::unmount(&mount, linux::mount::UnmountMode::Plain).unwrap();
        }
    }
    let record = std::fs::read_to_string(dir.join("sandbox.json")).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    std::fs::write(dir.join("sandbox.json"), record.replace(boot_id.trim(), "an-earlier-boot")).unwrap();

    let mut cri = host.start().await;
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: false };
    let found = cri.runtime.pod_sandbox_status(request).await.unwrap().into_inner().status.unwrap();
    assert_eq!(found.state(), PodSandboxState::SandboxNotready);
    let status = cri.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_second_runtime_on_the_same_directory_is_refused() {
    let mut host = Host::new();
    let _first = host.start().await;
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_hawser-runtime"))
        .arg("--root-dir")
        .arg(host.path("root"))
        .arg("--socket")
        .arg(host.path("second.sock"))
        .output()
        .unwrap();
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains("is in use by another runtime"), "{text}");
}

/// What a runtime that does not start has written to stderr.
async fn failure_to_start(host: &mut Host) -> String {
    let log = host.path("failure.log");
    let mut command = std::process::Command::new(binaries::under_test("hawser-runtime").unwrap());
    command.arg("--root-dir").arg(host.path("root")).arg("--socket").arg(host.path("cri.sock"));
    command.arg("--images").arg(host.path("images")).stderr(std::fs::File::create(&log).unwrap());
    let runtime = host.runtime.insert(command.spawn().unwrap());
    let status = eventually("the runtime ends", || runtime.try_wait().unwrap()).await;
    host.runtime = None;
    assert!(!status.success());
    std::fs::read_to_string(&log).unwrap()
}

/// A file that can only be written stands for a lack of descriptors or memory: the read fails, and the record
/// is intact.
#[tokio::test]
async fn a_record_that_cannot_be_read_now_keeps_the_runtime_from_starting_and_its_pod_runs_on() {
    let mut host = Host::new();
    let (_, pod, id) = start_container(&mut host).await;
    host.kill();
    let pod_dir = host.path("root/sandboxes").join(&pod);
    for record in [pod_dir.join("sandbox.json"), container_dir(&host, &pod, &id).join("container.json")] {
        let aside = record.with_extension("aside");
        std::fs::rename(&record, &aside).unwrap();
        std::os::unix::fs::symlink("/proc/self/clear_refs", &record).unwrap();
        let text = failure_to_start(&mut host).await;
        let wanted = format!("adopt pod sandbox {pod}: read {}: Invalid argument", record.display());
        assert!(text.contains(&wanted), "{text}");
        std::fs::rename(&aside, &record).unwrap();
    }

    let mut cri = host.start().await;
    assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn what_a_damaged_record_describes_is_ended_and_the_rest_of_its_pod_runs_on() {
    let mut host = Host::new();
    let (mut cri, pod, id) = start_container(&mut host).await;
    let other = cri.create(&pod, container("other", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&other).await.unwrap();
    let [pid, pid_of_other] = [&id, &other].map(|id| container_pid(&host, &pod, id).unwrap());
    let runs = |pid: i32| Path::new(&format!("/proc/{pid}/ns/pid")).exists();
    host.kill();
    std::fs::write(container_dir(&host, &pod, &id).join("container.json"), "").unwrap();
    let mut cri = host.start().await;
    let listed = cri.runtime.list_containers(ListContainersRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.containers.iter().map(|container| &container.id).collect::<Vec<_>>(), [&other]);
    assert!(!runs(pid) && runs(pid_of_other));

    host.kill();
    std::fs::write(host.path("root/sandboxes").join(&pod).join("sandbox.json"), "").unwrap();
    let _cri = host.start().await;
    assert!(!runs(pid_of_other));
    released(&host, &pod).await;
    host.assert_clean();
}

/// A directory and a loop of symbolic links, as of a damaged file system or a mistake in a restore: no later
/// read succeeds either.
#[tokio::test]
async fn what_is_no_file_in_the_place_of_a_record_is_a_damaged_record() {
    let mut host = Host::new();
    let (mut cri, pod, id) = start_container(&mut host).await;
    let other = cri.create(&pod, container("other", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&other).await.unwrap();
    let third = cri.create(&pod, container("third", &["/demo-app", "print", "third"])).await.unwrap();
    cri.start(&third).await.unwrap();
    let record = |id: &str, name: &str| container_dir(&host, &pod, id).join(name);
    let [status, containers, sandbox] = [
        record(&third, "status.json"),
        record(&id, "container.json"),
        host.path("root/sandboxes").join(&pod).join("sandbox.json"),
    ];
    eventually("the end of the third one is on record", || recorded_exit(status.parent().unwrap())).await;
    host.kill();
    // An earlier one of that name.
    std::fs::create_dir_all(host.path("root/unreadable")).unwrap();
    std::fs::write(host.path(&format!("root/unreadable/container-{id}.json")), "").unwrap();
    std::fs::remove_file(&containers).unwrap();
    std::fs::create_dir_all(containers.join("below")).unwrap();
    std::fs::remove_file(&status).unwrap();
    std::os::unix::fs::symlink(&status, &status).unwrap();
    let mut cri = host.start().await;
    assert!(host.path(&format!("root/unreadable/container-{id}.json/below")).is_dir());
    assert_eq!(cri.status(&other).await.state(), ContainerState::ContainerRunning);
    // The shim knows it.
    assert_eq!(cri.status(&third).await.exit_code, 0);
    let pid = container_pid(&host, &pod, &other).unwrap();

    host.kill();
    std::fs::remove_file(&sandbox).unwrap();
    std::os::unix::fs::symlink(&sandbox, &sandbox).unwrap();
    let _cri = host.start().await;
    assert!(!Path::new(&format!("/proc/{pid}/ns/pid")).exists());
    released(&host, &pod).await;
    assert!(host.path(&format!("root/unreadable/sandbox-{pod}.json")).is_symlink());
    host.assert_clean();
}

/// An immutable file stands for the many that take the removal long.
#[tokio::test]
async fn what_a_killed_removal_has_left_delays_no_start() {
    use rustix::fs::IFlags;
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    host.kill();
    let containers = host.path("root/sandboxes").join(&pod).join("containers");
    let places = [containers.join("0"), host.path("root/sandboxes/0"), host.path("root/images/layers/.0")];
    let mut files = Vec::new();
    for place in &places {
        std::fs::create_dir(place).unwrap();
        let file = std::fs::File::create(place.join("file")).unwrap();
        rustix::fs::ioctl_setflags(&file, IFlags::IMMUTABLE).unwrap();
        files.push(file);
    }

    let mut cri = host.start().await;
    assert_eq!(cri.status(&id).await.state(), ContainerState::ContainerRunning);
    assert!(places.iter().all(|place| !place.exists()), "they are out of the way");
    let trash = host.path("root/trash");
    let trash = || std::fs::read_dir(&trash).unwrap().count();
    assert_eq!(trash(), places.len());
    for file in &files {
        rustix::fs::ioctl_setflags(file, IFlags::empty()).unwrap();
    }
    host.kill();
    let mut cri = host.start().await;
    eventually("the trash is empty", || (trash() == 0).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// A shim that wakes up after the runtime has given the start up, for example behind a slow disk.
#[tokio::test]
async fn a_start_that_is_given_up_is_not_done_later() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("late", &["/demo-app", "print", "late"])).await.unwrap();
    let shim = Pid::from_raw(host.shims()[0]);
    kill(shim, Signal::SIGSTOP).unwrap();
    let started = cri.start(&id).await;
    kill(shim, Signal::SIGCONT).unwrap();
    started.unwrap_err();
    // It has done every call before this one.
    let next = cri.create(&pod, container("next", &["/demo-app", "print", "next"])).await.unwrap();
    cri.start(&next).await.unwrap();
    let status = cri.status(&id).await;
    assert_eq!((status.state(), status.reason.as_str()), (ContainerState::ContainerExited, "StartError"));
    assert_eq!(status.started_at, 0);
    assert!(host.container_log("late").is_empty());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The shim reports an exit once: before the runtime knows the container.
#[tokio::test]
async fn a_program_that_ends_while_the_runtime_reads_its_container_has_ended() {
    let mut host = Host::new();
    let (_, pod, id) = start_container(&mut host).await;
    let pid = container_pid(&host, &pod, &id).unwrap();
    host.kill();
    let dir = container_dir(&host, &pod, &id);
    // The runtime waits in its middle for the content of this one.
    let record = dir.join("resources.json");
    nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let ending = async {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let open = || {
            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            std::fs::OpenOptions::new().write(true).custom_flags(nonblocking).open(&record).ok()
        };
        let mut content = eventually("the runtime reads the record", open).await;
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        eventually("the shim saves the exit", || recorded_exit(&dir)).await;
        content.write_all(br#"{"resources":""}"#).unwrap();
    };
    let (mut cri, ()) = tokio::join!(host.start(), ending);
    std::fs::remove_file(&record).unwrap();
    let status = cri.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
