//! A volume's daemon ends while no driver runs: the keeper gives the volume to a waiting daemon, and the
//! next driver finds it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use keeper::wire::{Call, ReplyHeader, Request, Status};
use linux::fd_passing::PacketListener;
use nix::sys::signal::Signal;
use tests::csi::programs::install;
use tests::csi::scene::{Flags, NODE, Scene, TIMEOUT, volume_binary};
use tests::eventually;
use tests::trace_steps::{Fault, Injection, Kind, Places, Step, Trace, Tracing};

use crate::keepers::{keeper_binary, kill_keeper, published};
use crate::takeover::{go, writer};
use crate::warm::{Warm, launch_dirs};

/// Longer than the keeper takes to give a volume to a waiting daemon.
const SETTLES: Duration = Duration::from_millis(100);
const TAKEN: &str = "another daemon has taken the volume over";

/// A volume that an application writes to in a process of its own.
struct Used {
    warm: Warm,
    id: String,
    file: PathBuf,
    writer: Child,
}

impl Used {
    fn start(waiting: u8) -> Self {
        Self::start_with(waiting, &[])
    }

    fn start_with(waiting: u8, more: &[&str]) -> Self {
        let keeper = ["--keeper-binary".to_owned(), keeper_binary().display().to_string()];
        let flags: Vec<String> =
            keeper.into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect();
        let warm = Warm::start(waiting, &flags);
        // The application waits until a driver has started.
        warm.scene.sandbox.switch_fuse_guard_off();
        let caller = warm.scene.caller();
        let id = caller.bring_up("pvc-1", &["one"]).unwrap();
        let file = caller.target_path("one").join("f");
        let writer = writer(&warm.scene, &file);
        warm.waiting();
        let mut used = Self { warm, id, file, writer };
        used.progress();
        used
    }

    /// Waits until the application has written and read twice.
    fn progress(&mut self) {
        crate::takeover::wait_for_writer(&self.warm.scene, &self.file, &mut self.writer);
    }

    /// Kills the serving daemon while no driver runs; the one that serves then.
    fn kill_without_driver(&mut self) -> i32 {
        let (serving, waiting) = (self.warm.serving(), self.warm.scene.waiting_daemons());
        self.warm.kill(serving);
        self.progress();
        let next = self.warm.serving();
        assert!(waiting.contains(&next), "{next} serves, {waiting:?} waited");
        next
    }

    fn takeovers(&self) -> u64 {
        published(&self.warm.scene)["takeovers"].as_u64().unwrap()
    }

    /// At most one process has the volume's connection, whenever one looks.
    fn ensure_one_connection(&self) {
        let serving = self.warm.scene.serving_daemons();
        assert!(serving.len() <= 1, "{serving:?} have one connection\n{}", self.warm.scene.log());
    }

    /// Kills the daemon, and traces the driver until it has another one serve, or is dead.
    fn traced_takeover(&mut self, injection: Option<Injection>) -> Trace {
        let taken = |used: &Self| used.warm.scene.log().matches(TAKEN).count();
        let before = taken(self);
        let root = self.warm.scene.sandbox.dir().to_owned();
        let ignored = vec![self.warm.scene.sandbox.path("driver.log"), "daemon.log".into()];
        let driver = self.warm.scene.driver.as_ref().unwrap().pid();
        let tracing = Tracing::start(driver, Places { root, ignored }, injection, || {}).unwrap();
        self.warm.kill(self.warm.serving());
        let begun = Instant::now();
        while !tracing.is_over() && taken(self) == before {
            self.ensure_one_connection();
            assert!(begun.elapsed() < TIMEOUT, "no takeover\n{}", self.warm.scene.log());
        }
        tracing.finish().unwrap()
    }

    /// The driver runs. Nothing is left but what waits for the next volume.
    fn finish(mut self) {
        self.progress();
        fs::remove_file(go(&self.file)).unwrap();
        assert!(self.writer.wait().unwrap().success(), "{}", self.warm.scene.log());
        self.warm.waiting();
        self.warm.scene.caller().take_down(&self.id, &["one"]).unwrap();
        assert!(self.warm.scene.serving_daemons().is_empty());
        let waiting = self.warm.scene.waiting_daemons().len();
        assert_eq!(launch_dirs(&self.warm.scene).len(), waiting, "only waiting daemons have directories");
        self.warm.finish();
    }
}

#[test]
fn an_application_goes_on_when_driver_and_daemon_have_been_killed_and_the_next_driver_adopts() {
    let mut used = Used::start(1);
    let mut takeovers = 0;
    for _ in 0..3 {
        used.warm.scene.kill_driver();
        let next = used.kill_without_driver();
        takeovers += 1;
        used.warm.scene.start_driver();
        assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
        let mount = published(&used.warm.scene);
        assert_eq!(mount["daemon_pid"].as_i64(), Some(next.into()));
        assert_eq!(used.takeovers(), takeovers);
        // The driver's own takeover, of the daemon that it has adopted.
        used.warm.waiting();
        used.warm.kill(next);
        used.progress();
        takeovers += 1;
        eventually("the journal has it", TIMEOUT, || {
            anyhow::ensure!(used.takeovers() == takeovers, "{} takeovers", used.takeovers());
            Ok(())
        })
        .unwrap();
        used.warm.waiting();
    }
    used.finish();
}

/// No process but the daemon has the connection then, and no record names that daemon.
#[test]
fn a_driver_adopts_the_daemon_that_a_keeper_which_has_ended_too_gave_a_volume() {
    let mut used = Used::start(1);
    used.warm.scene.kill_driver();
    let next = used.kill_without_driver();
    kill_keeper(&used.warm.scene);
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
    assert_eq!(published(&used.warm.scene)["daemon_pid"].as_i64(), Some(next.into()));
    assert_eq!(used.takeovers(), 1);
    used.progress();
    // The new keeper gets all that a successor needs.
    crate::keepers::wait_until_held(&used.warm.scene, 0);
    used.warm.waiting();
    used.warm.kill(next);
    used.progress();
    used.finish();
}

/// Another program starts the keeper. Returns the flags with which the driver does.
fn start_with_foreign_keeper(used: &mut Used) -> Flags {
    let earlier = used.warm.scene.flags.clone();
    used.warm.scene.flags = earlier.clone().with(&["--keeper-binary", "service"].map(str::to_owned));
    used.warm.scene.start_driver();
    earlier
}

fn still_adopts_with(mut used: Used, flags: Flags, daemon: i32) {
    used.progress();
    used.warm.scene.kill_driver();
    used.warm.scene.flags = flags;
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), daemon, "still adopted\n{}", used.warm.scene.log());
    crate::keepers::wait_until_held(&used.warm.scene, 0);
    used.finish();
}

/// Another program starts the keeper, later than the driver.
#[test]
fn a_driver_adopts_the_daemon_that_a_keeper_gave_a_volume_also_while_no_keeper_answers() {
    let mut used = Used::start(1);
    used.warm.scene.kill_driver();
    let next = used.kill_without_driver();
    kill_keeper(&used.warm.scene);
    let earlier = start_with_foreign_keeper(&mut used);
    assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
    assert_eq!(published(&used.warm.scene)["daemon_pid"].as_i64(), Some(next.into()));
    still_adopts_with(used, earlier, next);
}

#[test]
fn a_driver_adopts_the_daemon_that_a_keeper_gave_a_volume_though_the_next_keeper_ends_before_it_lists_any() {
    let mut used = Used::start(1);
    used.warm.scene.kill_driver();
    let next = used.kill_without_driver();
    kill_keeper(&used.warm.scene);
    let keeper = keeper_that_ends_when_it_is_asked_for_takeovers(&used.warm.scene);
    let earlier = start_with_foreign_keeper(&mut used);
    assert!(keeper.join().unwrap(), "it was asked\n{}", used.warm.scene.log());
    assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
    still_adopts_with(used, earlier, next);
}

/// Whether it was asked for them.
fn keeper_that_ends_when_it_is_asked_for_takeovers(scene: &Scene) -> JoinHandle<bool> {
    let path = scene.sandbox.path("run/keeper/keeper.sock");
    fs::remove_file(&path).unwrap();
    let listener = PacketListener::bind(&path).unwrap();
    thread::spawn(move || {
        let socket = listener.accept().unwrap();
        drop(listener);
        while let Ok(Some(packet)) = socket.receive() {
            let request = Request::decode(&packet).unwrap();
            if matches!(request.call, Call::Takeovers) {
                return true;
            }
            let header = ReplyHeader {
                version: request.call.version(),
                number: request.number,
                status: Status::Done,
                count: 0,
            };
            socket.send(&header.encode(), &[]).unwrap();
        }
        false
    })
}

/// It has given the volume to a daemon, and is killed before it journals that the daemon serves.
#[test]
fn a_driver_adopts_the_daemon_that_an_earlier_one_was_starting_although_the_keeper_has_ended() {
    let mut used = Used::start(2);
    let undisturbed = used.traced_takeover(None);
    let is_of_journal = |step: &&Step| step.object.contains("boots") && matches!(step.kind, Kind::Effect);
    let last = undisturbed.steps.iter().rfind(is_of_journal).unwrap().clone();
    used.progress();
    used.warm.waiting();
    used.warm.scene.restart_driver();
    used.warm.waiting();
    let trace = used.traced_takeover(Some(Injection { step: last.clone(), fault: Fault::KillBefore }));
    assert!(trace.is_injected, "{last}");
    used.warm.scene.driver.take().unwrap().kill().unwrap();
    kill_keeper(&used.warm.scene);
    let next = used.warm.serving();
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
    assert_eq!(published(&used.warm.scene)["daemon_pid"].as_i64(), Some(next.into()));
    used.progress();
    crate::keepers::wait_until_held(&used.warm.scene, 0);
    used.finish();
}

/// As in an upgrade: the driver is stopped, both programs are replaced, and it is started.
#[test]
fn a_driver_with_a_replaced_program_adopts_the_daemon_that_the_keeper_has_given_a_volume() {
    adopts_with_a_replaced_program(|_keeps| {});
}

#[test]
fn a_driver_with_a_replaced_program_adopts_the_daemon_though_the_keeper_has_ended_too() {
    adopts_with_a_replaced_program(kill_keeper);
}

fn adopts_with_a_replaced_program(meanwhile: impl FnOnce(&Scene)) {
    let mut used = Used::start(1);
    used.warm.scene.kill_driver();
    let next = used.kill_without_driver();
    meanwhile(&used.warm.scene);
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("hawser-volume");
    install(&program, &fs::read(volume_binary()).unwrap());
    let earlier = used.warm.scene.flags.clone();
    used.warm.scene.flags = earlier.with(&["--volume-binary".to_owned(), program.display().to_string()]);
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), next, "adopted\n{}", used.warm.scene.log());
    assert_eq!(published(&used.warm.scene)["daemon_pid"].as_i64(), Some(next.into()));
    used.progress();
    assert_eq!(used.takeovers(), 1);
    crate::keepers::wait_until_held(&used.warm.scene, 0);
    used.finish();
}

#[test]
fn daemons_that_are_killed_one_after_another_are_followed_as_long_as_one_waits() {
    let mut used = Used::start(2);
    used.warm.scene.kill_driver();
    for _ in 0..2 {
        used.kill_without_driver();
    }
    // Now none waits: the application waits for a driver, without an error.
    let last = used.warm.serving();
    used.warm.kill(last);
    assert!(used.warm.scene.daemons().is_empty());
    used.warm.scene.start_driver();
    used.progress();
    used.finish();
}

#[test]
fn two_daemons_that_followed_are_both_counted() {
    let mut used = Used::start(2);
    used.warm.scene.kill_driver();
    used.kill_without_driver();
    let last = used.kill_without_driver();
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), last);
    assert_eq!(used.takeovers(), 2);
    used.finish();
}

#[test]
fn a_driver_that_was_stopped_leaves_its_waiting_daemon_to_a_volume_that_may_need_it() {
    let mut used = Used::start(1);
    used.warm.scene.driver.take().unwrap().stop(TIMEOUT).unwrap();
    let next = used.kill_without_driver();
    used.warm.scene.start_driver();
    assert_eq!(used.warm.serving(), next);
    used.finish();
}

/// The volume grew while a driver ran: so has what the next daemon enforces.
#[test]
fn a_daemon_that_follows_without_a_driver_enforces_the_volumes_size_of_now() {
    let mut used = Used::start(1);
    let caller = used.warm.scene.caller();
    let grown = 3_i64 << 30;
    let total = |used: &Used| {
        let found = rustix::fs::statvfs(used.file.parent().unwrap()).unwrap();
        i64::try_from(found.f_blocks * found.f_frsize).unwrap()
    };
    assert_ne!(total(&used), grown);
    assert_eq!(crate::size::expand(&caller, &used.id, grown).unwrap(), grown);
    assert_eq!(total(&used), grown);
    used.warm.scene.kill_driver();
    used.kill_without_driver();
    assert_eq!(total(&used), grown);
    used.warm.scene.start_driver();
    used.finish();
}

/// Either the driver or the keeper goes on with a takeover.
#[test]
fn a_driver_that_is_killed_at_any_step_of_its_own_takeover_leaves_one_daemon_at_most() {
    let mut used = Used::start(2);
    let undisturbed = used.traced_takeover(None);
    let steps: Vec<Step> =
        undisturbed.steps.into_iter().filter(|step| matches!(step.kind, Kind::Effect)).collect();
    let (mut hit, mut by_keeper) = (0, 0);
    for step in &steps {
        used.progress();
        used.warm.waiting();
        // Deaths at once, in a row, would give the volume up.
        used.warm.scene.restart_driver();
        used.warm.waiting();
        let fault = if step.name == "sendmsg" { Fault::KillBefore } else { Fault::KillAfter };
        let trace = used.traced_takeover(Some(Injection { step: step.clone(), fault }));
        // What the keeper does, it does at once. The volume is not looked at: it may have no daemon.
        let begun = Instant::now();
        while begun.elapsed() < SETTLES {
            used.ensure_one_connection();
        }
        if trace.is_injected {
            let said_before = used.warm.scene.log().len();
            used.warm.scene.driver.take().unwrap().kill().unwrap();
            used.warm.scene.start_driver();
            hit += 1;
            by_keeper += usize::from(used.warm.scene.log()[said_before..].contains("while no driver ran"));
        }
        used.ensure_one_connection();
    }
    // Other steps have the name of a new launch, which is another one each time.
    assert!(hit > steps.len() / 2, "{hit} of {} steps were reached again", steps.len());
    assert!(0 < by_keeper && by_keeper < hit, "the keeper served {by_keeper} of {hit}");
    used.finish();
}

/// The keeper is armed, so it could give the volume to a daemon too. However long it is stopped, no daemon
/// has died of that.
#[test]
fn a_takeover_waits_for_a_keeper_that_is_stopped() {
    let mut used = Used::start_with(1, &["--daemon-deadline", "1"]);
    used.warm.scene.sandbox.switch_fuse_guard_off();
    let [keeper] = crate::keepers::keepers(&used.warm.scene)[..] else { panic!("one keeper") };
    let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGSTOP as i32).unwrap();
    tests::wait_until_stopped(keeper, TIMEOUT).unwrap();
    used.warm.kill(used.warm.serving());
    // More than daemons that may die at once, and for longer than three daemons in a row may hang.
    eventually("many attempts", 3 * TIMEOUT, || {
        assert!(used.writer.try_wait()?.is_none(), "it failed\n{}", used.warm.scene.log());
        let attempts = used.warm.scene.log().matches("the volume over yet").count();
        anyhow::ensure!(attempts >= 30, "{attempts}");
        Ok(())
    })
    .unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGCONT as i32).unwrap();
    used.progress();
    used.finish();
}

#[test]
fn without_a_driver_the_views_and_the_doctor_know_what_the_keeper_does() {
    let mut used = Used::start(1);
    used.warm.scene.sandbox.switch_fuse_guard_off();
    used.warm.scene.kill_driver();
    let next = used.kill_without_driver();
    assert_eq!(published(&used.warm.scene)["daemon"], "serves");
    let volumes = crate::keepers::view(&used.warm.scene, "volumes", "json");
    assert!(volumes.contains("\"published\"") && !volumes.contains("dead"), "{volumes}");
    let found = doctor(&used.warm.scene);
    assert!(!found.contains("dead") && !found.contains("ENOTCONN"), "{found}");
    // None waits: the application waits for a driver.
    used.warm.kill(next);
    let mount = published(&used.warm.scene);
    assert_eq!((&mount["daemon"], &mount["holders"]), (&"dead".into(), &serde_json::json!(["keeper"])));
    let found = doctor(&used.warm.scene);
    assert!(found.contains("1 targets wait for a driver"), "{found}");
    assert!(!found.contains("ENOTCONN"), "{found}");
    used.warm.scene.start_driver();
    used.progress();
    assert!(!doctor(&used.warm.scene).contains("targets"));
    used.finish();
}

fn doctor(scene: &Scene) -> String {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    let path = |name: &str| scene.sandbox.path(name);
    command.args(["doctor", "-o", "json", "--node-id", NODE, "--log", "error"]);
    command.arg("--kubelet-dir").arg(path("k")).arg("--pool").arg(path("pool"));
    command.arg("--state-dir").arg(path("state")).arg("--run-dir").arg(path("run"));
    let output = command.args(&scene.flags.0).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(found.starts_with('['), "{found}{}", String::from_utf8_lossy(&output.stderr));
    found
}
