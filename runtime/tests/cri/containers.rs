//! Containers: output, end, privileges, limits, refusals.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proto::cri::security_profile::ProfileType;
use proto::cri::{
    Capability, ContainerConfig, ContainerState, Int64Value, LinuxContainerResources,
    LinuxContainerSecurityContext, Mount, MountPropagation, ReopenContainerLogRequest, SecurityProfile,
    StopContainerRequest,
};
use tests::cri::{Host, IMAGE, container, eventually, image_spec};
use tonic::Code;

/// The same container with a changed security context.
pub(crate) fn with_context(
    mut config: ContainerConfig,
    change: impl FnOnce(&mut LinuxContainerSecurityContext),
) -> ContainerConfig {
    change(config.linux.as_mut().unwrap().security_context.as_mut().unwrap());
    config
}

/// Field of /proc/self/status as the container printed it.
pub(crate) fn field(log: &[String], name: &str) -> String {
    let prefix = format!("stdout F {name}:\t");
    log.iter()
        .find_map(|l| l.strip_prefix(&prefix))
        .unwrap_or_else(|| panic!("no {name} in {log:?}"))
        .to_owned()
}

#[tokio::test]
async fn output_and_exit_code_are_kept() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let status = cri.run(&pod, container("hello", &["/demo-app", "print", "good day"])).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 0));
    assert_eq!(status.reason, "Completed");
    assert!(status.started_at > 0 && status.finished_at >= status.started_at);
    assert_eq!(host.container_log("hello"), ["stdout F good day"]);

    let status = cri.run(&pod, container("seven", &["/demo-app", "exit", "7"])).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (7, "Error"));

    let from_image = cri.run(&pod, container("default", &[])).await;
    assert_eq!(from_image.exit_code, 0);
    assert_eq!(host.container_log("default"), ["stdout F from the image"]);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_keeps_no_descriptor_of_containers_that_have_ended() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let shim = host.shims()[0];
    let descriptors = || std::fs::read_dir(format!("/proc/{shim}/fd")).unwrap().count();
    cri.run(&pod, container("c0", &["/demo-app", "print", "x"])).await;
    let before = descriptors();
    for n in 1..=5 {
        cri.run(&pod, container(&format!("c{n}"), &["/demo-app", "print", "x"])).await;
        assert_eq!(host.container_log(&format!("c{n}")), ["stdout F x"]);
    }
    eventually("its descriptors are closed", || (descriptors() <= before).then_some(())).await;

    // One that has given its end of the pipe to another container, as by SCM_RIGHTS.
    let id = cri.create(&pod, container("giver", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let children = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    let pid = children.split_whitespace().next().unwrap();
    let mut given = std::fs::File::options().write(true).open(format!("/proc/{pid}/fd/1")).unwrap();
    given.write_all(b"in time\n").unwrap();
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    cri.runtime.stop_container(stop).await.unwrap();
    assert_eq!(host.container_log("giver"), ["stdout F in time"]);
    assert_eq!(given.write_all(b"too late\n").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    eventually("its descriptors are closed", || (descriptors() <= before).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_program_with_a_name_of_megabytes_ends_no_other_container() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let other = cri.create(&pod, container("other", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&other).await.unwrap();
    let name = format!("/{}", "x".repeat(2 << 20));
    let id = cri.create(&pod, container("long", &[&name])).await.unwrap();
    let error = cri.start(&id).await.unwrap_err();
    assert!(error.message().len() < 8192 && error.message().contains("xxx"), "{}", error.message().len());
    assert_eq!(cri.status(&other).await.state(), ContainerState::ContainerRunning);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn stop_asks_first_and_does_not_wait_longer_than_needed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    // Its handler is in place a moment after execve; as process 1 it would not even see an earlier signal.
    let pid = eventually("the program's handler", || {
        let pid = container_pid(&host, &pod, &id)?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let blocked = status.lines().find_map(|l| l.strip_prefix("SigBlk:\t"))?;
        (u64::from_str_radix(blocked, 16).ok()? & (1 << 14) != 0).then_some(pid)
    })
    .await;
    let started = Instant::now();
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 30 };
    cri.runtime.stop_container(stop.clone()).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(25), "it ended on SIGTERM");
    assert_eq!(cri.status(&id).await.exit_code, 143);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    cri.runtime.stop_container(stop).await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The kernel drops a signal for the first process of a PID namespace if the process does not catch it.
#[tokio::test]
async fn a_program_that_catches_its_stop_signal_late_is_stopped_by_it() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "late", "1"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let begun = Instant::now();
    cri.runtime.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 60 }).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(45), "{:?}", begun.elapsed());
    assert_eq!(cri.status(&id).await.exit_code, 143);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn stop_kills_what_does_not_listen() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    // As process 1 `count` has no handler, so the kernel does not deliver SIGUSR1 to it.
    let mut deaf = container("c", &["/demo-app", "count"]);
    deaf.stop_signal = proto::cri::Signal::Sigusr1.into();
    let id = cri.create(&pod, deaf).await.unwrap();
    cri.start(&id).await.unwrap();
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 1 };
    cri.runtime.stop_container(stop).await.unwrap();
    assert_eq!(cri.status(&id).await.exit_code, 137);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// On cgroup v1 root in a user namespace can do this; a frozen process does not end on SIGKILL there.
#[tokio::test]
async fn stop_kills_what_freezes_itself_again_and_again() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let pid = eventually("the container's process", || container_pid(&host, &pod, &id)).await;
    let (group, file, value) = freezer_of(pid);
    let frozen = group.join("frozen");
    std::fs::create_dir(&frozen).unwrap();
    std::fs::write(frozen.join("cgroup.procs"), pid.to_string()).unwrap();
    let freeze = format!("while :; do echo {value} > {}; done", frozen.join(file).display());
    let mut freezing = std::process::Command::new("sh").args(["-c", &freeze]).spawn().unwrap();
    std::fs::write(group.join("cgroup.procs"), freezing.id().to_string()).unwrap();
    eventually("the container is frozen", || {
        (std::fs::read_to_string(frozen.join(file)).ok()?.trim() == value).then_some(())
    })
    .await;
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    let stopped = cri.runtime.stop_container(stop).await;
    freezing.kill().unwrap();
    freezing.wait().unwrap();
    stopped.unwrap();
    assert_eq!(cri.status(&id).await.exit_code, 137);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_missing_command_is_an_error_of_start_and_the_container_has_ended() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let native = std::env::var_os("HAWSER_TEST_OCI_RUNTIME").is_none();
    for (name, command, words) in [
        ("absolute", "/nope", "exec: \"/nope\": no such file or directory"),
        ("by-path", "nope", "exec: \"nope\": executable file not found in $PATH"),
        ("denied", "/plain-file", "exec: \"/plain-file\": permission denied"),
        ("magic", "/proc/self/exe", "exec: \"/proc/self/exe\": leads out of the container"),
    ] {
        // An OCI runtime has words and ways of its own (runc runs from a sealed copy of itself).
        if name == "magic" && !native {
            continue;
        }
        let id = cri.create(&pod, container(name, &[command])).await.unwrap();
        let error = cri.start(&id).await.unwrap_err();
        if native {
            assert_eq!(error.message(), format!("start container {name}: {words}"));
        }
        let status = cri.status(&id).await;
        assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 128));
        assert_eq!(status.reason, "StartError");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_missing_image_is_an_error_of_create_and_leaves_nothing() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mut config = container("c", &["/demo-app"]);
    config.image = Some(image_spec("unknown"));
    let error = cri.create(&pod, config).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::NotFound, "image \"unknown\" not found"));
    assert_eq!(
        std::fs::read_dir(host.path("root/sandboxes").join(&pod).join("containers")).unwrap().count(),
        0
    );
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn capabilities_are_exactly_those_asked_for() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let show = ["/demo-app", "status"];
    cri.run(&pod, container("default", &show)).await;
    let log = host.container_log("default");
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(field(&log, set), "00000000a80425fb", "{set}");
    }
    assert_eq!(
        (field(&log, "CapInh"), field(&log, "CapAmb")),
        ("0000000000000000".into(), "0000000000000000".into())
    );
    assert_eq!((field(&log, "NoNewPrivs"), field(&log, "Seccomp")), ("0".into(), "0".into()));

    // The set of a mount pod: CHOWN DAC_OVERRIDE FOWNER FSETID SETUID SETGID.
    let few = with_context(container("few", &show), |c| {
        c.capabilities = Some(Capability {
            drop_capabilities: vec!["ALL".into()],
            add_capabilities: ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID"]
                .map(String::from)
                .into(),
            ..Default::default()
        });
        c.no_new_privs = true;
        c.seccomp =
            Some(SecurityProfile { profile_type: ProfileType::RuntimeDefault.into(), ..Default::default() });
    });
    cri.run(&pod, few).await;
    let log = host.container_log("few");
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(field(&log, set), "00000000000000db", "{set}");
    }
    assert_eq!((field(&log, "NoNewPrivs"), field(&log, "Seccomp")), ("1".into(), "2".into()));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn another_user_has_its_groups_and_no_capabilities() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = with_context(container("web", &["/demo-app", "status"]), |c| {
        c.run_as_username = "web".into();
        c.supplemental_groups = vec![77];
    });
    cri.run(&pod, config).await;
    let log = host.container_log("web");
    assert_eq!(field(&log, "Uid"), "33\t33\t33\t33");
    assert_eq!(field(&log, "Gid"), "34\t34\t34\t34");
    assert_eq!(field(&log, "Groups").trim(), "34 77");
    assert_eq!(field(&log, "CapEff"), "0000000000000000");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn limits_are_in_the_cgroup_and_the_cgroup_goes_with_the_process() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mut config = container("c", &["/demo-app", "sleep", "forever"]);
    config.linux.as_mut().unwrap().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        cpu_shares: 102,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        ..Default::default()
    });
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    let hierarchies = linux::cgroup::Hierarchies::detect().unwrap();
    let group = std::path::Path::new(&host.cgroup).join(&id);
    let read = |controller: &str, v1: &str, v2: &str| {
        let dir = hierarchies.dir(controller, &group).unwrap();
        let text = std::fs::read_to_string(dir.join(v1)).or_else(|_| std::fs::read_to_string(dir.join(v2)));
        text.unwrap().trim().to_owned()
    };
    assert_eq!(read("memory", "memory.limit_in_bytes", "memory.max"), (64 << 20).to_string());
    assert!(["102", "4"].contains(&&*read("cpu", "cpu.shares", "cpu.weight")));
    assert!(["50000", "50000 100000"].contains(&&*read("cpu", "cpu.cfs_quota_us", "cpu.max")));
    let pid = container_pid(&host, &pod, &id).unwrap().to_string();
    assert_eq!(read("memory", "cgroup.procs", "cgroup.procs"), pid);
    let dir = hierarchies.dir("memory", &group).unwrap();
    cri.runtime.stop_container(StopContainerRequest { container_id: id, timeout: 0 }).await.unwrap();
    assert!(!dir.exists());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn mounts_show_the_host_read_only_means_read_only_and_nothing_leaks_out() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    std::fs::create_dir(host.path("data")).unwrap();
    let mount = |readonly| Mount {
        container_path: "/data/deep".into(),
        host_path: host.path("data").display().to_string(),
        readonly,
        ..Default::default()
    };
    let write = ContainerConfig {
        mounts: vec![mount(false)],
        ..container("write", &["/demo-app", "write", "/data/deep/file", "text"])
    };
    assert_eq!(cri.run(&pod, write).await.exit_code, 0);
    assert_eq!(std::fs::read_to_string(host.path("data/file")).unwrap(), "text\n");
    let refused = ContainerConfig {
        mounts: vec![mount(true)],
        ..container("refused", &["/demo-app", "write", "/data/deep/other", "text"])
    };
    assert_ne!(cri.run(&pod, refused).await.exit_code, 0);
    assert!(host.container_log("refused")[0].contains("Read-only file system"));
    // The pod's own files are those of all its containers.
    for file in ["/file", "/etc/resolv.conf", "/etc/hostname", "/etc/hosts"] {
        let name = file.replace('/', "-");
        let writes = |name: &str| container(name, &["/demo-app", "write", file, "text"]);
        let root = with_context(writes(&name), |c| c.readonly_rootfs = true);
        assert_ne!(cri.run(&pod, root).await.exit_code, 0, "{file}");
        assert!(host.container_log(&name)[0].contains("Read-only file system"), "{file}");
        assert_eq!(cri.run(&pod, writes(&format!("writable{name}"))).await.exit_code, 0, "{file}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn mounts_travel_as_the_propagation_says() {
    let mut host = Host::new();
    let share = host.path("share");
    std::fs::create_dir(&share).unwrap();
    linux::mount::mount_fs("tmpfs", "share", &share, Default::default(), "").unwrap();
    linux::mount::make_shared(&share).unwrap();
    std::fs::create_dir(share.join("sub")).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let modes = [
        ("private", MountPropagation::PropagationPrivate),
        ("slave", MountPropagation::PropagationHostToContainer),
        ("shared", MountPropagation::PropagationBidirectional),
    ];
    let mut pids = Vec::new();
    for (name, mode) in modes {
        let mount = Mount {
            container_path: "/share".into(),
            host_path: share.display().to_string(),
            propagation: mode.into(),
            ..Default::default()
        };
        let config =
            ContainerConfig { mounts: vec![mount], ..container(name, &["/demo-app", "sleep", "forever"]) };
        let id = cri.create(&pod, config).await.unwrap();
        cri.start(&id).await.unwrap();
        pids.push(container_pid(&host, &pod, &id).unwrap());
    }
    linux::mount::mount_fs("tmpfs", "later", &share.join("sub"), Default::default(), "").unwrap();
    let group = |mounts: &[linux::mountinfo::MountEntry], path: &std::path::Path| {
        let mount = mounts.iter().find(|m| m.mount_point == path).unwrap();
        mount.optional_fields.iter().find(|f| f.starts_with("shared:")).cloned()
    };
    let on_host = group(&linux::mountinfo::read().unwrap(), &share);
    let share_inside = std::path::Path::new("/share");
    for (pid, (name, sees_later, same_group)) in
        pids.into_iter().zip([("private", false, false), ("slave", true, false), ("shared", true, true)])
    {
        let inside = linux::mountinfo::read_of(pid).unwrap();
        let later = inside.iter().any(|m| m.mount_point == share_inside.join("sub"));
        assert_eq!((later, group(&inside, share_inside) == on_host), (sees_later, same_group), "{name}");
    }
    cri.remove_pod(&pod).await;
    linux::mount::unmount(&share.join("sub"), linux::mount::UnmountMode::Plain).unwrap();
    linux::mount::unmount(&share, linux::mount::UnmountMode::Plain).unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn ten_pods_at_once_come_and_go() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let mut pods = tokio::task::JoinSet::new();
    for number in 0..10 {
        let config = host.pod(&format!("pod{number}"));
        let mut cri = host.connect().await;
        pods.spawn(async move {
            let pod = cri.run_pod(&config).await.unwrap();
            let name = format!("c{number}");
            let status = cri.run(&pod, container(&name, &["/demo-app", "print", &name])).await;
            assert_eq!(status.exit_code, 0);
            cri.remove_pod(&pod).await;
            name
        });
    }
    for name in pods.join_all().await {
        assert_eq!(host.container_log(&name), [format!("stdout F {name}")]);
    }
    host.assert_clean();
}

#[tokio::test]
async fn the_hosts_kernel_is_masked_and_its_devices_are_closed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let status =
        cri.run(&pod, container("hostname", &["/demo-app", "cat", "/proc/sys/kernel/hostname"])).await;
    assert_eq!((status.exit_code, host.container_log("hostname")), (0, vec!["stdout F p".to_owned()]));
    cri.run(&pod, container("masked", &["/demo-app", "cat", "/proc/interrupts"])).await;
    assert_eq!(host.container_log("masked"), Vec::<String>::new(), "empty, as /dev/null is");
    let write = container("sys", &["/demo-app", "write", "/proc/sys/kernel/hostname", "x"]);
    assert_ne!(cri.run(&pod, write).await.exit_code, 0);
    cri.run(&pod, container("mounts", &["/demo-app", "cat", "/proc/self/mountinfo"])).await;
    let table: String =
        host.container_log("mounts").iter().map(|l| l.replacen("stdout F ", "", 1) + "\n").collect();
    for mount in linux::mountinfo::parse(table.as_bytes()).unwrap() {
        assert!(!mount.mount_point.starts_with(host.dir.path()), "a mount point of the host: {mount:?}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_reopened_log_goes_on_in_a_new_file_without_a_gap() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("count", &["/demo-app", "count"])).await.unwrap();
    cri.start(&id).await.unwrap();
    eventually("three lines", || (host.container_log("count").len() >= 3).then_some(())).await;
    std::fs::rename(host.path("logs/count.log"), host.path("logs/old.log")).unwrap();
    cri.runtime.reopen_container_log(ReopenContainerLogRequest { container_id: id }).await.unwrap();
    eventually("three more lines", || (host.container_log("count").len() >= 3).then_some(())).await;
    let mut all = host.container_log("old");
    all.extend(host.container_log("count"));
    for (index, line) in all.iter().enumerate() {
        assert_eq!(*line, format!("stdout F {}", index + 1));
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn bad_requests_name_the_field() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let cdi_devices = vec![proto::cri::CdiDevice { name: "a.b/c=d".to_owned() }];
    let devices = ContainerConfig { cdi_devices, ..container("c", &["/demo-app"]) };
    let error = cri.create(&pod, devices).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unimplemented, "CreateContainer: CDI_devices: a.b/c=d is not supported")
    );
    let confined = |profile_type: ProfileType, localhost_ref: &str| {
        let (profile_type, localhost_ref) = (profile_type.into(), localhost_ref.to_owned());
        let profile = SecurityProfile { profile_type, localhost_ref };
        with_context(container("c", &["/demo-app"]), |c| c.apparmor = Some(profile))
    };
    for (config, value) in [
        (confined(ProfileType::Localhost, "deny-write"), "deny-write"),
        (confined(ProfileType::RuntimeDefault, ""), "RuntimeDefault"),
    ] {
        let error = cri.create(&pod, config).await.unwrap_err();
        let message = format!("CreateContainer: security_context.apparmor: {value} is not supported");
        assert_eq!((error.code(), error.message()), (Code::Unimplemented, &*message));
    }
    let user = with_context(container("c", &["/demo-app"]), |c| {
        c.run_as_user = Some(Int64Value { value: 1000 });
        c.run_as_group = Some(Int64Value { value: -1 });
    });
    let error = cri.create(&pod, user).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::InvalidArgument, "run_as_group: -1 is not a group id")
    );
    let group_only =
        with_context(container("c", &["/demo-app"]), |c| c.run_as_group = Some(Int64Value { value: 5 }));
    let error = cri.create(&pod, group_only).await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::InvalidArgument, "run_as_group: 5 without run_as_user or run_as_username")
    );
    let mount = Mount {
        container_path: "/data".into(),
        host_path: "/".into(),
        readonly: true,
        recursive_read_only: true,
        propagation: MountPropagation::PropagationHostToContainer.into(),
        ..Default::default()
    };
    let travels = ContainerConfig { mounts: vec![mount], ..container("c", &["/demo-app"]) };
    let error = cri.create(&pod, travels).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    assert!(error.message().contains("recursive_read_only: needs PROPAGATION_PRIVATE"), "{error:?}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_container_is_removed_the_moment_its_end_is_announced() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    for number in 0..40 {
        let id =
            cri.create(&pod, container(&format!("c{number}"), &["/demo-app", "exit", "0"])).await.unwrap();
        cri.start(&id).await.unwrap();
        cri.ended(&id).await;
        let request = proto::cri::RemoveContainerRequest { container_id: id };
        cri.runtime.remove_container(request).await.unwrap_or_else(|e| panic!("container {number}: {e:?}"));
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The group of a process in v1's freezer or in v2, with the file and the value that freeze a group.
fn freezer_of(pid: i32) -> (PathBuf, &'static str, &'static str) {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let hierarchies = linux::cgroup::Hierarchies::detect().unwrap();
    let group_in = |marker| groups.lines().find_map(|line| Some(Path::new(line.split_once(marker)?.1)));
    if let Some(dir) = group_in(":freezer:").and_then(|path| hierarchies.dir("freezer", path)) {
        return (dir, "freezer.state", "FROZEN");
    }
    let path = group_in("0::").unwrap();
    (hierarchies.dir("pids", path).expect("cgroups are mounted"), "cgroup.freeze", "1")
}

/// As the shim recorded it.
pub(crate) fn container_pid(host: &Host, pod: &str, id: &str) -> Option<i32> {
    let path = host.path("root/sandboxes").join(pod).join("containers").join(id).join("status.json");
    let status: serde_json::Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    i32::try_from(status["pid"].as_i64()?).ok()
}
