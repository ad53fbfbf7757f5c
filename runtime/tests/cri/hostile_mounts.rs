//! Volumes, links and names that try to take the place of what isolates a
//! container: masks, devices, /proc, /sys.

use std::os::unix::fs::symlink;

use proto::cri::{ContainerConfig, Device, Mount};
use tests::cri::{Cri, Host, IMAGE, container, demo_program, image_spec, layer_with_links, write_layout};
use tonic::Code;

use crate::containers::with_context;

fn native() -> bool {
    std::env::var_os("HAWSER_TEST_OCI_RUNTIME").is_none()
}

fn mount(host: &Host, source: &str, target: &str) -> Mount {
    Mount {
        container_path: target.to_owned(),
        host_path: host.path(source).display().to_string(),
        ..Default::default()
    }
}

fn privileged(config: ContainerConfig) -> ContainerConfig {
    with_context(config, |c| c.privileged = true)
}

/// A pod of a host that has sources of mounts: `dir` and `file`.
async fn start() -> (Host, Cri, String) {
    let mut host = Host::new();
    std::fs::create_dir(host.path("dir")).unwrap();
    std::fs::write(host.path("file"), "of the volume\n").unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    (host, cri, pod)
}

#[tokio::test]
async fn an_unprivileged_container_cannot_mount_on_what_isolates_it() {
    let (host, mut cri, pod) = start().await;
    let directories = [
        "/",
        "/..",
        "/dev",
        "/dev/.",
        "/tmp/../dev",
        "/dev/pts",
        "/dev/fd",
        "/proc",
        "/proc/1",
        "/proc/sys",
        "/proc/sys/kernel",
        "/proc/bus",
        "/proc/self/attr",
        "/sys",
        "/sys/firmware",
        "/sys/devices",
        "/sys/devices/virtual",
        "/sys/devices/virtual/powercap",
    ];
    let files = [
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/random",
        "/dev/urandom",
        "/dev/tty",
        "/dev/console",
        "/dev/ptmx",
        "/dev/pts/0",
        "/dev/stdin",
        "/dev/stdout",
        "/dev/stderr",
        "/dev/core",
        "/dev/other",
        "/proc/kcore",
        "/proc/interrupts",
        "/proc/sysrq-trigger",
        "/proc/version",
        "/sys/kernel/file",
    ];
    let refused =
        directories.map(|target| ("dir", target)).into_iter().chain(files.map(|target| ("file", target)));
    for (number, (source, target)) in refused.enumerate() {
        let config = ContainerConfig {
            mounts: vec![mount(&host, source, target)],
            ..container(&format!("c{number}"), &["/demo-app", "print", "runs"])
        };
        let error = cri.create(&pod, config).await.expect_err(target);
        assert_eq!(error.code(), Code::InvalidArgument, "{target}: {error:?}");
        let words = format!("mounts {target:?} container_path: refused: ");
        assert!(error.message().starts_with(&words), "{error:?}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn what_users_mount_below_dev_proc_and_sys_is_there_and_the_masks_hold() {
    let (host, mut cri, pod) = start().await;
    std::fs::write(host.path("dir/inside"), "in the directory\n").unwrap();
    let directories = ["/dev/shm", "/dev/hugepages", "/dev/mqueue", "/dev/deep/directory", "/sys/kernel"];
    let files = ["/dev/termination-log", "/proc/uptime", "/proc/meminfo"];
    let mut mounts: Vec<Mount> = directories.map(|target| mount(&host, "dir", target)).into();
    mounts.extend(files.map(|target| mount(&host, "file", target)));
    let mut run = async |name: &str, command: &[&str]| {
        let config = ContainerConfig {
            mounts: mounts.clone(),
            annotations: [(
                "io.kubernetes.container.terminationMessagePath".to_owned(),
                "/dev/termination-log".to_owned(),
            )]
            .into(),
            ..container(name, command)
        };
        cri.run(&pod, config).await.exit_code
    };
    for (number, target) in directories.into_iter().enumerate() {
        let name = format!("d{number}");
        assert_eq!(run(&name, &["/demo-app", "cat", &format!("{target}/inside")]).await, 0, "{target}");
        assert_eq!(host.container_log(&name), ["stdout F in the directory"], "{target}");
    }
    for (number, target) in files.into_iter().enumerate() {
        let name = format!("f{number}");
        assert_eq!(run(&name, &["/demo-app", "cat", target]).await, 0, "{target}");
        assert_eq!(host.container_log(&name), ["stdout F of the volume"], "{target}");
    }
    assert_eq!(run("masked", &["/demo-app", "cat", "/proc/interrupts"]).await, 0);
    assert_eq!(host.container_log("masked"), Vec::<String>::new());
    assert_eq!(run("null", &["/demo-app", "cat", "/dev/null"]).await, 0);
    assert_ne!(run("sys", &["/demo-app", "write", "/proc/sys/kernel/hostname", "x"]).await, 0);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_privileged_container_mounts_on_dev_and_sys_but_not_on_proc() {
    let (host, mut cri, pod) = start().await;
    for (name, target) in [("proc", "/proc"), ("below", "/proc/1"), ("sys", "/proc/sys")] {
        let config = ContainerConfig {
            mounts: vec![mount(&host, "dir", target)],
            ..container(name, &["/demo-app", "print", "runs"])
        };
        let error = cri.create(&pod, privileged(config)).await.expect_err(target);
        assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    }
    std::fs::write(host.path("dir/inside"), "in the directory\n").unwrap();
    let dir = linux::rootfs::open_root(&host.path("dir")).unwrap();
    // runc opens it inside the container.
    linux::rootfs::make_device(&dir, "null", linux::rootfs::Device::character(1, 3), 0o666).unwrap();
    for (name, target) in [("dev", "/dev"), ("whole-sys", "/sys"), ("firmware", "/sys/firmware")] {
        let config = ContainerConfig {
            mounts: vec![mount(&host, "dir", target)],
            ..container(name, &["/demo-app", "cat", &format!("{target}/inside")])
        };
        assert_eq!(cri.run(&pod, privileged(config)).await.exit_code, 0, "{target}");
        assert_eq!(host.container_log(name), ["stdout F in the directory"]);
    }
    // A /dev of its own gets no node and no link.
    let mut left: Vec<_> =
        std::fs::read_dir(host.path("dir")).unwrap().flatten().map(|e| e.file_name()).collect();
    left.sort();
    assert_eq!(left, ["inside", "null"]);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn links_of_an_image_lead_no_mount_to_a_kernel_file_system() {
    let (mut host, mut cri, pod) = start().await;
    let images = [
        ("mnt", &[("mnt", "/proc/sys"), ("null", "../../dev"), ("fds", "/proc/self/fd")][..]),
        ("proc", &[("proc", "/etc")][..]),
        ("dev", &[("dev", "etc")][..]),
        ("sys", &[("sys", "/etc")][..]),
    ];
    for (name, links) in images {
        let program = demo_program();
        let layer = layer_with_links(&[("demo-app", 0o755, &program), ("etc/passwd", 0o644, b"")], links);
        write_layout(&host.path("images").join(name), &format!("{name}:1"), &layer);
        cri.pull(&format!("{name}:1")).await.unwrap();
    }
    let mut attempt = async |name: &str, image: &str, wanted: Option<Mount>, working_dir: &str| {
        let config = ContainerConfig {
            image: Some(image_spec(image)),
            mounts: wanted.into_iter().collect(),
            working_dir: working_dir.to_owned(),
            ..container(name, &["/demo-app", "print", "runs"])
        };
        let id = cri.create(&pod, config).await.unwrap();
        let started = cri.start(&id).await;
        assert_eq!(host.container_log(name), Vec::<String>::new(), "{name}: {started:?}");
        started.expect_err(name).message().to_owned()
    };
    let text = attempt("kernel", "mnt:1", Some(mount(&host, "dir", "/mnt/kernel")), "").await;
    assert!(text.contains("mount /mnt/kernel: it leads to /proc/sys/kernel: refused: "), "{text}");
    let text = attempt("null", "mnt:1", Some(mount(&host, "file", "/null/null")), "").await;
    assert!(text.contains("mount /null/null: it leads to /dev/null: refused: "), "{text}");
    for target in ["proc", "dev", "sys"] {
        let text = attempt(target, &format!("{target}:1"), None, "").await;
        assert!(text.contains(&format!("mount /{target}: the image has a link there, to /etc")), "{text}");
    }
    for (name, image, dir) in
        [("cwd", IMAGE, "/proc/self/fd/3"), ("fds", "mnt:1", "/fds/3"), ("self", IMAGE, "/proc/self/cwd")]
    {
        let text = attempt(name, image, None, dir).await;
        assert!(text.contains("/proc"), "{text}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
    host.kill();
}

#[tokio::test]
async fn a_link_in_a_shared_volume_never_moves_a_nested_mount() {
    let (host, mut cri, pod) = start().await;
    std::fs::create_dir(host.path("secret")).unwrap();
    for (number, link) in ["/etc", "/proc/sys", "/dev", "..", "loop"].into_iter().enumerate() {
        let volume = format!("volume{number}");
        std::fs::create_dir(host.path(&volume)).unwrap();
        symlink(link, host.path(&volume).join("nested")).unwrap();
        let name = format!("c{number}");
        let config = ContainerConfig {
            mounts: vec![mount(&host, "secret", "/volume/nested"), mount(&host, &volume, "/volume")],
            ..container(&name, &["/demo-app", "print", "runs"])
        };
        let id = cri.create(&pod, config).await.unwrap();
        let error = cri.start(&id).await.unwrap_err();
        let words = if native() {
            "mount /volume/nested: find mount point /volume/nested: link \"nested\" in /volume: "
        } else {
            "mount /volume/nested: "
        };
        assert!(error.message().contains(words), "{error:?}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_source_that_becomes_a_link_between_creation_and_start_is_not_mounted() {
    if !native() {
        return;
    }
    let (host, mut cri, pod) = start().await;
    std::fs::create_dir_all(host.path("parent/volume")).unwrap();
    let config = ContainerConfig {
        mounts: vec![mount(&host, "parent/volume", "/data")],
        ..container("c", &["/demo-app", "print", "runs"])
    };
    let id = cri.create(&pod, config).await.unwrap();
    std::fs::rename(host.path("parent"), host.path("old")).unwrap();
    std::fs::create_dir_all(host.path("secret/volume")).unwrap();
    symlink("secret", host.path("parent")).unwrap();
    let error = cri.start(&id).await.unwrap_err();
    assert!(error.message().contains("open mount source"), "{error:?}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_requested_device_is_that_device_or_the_container_does_not_start() {
    let (host, mut cri, pod) = start().await;
    let device = |target: &str| Device {
        container_path: target.to_owned(),
        host_path: "/dev/null".to_owned(),
        permissions: "rw".to_owned(),
    };
    let config = ContainerConfig {
        devices: vec![device("/dev/bus/nothing")],
        ..container("good", &["/demo-app", "cat", "/dev/bus/nothing"])
    };
    assert_eq!(cri.run(&pod, config).await.exit_code, 0);
    assert_eq!(host.container_log("good"), Vec::<String>::new());
    if native() {
        // The image has a file of that name.
        let config = ContainerConfig {
            devices: vec![device("/plain-file")],
            ..container("file", &["/demo-app", "print", "runs"])
        };
        let id = cri.create(&pod, config).await.unwrap();
        let error = cri.start(&id).await.unwrap_err();
        assert!(error.message().contains("it is not CharacterDevice 1:3 but RegularFile"), "{error:?}");
    }
    let covered = ContainerConfig {
        devices: vec![device("/dev/bus/nothing")],
        mounts: vec![mount(&host, "dir", "/dev/bus")],
        ..container("covered", &["/demo-app", "print", "runs"])
    };
    let error = cri.create(&pod, covered).await.unwrap_err();
    assert!(error.message().contains("it would cover the requested device /dev/bus/nothing"), "{error:?}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_pod_changes_the_settings_of_its_namespaces_and_none_of_the_nodes() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let victim = host.path("victim");
    std::fs::write(&victim, "old").unwrap();
    let climbs = format!("net/../../..{}", victim.display());
    for (name, setting, value, runs) in [
        ("good", "net.ipv4.ip_default_ttl", "77", true),
        ("vm", "vm.overcommit_ratio", "50", false),
        ("climbs", climbs.as_str(), "new", false),
    ] {
        let mut config = host.pod(name);
        config.linux.as_mut().unwrap().sysctls = [(setting.to_owned(), value.to_owned())].into();
        let made = cri.run_pod(&config).await;
        assert_eq!(made.is_ok(), runs, "{setting}: {made:?}");
        match made {
            Ok(pod) => {
                let read = container(name, &["/demo-app", "cat", "/proc/sys/net/ipv4/ip_default_ttl"]);
                let id = cri.create(&pod, read).await.unwrap();
                cri.start(&id).await.unwrap();
                cri.ended(&id).await;
                assert_eq!(host.container_log(name), ["stdout F 77"]);
                cri.remove_pod(&pod).await;
            }
            Err(refused) => {
                let text = refused.message();
                assert!(text.ends_with("not a setting of a namespace but of the whole node"), "{text}");
            }
        }
    }
    assert_eq!(std::fs::read(&victim).unwrap(), b"old");
    host.assert_clean();
}

#[tokio::test]
async fn a_host_path_that_does_not_exist_is_made_as_a_directory() {
    let (host, mut cri, pod) = start().await;
    let config = ContainerConfig {
        mounts: vec![mount(&host, "new/deep", "/data")],
        ..container("c", &["/demo-app", "write", "/data/file", "text"])
    };
    assert_eq!(cri.run(&pod, config).await.exit_code, 0);
    assert_eq!(std::fs::read_to_string(host.path("new/deep/file")).unwrap(), "text\n");
    let unmounted = "kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount";
    let config = ContainerConfig {
        mounts: vec![mount(&host, unmounted, "/data")],
        ..container("volume", &["/demo-app", "print", "runs"])
    };
    let error = cri.create(&pod, config).await.unwrap_err();
    assert!(error.message().ends_with("this volume of a pod is not mounted"), "{error:?}");
    assert!(!host.path("kubelet").exists());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
