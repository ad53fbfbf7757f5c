//! A node: one hawser-kubelet and one hawser-csi in a sandbox, with every
//! directory private, and the client commands that a user would type.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::image::{Program, write_archive, write_archive_of_two};
use crate::node_runtime::{CONTAINERD, NodeContainerd, NodeRuntime};
use crate::{Allowed, Daemon, LeakCheck, Sandbox, binaries, eventually, examples, manifests};

pub const DRIVER: &str = "csi.hawser.dev";
pub const KEEPER_POD: &str = "hawser-csi-hawser-dev-keeper";
pub const KEEPER_MANIFEST: &str = "hawser-csi-hawser-dev-keeper.yaml";
/// For what takes a healthy node a fraction of a second; generous, since tests share two cores.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// How the driver starts its daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    Manifest,
    Process,
}

impl Launcher {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Process => "process",
        }
    }
}

/// Where `hawser-keeper` runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    None,
    /// In a process that the driver starts.
    Process,
    /// In a static pod of the node's kubelet.
    Pod,
}

/// What a test or the demo decides about its node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    pub launcher: Launcher,
    /// Where the plugins are taken from; `None`: ours.
    pub cni_bin_dir: Option<PathBuf>,
    pub runtime: NodeRuntime,
    /// `runc`, by name or path; `None`: the native launcher.
    pub oci_runtime: Option<PathBuf>,
    /// As `--pool-capacity` takes it.
    pub pool_capacity: String,
    /// The binary in the mount pods' image and of the process launcher; `None`: ours.
    pub volume_binary: Option<PathBuf>,
    /// The name of the mount pods' image.
    pub volume_image: String,
    /// Seconds that a daemon has to dial in; `None`: the driver's own.
    pub start_timeout: Option<u32>,
    /// A directory of the sandbox that holds the kubelet's root directory, the logs and
    /// the leases; `None`: the sandbox itself.
    pub disk: Option<PathBuf>,
    /// More flags of `hawser-kubelet run`.
    pub kubelet_flags: Vec<String>,
    /// What holds the volumes' connections besides driver and daemon.
    pub keeper: Keeper,
    /// Daemons that wait for a volume.
    pub warm_daemons: u8,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            launcher: Launcher::Manifest,
            cni_bin_dir: None,
            runtime: NodeRuntime::default(),
            oci_runtime: None,
            pool_capacity: "10Gi".to_owned(),
            volume_binary: None,
            volume_image: examples::VOLUME_IMAGE.to_owned(),
            start_timeout: None,
            disk: None,
            kubelet_flags: Vec::new(),
            keeper: Keeper::None,
            warm_daemons: 0,
        }
    }
}

#[derive(Debug)]
pub struct Node<'a> {
    sandbox: &'a Sandbox,
    options: NodeOptions,
    kubelet: Option<Daemon>,
    driver: Option<Daemon>,
    /// `None`: the kubelet's own runtime.
    containerd: Option<NodeContainerd>,
}

impl<'a> Node<'a> {
    /// A node of our own making, up and registered.
    pub fn start(sandbox: &'a Sandbox, options: NodeOptions) -> Result<Self> {
        let mut node = Self::prepare(sandbox, options)?;
        node.start_all()?;
        Ok(node)
    }

    /// A node with the pod `web`, which serves its /etc on port 80 and has logged that it does; what it leaves
    /// when it is idle.
    pub fn start_with_web(sandbox: &'a Sandbox) -> Result<(Self, LeakCheck)> {
        let node = Self::start(sandbox, NodeOptions::default())?;
        let idle = node.leak_check()?;
        let web = manifests::Pod::new("web", &["serve", "[::]:80", "/etc"]);
        node.put_manifest("web.yaml", &web.yaml())?;
        node.wait_for_log("web", &["serving"])?;
        Ok((node, idle))
    }

    /// The driver and the kubelet, until the driver is registered.
    pub fn start_all(&mut self) -> Result<()> {
        self.start_driver()?;
        self.start_kubelet()?;
        self.wait_until_registered()
    }

    /// The node's directories, images and network configuration; nothing runs yet.
    pub fn prepare(sandbox: &'a Sandbox, options: NodeOptions) -> Result<Self> {
        for dir in ["m", "i", "net", "pool", "state", "run", "bin"] {
            sandbox.make_dir(dir)?;
        }
        let disk = options.disk.clone().unwrap_or_else(|| sandbox.dir().to_owned());
        for dir in ["k", "log", "lease"] {
            let dir = disk.join(dir);
            fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        }
        // A daemon of a volume must reach the pool's directories only through what it is handed.
        fs::set_permissions(sandbox.path("pool"), fs::Permissions::from_mode(0o700)).context("chmod pool")?;
        let mut node = Self { sandbox, options, kubelet: None, driver: None, containerd: None };
        node.install_plugins()?;
        node.write_conflist(&examples::conflist(&disk.join("lease"))?)?;
        if node.options.runtime == NodeRuntime::Containerd {
            let dir = disk.join(CONTAINERD);
            fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
            let started = NodeContainerd::start(sandbox, &dir, &node.cni_bin_dir(), &sandbox.path("net"));
            node.containerd = Some(started?);
        }
        node.write_images()?;
        Ok(node)
    }

    /// What an earlier boot prepared, its network configuration and its images included.
    pub fn resume(sandbox: &'a Sandbox, options: NodeOptions) -> Self {
        // By its trace it is known whether this boot's driver is registered.
        let _none_yet = fs::remove_file(sandbox.path("trace.jsonl"));
        Self { sandbox, options, kubelet: None, driver: None, containerd: None }
    }

    fn write_images(&self) -> Result<()> {
        let demo_app = binaries::find("demo-app")?;
        let program = Program {
            image: examples::DEMO_IMAGE,
            binary: &demo_app,
            path: "demo-app",
            directories: &["data", "tmp"],
        };
        self.offer_image(&program)?;
        self.write_volume_image()
    }

    /// Puts the image of one program where the node's runtime finds images.
    pub fn offer_image(&self, program: &Program<'_>) -> Result<()> {
        let (_, name) = program.image.rsplit_once('/').unwrap_or(("", program.image));
        let archive = self.sandbox.path(&format!("i/{}.tar", name.replace(':', "-")));
        write_archive(program, &archive)?;
        self.import(&archive)
    }

    /// The kubelet follows the directory of archives for its own runtime, but for no other.
    pub fn import(&self, archive: &Path) -> Result<()> {
        self.containerd.as_ref().map_or(Ok(()), |containerd| containerd.import(archive))
    }

    /// SIGKILL of the node's containerd.
    pub fn kill_containerd(&mut self) -> Result<()> {
        self.containerd.as_mut().context("the node has no containerd")?.kill()
    }

    pub fn start_containerd_again(&mut self) -> Result<()> {
        self.containerd.as_mut().context("the node has no containerd")?.start_again()
    }

    /// The image of mount pods and of the keeper's pod.
    fn write_volume_image(&self) -> Result<()> {
        let image = &self.options.volume_image;
        let tag = image.rsplit_once(':').map_or("", |(_, tag)| tag);
        let volume = self.volume_binary()?;
        let program =
            Program { image, binary: &volume, path: "hawser-volume", directories: &["run", "run/hawser"] };
        let keeper = binaries::find("hawser-keeper")?;
        let archive = self.sandbox.path(&format!("i/hawser-volume-{tag}.tar"));
        write_archive_of_two(&program, &keeper, &archive)?;
        self.import(&archive)
    }

    fn volume_binary(&self) -> Result<PathBuf> {
        self.options.volume_binary.clone().map_or_else(|| binaries::find("hawser-volume"), Ok)
    }

    /// Copies, so that a test can break one.
    fn install_plugins(&self) -> Result<()> {
        let from = self.options.cni_bin_dir.clone().unwrap_or_else(binaries::dir);
        for (_package, plugin) in binaries::CNI_PLUGINS {
            let (source, target) = (from.join(plugin), self.cni_bin_dir().join(plugin));
            fs::copy(&source, &target)
                .with_context(|| format!("{} -> {}", source.display(), target.display()))?;
        }
        Ok(())
    }

    pub fn cni_bin_dir(&self) -> PathBuf {
        self.sandbox.path("bin")
    }

    pub fn write_conflist(&self, text: &str) -> Result<()> {
        write_whole(&self.sandbox.path("net/10-hawser.conflist"), text)
    }

    pub fn root_dir(&self) -> PathBuf {
        self.disk().join("k")
    }

    /// What [`NodeOptions::disk`] says.
    pub fn disk(&self) -> &Path {
        self.options.disk.as_deref().unwrap_or(self.sandbox.dir())
    }

    pub fn manifests(&self) -> PathBuf {
        self.sandbox.path("m")
    }

    pub fn log_dir(&self) -> PathBuf {
        self.disk().join("log")
    }

    pub fn pool(&self) -> PathBuf {
        self.sandbox.path("pool")
    }

    pub fn trace_file(&self) -> PathBuf {
        self.sandbox.path("trace.jsonl")
    }

    pub fn sandbox(&self) -> &'a Sandbox {
        self.sandbox
    }

    /// What a node has one of, whatever the number of its pods.
    pub fn allowed(&self) -> Allowed {
        let sandbox = self.sandbox;
        let in_sandbox =
            |paths: &[&str]| -> Vec<PathBuf> { paths.iter().map(|path| sandbox.path(path)).collect() };
        let pods = sandbox.cgroup_root();
        let qos = pods.join("kubepods");
        let tag = pods.parent().unwrap_or(&pods).to_path_buf();
        Allowed {
            changing: in_sandbox(&[
                "m",
                "i",
                "net",
                "bin",
                "kubelet.out",
                "csi.out",
                "trace.jsonl",
                // Unpacked images stay for the next pod.
                "k/hawser/runtime/images",
                CONTAINERD,
            ]),
            standing: in_sandbox(&[
                // Of a keeper that was killed.
                "run/keeper/keeper.sock",
                "run/keeper/keeper.sock.lock",
                "lease/hawser",
                "lease/hawser/lock",
                "lease/hawser/last_reserved_ip.0",
                "lease/hawser/last_reserved_ip.1",
                "lease/.hawser",
                "lease/.hawser/hawser",
                "lease/.hawser/hawser/index",
                "k/hawser/cni",
                "k/hawser/cni/results",
                "k/hawser/runtime/cgroups.json",
                "k/plugins/kubernetes.io",
                "k/plugins/kubernetes.io/csi",
                "k/plugins/kubernetes.io/csi/csi.hawser.dev",
            ]),
            links: vec![examples::BRIDGE.to_owned()],
            cgroups: vec![
                tag,
                pods,
                qos.join("besteffort"),
                qos.join("burstable"),
                qos,
                self.sandbox.volumes_cgroup_root(),
            ],
        }
    }

    /// What is there now, on an idle node.
    pub fn leak_check(&self) -> Result<LeakCheck> {
        LeakCheck::start(self.sandbox, self.allowed())
    }

    /// Puts the class and the driver object of the examples into the manifest directory.
    pub fn put_class(&self) -> Result<()> {
        self.put_manifest("storageclass.yaml", &examples::read("storageclass.yaml")?)
    }

    /// Every process of the sandbox with this name (`comm`).
    pub fn processes(&self, name: &str) -> Result<Vec<i32>> {
        let processes = self.sandbox.tag().processes()?;
        Ok(processes.into_iter().filter(|process| process.name == name).map(|process| process.pid).collect())
    }

    /// The daemons that have a FUSE connection.
    pub fn serving_daemons(&self) -> Result<Vec<i32>> {
        let daemons = self.processes("hawser-volume")?;
        Ok(daemons.into_iter().filter(|pid| has_connection(*pid)).collect())
    }

    /// The daemons that wait for a volume.
    pub fn waiting_daemons(&self) -> Result<Vec<i32>> {
        let daemons = self.processes("hawser-volume")?;
        Ok(daemons.into_iter().filter(|pid| !has_connection(*pid)).collect())
    }

    /// SIGKILL of a process of the sandbox, and its end.
    pub fn kill(&self, pid: i32) -> Result<()> {
        let process = linux::process::open_pidfd(pid)?.with_context(|| format!("process {pid} is gone"))?;
        linux::process::signal_pidfd(&process, Signal::SIGKILL as i32)?;
        ensure!(linux::process::wait_for_end(&process, TIMEOUT)?, "process {pid} does not end");
        Ok(())
    }

    /// Starts the driver anew, so that this number of daemons wait for a volume, and waits for them.
    pub fn set_warm_daemons(&mut self, number: u8) -> Result<()> {
        let ended = self.driver()?.stop(TIMEOUT)?;
        ensure!(ended.success(), "the driver ended with {ended}");
        self.options.warm_daemons = number;
        self.start_driver()?;
        let dialled = format!("{number} daemons have dialled in");
        eventually(&dialled, TIMEOUT, || {
            let waiting = self.waiting_daemons()?;
            let log = self.driver.as_ref().map(Daemon::output).unwrap_or_default();
            let log = log.rsplit_once(" serving ").map_or("", |(_, since)| since);
            let dialled = log.matches("a daemon waits for the next volume").count();
            let number = usize::from(number);
            ensure!(waiting.len() == number && dialled >= number, "{waiting:?}");
            Ok(())
        })
        .with_context(|| self.outputs())
    }

    /// Starts the driver anew, with its keeper in a pod, or with none, and waits for the pod, or for its end.
    pub fn set_keeper(&mut self, keeper: Keeper) -> Result<()> {
        let ended = self.driver()?.stop(TIMEOUT)?;
        ensure!(ended.success(), "the driver ended with {ended}");
        self.options.keeper = keeper;
        self.start_driver()?;
        match keeper {
            Keeper::Pod => self.wait_for_keeper().map(drop),
            Keeper::None | Keeper::Process => self.wait_for_no_pod(KEEPER_POD),
        }
    }

    /// Starts the driver anew, with the same programs in an image of this name.
    pub fn set_volume_image(&mut self, image: &str) -> Result<()> {
        let ended = self.driver()?.stop(TIMEOUT)?;
        ensure!(ended.success(), "the driver ended with {ended}");
        self.options.volume_image = image.to_owned();
        self.write_volume_image()?;
        self.start_driver()
    }

    /// What a command of the driver shows.
    pub fn driver_view(&self, view: &str) -> Result<Value> {
        let mut command = self.sandbox.command(&binaries::find("hawser-csi")?);
        command.args([view, "-o", "json", "--state-dir"]).arg(self.sandbox.path("state"));
        let output =
            command.arg("--run-dir").arg(self.sandbox.path("run")).output().context(view.to_owned())?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "hawser-csi {view}: {}: {stderr}", output.status);
        serde_json::from_slice(&output.stdout).with_context(|| format!("hawser-csi {view}"))
    }

    /// Waits for one keeper that listens; its process.
    pub fn wait_for_keeper(&self) -> Result<i32> {
        eventually("a keeper listens", TIMEOUT, || {
            let keepers = self.processes("hawser-keeper")?;
            let [keeper] = keepers[..] else { bail!("{keepers:?}: {}", self.describe_all()) };
            linux::fd_passing::PacketSocket::connect(&self.sandbox.path("run/keeper/keeper.sock"))?;
            Ok(keeper)
        })
        .with_context(|| self.outputs())
    }

    /// Removes every manifest, deletes what only a deletion removes, waits until
    /// the node is as `idle` was, and stops it; then nothing may be left at all.
    pub fn finish(self, idle: &LeakCheck) -> Result<()> {
        self.remove_all_manifests()?;
        self.wait_for_no_pods()?;
        for kind in ["vs", "vsc", "vsclass", "pvc", "pv", "storageclass", "csidriver"] {
            for object in self.list(kind)? {
                // A volume goes with its claim.
                let name = text(&object["metadata"]["name"]);
                if self.get(kind, &name).is_ok() {
                    self.delete(kind, &name)?;
                }
            }
        }
        idle.verify(self.sandbox, TIMEOUT).with_context(|| self.outputs())?;
        let sandbox = self.sandbox;
        self.stop()?;
        let processes = sandbox.tag().processes()?;
        ensure!(processes.is_empty(), "left after stop: {processes:?}");
        Ok(())
    }

    /// The files of users; those of mount pods and of the keeper's pod belong to the driver.
    pub fn remove_all_manifests(&self) -> Result<()> {
        for entry in fs::read_dir(self.manifests()).context("read the manifest directory")? {
            let name = entry.context("read the manifest directory")?.file_name().display().to_string();
            let is_the_drivers = name.starts_with("hawser-volume-") || name == KEEPER_MANIFEST;
            if !is_the_drivers && !name.starts_with('.') {
                self.remove_manifest(&name)?;
            }
        }
        Ok(())
    }

    pub fn wait_for_no_pods(&self) -> Result<()> {
        eventually("no pod is left", TIMEOUT, || {
            let pods = self.list("pods")?;
            ensure!(pods.is_empty(), "{}", self.client(&["get", "pods", "-A"])?);
            Ok(())
        })
        .with_context(|| self.outputs())
    }

    pub fn wait_for_no_pod(&self, name: &str) -> Result<()> {
        eventually(&format!("pod {name} is gone"), TIMEOUT, || {
            let pods = self.list("pods")?;
            ensure!(
                pods.iter().all(|pod| pod["metadata"]["name"] != name),
                "{}",
                self.client(&["get", "pods", "-A"])?
            );
            Ok(())
        })
        .with_context(|| self.outputs())
    }

    /// Where the pod's volume is bind-mounted.
    pub fn volume_path(&self, pod: &str) -> Result<PathBuf> {
        let uid = text(&self.get("pod", pod)?["metadata"]["uid"]);
        let volumes = self.root_dir().join("pods").join(uid).join("volumes/kubernetes.io~csi");
        let mut entries = fs::read_dir(&volumes).with_context(|| volumes.display().to_string())?;
        let volume = entries.next().with_context(|| format!("{} is empty", volumes.display()))?;
        Ok(volume.context("a volume's directory")?.path().join("mount"))
    }

    pub fn start_driver(&mut self) -> Result<()> {
        let sandbox = self.sandbox;
        let mut command = sandbox.command(&binaries::find("hawser-csi")?);
        command
            .args(["--paths", "kubelet-dir", "--kubelet-dir"])
            .arg(self.root_dir())
            .args(["--driver-name", DRIVER, "--node-id", "demo"])
            .arg("--pool")
            .arg(self.pool())
            .args(["--pool-capacity", &self.options.pool_capacity])
            .arg("--state-dir")
            .arg(sandbox.path("state"))
            .arg("--run-dir")
            .arg(sandbox.path("run"))
            .args(["--launcher", self.options.launcher.as_str()])
            .arg("--manifests")
            .arg(self.manifests())
            .args(["--mount-image", &self.options.volume_image])
            .arg("--volume-binary")
            .arg(self.volume_binary()?)
            .arg("--cgroup-root")
            .arg(sandbox.volumes_cgroup_root())
            .args(["--warm-daemons", &self.options.warm_daemons.to_string()])
            .arg("--trace-file")
            .arg(self.trace_file());
        if let Some(seconds) = self.options.start_timeout {
            command.args(["--start-timeout", &seconds.to_string()]);
        }
        command.arg("--keeper-binary");
        match self.options.keeper {
            Keeper::None => command.arg("none"),
            Keeper::Process => command.arg(binaries::find("hawser-keeper")?),
            Keeper::Pod => command.arg("pod"),
        };
        self.driver = Some(Daemon::start("hawser-csi", command, &sandbox.path("csi.out"))?);
        Ok(())
    }

    /// The command that `start_kubelet` starts.
    pub fn kubelet_command(&self) -> Result<Command> {
        let sandbox = self.sandbox;
        let mut command = sandbox.command(&binaries::find("hawser-kubelet")?);
        command
            .arg("run")
            .arg("--manifests")
            .arg(self.manifests())
            .arg("--root-dir")
            .arg(self.root_dir())
            .arg("--images")
            .arg(sandbox.path("i"))
            .arg("--cni-conf-dir")
            .arg(sandbox.path("net"))
            .arg("--cni-bin-dir")
            .arg(self.cni_bin_dir())
            .arg("--log-dir")
            .arg(self.log_dir())
            .args(["--node-name", "demo"])
            .arg("--cgroup-root")
            .arg(sandbox.cgroup_root())
            .arg("--trace-file")
            .arg(self.trace_file());
        if let Some(containerd) = &self.containerd {
            command.arg("--container-runtime-endpoint").arg(containerd.socket());
        }
        if let Some(runtime) = &self.options.oci_runtime {
            command.arg("--oci-runtime").arg(runtime);
        }
        // A machine whose disk is nearly full runs the tests too.
        if !self.options.kubelet_flags.iter().any(|flag| flag.starts_with("--eviction-hard")) {
            command.arg("--eviction-hard=");
        }
        command.args(&self.options.kubelet_flags);
        Ok(command)
    }

    pub fn start_kubelet(&mut self) -> Result<()> {
        let command = self.kubelet_command()?;
        let output = self.sandbox.path("kubelet.out");
        let said_before = fs::read_to_string(&output).unwrap_or_default().len();
        self.kubelet = Some(Daemon::start("hawser-kubelet", command, &output)?);
        let answered = eventually("the kubelet answers", TIMEOUT, || {
            if let Some(status) = self.kubelet()?.ended()? {
                bail!("it ended with {status}: {}", self.kubelet()?.output());
            }
            let said = self.kubelet()?.output().split_off(said_before);
            ensure!(said.contains("container runtime name="), "its runtime does not answer");
            self.client(&["get", "pods", "-A"])
        });
        answered.with_context(|| self.outputs()).map(|_table| ())
    }

    /// A claim can be provisioned from here on.
    pub fn wait_until_registered(&mut self) -> Result<()> {
        let registered = eventually("the driver is registered", TIMEOUT, || {
            if let Some(status) = self.driver()?.ended()? {
                bail!("hawser-csi ended with {status}");
            }
            let offered = self.root_dir().join("plugins_registry").join(format!("{DRIVER}-reg.sock"));
            ensure!(offered.exists(), "{} is not there", offered.display());
            // The last that a registration asks of a driver.
            let trace = fs::read_to_string(self.trace_file()).unwrap_or_default();
            ensure!(trace.contains("csi.NodeGetInfo"), "NodeGetInfo was not called");
            Ok(())
        });
        registered.with_context(|| self.outputs())
    }

    /// Waits until a program of the node has done this so often.
    pub fn wait_for_traces(&self, span: &str, times: usize) -> Result<()> {
        eventually(&format!("{span} in the trace, {times} times"), TIMEOUT, || {
            let trace = fs::read_to_string(self.trace_file()).unwrap_or_default();
            let found = trace.lines().filter(|line| line.contains(span)).count();
            ensure!(found >= times, "{found} times");
            Ok(())
        })
        .with_context(|| self.outputs())
    }

    pub fn kubelet(&mut self) -> Result<&mut Daemon> {
        self.kubelet.as_mut().context("the kubelet was not started")
    }

    /// For a driver that was killed and does not end yet: its drop waits for its end.
    pub fn take_driver(&mut self) -> Result<Daemon> {
        self.driver.take().context("the driver was not started")
    }

    pub fn driver(&mut self) -> Result<&mut Daemon> {
        self.driver.as_mut().context("the driver was not started")
    }

    /// The logs of both, for a failure's message.
    pub fn outputs(&self) -> String {
        let tail = |daemon: &Option<Daemon>| {
            let output = daemon.as_ref().map(Daemon::output).unwrap_or_default();
            let lines: Vec<&str> = output.lines().collect();
            lines[lines.len().saturating_sub(40)..].join("\n")
        };
        let containerd = self.containerd.as_ref().map(NodeContainerd::log_tail).unwrap_or_default();
        format!(
            "--- hawser-kubelet:\n{}\n--- hawser-csi:\n{}\n---{containerd}",
            tail(&self.kubelet),
            tail(&self.driver)
        )
    }

    /// Runs a client command; its stdout, or an error with its stderr.
    pub fn client(&self, words: &[&str]) -> Result<String> {
        let output = self.client_output(words)?;
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "hawser-kubelet {}: {}: {stderr}", words.join(" "), output.status);
        Ok(stdout.into_owned())
    }

    pub fn client_output(&self, words: &[&str]) -> Result<Output> {
        let mut command = self.client_command(words)?;
        command.output().with_context(|| format!("run hawser-kubelet {}", words.join(" ")))
    }

    pub fn client_command(&self, words: &[&str]) -> Result<Command> {
        let mut command = self.sandbox.command(&binaries::find("hawser-kubelet")?);
        let (verb, rest) = words.split_first().context("a verb")?;
        command.arg(verb).arg("--root-dir").arg(self.root_dir()).args(rest);
        Ok(command)
    }

    /// Puts a manifest into the directory as a user's editor should: written
    /// beside and renamed into place.
    pub fn put_manifest(&self, file: &str, text: &str) -> Result<()> {
        write_whole(&self.manifests().join(file), text)
    }

    pub fn remove_manifest(&self, file: &str) -> Result<()> {
        let path = self.manifests().join(file);
        fs::remove_file(&path).with_context(|| path.display().to_string())
    }

    /// An object as the API has it.
    pub fn get(&self, kind: &str, name: &str) -> Result<Value> {
        let json = self.client(&["get", kind, name, "-n", "default", "-o", "json"])?;
        serde_json::from_str(&json).with_context(|| format!("{kind} {name}: {json}"))
    }

    /// All objects of a kind, of every namespace.
    pub fn list(&self, kind: &str) -> Result<Vec<Value>> {
        let json = self.client(&["get", kind, "-A", "-o", "json"])?;
        let list: Value = serde_json::from_str(&json).with_context(|| format!("{kind}: {json}"))?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    pub fn logs(&self, pod: &str) -> Result<String> {
        self.client(&["logs", pod, "-n", "default"])
    }

    /// Waits until an object is as `check` wants it; the object. `what` is for the error.
    pub fn wait_for(
        &self,
        kind: &str,
        name: &str,
        what: &str,
        check: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let reached = eventually(&format!("{kind} {name}: {what}"), TIMEOUT, || {
            let object = self.get(kind, name)?;
            ensure!(check(&object), "{:#}", object["status"]);
            Ok(object)
        });
        reached.with_context(|| format!("{}\n{}", self.describe_all(), self.outputs()))
    }

    /// Waits until the pod's phase is `phase`; the pod.
    pub fn wait_for_phase(&self, pod: &str, phase: &str) -> Result<Value> {
        self.wait_for("pod", pod, phase, |object| object["status"]["phase"] == phase)
    }

    /// Waits until every one of `texts` is in the pod's log; the log.
    pub fn wait_for_log(&self, pod: &str, texts: &[&str]) -> Result<String> {
        let what = format!("the log of {pod} has {texts:?}");
        let reached = eventually(&what, TIMEOUT, || {
            let log = self.logs(pod)?;
            ensure!(texts.iter().all(|text| log.contains(text)), "{log:?}");
            Ok(log)
        });
        reached.with_context(|| format!("{}\n{}", self.describe_all(), self.outputs()))
    }

    /// Waits for an event with this reason, whose message holds every one of `words`; its message.
    pub fn wait_for_event(&self, reason: &str, words: &[&str]) -> Result<String> {
        let reached = eventually(&format!("an event {reason} with {words:?}"), TIMEOUT, || {
            let events = self.list("events")?;
            let messages: Vec<String> = events
                .iter()
                .map(|event| format!("{}: {}", text(&event["reason"]), text(&event["message"])))
                .collect();
            let found = messages.iter().find(|message| {
                message.strip_prefix(reason).is_some_and(|rest| rest.starts_with(": "))
                    && words.iter().all(|word| message.contains(word))
            });
            found.cloned().with_context(|| format!("{messages:#?}"))
        });
        reached.with_context(|| self.outputs())
    }

    /// Pods and events in one text.
    pub fn describe_all(&self) -> String {
        let of = |words: &[&str]| self.client(words).unwrap_or_else(|error| format!("{error:#}"));
        format!("{}\n{}", of(&["get", "pods", "-A", "-o", "wide"]), of(&["get", "events", "-A"]))
    }

    /// Deletes an object and waits until it is gone, volumes and all.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.client(&["delete", kind, name, "-n", "default"]).with_context(|| self.outputs())?;
        eventually(&format!("{kind} {name} is gone"), TIMEOUT, || {
            ensure!(self.get(kind, name).is_err(), "it is still there");
            Ok(())
        })
        .with_context(|| self.outputs())
    }

    /// Ends the driver first, as a package upgrade would, then the kubelet with its pods.
    pub fn stop(mut self) -> Result<()> {
        let outputs = self.outputs();
        self.client(&["stop", "--pods"]).with_context(|| outputs.clone())?;
        for daemon in [self.kubelet.as_mut(), self.driver.as_mut()].into_iter().flatten() {
            let status = daemon.stop(TIMEOUT).with_context(|| outputs.clone())?;
            ensure!(status.success(), "ended with {status}: {}", daemon.output());
        }
        self.end_keeper().with_context(|| outputs)?;
        self.containerd.map_or(Ok(()), NodeContainerd::stop)
    }

    /// The driver leaves it running; without volumes it ends at SIGTERM.
    fn end_keeper(&self) -> Result<()> {
        for pid in self.processes("hawser-keeper")? {
            let Some(keeper) = linux::process::open_pidfd(pid)? else { continue };
            linux::process::signal_pidfd(&keeper, Signal::SIGTERM as i32)?;
            ensure!(linux::process::wait_for_end(&keeper, TIMEOUT)?, "the keeper holds something");
        }
        Ok(())
    }
}

/// Whether the process has a FUSE connection open.
pub fn has_connection(pid: i32) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.any(|target| target == Path::new("/dev/fuse"))
}

/// The text of a JSON string, or its JSON.
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn write_whole(path: &Path, text: &str) -> Result<()> {
    let name = path.file_name().unwrap_or_default().display().to_string();
    let unfinished = path.with_file_name(format!(".{name}.new"));
    fs::write(&unfinished, text).with_context(|| unfinished.display().to_string())?;
    fs::rename(&unfinished, path).with_context(|| path.display().to_string())
}
