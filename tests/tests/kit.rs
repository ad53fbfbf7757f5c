//! The test support itself: a check that cannot see a leak proves nothing.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use linux::mount::{FuseMountOptions, FuseName, MountFlags};
use tests::loop_device::{self, FileSystem, LoopMount};
use tests::trace_calls::{self, Fault, Injection, Run};
use tests::{Allowed, LeakCheck, Sandbox, netlink};

fn leaks(check: &LeakCheck, sandbox: &Sandbox) -> String {
    check.leaks(sandbox).expect("the kernel answers").to_string()
}

#[test]
fn a_sandbox_has_its_own_network_and_leaves_nothing() {
    let links_outside = fs::read_to_string("/proc/self/net/dev").unwrap();
    let sandbox = Sandbox::new();
    let dir = sandbox.dir().to_path_buf();
    let names: Vec<String> = netlink::links().unwrap().into_iter().map(|link| link.name).collect();
    assert!(names.contains(&"lo".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("eth")), "{names:?}");
    let mut child = sandbox.command(Path::new("/bin/sleep")).arg("600").spawn().unwrap();
    assert_eq!(sandbox.tag().processes().unwrap().len(), 1);
    drop(sandbox);
    assert!(child.wait().unwrap().code().is_none(), "killed by the sandbox's end");
    assert!(!dir.exists());
    assert_eq!(
        fs::read_to_string("/proc/self/net/dev").unwrap().lines().count(),
        links_outside.lines().count()
    );
}

#[test]
fn every_kind_of_leak_is_seen() {
    let sandbox = Sandbox::new();
    let check =
        LeakCheck::start(&sandbox, Allowed { changing: vec![sandbox.path("logs")], ..Allowed::default() })
            .unwrap();
    assert_eq!(check.leaks(&sandbox).unwrap().to_string(), "0 leaks:\n  ");

    fs::create_dir_all(sandbox.path("logs/any")).unwrap();
    fs::create_dir_all(sandbox.path("leases/net")).unwrap();
    fs::write(sandbox.path("leases/net/10.0.0.2"), "x").unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(sandbox.path("s.sock")).unwrap();
    let cgroup = Path::new("/sys/fs/cgroup/memory").join(sandbox.cgroup_root().strip_prefix("/").unwrap());
    fs::create_dir_all(&cgroup).unwrap();
    linux::mount::mount_fs("tmpfs", "t", &sandbox.path("leases"), MountFlags::default(), "").unwrap();
    let mut child = sandbox.command(Path::new("/bin/sleep")).arg("600").spawn().unwrap();

    // Its command line is empty for an instant within execve.
    tests::eventually("sleep has begun", Duration::from_secs(30), || {
        let processes = sandbox.tag().processes()?;
        anyhow::ensure!(processes.iter().any(|process| !process.command_line.is_empty()), "{processes:?}");
        Ok(())
    })
    .unwrap();

    let seen = leaks(&check, &sandbox);
    let dir = sandbox.dir().display();
    for expected in [
        format!("directory {dir}/leases: 0 before"),
        format!("listening socket {dir}/s.sock"),
        format!("cgroup {}", cgroup.display()),
        format!("mount tmpfs on {dir}/leases"),
        "process sleep (/bin/sleep 600)".to_owned(),
    ] {
        assert!(seen.contains(&expected), "{expected} is not in {seen}");
    }
    assert!(!seen.contains("logs"), "{seen}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn links_routes_and_nf_tables_are_seen() {
    let sandbox = Sandbox::new();
    let check =
        LeakCheck::start(&sandbox, Allowed { links: vec!["stays0".to_owned()], ..Allowed::default() })
            .unwrap();
    netlink::create_bridge("leak0", "10.10.10.1".parse().unwrap()).unwrap();
    netlink::create_bridge("stays0", "10.10.11.1".parse().unwrap()).unwrap();
    netlink::create_nft_table("leak").unwrap();
    let seen = leaks(&check, &sandbox);
    assert!(seen.contains("link leak0"), "{seen}");
    assert!(seen.contains("route 000A0A0A/00FFFFFF"), "{seen}");
    assert!(seen.contains("nft table 2 leak"), "{seen}");
    assert!(!seen.contains("stays0"), "{seen}");
    netlink::delete_link("leak0").unwrap();
    let seen = leaks(&check, &sandbox);
    assert!(!seen.contains("leak0"), "{seen}");
}

#[test]
fn a_fuse_mount_that_stops_answering_is_aborted_within_seconds() {
    // A busy machine may be late in all attempts but one.
    const ATTEMPTS: usize = 5;
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_secs(7)) {
        assert!(took.len() < ATTEMPTS, "{took:?}");
        took.push(aborted_after());
    }
}

/// How long the first request waits that such a mount does not answer.
fn aborted_after() -> Duration {
    let sandbox = Sandbox::new();
    let target = sandbox.make_dir("v").expect("a directory");
    let device = linux::mount::open_fuse_device().expect("/dev/fuse");
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: true, default_permissions: true };
    linux::mount::mount_fuse(
        device.as_fd(),
        FuseName { source: "wedged", subtype: "wedged" },
        &target,
        options,
    )
    .expect("mount");
    answer_init(&device);
    let idle_since = Instant::now();
    tests::eventually("the guard has seen it idle", Duration::from_secs(1), || {
        anyhow::ensure!(
            idle_since.elapsed() > Duration::from_millis(300),
            "idle for {:?}",
            idle_since.elapsed()
        );
        Ok(())
    })
    .expect("time passes");

    let started = Instant::now();
    let error = fs::metadata(target.join("file")).expect_err("it is aborted");
    assert_eq!(error.raw_os_error(), Some(nix::errno::Errno::ECONNABORTED as i32), "{error}");
    started.elapsed()
}

/// Reads FUSE_INIT and answers it (linux/fuse.h: fuse_out_header, fuse_init_out), and then nothing more.
fn answer_init(device: &impl AsFd) {
    let mut request = vec![0; 128 * 1024];
    let length = nix::unistd::read(device, &mut request).expect("INIT is queued by the mount");
    assert!(length >= 40, "{length}");
    assert_eq!(request[4..8], 26_u32.to_ne_bytes(), "opcode FUSE_INIT");
    let mut reply = Vec::new();
    reply.extend(80_u32.to_ne_bytes()); // length
    reply.extend(0_i32.to_ne_bytes()); // error
    reply.extend(&request[8..16]); // unique
    reply.extend(7_u32.to_ne_bytes()); // major
    reply.extend(31_u32.to_ne_bytes()); // minor
    reply.resize(80, 0);
    assert_eq!(nix::unistd::write(device, &reply).expect("INIT is answered"), 80);
}

#[test]
fn a_fault_is_injected_at_the_chosen_call_of_a_traced_program() {
    let traced = |injection: Option<Injection>| -> Run {
        let mut command = std::process::Command::new("/bin/echo");
        command.arg("said");
        trace_calls::run(&command, b"", injection).unwrap()
    };
    let calm = traced(None);
    assert_eq!((calm.code, calm.stdout.as_str()), (Some(0), "said\n"));
    let write = calm.calls.iter().find(|call| call.name == "write").expect("it writes");
    assert_eq!((write.object.as_str(), write.result), ("stdout", Some(5)));

    let injection = |fault| Some(Injection { point: write.point, name: write.name, fault });
    let failed = traced(injection(Fault::Fail(nix::errno::Errno::ENOSPC)));
    assert_eq!((failed.code, failed.stdout.as_str()), (Some(1), ""));
    assert!(failed.stderr.contains("No space left"), "{}", failed.stderr);
    let before = traced(injection(Fault::KillBefore));
    assert_eq!((before.code, before.stdout.as_str()), (None, ""));
    let after = traced(injection(Fault::KillAfter));
    assert_eq!((after.code, after.stdout.as_str()), (None, "said\n"));
    assert_eq!(trace_calls::ensure_injected(&after).unwrap().point, write.point);
}

#[test]
fn a_loop_device_is_free_again_even_after_a_panic() {
    for kind in [FileSystem::Btrfs, FileSystem::Ext4, FileSystem::Xfs] {
        let (tell, told) = std::sync::mpsc::channel();
        let test = std::thread::spawn(move || {
            let sandbox = Sandbox::new();
            let mount = LoopMount::new(&sandbox, "disk", kind, loop_device::IMAGE_BYTES).unwrap();
            fs::write(mount.dir().join("file"), "content").unwrap();
            mount.unmount().unwrap();
            assert!(!mount.dir().join("file").exists());
            mount.mount(&sandbox, kind).unwrap();
            assert_eq!(fs::read(mount.dir().join("file")).unwrap(), b"content");
            let (device, image) = (mount.device().unwrap(), sandbox.path("disk.img"));
            assert_eq!(loop_device::backing_file(&device), Some(image.clone()));
            tell.send((device, image)).unwrap();
            panic!("on purpose");
        });
        let (device, image) = told.recv().unwrap();
        assert!(test.join().is_err());
        tests::eventually("the device is free", Duration::from_secs(30), || {
            let stands_for = loop_device::backing_file(&device);
            // The kernel adds " (deleted)" to the name of a removed file.
            let is_ours =
                stands_for.is_some_and(|file| file.starts_with(image.parent().expect("in the sandbox")));
            anyhow::ensure!(!is_ours, "{}", device.display());
            Ok(())
        })
        .unwrap();
        assert!(!image.exists());
    }
}
