//! A driver with a keeper, volumes with applications, and the kills.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use proto::csi::{CapacityRange, CreateVolumeRequest};
use tests::csi::scene::{Caller, Flags, GI, Scene, create_request, is_uncertain};
use tests::csi::snapshots::with;
use tests::random::Random;
use tests::{Sandbox, eventually};
use tonic::{Code, Status};

use crate::TIMEOUT;
use crate::app::{App, Ended};
use crate::process::{self, Daemon, Holders};
use crate::report::{Report, Target};

const SEED: &str = "HAWSER_CHAOS_SEED";
/// A daemon that dies sooner has died at once: after eight in a row the driver ends the connection.
const LIVES: Duration = Duration::from_millis(60);
/// Answers of the daemon between two kills.
const PROBED: u64 = 20;
/// Longest wait for a step of an application whose steps are whole programs.
const COARSE: Duration = Duration::from_secs(1);
/// For a call to the driver, with repetitions.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
const PROBE: &str = "probe";
const LAST_LINES: usize = 150;

#[derive(Debug, Clone)]
pub(crate) struct Volume {
    pub(crate) id: String,
    pub(crate) pod: String,
    /// Where it is published.
    pub(crate) path: PathBuf,
}

/// Which way the volume's data takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Class {
    #[default]
    ByDaemon,
    /// The kernel reads and writes.
    Passing,
    /// As the driver chooses in a pool with quotas: the kernel reads, writes and limits.
    Limited,
}

impl Class {
    fn parameters(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::ByDaemon => &[("dataPath", "daemon"), ("capacity", "daemon")],
            Self::Passing => &[("dataPath", "passthrough"), ("capacity", "none")],
            Self::Limited => &[],
        }
    }

    /// Data path and capacity policy.
    fn policies(self) -> (&'static str, &'static str) {
        match self {
            Self::ByDaemon => ("daemon", "daemon"),
            Self::Passing => ("passthrough", "none"),
            Self::Limited => ("passthrough", "kernel"),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Suite {
    pub(crate) scene: Scene,
    pub(crate) random: Random,
    pub(crate) volumes: Vec<Volume>,
    /// Of the class of the next volume.
    pub(crate) class: Class,
    apps: Vec<App>,
    started: usize,
    report: Report,
}

impl Suite {
    pub(crate) fn start() -> Self {
        Self::start_in(Sandbox::new())
    }

    pub(crate) fn start_in(sandbox: Sandbox) -> Self {
        let seed = Random::seed(SEED);
        eprintln!("{SEED}={seed}");
        // Here a connection whose requests wait is the normal case.
        sandbox.switch_fuse_guard_off();
        let scene = Scene::start_in(sandbox, Flags::process_with_keeper());
        let (volumes, apps) = (Vec::new(), Vec::new());
        let class = Class::default();
        Self { scene, random: Random::new(seed), volumes, class, apps, started: 0, report: Report::default() }
    }

    /// A volume of 1 Gi that a pod uses.
    pub(crate) fn volume(&mut self) -> Volume {
        self.volume_of(GI)
    }

    pub(crate) fn volume_of(&mut self, bytes: i64) -> Volume {
        let pod = format!("pod-{}", self.volumes.len());
        let capacity_range = Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 });
        let request = with(create_request(&format!("of-{pod}")), self.class.parameters());
        let request = CreateVolumeRequest { capacity_range, ..request };
        let id = self.call("create", move |caller| caller.create(request.clone())).volume_id;
        self.call("stage", {
            let id = id.clone();
            move |caller| caller.stage(&id)
        });
        self.call("publish", {
            let (id, pod) = (id.clone(), pod.clone());
            move |caller| caller.publish(&id, &pod)
        });
        let (data_path, capacity) = self.scene.policies(&id).unwrap();
        assert_eq!((data_path.as_str(), capacity.as_str()), self.class.policies());
        let path = self.scene.caller().target_path(&pod);
        let volume = Volume { id, pod, path };
        self.volumes.push(volume.clone());
        volume
    }

    /// Starts applications on the volume, and one that measures pauses.
    pub(crate) fn applications(&mut self, volume: &Volume, names: &[&str]) {
        self.application(volume, PROBE);
        for name in names {
            self.application(volume, name);
        }
    }

    /// Locks are in a directory that all applications of their kind use.
    pub(crate) fn application(&mut self, volume: &Volume, name: &str) {
        let own = format!("{name}-{}", self.started);
        let dir = volume.path.join(if name.starts_with("lock-") { "locks" } else { own.as_str() });
        let seed = self.random.number() >> 32;
        self.apps.push(App::start(&self.scene.sandbox, self.started, name, &dir, seed));
        self.started += 1;
    }

    /// Waits until every application has made progress, and daemons have not died at once.
    pub(crate) fn progress(&mut self) {
        let before: Vec<u64> = self.apps.iter().map(App::steps).collect();
        let begun = Instant::now();
        loop {
            self.check_applications();
            let made = |(app, before): (&App, &u64)| match app.name.as_str() {
                PROBE => app.steps() >= before + PROBED,
                _ => app.steps() > *before || (begun.elapsed() >= COARSE && app.steps() > 0),
            };
            if begun.elapsed() >= LIVES && self.apps.iter().zip(&before).all(made) {
                return;
            }
            if begun.elapsed() > TIMEOUT {
                self.fail("an application makes no progress");
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// Their steps are single requests.
    fn probes(&self) -> impl Iterator<Item = &App> {
        self.apps.iter().filter(|app| app.name == PROBE)
    }

    fn check_applications(&mut self) {
        let ended =
            self.apps.iter_mut().find_map(|app| app.ended().map(|status| format!("{}: {status}", app.name)));
        if let Some(ended) = ended {
            self.fail(&format!("an application has failed: {ended}"));
        }
    }

    pub(crate) fn holders(&self) -> Holders {
        let ids: Vec<&str> = self.volumes.iter().map(|volume| volume.id.as_str()).collect();
        process::holders(&self.scene, &ids)
    }

    /// Waits until another process than the daemons holds all connections.
    fn wait_for_holder(&self) -> Holders {
        let held = eventually("driver or keeper holds the connections", TIMEOUT, || {
            let holders = self.holders();
            anyhow::ensure!(holders.keeper || holders.driver, "{holders:?}");
            Ok(holders)
        });
        held.unwrap_or_else(|error| self.fail(&format!("{error:#}")))
    }

    /// One kill, at random, and progress after it.
    pub(crate) fn kill(&mut self) {
        let target = *self.random.pick(&Target::ALL);
        self.kill_or_daemon(target);
    }

    /// Kills a daemon instead, if only the driver holds the connections: then the driver starts another
    /// keeper, if it has not yet.
    pub(crate) fn kill_or_daemon(&mut self, target: Target) {
        let target = match self.wait_for_holder() {
            Holders { keeper: true, driver: true } => target,
            Holders { .. } => Target::Daemon,
        };
        let seen: Vec<usize> = self.probes().map(|probe| probe.pauses().len()).collect();
        self.kill_now(target);
        self.progress();
        let new = self.probes().zip(seen).flat_map(|(probe, seen)| probe.pauses().split_off(seen));
        let pause = new.max().unwrap_or_default();
        self.report.add(target, pause);
    }

    /// Kills daemons until a keeper holds everything again: a takeover makes the driver start one.
    pub(crate) fn have_keeper(&mut self) {
        while !self.holders().keeper {
            self.kill_or_daemon(Target::Daemon);
        }
    }

    fn kill_now(&mut self, target: Target) {
        match target {
            Target::Daemon => {
                let (volume, daemon) = self.any_daemon();
                process::kill_now(daemon.pid);
                self.wait_for_successor(&volume, daemon);
            }
            Target::Keeper => {
                let keeper = process::keeper(&self.scene);
                let keeper = keeper.unwrap_or_else(|| self.fail("no keeper answers"));
                process::kill_now(keeper);
            }
            Target::Driver => {
                self.scene.kill_driver();
                self.scene.start_driver();
            }
            Target::DriverAndDaemon => {
                let (volume, daemon) = self.any_daemon();
                self.scene.kill_driver();
                process::kill_now(daemon.pid);
                self.scene.start_driver();
                self.wait_for_successor(&volume, daemon);
            }
        }
    }

    fn any_daemon(&mut self) -> (Volume, Daemon) {
        let volume = self.random.pick(&self.volumes).clone();
        let daemon = self.daemon(&volume);
        (volume, daemon)
    }

    /// The one that serves the volume.
    pub(crate) fn daemon(&self, volume: &Volume) -> Daemon {
        let daemon = process::daemon(&self.scene, &volume.id).filter(|daemon| process::is_alive(daemon.pid));
        daemon.unwrap_or_else(|| self.fail(&format!("no daemon serves {}", volume.id)))
    }

    pub(crate) fn wait_for_successor(&self, volume: &Volume, before: Daemon) {
        let served = eventually("another daemon serves", TIMEOUT, || {
            let now = process::daemon(&self.scene, &volume.id);
            let is_another = now.is_some_and(|now| now.pid != before.pid && process::is_alive(now.pid));
            anyhow::ensure!(is_another, "{before:?}, then {now:?}");
            Ok(())
        });
        served.unwrap_or_else(|error| self.fail(&format!("{error:#}")));
    }

    /// Calls the driver as kubelet does: again, when the answer is not final.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        what: &str,
        call: impl Fn(&Caller) -> Result<T, Status> + Send + 'static,
    ) -> T {
        self.begin(what, call).join(self)
    }

    /// The same in another thread, so that something can be killed meanwhile.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        what: &str,
        call: impl Fn(&Caller) -> Result<T, Status> + Send + 'static,
    ) -> Call<T> {
        let (sender, answer) = channel();
        let (caller, begun) = (self.scene.caller(), Instant::now());
        std::thread::spawn(move || {
            let answer = loop {
                match call(&caller) {
                    Err(status) if is_repeated(&status) && begun.elapsed() < CALL_TIMEOUT => {
                        std::thread::park_timeout(Duration::from_millis(20));
                    }
                    answer => break answer,
                }
            };
            let _gave_up = sender.send(answer);
        });
        Call { what: what.to_owned(), answer }
    }

    /// Works on a volume in another thread, with a time limit.
    pub(crate) fn on_volume<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (sender, answer) = channel();
        std::thread::spawn(move || {
            let _gave_up = sender.send(work());
        });
        let answer = answer.recv_timeout(TIMEOUT);
        answer.unwrap_or_else(|error| self.fail(&format!("{what}: {error}")))
    }

    /// Ends all applications, the latest first: each verifies what it has.
    pub(crate) fn end_applications(&mut self) {
        while let Some(mut app) = self.apps.pop() {
            if let Ended::Badly(how) = app.end() {
                self.apps.push(app);
                self.fail(&how);
            }
            eprintln!("{}: {} steps, longest {:?}", app.name, app.steps(), app.pauses().into_iter().max());
        }
    }

    /// The sum of the numbers that applications have reported in files of this name.
    pub(crate) fn reported(&self, name: &str) -> u64 {
        let reports = std::fs::read_dir(self.scene.sandbox.path("apps")).unwrap().flatten();
        let numbers = reports.filter_map(|report| std::fs::read_to_string(report.path().join(name)).ok());
        numbers.map(|number| number.parse::<u64>().unwrap()).sum()
    }

    /// Ends all applications and removes all volumes.
    pub(crate) fn empty(&mut self) {
        self.end_applications();
        for volume in std::mem::take(&mut self.volumes) {
            self.take_down(volume);
        }
    }

    /// Ends everything, and proves that nothing is left.
    pub(crate) fn finish(mut self) {
        self.empty();
        eprintln!("{}", self.report);
        let reports = self.scene.sandbox.path("apps");
        if reports.exists() {
            std::fs::remove_dir_all(reports).unwrap();
        }
        self.scene.assert_nothing_left();
        self.end_keeper();
    }

    pub(crate) fn take_down(&self, Volume { id, pod, .. }: Volume) {
        self.call("take down", move |caller| caller.take_down(&id, &[&pod]));
    }

    /// As an administrator does: it ends at once, because it holds nothing.
    fn end_keeper(self) {
        let keeper = process::keeper(&self.scene).unwrap_or_else(|| self.fail("no keeper answers"));
        let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
        linux::process::signal_pidfd(&pidfd, nix::sys::signal::Signal::SIGTERM as i32).unwrap();
        assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap(), "the keeper holds something");
    }

    /// Fails the test with all that may explain it. What is left ends with the sandbox, which kills
    /// every process and aborts every connection.
    pub(crate) fn fail(&self, why: &str) -> ! {
        let mut text = format!("{why}\n{}\n", self.report);
        for volume in &self.volumes {
            let daemon = process::daemon(&self.scene, &volume.id);
            let waiting = daemon.map_or(0, |daemon| process::waiting(&self.scene, daemon.minor));
            let held = daemon.map(|daemon| process::nameless_files(daemon.pid));
            text.push_str(&format!("{}: {daemon:?}, {waiting} requests wait, {held:?}\n", volume.id));
        }
        text.push_str(&format!("{:?}\n", self.holders()));
        for app in &self.apps {
            text.push_str(&format!("{}: {} steps\n{}\n", app.name, app.steps(), app.messages()));
        }
        let log = self.scene.log();
        // The gRPC library logs each frame.
        let lines: Vec<&str> =
            log.lines().filter(|line| !line.contains("frame=") && !line.contains("settings ACK")).collect();
        text.push_str("--- the end of the driver's log:\n");
        text.push_str(&lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"));
        panic!("{text}");
    }
}

impl Drop for Suite {
    /// After a failure, users may wait for a daemon that never comes, and looks at their processes too.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for volume in &self.volumes {
                let minor = process::daemon(&self.scene, &volume.id)
                    .and_then(|daemon| u32::try_from(daemon.minor).ok());
                let abort = |minor| linux::mount::abort_fuse(&self.scene.sandbox.path("fusectl"), minor);
                let _ended_already = minor.map(abort);
            }
        }
    }
}

/// A call that is being made.
#[derive(Debug)]
pub(crate) struct Call<T> {
    what: String,
    answer: std::sync::mpsc::Receiver<Result<T, Status>>,
}

impl<T> Call<T> {
    pub(crate) fn join(self, suite: &Suite) -> T {
        match self.answer.recv_timeout(CALL_TIMEOUT + TIMEOUT) {
            Ok(Ok(value)) => value,
            Ok(Err(status)) => suite.fail(&format!("{}: {status:?}", self.what)),
            Err(RecvTimeoutError::Timeout) => suite.fail(&format!("{}: no answer", self.what)),
            Err(RecvTimeoutError::Disconnected) => suite.fail(&format!("{}: a panic", self.what)),
        }
    }
}

/// A driver that is killed answers nothing, which the client reports as an unknown error.
fn is_repeated(status: &Status) -> bool {
    is_uncertain(status) || status.code() == Code::Unknown
}
