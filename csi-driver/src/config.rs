//! The command line, as typed and then checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::model::capacity::{Overcommit, parse_bytes};
use crate::model::limits;
use crate::model::limits::{MAX_RUN_DIR_BYTES, MAX_SOCKET_PATH_BYTES};
use crate::model::sizes::MAX_NODE_ID_BYTES;
use crate::model::topology::Segment;

const MAX_DRIVER_NAME_BYTES: usize = 63;
/// The stage also waits for the daemon's answer and a roll-back, all within kubelet's timeout.
const MAX_START_TIMEOUT_SECONDS: u64 = limits::START_POD.as_secs();
const DEFAULT_CGROUP_ROOT: &str = "/hawser-volumes";
/// For `--cgroup-root`.
const NO_CGROUPS: &str = "none";
/// On several nodes, the topology would be the same.
const UNNAMED_NODES: [&str; 2] = ["localhost", "localhost.localdomain"];
/// For `--keeper-binary`.
const NO_KEEPER: &str = "none";
const KEEPER_SERVICE: &str = "service";
const KEEPER_POD: &str = "pod";
const DAEMON_DEADLINE_SECONDS: u64 = limits::DAEMON.as_secs();
const MAX_DAEMON_DEADLINE_SECONDS: u64 = 3600;
/// In its directory.
pub(crate) const KEEPER_SOCKET: &str = "keeper.sock";
/// More would only take memory.
const MAX_WARM_DAEMONS: i64 = 64;

/// CSI driver of Hawser: volumes from a pool on this node, each served by one FUSE daemon.
///
/// Serves CSI on KUBELET-DIR/plugins/DRIVER-NAME/csi.sock and registers itself with the kubelet
/// through KUBELET-DIR/plugins_registry. SIGTERM ends the driver; volumes and daemons continue, and
/// the next start adopts them.
#[derive(Debug, Clone, Parser)]
#[command(name = "hawser-csi", version)]
pub struct Flags {
    /// Root directory of the kubelet: what hawser-kubelet calls --root-dir.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// Which services of CSI are served.
    #[arg(long, value_enum, value_name = "SERVICES", default_value_t = Mode::Both)]
    pub mode: Mode,
    /// Where volumes may be staged and published.
    #[arg(long, value_enum, value_name = "WHERE", default_value_t = AllowedPaths::Any)]
    pub paths: AllowedPaths,
    /// Name that StorageClass and CSIDriver objects know the driver by.
    #[arg(long, value_name = "NAME", default_value = "csi.hawser.dev")]
    pub driver_name: String,
    /// Endpoint for CSI calls that the registration gives kubelet.
    #[arg(long, value_enum, value_name = "SOCKET", default_value_t = RegistrationEndpoint::Own)]
    pub registration_endpoint: RegistrationEndpoint,
    /// Name of this node.
    #[arg(long, value_name = "NAME")]
    pub node_id: String,
    /// Directory whose subdirectories are the volumes.
    #[arg(long, value_name = "DIR")]
    pub pool: PathBuf,
    /// What all volumes together may claim, as 1Gi or in bytes [default: the size of the pool's file system]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub pool_capacity: Option<u64>,
    /// How many times the pool's capacity all volumes together may claim, from 1 to 100
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = Overcommit::parse)]
    pub overcommit: Overcommit,
    /// Offer ControllerPublishVolume: NodeStageVolume then needs an attachment, and a single-node volume
    /// can be attached to one node only.
    #[arg(long)]
    pub attach: bool,
    /// Another node that volumes may be attached to; may be repeated.
    #[arg(long = "peer-node", value_name = "NAME", requires = "attach")]
    pub peer_nodes: Vec<String>,
    /// How many volumes may be attached to a node; 0: any number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_volumes: u32,
    /// Directory of the driver's journal; must survive a reboot.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/hawser-csi")]
    pub state_dir: PathBuf,
    /// Directory of the sockets on which daemons connect to the driver; at most 64 bytes long.
    #[arg(long, value_name = "DIR", default_value = "/run/hawser")]
    pub run_dir: PathBuf,
    /// How volume daemons are started.
    #[arg(long, value_enum, default_value_t = LauncherName::Manifest)]
    pub launcher: LauncherName,
    /// Directory of static pod manifests that the kubelet watches, for --launcher manifest.
    #[arg(long, value_name = "DIR", required_if_eq("launcher", "manifest"))]
    pub manifests: Option<PathBuf>,
    /// Image of the mount pods, which must be present on the node, for --launcher manifest.
    #[arg(long, value_name = "IMAGE", required_if_eq("launcher", "manifest"))]
    pub mount_image: Option<String>,
    /// The program hawser-volume, for --launcher process.
    #[arg(long, value_name = "PATH", required_if_eq("launcher", "process"))]
    pub volume_binary: Option<PathBuf>,
    /// Parent of the daemons' control groups, for --launcher process: each daemon gets a group of its own,
    /// with its limits. `none`: daemons stay in the driver's group
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CGROUP_ROOT)]
    pub cgroup_root: PathBuf,
    /// The program hawser-keeper, which holds volumes' FUSE connections: if a daemon dies, another one
    /// continues, and pods see a pause. `none`: their I/O fails with ENOTCONN. `service`: a service
    /// manager starts it. `pod`: a static pod with --mount-image runs it [default: `pod` with --launcher
    /// manifest, else hawser-keeper beside this program]
    #[arg(long, value_name = "PATH")]
    pub keeper_binary: Option<PathBuf>,
    /// How many daemons are started before a volume needs one: a stage or a takeover then does not wait
    /// for a start. 0: none
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=MAX_WARM_DAEMONS))]
    pub warm_daemons: u8,
    /// How long a daemon may take to connect to the driver, up to 80 [default: 30 for a process, 80 for a pod]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=MAX_START_TIMEOUT_SECONDS))]
    pub start_timeout: Option<u64>,
    /// Interval of the check for hung daemons. A daemon that answers no request of its volume for three
    /// intervals, while users wait, is killed. Another one continues; without a keeper, users get ENOTCONN.
    /// 0: no check
    #[arg(long, value_name = "SECONDS", default_value_t = DAEMON_DEADLINE_SECONDS, value_parser = clap::value_parser!(u64).range(0..=MAX_DAEMON_DEADLINE_SECONDS))]
    pub daemon_deadline: u64,
    /// Appends one JSON line for each finished span.
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
    /// Filter for the log on stderr: info, or csi_driver=debug.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LauncherName {
    /// One static pod for each volume; a kubelet that watches --manifests runs it.
    Manifest,
    /// One child process for each volume.
    Process,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Controller and node service.
    Both,
    /// The node service alone: no volume is made, deleted, copied or expanded.
    Node,
    /// Refused: only the node that has the pool can make its volumes.
    Controller,
}

impl Mode {
    pub(crate) fn has_controller(self) -> bool {
        self != Self::Node
    }

    pub(crate) fn has_node(self) -> bool {
        self != Self::Controller
    }
}

/// Never in the driver's own directories or through a FUSE mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AllowedPaths {
    /// Anywhere else on the node, as the specification lets a caller choose.
    Any,
    /// Below --kubelet-dir only, as every kubelet chooses.
    KubeletDir,
}

/// The endpoint that the registration gives kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RegistrationEndpoint {
    /// The path of csi.sock.
    Own,
    /// None: the registration socket serves CSI too, beside csi.sock.
    Shared,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LauncherKind {
    Manifest {
        manifests: PathBuf,
        mount_image: String,
    },
    /// Each daemon in a control group below `cgroup_root`, if there is one.
    Process {
        volume_binary: PathBuf,
        cgroup_root: Option<PathBuf>,
    },
}

/// Which program holds volumes' connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeeperBinary {
    /// A daemon's death ends its connection.
    None,
    BesideDriver,
    At(PathBuf),
    /// Another program starts it.
    Service,
    Pod(KeeperPod),
}

/// The static pod that runs the keeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperPod {
    /// Also of the manifest's file.
    pub name: String,
    pub manifests: PathBuf,
    pub image: String,
    /// The driver's.
    pub run_dir: PathBuf,
}

/// What makes a keeper run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeeperStart {
    /// The driver starts the program, in this control group; `None`: in the driver's own.
    Program { binary: PathBuf, cgroup: Option<PathBuf> },
    /// A kubelet, once the driver has written the pod's manifest.
    Pod(KeeperPod),
    /// Another program.
    Elsewhere,
}

/// The process that holds volumes' connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperProgram {
    pub start: KeeperStart,
    /// Where it listens.
    pub socket: PathBuf,
}

/// Checked: paths are absolute, every socket path fits.
#[derive(Debug, Clone)]
pub struct Config {
    pub kubelet_dir: PathBuf,
    pub mode: Mode,
    pub paths: AllowedPaths,
    pub driver_name: String,
    pub registration_endpoint: RegistrationEndpoint,
    pub node_id: String,
    pub pool: PathBuf,
    pub pool_capacity_bytes: Option<u64>,
    pub overcommit: Overcommit,
    /// ControllerPublishVolume is offered, and asked for.
    pub attach: bool,
    /// Nodes besides this one that a volume may be attached to.
    pub peer_nodes: Vec<String>,
    /// Attachments that a node may have; 0: any number.
    pub max_volumes: u32,
    pub state_dir: PathBuf,
    pub run_dir: PathBuf,
    pub launcher: LauncherKind,
    pub keeper: KeeperBinary,
    /// Daemons that wait for a volume.
    pub warm_daemons: usize,
    pub start_timeout: Duration,
    /// A daemon that misses three is hung; `None`: none ever is.
    pub daemon_deadline: Option<Duration>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{flag} {value:?}: {reason}")]
    Flag { flag: &'static str, value: String, reason: String },
    #[error("socket path {} has {length} bytes, more than {MAX_SOCKET_PATH_BYTES}: choose a shorter {flag}", path.display())]
    SocketPath { flag: &'static str, path: PathBuf, length: usize },
    #[error("{flag} is required with --launcher {launcher}; --launcher {other} works without it")]
    Missing { flag: &'static str, launcher: &'static str, other: &'static str },
}

fn missing(flag: &'static str, launcher: &'static str, other: &'static str) -> ConfigError {
    ConfigError::Missing { flag, launcher, other }
}

impl Config {
    pub fn check(flags: Flags) -> Result<Self, ConfigError> {
        check_driver_name(&flags.driver_name)?;
        check_node_id("--node-id", &flags.node_id)?;
        for node in &flags.peer_nodes {
            check_node_id("--peer-node", node)?;
            check_named("--peer-node", node)?;
        }
        let kubelet_dir = absolute("--kubelet-dir", &flags.kubelet_dir)?;
        let run_dir = absolute("--run-dir", &flags.run_dir)?;
        if run_dir.as_os_str().len() > MAX_RUN_DIR_BYTES {
            let reason =
                format!("longer than {MAX_RUN_DIR_BYTES} bytes: dial sockets below it would not fit");
            return Err(wrong("--run-dir", &run_dir.to_string_lossy(), reason));
        }
        let (launcher, start_timeout) = match flags.launcher {
            LauncherName::Process => {
                let path = flags.volume_binary.ok_or(missing("--volume-binary", "process", "manifest"))?;
                let volume_binary = absolute("--volume-binary", &path)?;
                let cgroup_root = check_cgroup_root(flags.cgroup_root)?;
                (LauncherKind::Process { volume_binary, cgroup_root }, limits::START_PROCESS)
            }
            LauncherName::Manifest => {
                let path = flags.manifests.ok_or(missing("--manifests", "manifest", "process"))?;
                let manifests = absolute("--manifests", &path)?;
                let mount_image = flags.mount_image.ok_or(missing("--mount-image", "manifest", "process"))?;
                if mount_image.is_empty()
                    || mount_image.contains(|c: char| c.is_whitespace() || c.is_control())
                {
                    return Err(wrong("--mount-image", &mount_image, "the name of an image is wanted"));
                }
                (LauncherKind::Manifest { manifests, mount_image }, limits::START_POD)
            }
        };
        let pod = keeper_pod(&launcher, &flags.driver_name, &run_dir);
        let keeper = check_keeper(flags.keeper_binary, pod)?;
        let config = Self {
            keeper,
            kubelet_dir,
            mode: flags.mode,
            paths: flags.paths,
            driver_name: flags.driver_name,
            registration_endpoint: flags.registration_endpoint,
            node_id: flags.node_id,
            pool: absolute("--pool", &flags.pool)?,
            pool_capacity_bytes: flags.pool_capacity,
            overcommit: flags.overcommit,
            attach: flags.attach,
            peer_nodes: flags.peer_nodes,
            max_volumes: flags.max_volumes,
            state_dir: absolute("--state-dir", &flags.state_dir)?,
            run_dir,
            launcher,
            warm_daemons: flags.warm_daemons.into(),
            start_timeout: flags.start_timeout.map_or(start_timeout, Duration::from_secs),
            daemon_deadline: Some(Duration::from_secs(flags.daemon_deadline)).filter(|d| !d.is_zero()),
        };
        for path in [config.csi_socket(), config.registration_socket()] {
            let length = path.as_os_str().len();
            if length > MAX_SOCKET_PATH_BYTES {
                return Err(ConfigError::SocketPath { flag: "--kubelet-dir", path, length });
            }
        }
        Ok(config)
    }

    pub fn csi_socket(&self) -> PathBuf {
        self.kubelet_dir.join("plugins").join(&self.driver_name).join("csi.sock")
    }

    /// No longer than a volume's sockets, for which `--run-dir` is checked.
    pub fn metrics_socket(&self) -> PathBuf {
        metrics_socket(&self.run_dir)
    }

    /// How to reach the keeper.
    pub fn keeper_program(&self, start: KeeperStart) -> KeeperProgram {
        KeeperProgram { start, socket: keeper_socket(&self.run_dir) }
    }

    /// How to start the keeper whose program is `binary`.
    pub fn keeper_start(&self, binary: PathBuf) -> KeeperStart {
        let cgroup = match &self.launcher {
            LauncherKind::Process { cgroup_root: Some(root), .. } => Some(root.join("keeper")),
            LauncherKind::Process { cgroup_root: None, .. } | LauncherKind::Manifest { .. } => None,
        };
        KeeperStart::Program { binary, cgroup }
    }

    /// The pod of a keeper, also if none is wanted; `None`: this driver writes no manifests.
    pub fn keeper_pod(&self) -> Option<KeeperPod> {
        keeper_pod(&self.launcher, &self.driver_name, &self.run_dir)
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry").join(format!("{}-reg.sock", self.driver_name))
    }

    /// The topology key whose value is a node id.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/node", self.driver_name)
    }

    pub(crate) fn own_segment(&self) -> Segment {
        Segment { key: self.topology_key(), value: self.node_id.clone() }
    }
}

/// Below a driver's run directory.
pub(crate) fn admin_socket(run_dir: &Path) -> PathBuf {
    run_dir.join("admin.sock")
}

/// Below a driver's run directory: what the keeper's pod sees of it.
pub(crate) fn keeper_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("keeper")
}

/// Below a driver's run directory.
pub(crate) fn keeper_socket(run_dir: &Path) -> PathBuf {
    keeper_dir(run_dir).join(KEEPER_SOCKET)
}

/// Below a driver's run directory.
pub(crate) fn metrics_socket(run_dir: &Path) -> PathBuf {
    run_dir.join("prom.sock")
}

/// csi-sanity's rule: letters, digits, `-._`, a letter at both ends, at most 63 bytes.
fn check_driver_name(name: &str) -> Result<(), ConfigError> {
    let is_letter = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphabetic);
    let bytes = name.as_bytes();
    let fits = bytes.len() <= MAX_DRIVER_NAME_BYTES && is_letter(bytes.first()) && is_letter(bytes.last());
    if fits && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(b)) {
        return Ok(());
    }
    let reason = "letters, digits, `-`, `.`, `_`, a letter at both ends, at most 63 bytes";
    Err(wrong("--driver-name", name, reason))
}

fn keeper_pod(launcher: &LauncherKind, driver_name: &str, run_dir: &Path) -> Option<KeeperPod> {
    let LauncherKind::Manifest { manifests, mount_image } = launcher else { return None };
    // The other characters of a driver's name may not be in a pod's.
    let driver = driver_name.to_ascii_lowercase().replace(['.', '_'], "-");
    Some(KeeperPod {
        name: format!("hawser-{driver}-keeper"),
        manifests: manifests.clone(),
        image: mount_image.clone(),
        run_dir: run_dir.to_owned(),
    })
}

/// `pod`: of the driver, if it writes manifests.
fn check_keeper(binary: Option<PathBuf>, pod: Option<KeeperPod>) -> Result<KeeperBinary, ConfigError> {
    let Some(path) = binary else { return Ok(pod.map_or(KeeperBinary::BesideDriver, KeeperBinary::Pod)) };
    match path.to_str() {
        Some(NO_KEEPER) => Ok(KeeperBinary::None),
        Some(KEEPER_SERVICE) => Ok(KeeperBinary::Service),
        Some(KEEPER_POD) => pod
            .map(KeeperBinary::Pod)
            .ok_or_else(|| wrong("--keeper-binary", KEEPER_POD, "only --launcher manifest writes pods")),
        _ => Ok(KeeperBinary::At(absolute("--keeper-binary", &path)?)),
    }
}

fn check_node_id(flag: &'static str, node_id: &str) -> Result<(), ConfigError> {
    if node_id.is_empty() || node_id.len() > MAX_NODE_ID_BYTES || node_id.chars().any(char::is_control) {
        return Err(wrong(flag, node_id, "1 to 256 bytes without control characters are wanted"));
    }
    Ok(())
}

/// Refuses what a machine is called until it has its name.
pub(crate) fn check_named(flag: &'static str, node_id: &str) -> Result<(), ConfigError> {
    if UNNAMED_NODES.contains(&node_id) {
        return Err(wrong(flag, node_id, "a machine without a name has this one: pass the node's own name"));
    }
    Ok(())
}

/// A path below the root, without `..`.
fn check_cgroup_root(path: PathBuf) -> Result<Option<PathBuf>, ConfigError> {
    use std::path::Component;
    if path == Path::new(NO_CGROUPS) {
        return Ok(None);
    }
    let mut components = path.components();
    let is_rooted = components.next() == Some(Component::RootDir);
    let has_names = components.clone().next().is_some();
    if is_rooted && has_names && components.all(|component| matches!(component, Component::Normal(_))) {
        return Ok(Some(path));
    }
    let reason = "a path from the root of the control groups, as /hawser-volumes, or `none` is wanted";
    Err(wrong("--cgroup-root", &path.to_string_lossy(), reason))
}

fn absolute(flag: &'static str, path: &Path) -> Result<PathBuf, ConfigError> {
    let value = path.to_string_lossy();
    let absolute = std::path::absolute(path).map_err(|e| wrong(flag, &value, e.to_string()))?;
    match absolute.to_str() {
        Some(_) => Ok(absolute),
        None => Err(wrong(flag, &value, "not UTF-8")),
    }
}

pub(crate) fn wrong(flag: &'static str, value: &str, reason: impl Into<String>) -> ConfigError {
    ConfigError::Flag { flag, value: value.to_owned(), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn check(more: &[&str]) -> Result<Config, String> {
        let process = ["--launcher", "process", "--volume-binary", "/v"];
        let launcher = if more.contains(&"--launcher") { &[][..] } else { &process };
        let base = ["hawser-csi", "--node-id", "n", "--pool", "/p"];
        let flags =
            Flags::try_parse_from(base.iter().chain(launcher).chain(more)).map_err(|e| e.to_string())?;
        Config::check(flags).map_err(|e| e.to_string())
    }

    #[test]
    fn the_sockets_lie_where_kubelet_looks() {
        let config = check(&["--kubelet-dir", "/k"]).unwrap();
        assert_eq!(config.csi_socket(), Path::new("/k/plugins/csi.hawser.dev/csi.sock"));
        assert_eq!(config.registration_socket(), Path::new("/k/plugins_registry/csi.hawser.dev-reg.sock"));
        assert_eq!(config.start_timeout, limits::START_PROCESS);
    }

    #[test]
    fn a_keeper_is_the_default_and_none_turns_it_off() {
        let keeper = |more: &[&str]| check(more).unwrap().keeper;
        assert_eq!(keeper(&[]), KeeperBinary::BesideDriver);
        assert_eq!(keeper(&["--keeper-binary", "none"]), KeeperBinary::None);
        assert_eq!(keeper(&["--keeper-binary", "service"]), KeeperBinary::Service);
        assert_eq!(keeper(&["--keeper-binary", "/k"]), KeeperBinary::At("/k".into()));
        let started = |more: &[&str]| check(more).unwrap().keeper_start("/k".into());
        let program = |cgroup| KeeperStart::Program { binary: "/k".into(), cgroup };
        assert_eq!(started(&["--cgroup-root", "/g"]), program(Some("/g/keeper".into())));
        assert_eq!(started(&["--cgroup-root", "none"]), program(None));
    }

    #[test]
    fn with_manifests_the_keeper_is_a_pod_unless_another_is_named() {
        let manifest = ["--launcher", "manifest", "--manifests", "/m", "--mount-image", "i"];
        let keeper = |more: &[&str]| check(&[&manifest, more].concat()).unwrap().keeper;
        let pod = KeeperBinary::Pod(KeeperPod {
            name: "hawser-csi-hawser-dev-keeper".into(),
            manifests: "/m".into(),
            image: "i".into(),
            run_dir: "/run/hawser".into(),
        });
        assert_eq!(keeper(&[]), pod);
        assert_eq!(keeper(&["--keeper-binary", "pod"]), pod);
        assert_eq!(keeper(&["--keeper-binary", "none"]), KeeperBinary::None);
        assert_eq!(keeper(&["--keeper-binary", "/k"]), KeeperBinary::At("/k".into()));
        let named = check(&[&manifest[..], &["--driver-name", "A_b.C"]].concat()).unwrap();
        assert_eq!(named.keeper_pod().unwrap().name, "hawser-a-b-c-keeper");
        assert_eq!(
            check(&["--keeper-binary", "pod"]).unwrap_err(),
            "--keeper-binary \"pod\": only --launcher manifest writes pods"
        );
    }

    #[test]
    fn wrong_values_are_named_with_their_flag() {
        let long = format!("/{}", "r".repeat(64));
        for (more, named) in [
            (vec!["--driver-name", "csi.hawser.9"], "--driver-name \"csi.hawser.9\""),
            (vec!["--run-dir", &long], "--run-dir"),
            (
                vec!["--kubelet-dir", &long, "--driver-name", &"d".repeat(60)],
                "choose a shorter --kubelet-dir",
            ),
            (vec!["--pool-capacity", "1GB"], "invalid quantity \"1GB\""),
            (vec!["--peer-node", "n2"], "--attach"),
            (vec!["--attach", "--peer-node", ""], "--peer-node \"\""),
            (
                vec!["--attach", "--peer-node", "localhost"],
                "--peer-node \"localhost\": a machine without a name",
            ),
            (vec!["--max-volumes", "many"], "--max-volumes"),
            (vec!["--overcommit", "0.5"], "--overcommit"),
            (vec!["--start-timeout", "81"], "--start-timeout"),
            (vec!["--cgroup-root", "/"], "--cgroup-root \"/\""),
            (vec!["--cgroup-root", "relative"], "--cgroup-root \"relative\""),
            (vec!["--cgroup-root", "/a/../.."], "--cgroup-root \"/a/../..\""),
            (vec!["--daemon-deadline", "3601"], "--daemon-deadline"),
            (vec!["--launcher", "manifest"], "--manifests"),
            (
                vec!["--launcher", "manifest", "--manifests", "/m", "--mount-image", ""],
                "--mount-image \"\": the name of an image",
            ),
        ] {
            let message = check(&more).unwrap_err();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn every_flag_is_documented() {
        let docs = include_str!("../../docs/CSI.md");
        for flag in Flags::command().get_arguments().filter_map(|argument| argument.get_long()) {
            assert!(docs.contains(&format!("`--{flag}")), "--{flag}");
        }
    }
}
