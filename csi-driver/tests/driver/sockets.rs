//! The driver's sockets: there as long as it runs, and answering as long as anybody asks.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tests::csi::scene::{Flags, Scene, TIMEOUT};
use tests::eventually;

fn metrics(scene: &Scene) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(scene.sandbox.path("run/prom.sock"))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}

fn file(path: &Path) -> Option<(u64, i64)> {
    fs::symlink_metadata(path).map(|found| (found.ino(), found.ctime_nsec())).ok()
}

#[test]
fn sockets_that_somebody_removes_come_back() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let metrics_socket = scene.sandbox.path("run/prom.sock");
    for path in [scene.csi_socket(), metrics_socket.clone(), scene.sandbox.path("run/admin.sock")] {
        fs::remove_file(&path).unwrap();
        eventually("it is there again", TIMEOUT, || Ok(UnixStream::connect(&path).map(drop)?)).unwrap();
    }
    assert_eq!(caller.create_named("pvc-1").unwrap(), id);
    assert!(metrics(&scene).unwrap().contains("hawser_csi_volumes"));
    assert!(scene.log().contains("the socket was removed"), "{}", scene.log());
    // kubelet's own directory, as after a reset of the node.
    let before = file(&scene.csi_socket());
    fs::remove_dir_all(scene.csi_socket().parent().unwrap()).unwrap();
    eventually("another one", TIMEOUT, || {
        let now = file(&scene.csi_socket());
        anyhow::ensure!(now.is_some() && now != before, "{now:?}");
        Ok(())
    })
    .unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// Processor time of the driver, and of all its threads.
fn processor_time(pid: i32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let ticks: u64 = text
        .rsplit(") ")
        .next()
        .unwrap()
        .split(' ')
        .skip(11)
        .take(2)
        .map(|n| n.parse::<u64>().unwrap())
        .sum();
    Duration::from_millis(ticks * 10)
}

#[test]
fn out_of_descriptors_the_driver_waits_and_does_not_spin() {
    const DESCRIPTORS: u64 = 64;
    let scene = Scene::start(Flags::process());
    let pid = scene.driver.as_ref().unwrap().pid().as_raw();
    let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    prlimit(Pid::from_raw(pid), Resource::Nofile, limit).unwrap();
    let waiting: Vec<_> =
        (0..DESCRIPTORS * 2).map(|_| UnixStream::connect(scene.csi_socket()).unwrap()).collect();
    let said = || scene.log().matches("accept a connection: not again for a second").count();
    let times = |wanted| {
        eventually("it is said", TIMEOUT, || {
            anyhow::ensure!(said() >= wanted, "{}", scene.log());
            Ok(())
        })
        .unwrap();
    };
    times(1);
    let (begun, used) = (Instant::now(), processor_time(pid));
    times(4);
    let (elapsed, used) = (begun.elapsed(), processor_time(pid) - used);
    assert!(used < elapsed / 2, "{used:?} of {elapsed:?}");
    drop(waiting);
    eventually("it serves again", TIMEOUT, || Ok(scene.caller().create_named("pvc-1").map(drop)?)).unwrap();
}

#[test]
fn readers_of_metrics_that_say_nothing_do_not_hold_up_the_next() {
    let scene = Scene::start(Flags::process());
    let socket = scene.sandbox.path("run/prom.sock");
    let idle: Vec<_> = (0..8).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    assert!(metrics(&scene).unwrap().contains("hawser_csi_volumes"));
    for mut stream in idle {
        stream.set_nonblocking(true).unwrap();
        // Still open: the page did not come after their end.
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}
