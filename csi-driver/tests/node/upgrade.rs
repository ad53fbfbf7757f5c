//! `hawser-csi upgrade`: a daemon of another program replaces one that serves, and applications see a
//! pause and no error. One that cannot serve leaves, or brings back, a daemon of the program before.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linux::fd_passing::PacketSocket;
use nix::sys::signal::Signal;
use prost::Message;
use proto::handover::{Answer, FIRST_WITH_PROCEED, Failed, Hello, Prepared, Ready, VERSIONS, answer};
use rustix::fs::IFlags;
use serde_json::Value;
use tests::csi::programs::install;
use tests::csi::scene::{Flags, Scene, TIMEOUT, volume_binary};
use tests::eventually;
use tests::trace_steps::{Fault, Injection, Kind, Places, Step, Trace, Tracing};

use crate::keepers::{keeper_binary, kill_daemon, published, with_keeper};
use crate::takeover::{Load, with_own_program};
use crate::warm::{Warm, wait_for_waiting};

/// A program for daemons that a test may replace, and a volume that is in use.
struct Used {
    scene: Scene,
    program: PathBuf,
    id: String,
    load: Load,
}

impl Used {
    fn start() -> Self {
        let (scene, program) = with_own_program(with_keeper());
        // Users wait for each daemon that follows, and for some seconds for a roll-back.
        scene.sandbox.switch_fuse_guard_off();
        let caller = scene.caller();
        let id = caller.bring_up("pvc-1", &["one"]).unwrap();
        let load = Load::start(&caller.target_path("one"));
        Self { scene, program, id, load }
    }

    /// The driver's next daemon executes another file, which holds the same.
    fn replace_program(&self) {
        install(&self.program, &fs::read(volume_binary()).unwrap());
    }

    /// The driver's next daemon has this fault.
    fn replace_by_faulty(&self, fault: &str) {
        install(&self.program, faulty(fault).as_bytes());
    }

    fn daemon(&self) -> i32 {
        let [daemon] = self.scene.daemons()[..] else {
            panic!("{:?}\n{}", self.scene.daemons(), self.scene.log());
        };
        daemon
    }

    /// Upgrades the volume, which must have this result.
    #[track_caller]
    fn upgrade(&self, result: &str, more: &[&str]) -> Value {
        let (rows, output) = upgrade(&self.scene, &[&[self.id.as_str()], more].concat());
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!(row["result"], result, "{row}\n{}", self.scene.log());
        let is_complete = ["upgraded", "current"].contains(&result);
        assert_eq!(output.status.success(), is_complete, "{output:?}");
        row.clone()
    }

    /// The daemon serves as before, and can be followed as before.
    fn finish(self) {
        self.load.progress();
        self.replace_program();
        kill_daemon(&self.scene);
        self.load.progress();
        self.load.end();
        // The takeover may still be under way: then the caller repeats the call, as a CO does.
        let taken_down = eventually("the takeover has ended", TIMEOUT, || {
            match self.scene.caller().take_down(&self.id, &["one"]) {
                Err(status) if status.code() == tonic::Code::Aborted => Err(status.into()),
                done => Ok(done),
            }
        });
        taken_down.unwrap().unwrap();
        self.scene.assert_nothing_left();
        self.scene.end_keeper();
    }
}

fn command(scene: &Scene, arguments: &[&str]) -> Command {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.arg("upgrade").args(arguments).arg("--state-dir").arg(scene.sandbox.path("state"));
    command.arg("--run-dir").arg(scene.sandbox.path("run"));
    command
}

fn run(scene: &Scene, arguments: &[&str]) -> Output {
    command(scene, arguments).output().unwrap()
}

fn upgrade(scene: &Scene, arguments: &[&str]) -> (Vec<Value>, Output) {
    let output = run(scene, &[arguments, &["-o", "json"]].concat());
    let rows = serde_json::from_slice(&output.stdout);
    (rows.unwrap_or_else(|error| panic!("{error}: {output:?}\n{}", scene.log())), output)
}

/// The file that a process executes.
fn executed(pid: i32) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/exe")).unwrap()
}

/// A program that is this test program, as the daemon of [`a_daemon_with_a_fault`].
fn faulty(fault: &str) -> String {
    let tests = std::env::current_exe().unwrap();
    format!(
        "#!/bin/sh\nHAWSER_FAULT={fault} HAWSER_DIAL=\"$4\" exec {} --exact upgrade::a_daemon_with_a_fault --nocapture\n",
        tests.display()
    )
}

/// Passes, unless a driver of one of these tests has started it as a daemon.
#[test]
fn a_daemon_with_a_fault() {
    let Ok(fault) = std::env::var("HAWSER_FAULT") else { return };
    let driver = PacketSocket::connect(Path::new(&std::env::var("HAWSER_DIAL").unwrap())).unwrap();
    let newest_version = if fault == "earlier-version" { FIRST_WITH_PROCEED - 1 } else { VERSIONS.newest };
    let nonce = std::env::var("HAWSER_NONCE").unwrap();
    let hello =
        Hello { newest_version, nonce, oldest_version: VERSIONS.oldest, release: "0.0.0-faulty".to_owned() };
    driver.send(&hello.encode_to_vec(), &[]).unwrap();
    let Some((_assignment, kept)) = driver.receive_with_fds(16).unwrap() else { return };
    let answer = |result| driver.send(&Answer { result: Some(result) }.encode_to_vec(), &[]).unwrap();
    match fault.as_str() {
        "dies" => return,
        "refuses" => {
            answer(answer::Result::Failed(Failed { reason: "made to refuse".to_owned() }));
            return;
        }
        _ => answer(answer::Result::Prepared(Prepared {})),
    }
    let Some((_proceed, keeper)) = driver.receive_with_fds(16).unwrap() else { return };
    if fault == "serves-nothing" {
        let ready = Ready { max_write_bytes: 1 << 20, can_be_continued: true, ..Ready::default() };
        answer(answer::Result::Ready(ready));
    }
    hold(&[kept, keeper]);
}

/// Until the driver kills this process.
fn hold(_descriptors: &[Vec<OwnedFd>]) -> ! {
    loop {
        std::thread::park();
    }
}

#[test]
fn applications_see_a_pause_and_no_error_when_a_daemon_is_upgraded() {
    let used = Used::start();
    let target = used.scene.caller().target_path("one");
    let mut removed = File::create_new(target.join("removed")).unwrap();
    fs::remove_file(target.join("removed")).unwrap();
    for round in 0..10_u8 {
        used.load.progress();
        removed.write_all(&[round]).unwrap();
        used.replace_program();
        let before = used.daemon();
        assert!(executed(before).to_string_lossy().ends_with(" (deleted)"), "of the file that was there");
        let row = used.upgrade("upgraded", &[]);
        let pause_us = row["pause_us"].as_u64().unwrap();
        println!("round {round}: paused for {pause_us} us");
        assert!(row["from"].as_str().unwrap().contains("(deleted)"), "{row}");
        assert_eq!(executed(used.daemon()), used.program);
        assert_ne!(used.daemon(), before);
    }
    used.load.progress();
    removed.rewind().unwrap();
    let mut written = Vec::new();
    removed.read_to_end(&mut written).unwrap();
    assert_eq!(written, (0..10).collect::<Vec<u8>>());
    drop(removed);
    let mount = published(&used.scene);
    assert_eq!((&mount["takeovers"], &mount["needs_new_stage"]), (&10.into(), &Value::Array(Vec::new())));
    assert_eq!(mount["daemon_pid"].as_i64(), Some(used.daemon().into()));
    used.finish();
}

#[test]
fn a_daemon_of_the_configured_program_is_replaced_only_by_force() {
    let used = Used::start();
    let daemon = used.daemon();
    let row = used.upgrade("current", &[]);
    assert_eq!((&row["pause_us"], &row["from"]), (&Value::Null, &row["to"]));
    assert!(row["to"].as_str().unwrap().starts_with(env!("CARGO_PKG_VERSION")), "{row}");
    assert_eq!(used.daemon(), daemon);
    used.upgrade("upgraded", &["--force"]);
    assert_ne!(used.daemon(), daemon);
    used.finish();
}

#[test]
fn a_new_daemon_that_cannot_follow_is_refused_and_the_earlier_one_is_not_stopped() {
    let used = Used::start();
    let daemon = used.daemon();
    for (fault, reason) in [
        (
            "earlier-version",
            "speaks version 4 of the hand-over protocol, and can follow one that serves from version 5",
        ),
        ("refuses", "refused to serve: made to refuse"),
        ("dies", "ended before it served"),
    ] {
        used.load.progress();
        used.replace_by_faulty(fault);
        let row = used.upgrade("refused", &[]);
        assert!(row["reason"].as_str().unwrap().contains(reason), "{row}");
        assert!(row["to"].as_str().unwrap().starts_with("0.0.0-faulty"), "{row}");
        assert_eq!(row["pause_us"], Value::Null);
        assert_eq!(used.daemon(), daemon);
    }
    install(&used.program, b"#!/bin/sh\nexit 1\n");
    let row = used.upgrade("refused", &[]);
    assert!(row["reason"].as_str().unwrap().contains("ended before it served"), "{row}");
    assert_eq!(used.daemon(), daemon);
    assert_eq!(published(&used.scene)["takeovers"], 0);
    used.finish();
}

#[test]
fn a_new_daemon_that_does_not_serve_is_rolled_back_to_the_earlier_program() {
    let used = Used::start();
    let original = fs::metadata(format!("/proc/{}/exe", used.daemon())).unwrap();
    for (fault, reason) in
        [("is-silent", "took longer than 5 s"), ("serves-nothing", "did not answer Ping within 2 s")]
    {
        used.load.progress();
        used.replace_by_faulty(fault);
        let row = used.upgrade("rolled-back", &[]);
        assert!(row["reason"].as_str().unwrap().contains(reason), "{row}");
        assert!(row["pause_us"].as_u64().is_some(), "{row}");
        let now = fs::metadata(format!("/proc/{}/exe", used.daemon())).unwrap();
        let file = |seen: &fs::Metadata| std::os::unix::fs::MetadataExt::ino(seen);
        assert_eq!(file(&now), file(&original), "a daemon of the program before");
    }
    used.load.progress();
    // The next program that can serve follows.
    used.replace_program();
    used.upgrade("upgraded", &[]);
    used.finish();
}

/// A disk that takes no record, as if it were full or read-only: files and directories that cannot change.
struct Unwritable(Vec<PathBuf>);

impl Unwritable {
    /// The records of volumes in use.
    fn journal(scene: &Scene) -> Self {
        let mut found = Vec::new();
        let mut pending = vec![scene.sandbox.path("state/boots")];
        while let Some(path) = pending.pop() {
            if path.is_dir() {
                pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            found.push(path);
        }
        assert!(found.iter().any(|path| path.is_file()), "{found:?}");
        let unwritable = Self(found);
        unwritable.set(true);
        unwritable
    }

    fn set(&self, is_immutable: bool) {
        for path in &self.0 {
            let file = File::open(path).unwrap();
            let mut flags = rustix::fs::ioctl_getflags(&file).unwrap();
            flags.set(IFlags::IMMUTABLE, is_immutable);
            rustix::fs::ioctl_setflags(&file, flags).unwrap();
        }
    }
}

impl Drop for Unwritable {
    fn drop(&mut self) {
        self.set(false);
    }
}

#[test]
fn no_daemon_is_stopped_whose_successor_cannot_be_journaled() {
    let used = Used::start();
    let daemon = used.daemon();
    let unwritable = Unwritable::journal(&used.scene);
    used.upgrade("refused", &["--force"]);
    assert_eq!(used.daemon(), daemon);
    used.load.progress();
    drop(unwritable);
    used.upgrade("upgraded", &["--force"]);
    used.finish();
}

#[test]
fn a_driver_that_starts_after_a_roll_back_adopts_the_daemon_of_the_earlier_program() {
    let mut used = Used::start();
    used.replace_by_faulty("serves-nothing");
    used.load.progress();
    used.upgrade("rolled-back", &[]);
    let daemon = used.daemon();
    used.replace_program();
    // A process that has a file of the volume open cannot start a driver: its child waits to close it.
    let Used { load, .. } = used;
    load.end();
    used.scene.restart_driver();
    assert_eq!(used.scene.daemons(), [daemon]);
    let again = used.scene.caller().target_path("one").join("again");
    fs::create_dir(&again).unwrap();
    let load = Load::start(&again);
    let used = Used { load, ..used };
    used.upgrade("upgraded", &[]);
    used.finish();
}

/// The program was replaced while the daemon waited.
#[test]
fn a_waiting_daemon_of_the_earlier_program_does_not_follow() {
    let (mut scene, program) = with_own_program(with_keeper());
    let cold = scene.flags.clone();
    scene.flags = cold.clone().with(&["--warm-daemons", "1"].map(str::to_owned));
    scene.restart_driver();
    let first = wait_for_waiting(&scene, 1)[0];
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    assert_eq!(scene.serving_daemons(), [first]);
    let waiting = wait_for_waiting(&scene, 1)[0];
    install(&program, &fs::read(volume_binary()).unwrap());
    let (rows, output) = upgrade(&scene, &[&id]);
    assert_eq!(rows[0]["result"], "upgraded", "{output:?}");
    let [serving] = scene.serving_daemons()[..] else { panic!("{:?}", scene.serving_daemons()) };
    assert_ne!(serving, waiting);
    assert_eq!(executed(serving), program);
    scene.caller().take_down(&id, &["one"]).unwrap();
    scene.flags = cold;
    scene.restart_driver();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn all_volumes_are_upgraded_and_one_that_fails_does_not_keep_the_others() {
    let (scene, program) = with_own_program(with_keeper());
    let caller = scene.caller();
    let ids = ["pvc-1", "pvc-2"].map(|name| caller.create_named(name).unwrap());
    ids.iter().for_each(|id| caller.stage(id).unwrap());
    // One that is not staged is none to upgrade.
    let unstaged = caller.create_named("pvc-3").unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let pid_of = |id: &str| {
        let mounts = crate::keepers::mounts(&scene);
        let mount = mounts.into_iter().find(|mount| mount["volume"] == id).unwrap();
        i32::try_from(mount["daemon_pid"].as_i64().unwrap()).unwrap()
    };
    let stopped = linux::process::open_pidfd(pid_of(&ids[0])).unwrap().unwrap();
    linux::process::signal_pidfd(&stopped, Signal::SIGSTOP as i32).unwrap();
    install(&program, &fs::read(volume_binary()).unwrap());
    let result = |rows: &[Value], id: &str| {
        let row = rows.iter().find(|row| row["volume"] == id);
        row.unwrap_or_else(|| panic!("{rows:?}"))["result"].clone()
    };
    let (rows, output) = upgrade(&scene, &["--all"]);
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert_eq!(ids.each_ref().map(|id| result(&rows, id)), ["refused", "upgraded"], "{rows:?}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    linux::process::signal_pidfd(&stopped, Signal::SIGCONT as i32).unwrap();
    let (rows, output) = upgrade(&scene, &["--all"]);
    assert_eq!(ids.each_ref().map(|id| result(&rows, id)), ["upgraded", "current"], "{rows:?}");
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(run(&scene, &["--all"]).stdout).unwrap();
    assert!(table.starts_with("VOLUME ") && table.matches("current").count() == 2, "{table}");
    for id in ids.iter().chain([&unstaged]) {
        caller.take_down(id, &[]).unwrap();
    }
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn what_cannot_be_upgraded_is_named() {
    let scene = Scene::start(Flags::process());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let unstaged = scene.caller().create_named("pvc-2").unwrap();
    let unknown = format!("vol-{}", "0".repeat(32));
    for (volume, reason) in [
        (id.as_str(), "no keeper"),
        (&unstaged, "is not staged"),
        (&unknown, "does not exist"),
        ("x", "not the id of a volume"),
    ] {
        let (rows, output) = upgrade(&scene, &[volume]);
        assert_eq!((&rows[0]["result"], &rows[0]["volume"]), (&"refused".into(), &volume.into()));
        assert!(rows[0]["reason"].as_str().unwrap().contains(reason), "{rows:?}");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
    let mut scene = scene;
    scene.kill_driver();
    let output = run(&scene, &[&id]);
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(text.contains("no driver that can replace daemons answers"), "{output:?}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    scene.start_driver();
    scene.caller().take_down(&id, &["one"]).unwrap();
    scene.caller().delete(&unstaged).unwrap();
    scene.assert_nothing_left();
}

/// A driver with waiting daemons and a keeper that stands by, and a volume in use by another process.
struct Traced {
    warm: Warm,
    id: String,
    file: PathBuf,
    writer: Child,
}

impl Traced {
    fn start() -> Self {
        Self::start_beside(&[], |_| {})
    }

    /// `beside` runs the mount pods, if `launcher` has the driver write manifests.
    fn start_beside(launcher: &[&str], beside: impl FnOnce(&Scene)) -> Self {
        let keeper = keeper_binary().display().to_string();
        let more = launcher.iter().copied().chain(["--keeper-binary", &keeper]);
        let more: Vec<String> = more.map(str::to_owned).collect();
        let warm = Warm::start_beside(1, &more, beside);
        // Users wait until the driver is started again.
        warm.scene.sandbox.switch_fuse_guard_off();
        let caller = warm.scene.caller();
        let id = caller.bring_up("pvc-1", &["one"]).unwrap();
        let file = caller.target_path("one").join("f");
        let writer = crate::takeover::writer(&warm.scene, &file);
        let mut traced = Self { warm, id, file, writer };
        traced.progress();
        traced
    }

    /// Waits until the application has written and read twice.
    fn progress(&mut self) {
        crate::takeover::wait_for_writer(&self.warm.scene, &self.file, &mut self.writer);
    }

    /// Upgrades the volume, and traces the driver until it has answered, or is dead.
    fn upgrade(&self, injection: Option<Injection>) -> Trace {
        let root = self.warm.scene.sandbox.dir().to_owned();
        let ignored = vec![self.warm.scene.sandbox.path("driver.log"), "daemon.log".into()];
        let driver = self.warm.scene.driver.as_ref().unwrap().pid();
        let tracing = Tracing::start(driver, Places { root, ignored }, injection, || {}).unwrap();
        let output = run(&self.warm.scene, &[&self.id, "--force", "-o", "json"]);
        let is_over = tracing.is_over();
        let trace = tracing.finish().unwrap();
        assert!(output.status.success() || is_over || trace.is_injected, "{output:?}");
        trace
    }

    fn end(&mut self) {
        self.progress();
        fs::remove_file(crate::takeover::go(&self.file)).unwrap();
        assert!(self.writer.wait().unwrap().success(), "{}", self.warm.scene.log());
        self.warm.waiting();
        self.warm.scene.caller().take_down(&self.id, &["one"]).unwrap();
        self.warm.end();
    }
}

/// Upgrades the volume again and again, with a driver that is killed at each step.
fn kill_at_each_step(traced: &mut Traced) {
    traced.warm.waiting();
    let whole = traced.upgrade(None);
    let steps: Vec<Step> = whole.steps.into_iter().filter(|step| matches!(step.kind, Kind::Effect)).collect();
    let faults = steps.into_iter().flat_map(|step| {
        // The peer acts on a packet at once, or never gets it.
        let is_sent = step.name == "sendmsg";
        let before = is_sent.then(|| Injection { step: step.clone(), fault: Fault::KillBefore });
        before.into_iter().chain([Injection { step, fault: Fault::KillAfter }])
    });
    let (mut all, mut hit, mut undisturbed) = (0, 0, 0);
    for injection in faults {
        traced.progress();
        // Deaths at once, in a row, would give the volume up.
        traced.warm.scene.restart_driver();
        traced.warm.waiting();
        let before = traced.warm.serving();
        all += 1;
        if traced.upgrade(Some(injection)).is_injected {
            hit += 1;
            traced.warm.scene.driver.take().unwrap().kill().unwrap();
            traced.warm.scene.start_driver();
            traced.progress();
            undisturbed += usize::from(traced.warm.serving() == before);
        }
        traced.progress();
        traced.warm.serving();
    }
    // Other steps have the name of a new launch, which is another one each time.
    assert!(hit > all / 2, "{hit} of {all} steps were reached again");
    assert!(0 < undisturbed && undisturbed < hit, "the earlier daemon went on after {undisturbed} of {hit}");
}

#[test]
fn a_driver_that_is_killed_at_any_step_of_an_upgrade_leaves_one_daemon_and_no_error() {
    let mut traced = Traced::start();
    kill_at_each_step(&mut traced);
    traced.end();
}

#[test]
fn a_driver_that_is_killed_at_any_step_of_an_upgrade_of_a_mount_pod_leaves_one() {
    let manifests = ["--launcher", "manifest", "--manifests", "m", "--mount-image", "i"];
    let mut pods = None;
    let run_pods = |scene: &Scene| pods = Some(Pods::start(scene, &[("i", volume_binary())]));
    let mut traced = Traced::start_beside(&manifests, run_pods);
    kill_at_each_step(&mut traced);
    traced.end();
    // Before the sandbox is removed.
    pods.unwrap().end();
}

#[test]
fn after_an_upgrade_the_keeper_stands_by_again() {
    let mut traced = Traced::start();
    for _ in 0..2 {
        let waiting = traced.warm.waiting();
        traced.upgrade(None);
        assert_eq!(traced.warm.serving(), waiting, "the waiting daemon has followed");
        traced.progress();
        let waiting = traced.warm.waiting();
        traced.warm.scene.kill_driver();
        traced.warm.kill(traced.warm.serving());
        traced.progress();
        assert_eq!(traced.warm.serving(), waiting);
        traced.warm.scene.start_driver();
        traced.progress();
    }
    traced.end();
}

/// It has journaled that the daemon serves, and is killed then: the keeper has that daemon's sockets, not those of
/// the one before.
#[test]
fn after_an_upgrade_whose_driver_was_killed_the_keeper_has_the_sockets_of_the_daemon_that_serves() {
    let mut traced = Traced::start();
    let whole = traced.upgrade(None);
    let is_of_journal = |step: &&Step| step.object.contains("boots") && matches!(step.kind, Kind::Effect);
    let last = whole.steps.iter().rfind(is_of_journal).unwrap().clone();
    traced.progress();
    traced.warm.scene.restart_driver();
    traced.warm.waiting();
    let trace = traced.upgrade(Some(Injection { step: last.clone(), fault: Fault::KillAfter }));
    assert!(trace.is_injected, "{last}");
    traced.warm.scene.driver.take().unwrap().kill().unwrap();
    let serving = traced.warm.serving();
    traced.warm.scene.start_driver();
    assert_eq!(traced.warm.serving(), serving, "no other one has followed\n{}", traced.warm.scene.log());
    let waiting = traced.warm.waiting();
    traced.warm.scene.kill_driver();
    traced.warm.kill(serving);
    traced.progress();
    assert_eq!(traced.warm.serving(), waiting);
    traced.warm.scene.start_driver();
    traced.progress();
    // The driver asks the daemon for its release first.
    traced.warm.waiting();
    traced.upgrade(None);
    traced.end();
}

/// In a kubelet's place: runs the program of each image in the manifests that appear, as the pod's
/// container would be run, but for the container. A pod of an image that the node lacks, or the keeper's, never
/// runs.
pub(crate) struct Pods {
    stop: Arc<AtomicBool>,
    runs: std::thread::JoinHandle<()>,
}

impl Pods {
    pub(crate) fn start(scene: &Scene, programs: &[(&str, PathBuf)]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (manifests, is_over) = (scene.sandbox.path("m"), Arc::clone(&stop));
        let programs: Vec<_> =
            programs.iter().map(|(image, path)| ((*image).to_owned(), path.clone())).collect();
        let runs = std::thread::spawn(move || {
            let mut started: HashMap<String, Option<Child>> = HashMap::new();
            while !is_over.load(Ordering::Relaxed) {
                for pod in pods_in(&manifests) {
                    let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
                    started.entry(name).or_insert_with(|| run_pod(&pod, &programs));
                }
                for pod in started.values_mut().flatten() {
                    let _ended_or_not = pod.try_wait().unwrap();
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
            for pod in started.values_mut().flatten() {
                pod.wait().unwrap();
            }
        });
        Self { stop, runs }
    }

    /// All pods have ended.
    pub(crate) fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.runs.join().unwrap();
    }
}

pub(crate) fn pods_in(manifests: &Path) -> Vec<Value> {
    let names = fs::read_dir(manifests).unwrap().map(|entry| entry.unwrap().path());
    let whole = names.filter(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    // One that was removed meanwhile is none.
    whole.filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok()).collect()
}

pub(crate) fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().unwrap()
}

fn run_pod(pod: &Value, programs: &[(String, PathBuf)]) -> Option<Child> {
    let (_, program) = programs.iter().find(|(name, _)| name == image(pod))?;
    let nonce = pod["spec"]["containers"][0]["env"][0]["value"].as_str()?;
    let dial_dir = pod["spec"]["volumes"][0]["hostPath"]["path"].as_str().unwrap();
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child"]).arg(program).args(["serve", "--confine", "--socket"]);
    unshare.arg(Path::new(dial_dir).join("dial.sock")).env("HAWSER_NONCE", nonce);
    Some(unshare.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

fn with_image(image: &str) -> Flags {
    let keeper = keeper_binary().display().to_string();
    let flags = ["--launcher", "manifest", "--manifests", "m", "--mount-image", image, "--warm-daemons", "0"];
    Flags(flags.into_iter().chain(["--keeper-binary", &keeper]).map(str::to_owned).collect())
}

#[test]
fn mount_pods_are_upgraded_to_another_image_and_rolled_back_to_the_image_before() {
    let mut scene = Scene::start(with_image("i:1"));
    scene.sandbox.switch_fuse_guard_off();
    let silent = scene.sandbox.path("silent");
    install(&silent, faulty("is-silent").as_bytes());
    let programs = [("i:1", volume_binary()), ("i:2", volume_binary()), ("i:silent", silent)];
    let pods = Pods::start(&scene, &programs);
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    let serving = |scene: &Scene| {
        let pods = pods_in(&scene.sandbox.path("m"));
        let [pod] = &pods[..] else { panic!("{pods:?}") };
        assert_eq!(pod["metadata"]["annotations"]["hawser.dev/volume-id"], id, "{pod}");
        image(pod).to_owned()
    };
    for (next, result, serves) in [("i:2", "upgraded", "i:2"), ("i:silent", "rolled-back", "i:2")] {
        scene.kill_driver();
        scene.flags = with_image(next);
        scene.start_driver();
        let before = serving(&scene);
        let (rows, output) = upgrade(&scene, &[&id]);
        assert_eq!(rows[0]["result"], result, "{output:?}\n{}", scene.log());
        assert!(rows[0]["from"].as_str().unwrap().contains(&before), "{rows:?}");
        assert!(rows[0]["to"].as_str().unwrap().contains(next), "{rows:?}");
        assert_eq!(serving(&scene), serves);
        assert_eq!(fs::read(&file).unwrap(), b"kept");
    }
    end_pods(scene, pods, &id);
}

/// Of a test with a program `silent`, whose driver has started with the image `i:1`.
fn end_pods(mut scene: Scene, pods: Pods, id: &str) {
    // A takeover may be under way.
    tests::csi::scene::retried(&scene, "take down", || scene.caller().take_down(id, &["one"]));
    pods.end();
    // The ground is that of the first driver, before there was this file.
    fs::remove_file(scene.sandbox.path("silent")).unwrap();
    scene.kill_driver();
    scene.flags = with_image("i:1");
    scene.start_driver();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_driver_that_is_killed_while_an_image_that_cannot_serve_follows_leaves_the_image_before_to_the_next_one()
{
    let mut scene = Scene::start(with_image("i:1"));
    scene.sandbox.switch_fuse_guard_off();
    let silent = scene.sandbox.path("silent");
    install(&silent, faulty("is-silent").as_bytes());
    let pods = Pods::start(&scene, &[("i:1", volume_binary()), ("i:silent", silent)]);
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    scene.kill_driver();
    scene.flags = with_image("i:silent");
    scene.start_driver();
    let images = |scene: &Scene| -> Vec<String> {
        pods_in(&scene.sandbox.path("m")).iter().map(|pod| image(pod).to_owned()).collect()
    };
    let mut upgrade = command(&scene, &[&id]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Written after the journal, and before the daemon has answered.
    let successor = scene.dial_dir(&id).join("launch");
    eventually("the journal names the daemon that follows", TIMEOUT, || {
        anyhow::ensure!(successor.is_symlink(), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    scene.kill_driver();
    assert!(!upgrade.wait().unwrap().success());
    scene.start_driver();
    assert_eq!(fs::read(&file).unwrap(), b"kept", "{}", scene.log());
    assert_eq!(images(&scene), ["i:1"], "{}", scene.log());
    end_pods(scene, pods, &id);
}

/// They take turns, and none is lost.
#[test]
fn upgrades_at_the_same_time_as_each_other_and_other_calls_leave_one_daemon_and_no_error() {
    let used = Used::start();
    let caller = used.scene.caller();
    let begin = || {
        let mut command = command(&used.scene, &["--force", "-o", "json", &used.id]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut upgraded = 0;
    for round in 1..=4_i64 {
        let at_once: Vec<Child> = (0..4).map(|_| begin()).collect();
        tests::csi::scene::retried(&used.scene, "expand", || {
            crate::size::expand(&caller, &used.id, (2 + round) << 30)
        });
        let name = format!("snapshot-{round}");
        let snapshot = tests::csi::scene::retried(&used.scene, "snapshot", || {
            tests::csi::snapshots::snapshot_with(
                &caller,
                &name,
                &used.id,
                &[("snapshotMode", "blocking-copy")],
            )
        });
        tests::csi::snapshots::delete_snapshot(&caller, &snapshot.snapshot_id).unwrap();
        for one in at_once {
            let output = one.wait_with_output().unwrap();
            let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
            let is_upgraded = rows[0]["result"] == "upgraded";
            // A copy is not waited for.
            let is_copied =
                rows[0]["reason"].as_str().is_some_and(|reason| reason.contains("is being copied"));
            assert!(is_upgraded || is_copied, "{rows:?}\n{}", used.scene.log());
            upgraded += usize::from(is_upgraded);
        }
        used.load.progress();
        used.daemon();
    }
    assert!(upgraded > 0);
    assert_eq!(published(&used.scene)["takeovers"], upgraded);
    used.finish();
}
