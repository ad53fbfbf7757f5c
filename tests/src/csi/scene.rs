//! One driver in a sandbox of its own, a caller with kubelet's habits, and the
//! proof that nothing is left.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test that uses it")]

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hyper_util::rt::TokioIo;
use linux::mountinfo::MountEntry;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::Signal;
use proto::csi::controller_client::ControllerClient;
use proto::csi::identity_client::IdentityClient;
use proto::csi::node_client::NodeClient;
use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use proto::csi::{
    CapacityRange, CreateVolumeRequest, DeleteVolumeRequest, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, Volume, VolumeCapability,
};
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::{Allowed, Daemon, LeakCheck, Sandbox, binaries, eventually, wait_until_stopped};

pub const NODE: &str = "node-1";
pub const TIMEOUT: Duration = Duration::from_secs(30);
pub const GI: i64 = 1 << 30;

/// The driver under test.
pub fn driver_binary() -> PathBuf {
    binaries::under_test("hawser-csi").unwrap()
}

/// `hawser-volume` lies where the driver under test was built to.
pub fn volume_binary() -> PathBuf {
    let path = driver_binary().with_file_name("hawser-volume");
    assert!(path.is_file(), "{} is missing: run `cargo build -p volume-local` first", path.display());
    path
}

/// How the driver is started.
#[derive(Debug, Clone)]
pub struct Flags(pub Vec<String>);

impl Flags {
    /// Daemons as child processes, each started for its volume, a pool of 10 Gi, no keeper: a daemon's
    /// death ends its connection.
    pub fn process() -> Self {
        Self::warm_process(0)
    }

    /// The same, and so many daemons wait for a volume.
    pub fn warm_process(daemons: u8) -> Self {
        let Self(mut flags) = Self::children(daemons);
        flags.extend(["--keeper-binary", "none"].map(str::to_owned));
        Self(flags)
    }

    /// As [`Self::process`], with the keeper beside the driver.
    pub fn process_with_keeper() -> Self {
        let keeper = driver_binary().with_file_name("hawser-keeper");
        assert!(keeper.is_file(), "{} is missing: run `cargo build -p keeper` first", keeper.display());
        Self::children(0)
    }

    /// With these flags, each with its value, in place of those of the same names.
    pub fn with(self, more: &[String]) -> Self {
        let is_replaced = |flag: &[String]| more.chunks(2).any(|other| other.first() == flag.first());
        let kept = self.0.chunks(2).filter(|flag| !is_replaced(flag)).flatten().cloned();
        Self(kept.chain(more.iter().cloned()).collect())
    }

    fn children(warm_daemons: u8) -> Self {
        let (volume_binary, daemons) = (volume_binary().display().to_string(), warm_daemons.to_string());
        let flags = ["--launcher", "process", "--volume-binary", &volume_binary, "--pool-capacity", "10Gi"];
        Self(flags.into_iter().chain(["--warm-daemons", &daemons]).map(str::to_owned).collect())
    }
}

/// Fields are dropped in order: the driver before its sandbox.
#[derive(Debug)]
pub struct Scene {
    pub driver: Option<Daemon>,
    /// Of the next start.
    pub flags: Flags,
    ground: Option<LeakCheck>,
    /// Bytes of the log that are of earlier drivers.
    earlier_log: usize,
    pub sandbox: Sandbox,
}

impl Scene {
    /// A driver that serves, on a kubelet directory that is rshared as kubelet makes it.
    pub fn start(flags: Flags) -> Self {
        Self::start_in(Sandbox::new(), flags)
    }

    /// In a sandbox in which something was made ready: a pool on a file system of its own.
    pub fn start_in(sandbox: Sandbox, flags: Flags) -> Self {
        for dir in ["k", "m", "pool"] {
            sandbox.make_dir(dir).unwrap();
        }
        // As on a machine with systemd: below a shared root, what is mounted in a
        // directory that is bound on itself stands in mountinfo twice.
        linux::mount::make_shared(Path::new("/")).unwrap();
        let kubelet_dir = sandbox.path("k");
        linux::mount::bind(&kubelet_dir, &kubelet_dir).unwrap();
        linux::mount::make_shared(&kubelet_dir).unwrap();
        let mut scene = Self { driver: None, flags, ground: None, earlier_log: 0, sandbox };
        scene.start_driver();
        fs::create_dir_all(scene.kubelet_dir().join("pods")).unwrap();
        scene.ground = Some(scene.ground(Vec::new()));
        scene
    }

    pub fn start_driver(&mut self) {
        self.earlier_log = self.log().len();
        self.driver = Some(self.spawn_driver());
        let (csi, registration) = (self.csi_socket(), self.registration_socket());
        let earlier_log = self.earlier_log;
        let driver = self.driver.as_mut().unwrap();
        eventually("the driver listens", TIMEOUT, || {
            anyhow::ensure!(driver.ended()?.is_none(), "it ended:\n{}", driver.output());
            let accepts = |path: &Path| std::os::unix::net::UnixStream::connect(path).is_ok();
            // Its own word: a socket of a killed driver answers until its last child has begun.
            let is_serving = driver.output()[earlier_log..].contains(" serving ");
            anyhow::ensure!(
                is_serving && accepts(&csi) && accepts(&registration),
                "not yet:\n{}",
                driver.output()
            );
            Ok(())
        })
        .unwrap();
    }

    /// Started, and not waited for.
    pub fn spawn_driver(&self) -> Daemon {
        Daemon::start("hawser-csi", self.driver_command(), &self.sandbox.path("driver.log")).unwrap()
    }

    pub fn driver_command(&self) -> Command {
        let mut command = self.sandbox.command(&driver_binary());
        let path = |name: &str| self.sandbox.path(name);
        command.args(["--node-id", NODE, "--log", "debug"]);
        command
            .args(["--paths", "kubelet-dir", "--kubelet-dir"])
            .arg(path("k"))
            .arg("--pool")
            .arg(path("pool"));
        command.arg("--state-dir").arg(path("state")).arg("--run-dir").arg(path("run"));
        command.args(&self.flags.0);
        if !self.flags.0.iter().any(|flag| flag == "--cgroup-root") {
            command.arg("--cgroup-root").arg(self.sandbox.volumes_cgroup_root());
        }
        command
    }

    /// kill -9, and dead.
    pub fn kill_driver(&mut self) {
        self.driver.take().unwrap().kill().unwrap();
    }

    pub fn restart_driver(&mut self) {
        self.kill_driver();
        self.start_driver();
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.sandbox.path("driver.log")).unwrap_or_default()
    }

    /// Without what earlier drivers have logged.
    pub fn log_of_this_driver(&self) -> String {
        self.log().split_off(self.earlier_log)
    }

    /// As an administrator does: it ends at once, because it holds nothing.
    pub fn end_keeper(&self) {
        let processes = self.sandbox.tag().processes().unwrap();
        for keeper in processes.iter().filter(|p| p.name == "hawser-keeper" && !p.command_line.is_empty()) {
            let pidfd = linux::process::open_pidfd(keeper.pid).unwrap().unwrap();
            linux::process::signal_pidfd(&pidfd, Signal::SIGTERM as i32).unwrap();
            assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap(), "the keeper holds something");
        }
    }

    /// Everything is as it was before the first volume. The driver must run.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        self.ensure_nothing_left(TIMEOUT)
            .unwrap_or_else(|error| panic!("{error:#}\n--- driver:\n{}", self.log()));
    }

    pub fn ensure_nothing_left(&self, timeout: Duration) -> anyhow::Result<()> {
        self.ground.as_ref().unwrap().verify(&self.sandbox, timeout)
    }

    /// What is there now, and is to be there later; `standing` may come.
    pub fn ground(&self, standing: Vec<PathBuf>) -> LeakCheck {
        // fusectl shows the whole machine's connections, other tests' among them.
        let changing = ["driver.log", "fusectl"].map(|name| self.sandbox.path(name)).to_vec();
        LeakCheck::start(&self.sandbox, Allowed { changing, standing, ..Default::default() }).unwrap()
    }

    pub fn kubelet_dir(&self) -> PathBuf {
        self.sandbox.path("k")
    }

    pub fn csi_socket(&self) -> PathBuf {
        csi_socket_in(&self.kubelet_dir())
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet_dir().join("plugins_registry/csi.hawser.dev-reg.sock")
    }

    pub fn caller(&self) -> Caller {
        Caller::of(&self.kubelet_dir())
    }

    /// The journal's text about a volume; empty when there is none.
    pub fn journal(&self, volume_id: &str) -> String {
        fs::read_to_string(self.journal_path(volume_id)).unwrap_or_default()
    }

    pub fn journal_path(&self, volume_id: &str) -> PathBuf {
        self.sandbox.path("state/volumes").join(format!("{volume_id}.json"))
    }

    pub fn dial_dir(&self, volume_id: &str) -> PathBuf {
        self.sandbox.path("run").join(volume_id.trim_start_matches("vol-"))
    }

    /// Where the daemon of a volume shows its metrics.
    pub fn daemon_metrics(&self, volume_id: &str) -> PathBuf {
        self.dial_dir(volume_id).join("prom.sock")
    }

    /// What `hawser-csi mounts` shows.
    pub fn mounts(&self) -> anyhow::Result<Vec<Value>> {
        let mut command = self.sandbox.command(&driver_binary());
        command.args(["mounts", "-o", "json", "--state-dir"]).arg(self.sandbox.path("state"));
        let output = command.arg("--run-dir").arg(self.sandbox.path("run")).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "hawser-csi mounts: {}: {said}", output.status);
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Data path and capacity policy of a published volume, as `hawser-csi mounts` shows them.
    pub fn policies(&self, volume_id: &str) -> anyhow::Result<(String, String)> {
        let mounts = self.mounts()?;
        let mount = mounts.iter().find(|mount| mount["volume"] == volume_id && mount["state"] == "published");
        let mount = mount.with_context(|| format!("{volume_id} is not published: {mounts:?}"))?;
        let text = |name: &str| mount[name].as_str().unwrap_or_default().to_owned();
        Ok((text("data_path"), text("capacity_policy")))
    }

    /// Pids of the daemons that run in this sandbox.
    pub fn daemons(&self) -> Vec<i32> {
        let processes = self.sandbox.tag().processes().unwrap();
        processes
            .into_iter()
            .filter(|p| p.name == "hawser-volume" && !p.command_line.is_empty())
            .map(|p| p.pid)
            .collect()
    }

    /// Those that have a FUSE connection.
    pub fn serving_daemons(&self) -> Vec<i32> {
        self.daemons().into_iter().filter(|pid| crate::node::has_connection(*pid)).collect()
    }

    /// Those that wait for a volume.
    pub fn waiting_daemons(&self) -> Vec<i32> {
        self.daemons().into_iter().filter(|pid| !crate::node::has_connection(*pid)).collect()
    }

    pub fn kill_daemon(&self) {
        let [daemon] = self.daemons()[..] else { panic!("one daemon: {:?}", self.daemons()) };
        let pidfd = linux::process::open_pidfd(daemon).unwrap().unwrap();
        assert!(linux::process::signal_pidfd(&pidfd, 9).unwrap());
        // Readable once it is a zombie, and then its descriptors are closed.
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut fds, PollTimeout::from(30_000u16)), Ok(1));
    }

    /// Signals the one daemon.
    pub fn signal_daemon(&self, signal: Signal) {
        let [_] = self.daemons()[..] else { panic!("one daemon: {:?}", self.daemons()) };
        self.signal_daemons(signal);
    }

    pub fn signal_daemons(&self, signal: Signal) {
        for daemon in self.daemons() {
            let pidfd = linux::process::open_pidfd(daemon).unwrap().unwrap();
            assert!(linux::process::signal_pidfd(&pidfd, signal as i32).unwrap());
            if signal == Signal::SIGSTOP {
                wait_until_stopped(daemon, TIMEOUT).unwrap();
            }
        }
    }

    /// Stops the one daemon, as a frozen cgroup does. The sandbox no longer aborts its connection.
    pub fn stop_daemon(&self) {
        self.sandbox.switch_fuse_guard_off();
        self.signal_daemon(Signal::SIGSTOP);
    }
}

/// What is mounted at `path`, as the calling thread sees it.
pub fn mounted(path: &Path) -> Option<MountEntry> {
    linux::mountinfo::at(path).unwrap()
}

/// Calls as kubelet does: a connection of its own for every call, directories
/// made and removed as kubelet makes and removes them.
#[derive(Debug, Clone)]
pub struct Caller {
    pub socket: PathBuf,
    kubelet_dir: PathBuf,
    /// Once notified, the next call, or the one that is waiting, is CANCELLED and its connection closed.
    pub gives_up: Option<Arc<Notify>>,
}

fn csi_socket_in(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins/csi.hawser.dev/csi.sock")
}

impl Caller {
    /// Of the driver that serves in this directory.
    pub fn of(kubelet_dir: &Path) -> Self {
        Self { socket: csi_socket_in(kubelet_dir), kubelet_dir: kubelet_dir.to_owned(), gives_up: None }
    }

    fn call<T>(&self, call: impl AsyncFnOnce(Channel) -> Result<T, Status>) -> Result<T, Status> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let socket = self.socket.clone();
            let connector = tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { UnixStream::connect(socket).await.map(TokioIo::new) }
            });
            let answer = async {
                let channel =
                    Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
                call(channel.map_err(|e| Status::unavailable(e.to_string()))?).await
            };
            let Some(gives_up) = &self.gives_up else { return answer.await };
            tokio::select! {
                answer = answer => answer,
                () = gives_up.notified() => Err(Status::cancelled("the caller gave up")),
            }
        })
    }

    pub fn controller<T>(
        &self,
        call: impl AsyncFnOnce(ControllerClient<Channel>) -> Result<T, Status>,
    ) -> Result<T, Status> {
        self.call(async |channel| call(ControllerClient::new(channel)).await)
    }

    pub fn node<T>(
        &self,
        call: impl AsyncFnOnce(NodeClient<Channel>) -> Result<T, Status>,
    ) -> Result<T, Status> {
        self.call(async |channel| call(NodeClient::new(channel)).await)
    }

    pub fn identity<T>(
        &self,
        call: impl AsyncFnOnce(IdentityClient<Channel>) -> Result<T, Status>,
    ) -> Result<T, Status> {
        self.call(async |channel| call(IdentityClient::new(channel)).await)
    }

    pub fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let reply = self.controller(async |mut c| c.create_volume(request).await)?;
        Ok(reply.into_inner().volume.expect("a volume in the reply"))
    }

    /// A volume of 1 Gi, by its id.
    pub fn create_named(&self, name: &str) -> Result<String, Status> {
        self.create(create_request(name)).map(|volume| volume.volume_id)
    }

    pub fn delete(&self, volume_id: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: volume_id.into(), ..Default::default() };
        self.controller(async |mut c| c.delete_volume(request).await).map(drop)
    }

    pub fn staging_path(&self, volume_id: &str) -> PathBuf {
        self.kubelet_dir.join("plugins/kubernetes.io/csi/csi.hawser.dev").join(volume_id).join("globalmount")
    }

    pub fn target_path(&self, pod: &str) -> PathBuf {
        self.kubelet_dir.join("pods").join(pod).join("volumes/kubernetes.io~csi/pv/mount")
    }

    pub fn stage(&self, volume_id: &str) -> Result<(), Status> {
        self.stage_as(volume_id, Mode::MultiNodeMultiWriter)
    }

    pub fn stage_as(&self, volume_id: &str, mode: Mode) -> Result<(), Status> {
        let path = self.staging_path(volume_id);
        // On a mount whose daemon is dead there is no stat: kubelet too asks mountinfo.
        if mounted(&path).is_none() {
            fs::create_dir_all(&path).unwrap();
        }
        let request = NodeStageVolumeRequest {
            volume_id: volume_id.into(),
            staging_target_path: text(&path),
            volume_capability: Some(capability(mode)),
            ..Default::default()
        };
        self.node(async |mut n| n.node_stage_volume(request).await).map(drop)
    }

    pub fn publish(&self, volume_id: &str, pod: &str) -> Result<(), Status> {
        self.publish_with(volume_id, pod, |_| {})
    }

    pub fn publish_with(
        &self,
        volume_id: &str,
        pod: &str,
        change: impl FnOnce(&mut NodePublishVolumeRequest),
    ) -> Result<(), Status> {
        let target = self.target_path(pod);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        let mut request = NodePublishVolumeRequest {
            volume_id: volume_id.into(),
            staging_target_path: text(&self.staging_path(volume_id)),
            target_path: text(&target),
            volume_capability: Some(capability(Mode::MultiNodeMultiWriter)),
            ..Default::default()
        };
        change(&mut request);
        self.node(async |mut n| n.node_publish_volume(request).await).map(drop)
    }

    /// And removes the pod's directory, as kubelet does: with rmdir.
    pub fn unpublish(&self, volume_id: &str, pod: &str) -> Result<(), Status> {
        let target = self.target_path(pod);
        let request = NodeUnpublishVolumeRequest { volume_id: volume_id.into(), target_path: text(&target) };
        self.node(async |mut n| n.node_unpublish_volume(request).await)?;
        remove_empty(target.parent().unwrap(), &self.kubelet_dir.join("pods"));
        Ok(())
    }

    /// A volume of that name, which these pods use. Its id.
    pub fn bring_up(&self, name: &str, pods: &[&str]) -> Result<String, Status> {
        let id = self.create_named(name)?;
        self.stage(&id)?;
        pods.iter().try_for_each(|pod| self.publish(&id, pod))?;
        Ok(id)
    }

    /// Everything of a volume that these pods use, and the volume.
    pub fn take_down(&self, volume_id: &str, pods: &[&str]) -> Result<(), Status> {
        pods.iter().try_for_each(|pod| self.unpublish(volume_id, pod))?;
        self.unstage(volume_id)?;
        self.delete(volume_id)
    }

    pub fn unstage(&self, volume_id: &str) -> Result<(), Status> {
        let path = self.staging_path(volume_id);
        let request =
            NodeUnstageVolumeRequest { volume_id: volume_id.into(), staging_target_path: text(&path) };
        self.node(async |mut n| n.node_unstage_volume(request).await)?;
        remove_empty(&path, &self.kubelet_dir.join("plugins"));
        Ok(())
    }

    pub fn stats(&self, volume_id: &str, path: &Path) -> Result<NodeGetVolumeStatsResponse, Status> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume_id.into(),
            volume_path: text(path),
            ..Default::default()
        };
        self.node(async |mut n| n.node_get_volume_stats(request).await).map(tonic::Response::into_inner)
    }
}

/// Calls again on what kubelet takes for "not final", as kubelet does.
#[track_caller]
pub fn retried<T>(scene: &Scene, what: &str, mut call: impl FnMut() -> Result<T, Status>) -> T {
    let result = eventually(what, TIMEOUT, || match call() {
        Ok(value) => Ok(Ok(value)),
        Err(status) if is_uncertain(&status) => anyhow::bail!("{status:?}"),
        Err(status) => Ok(Err(status)),
    });
    let failed =
        |reason: &dyn std::fmt::Debug| -> ! { panic!("{what}: {reason:?}\n--- driver:\n{}", scene.log()) };
    result.unwrap_or_else(|error| failed(&error)).unwrap_or_else(|status| failed(&status))
}

pub fn is_uncertain(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Unavailable
            | Code::ResourceExhausted
            | Code::Aborted
    )
}

pub fn capability(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub fn create_request(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(CapacityRange { required_bytes: GI, limit_bytes: 0 }),
        volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter)],
        ..Default::default()
    }
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// rmdir of `dir` and its parents below `end`: fails on what a driver left in it.
fn remove_empty(dir: &Path, end: &Path) {
    let mut dir = dir;
    while dir != end {
        match fs::remove_dir(dir) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            // The plugin's own directory, or another pod's volume.
            Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty => return,
            Err(e) => panic!("rmdir {}: {e}", dir.display()),
        }
        dir = dir.parent().unwrap();
    }
}
