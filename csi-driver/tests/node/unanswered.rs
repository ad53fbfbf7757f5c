//! Daemons that answer none of their volume's requests: hung ones are ended, so that
//! their users get an error; one whose disk stalls lives on.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tests::csi::scene::{Flags, Scene, TIMEOUT};
use tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use tests::{Sandbox, eventually};

use crate::hung::within;
use crate::metrics::metrics;

/// Three deadlines of a second, and a busy machine.
const BOUND: Duration = Duration::from_secs(20);

fn scene() -> Scene {
    Scene::start(flags())
}

fn flags() -> Flags {
    let Flags(mut flags) = Flags::process();
    flags.extend(["--daemon-deadline", "1"].map(str::to_owned));
    Flags(flags)
}

/// Somebody who makes a file, on a thread of its own; what comes of it.
fn user(path: PathBuf) -> Receiver<io::Result<()>> {
    let (sender, result) = channel();
    thread::spawn(move || sender.send(fs::File::create(path).map(drop)));
    result
}

#[track_caller]
fn assert_disconnected(user: &Receiver<io::Result<()>>) {
    let error = user.recv_timeout(BOUND).expect("the user's wait ends").unwrap_err();
    let errno = nix::errno::Errno::from_raw(error.raw_os_error().unwrap());
    assert!(matches!(errno, nix::errno::Errno::ENOTCONN | nix::errno::Errno::ECONNABORTED), "{errno}");
}

/// `hawser-csi volumes`, which asks the daemons by their control sockets.
fn volumes(scene: &Scene) -> String {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args(["volumes", "--state-dir"]).arg(scene.sandbox.path("state"));
    let done = command.arg("--run-dir").arg(scene.sandbox.path("run")).output().unwrap();
    String::from_utf8(done.stdout).unwrap()
}

fn count(scene: &Scene, metric: &str) -> u64 {
    let page = metrics(scene);
    let value = page.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("{metric} in\n{page}")).parse().unwrap()
}

/// Ended by the driver, its pod told why, and another one with the next publish.
#[track_caller]
fn assert_ended_and_healed(scene: &Scene, id: &str) {
    let caller = scene.caller();
    let target = caller.target_path("one");
    let condition = caller.stats(id, &target).unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("answered no request"), "{condition:?}");
    assert_eq!(count(scene, "hawser_csi_hung_daemons_total"), 1);
    assert_eq!(count(scene, "hawser_csi_daemon_deaths_total"), 0, "the driver ended it");
    assert!(scene.log().contains("answered no request for three deadlines"), "{}", scene.log());
    // ABORTED until the driver is through with the daemon that it ends.
    eventually("it is published anew", TIMEOUT, || Ok(caller.publish(id, "one")?)).unwrap();
    fs::write(target.join("after"), "x").unwrap();
    assert!(!caller.stats(id, &target).unwrap().volume_condition.unwrap().abnormal);
    caller.take_down(id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn users_of_a_stopped_daemon_get_an_error_after_three_deadlines() {
    let scene = scene();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.stop_daemon();
    let waiting = user(caller.target_path("one").join("file"));
    assert_disconnected(&waiting);
    assert_ended_and_healed(&scene, &id);
}

/// Stops all threads of a process but its control server, as a fault in its file system
/// would, until it is killed.
fn stop_all_but_control(pid: i32) -> thread::JoinHandle<()> {
    let (stopped, all_stopped) = channel();
    let holder = thread::spawn(move || {
        for entry in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let task = entry.unwrap().path();
            if fs::read_to_string(task.join("comm")).unwrap().trim() == "control" {
                continue;
            }
            let tid = Pid::from_raw(task.file_name().unwrap().to_str().unwrap().parse().unwrap());
            ptrace::seize(tid, ptrace::Options::empty()).unwrap();
            ptrace::interrupt(tid).unwrap();
            waitpid(tid, Some(WaitPidFlag::__WALL)).unwrap();
        }
        stopped.send(()).unwrap();
        // Their ends come here before their process's is seen by anybody.
        let own = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        while waitpid(None, Some(own)).is_ok() {}
    });
    all_stopped.recv_timeout(TIMEOUT).unwrap();
    holder
}

#[test]
fn a_daemon_that_answers_pings_and_no_file_request_is_ended() {
    let scene = scene();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let [daemon] = scene.daemons()[..] else { panic!("{:?}", scene.daemons()) };
    let holder = stop_all_but_control(daemon);
    assert!(volumes(&scene).contains("published"), "it answers pings: {}", volumes(&scene));
    let waiting = user(caller.target_path("one").join("file"));
    assert_disconnected(&waiting);
    holder.join().unwrap();
    assert_ended_and_healed(&scene, &id);
}

/// What waits for a stopped daemon is the driver's own statfs alone: nobody suffers, the
/// daemon lives, and neither Unpublish nor Unstage takes it for a user.
#[test]
fn requests_of_the_driver_itself_are_no_users() {
    let scene = scene();
    let caller = scene.caller();
    let [used, idle] = ["used", "idle"].map(|name| caller.create_named(name).unwrap());
    caller.stage(&idle).unwrap();
    caller.publish(&idle, "idle").unwrap();
    let [idle_daemon] = scene.daemons()[..] else { panic!("{:?}", scene.daemons()) };
    caller.stage(&used).unwrap();
    caller.publish(&used, "one").unwrap();
    scene.sandbox.switch_fuse_guard_off();
    scene.signal_daemons(Signal::SIGSTOP);
    let stats = caller.stats(&idle, &caller.target_path("idle")).unwrap();
    assert!(stats.volume_condition.unwrap().message.contains("does not answer"));
    // Longer than the idle one's daemon would live, if it was taken for hung.
    assert_disconnected(&user(caller.target_path("one").join("file")));
    eventually("the hung daemon is gone", TIMEOUT, || {
        anyhow::ensure!(scene.daemons() == [idle_daemon], "{:?}", scene.daemons());
        Ok(())
    })
    .unwrap();
    within(Duration::from_secs(5), || caller.unpublish(&idle, "idle")).unwrap();
    assert_eq!(scene.daemons(), [idle_daemon], "its connection was not aborted for it");
    assert_eq!(count(&scene, "hawser_csi_hung_daemons_total"), 1);
    caller.take_down(&idle, &[]).unwrap();
    caller.take_down(&used, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// A file system whose writers are stopped until the drop, or 15 s have passed, whatever happens to the test.
///
/// The helper is started before anybody has a file of the volume open: a child that
/// inherits one waits for the daemon in its execve(2), and would never thaw anything.
struct Freezer(Child);

impl Freezer {
    fn start(sandbox: &Sandbox, dir: &Path) -> Self {
        let script =
            "read go; fsfreeze --freeze \"$0\" && echo frozen; read -t 15 end; fsfreeze --unfreeze \"$0\"";
        let mut command = sandbox.command(Path::new("bash"));
        command.args(["-c", script]).arg(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn freeze(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        let mut answer = [0; 7];
        self.0.stdout.as_mut().unwrap().read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"frozen\n");
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

/// Writes to a file of its own once its stdin ends; a process, so that no other that is
/// started meanwhile inherits the file.
fn writer(sandbox: &Sandbox, file: &Path) -> Child {
    let mut command = sandbox.command(Path::new("sh"));
    command.args(["-c", "exec >\"$0\"; echo ready >&2; read go; echo data"]).arg(file);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stderr.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
    child
}

#[test]
fn a_daemon_whose_disk_stalls_for_longer_survives_and_its_pods_are_told() {
    let sandbox = Sandbox::new();
    let pool = LoopMount::new(&sandbox, "pool", FileSystem::Ext4, IMAGE_BYTES).unwrap();
    let scene = Scene::start_in(sandbox, flags());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    scene.sandbox.switch_fuse_guard_off();
    let daemons = scene.daemons();
    let mut freezer = Freezer::start(&scene.sandbox, pool.dir());
    // More than the daemon has threads.
    let mut writers: Vec<_> =
        (0..8).map(|n| writer(&scene.sandbox, &target.join(format!("file-{n}")))).collect();
    freezer.freeze();
    writers.iter_mut().for_each(|writer| drop(writer.stdin.take()));
    eventually("the stall is told", TIMEOUT, || {
        anyhow::ensure!(count(&scene, "hawser_csi_disk_stalls_total") == 1, "{}", scene.log());
        let condition = caller.stats(&id, &target)?.volume_condition.unwrap();
        anyhow::ensure!(condition.abnormal && condition.message.contains("disk stalls"), "{condition:?}");
        Ok(())
    })
    .unwrap();
    assert_eq!(scene.daemons(), daemons);
    drop(freezer);
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    assert_eq!(fs::read(target.join("file-7")).unwrap(), b"data\n");
    eventually("the volume is healthy", TIMEOUT, || {
        let condition = caller.stats(&id, &target)?.volume_condition.unwrap();
        anyhow::ensure!(!condition.abnormal, "{condition:?}");
        Ok(())
    })
    .unwrap();
    fs::File::create(target.join("last")).and_then(|mut file| file.write_all(b"x")).unwrap();
    assert_eq!((scene.daemons(), count(&scene, "hawser_csi_hung_daemons_total")), (daemons, 0));
    caller.take_down(&id, &["one"]).unwrap();
    drop(scene);
    drop(pool);
}
