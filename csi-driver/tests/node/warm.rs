//! Daemons that are started before a volume needs one (`--warm-daemons`).

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tests::csi::scene::{Flags, Scene, TIMEOUT, retried, volume_binary};
use tests::eventually;

/// Longer than what the driver takes for a daemon that died at once.
const LIVES: Duration = Duration::from_millis(60);

/// A driver with waiting daemons, on the ground of a driver without any.
pub(crate) struct Warm {
    pub(crate) scene: Scene,
    cold: Flags,
    wanted: usize,
}

impl Warm {
    pub(crate) fn start(wanted: u8, more: &[String]) -> Self {
        Self::start_beside(wanted, more, |_| {})
    }

    /// `beside` starts what runs the daemons, if the driver does not.
    pub(crate) fn start_beside(wanted: u8, more: &[String], beside: impl FnOnce(&Scene)) -> Self {
        let with = |flags: Flags| flags.with(more);
        let cold = with(Flags::process());
        let mut scene = Scene::start(cold.clone());
        beside(&scene);
        scene.flags = with(Flags::warm_process(wanted));
        scene.restart_driver();
        let warm = Self { scene, cold, wanted: wanted.into() };
        warm.waiting();
        warm
    }

    /// Returns once all wait; the first.
    pub(crate) fn waiting(&self) -> i32 {
        wait_for_waiting(&self.scene, self.wanted)[0]
    }

    pub(crate) fn serving(&self) -> i32 {
        let [serving] = self.scene.serving_daemons()[..] else {
            panic!("{:?}\n{}", self.scene.serving_daemons(), self.scene.log());
        };
        serving
    }

    pub(crate) fn kill(&self, pid: i32) {
        let pidfd = linux::process::open_pidfd(pid).unwrap().unwrap();
        assert!(linux::process::signal_pidfd(&pidfd, Signal::SIGKILL as i32).unwrap());
        assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap());
    }

    /// A driver that wants no waiting daemon finds nothing of an earlier one's.
    pub(crate) fn finish(mut self) {
        self.end();
    }

    /// As [`Self::finish`], and the sandbox stays.
    pub(crate) fn end(&mut self) {
        self.scene.flags = self.cold.clone();
        self.scene.restart_driver();
        self.scene.assert_nothing_left();
    }
}

/// Returns once so many daemons wait for a volume, and the driver has all of them to give away: their pids.
pub(crate) fn wait_for_waiting(scene: &Scene, wanted: usize) -> Vec<i32> {
    eventually("all daemons wait", TIMEOUT, || {
        let (waiting, log) = (scene.waiting_daemons(), scene.log_of_this_driver());
        anyhow::ensure!(waiting.len() == wanted, "{waiting:?}\n{log}");
        // A process is found before it has dialled in, and the driver logs it once it is queued.
        let is_queued = |pid: &i32| {
            let ends = format!(" pid={pid}");
            let mut lines = log.lines().filter(|line| line.contains("a daemon waits for the next volume"));
            lines.any(|line| line.ends_with(&ends))
        };
        anyhow::ensure!(waiting.iter().all(is_queued), "{waiting:?} are not all queued\n{log}");
        Ok(waiting)
    })
    .unwrap()
}

pub(crate) fn launch_dirs(scene: &Scene) -> Vec<PathBuf> {
    let entries = fs::read_dir(scene.sandbox.path("run")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir() && path.file_name().is_some_and(|name| name.len() == 32)).collect()
}

#[test]
fn a_stage_gets_the_waiting_daemon_and_another_one_waits() {
    let warm = Warm::start(1, &[]);
    let caller = warm.scene.caller();
    let first = warm.waiting();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    assert_eq!(warm.serving(), first);
    let second = warm.waiting();
    assert_ne!(second, first);
    let file = caller.target_path("one").join("f");
    fs::write(&file, "text").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "text");
    assert!(!caller.stats(&id, &caller.target_path("one")).unwrap().volume_condition.unwrap().abnormal);
    caller.take_down(&id, &["one"]).unwrap();
    assert_eq!(warm.scene.daemons(), [second], "the volume's daemon has ended");
    assert_eq!(launch_dirs(&warm.scene).len(), 1);
    warm.finish();
}

#[test]
fn a_waiting_daemon_that_ends_is_replaced_and_one_that_is_stopped_costs_no_stage() {
    let warm = Warm::start(1, &[]);
    let first = warm.waiting();
    warm.kill(first);
    let second = warm.waiting();
    assert_ne!(first, second);
    // Nobody notices that it is stopped until it gets a volume.
    let pidfd = linux::process::open_pidfd(second).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGSTOP as i32).unwrap();
    let caller = warm.scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let refused = caller.stage(&id).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::DeadlineExceeded, "{refused}");
    caller.stage(&id).unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    warm.finish();
}

#[test]
fn a_volume_with_settings_of_its_own_gets_a_daemon_of_its_own() {
    let warm = Warm::start(1, &[]);
    let waiting = warm.waiting();
    let caller = warm.scene.caller();
    let mut request = tests::csi::scene::create_request("pvc-1");
    request.parameters.insert("mountPodMemoryLimit".to_owned(), "64Mi".to_owned());
    let id = caller.create(request).unwrap().volume_id;
    caller.stage(&id).unwrap();
    assert_ne!(warm.serving(), waiting);
    assert_eq!(warm.waiting(), waiting);
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    warm.finish();
}

#[test]
fn a_driver_that_is_killed_leaves_served_volumes_and_no_waiting_daemon() {
    let mut warm = Warm::start(1, &[]);
    let caller = warm.scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let (serving, waiting) = (warm.serving(), warm.waiting());
    warm.scene.kill_driver();
    eventually("the waiting daemon ends with its driver", TIMEOUT, || {
        let daemons = warm.scene.daemons();
        anyhow::ensure!(daemons == [serving], "{daemons:?}, {waiting} waited");
        Ok(())
    })
    .unwrap();
    warm.scene.start_driver();
    warm.waiting();
    assert_eq!(warm.serving(), serving, "adopted");
    fs::write(caller.target_path("one").join("f"), "text").unwrap();
    assert!(!caller.stats(&id, &caller.target_path("one")).unwrap().volume_condition.unwrap().abnormal);
    caller.take_down(&id, &["one"]).unwrap();
    warm.finish();
}

#[test]
fn a_driver_that_is_stopped_ends_its_waiting_daemons() {
    let mut warm = Warm::start(1, &[]);
    warm.scene.driver.take().unwrap().stop(TIMEOUT).unwrap();
    assert_eq!(warm.scene.daemons(), [0; 0]);
    assert_eq!(launch_dirs(&warm.scene).len(), 0);
    warm.scene.start_driver();
    warm.waiting();
    warm.finish();
}

#[test]
fn a_volume_of_a_lost_journal_keeps_the_daemon_that_had_waited() {
    let mut warm = Warm::start(1, &[]);
    let caller = warm.scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let serving = warm.serving();
    warm.scene.kill_driver();
    let journal = warm.scene.sandbox.path("state");
    fs::rename(&journal, warm.scene.sandbox.path("kept")).unwrap();
    warm.scene.start_driver();
    assert_eq!(warm.serving(), serving);
    fs::write(caller.target_path("one").join("f"), "text").unwrap();
    warm.scene.kill_driver();
    fs::remove_dir_all(&journal).unwrap();
    fs::rename(warm.scene.sandbox.path("kept"), &journal).unwrap();
    warm.scene.start_driver();
    assert_eq!(warm.serving(), serving);
    caller.take_down(&id, &["one"]).unwrap();
    warm.finish();
}

#[test]
fn a_killed_daemon_is_followed_by_the_waiting_one() {
    let keeper = volume_binary().with_file_name("hawser-keeper");
    assert!(keeper.is_file(), "{} is missing: run `cargo build -p keeper` first", keeper.display());
    let warm = Warm::start(1, &["--keeper-binary".to_owned(), keeper.display().to_string()]);
    // The file's user waits for each takeover.
    warm.scene.sandbox.switch_fuse_guard_off();
    let caller = warm.scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let file = caller.target_path("one").join("f");
    for round in 0..10_u32 {
        let (serving, waiting) = (warm.serving(), warm.waiting());
        warm.kill(serving);
        fs::write(&file, round.to_string()).unwrap();
        // A daemon that dies at once counts towards the end of the connection.
        let begun = Instant::now();
        while begun.elapsed() < LIVES {
            assert_eq!(fs::read_to_string(&file).unwrap(), round.to_string());
        }
        eventually("the waiting daemon serves", TIMEOUT, || {
            let now = warm.scene.serving_daemons();
            anyhow::ensure!(now == [waiting], "{now:?}, {waiting} waited, {serving} was killed");
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error:#}\n{}", warm.scene.log()));
    }
    // The driver may still record the last takeover.
    retried(&warm.scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    warm.finish();
}
