//! The command line: the daemon's flags and the client's verbs.

mod endpoints;
mod habits;
mod keyboard;
mod numbers;
mod output;
mod usage;

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::command_line::called_as::called_as;
use crate::command_line::durations;
use crate::command_line::selectors::{FieldSelector, LabelSelector};
use crate::node::sockets;
pub use keyboard::{
    CompletionArgs, CopyArgs, CopyPlace, EventsArgs, LogsArgs, Shell, Since, Top, TopArgs, WaitArgs, WaitFor,
};
pub use output::{Column, OutputFormat};

pub use self::endpoints::{EndpointArgs, TlsListener};
use crate::capacity::pressure::{GracePeriods, PressureLimits, Thresholds};

/// Pods with volumes on one machine, without a cluster.
///
/// `hawser-kubelet run` is the daemon: it runs what the manifests of a directory
/// describe. The other commands talk to it over a socket in its root directory.
#[derive(Debug, Parser)]
#[command(name = "hawser-kubelet", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads the command line of this process. Its messages have the command that users type.
    pub fn read() -> Result<Self, clap::Error> {
        let mut command = Self::command().bin_name(called_as());
        let words = habits::translate(std::env::args_os().collect(), &mut command)?;
        let matches = command.try_get_matches_from_mut(&words);
        let mut matches = matches.map_err(|error| usage::as_in_help(error, &words, &mut command))?;
        Self::from_arg_matches_mut(&mut matches)
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the kubelet until SIGTERM; pods keep running and the next start adopts them
    Run(Box<RunArgs>),
    #[command(flatten)]
    Client(Box<ClientCommand>),
}

/// A request to a running kubelet.
#[derive(Debug, Subcommand)]
pub enum ClientCommand {
    /// Create or change objects from files
    Apply(ApplyArgs),
    /// List objects, or show one
    Get(GetArgs),
    /// Show an object in detail, with its events
    Describe(DescribeArgs),
    /// Print the logs of containers
    Logs(LogsArgs),
    /// List events, the newest last
    Events(EventsArgs),
    /// Wait until objects have a condition or a value, or are gone
    Wait(WaitArgs),
    /// Show what pods or the node use of processors and memory
    Top(TopArgs),
    /// Run a program in a container
    Exec(ExecArgs),
    /// Connect to the program that a container runs
    Attach(AttachArgs),
    /// Forward ports of 127.0.0.1 to a pod
    PortForward(PortForwardArgs),
    /// Copy files and directories to or from a container that has tar
    Cp(CopyArgs),
    /// Delete objects; the reclaim policy decides about a claim's data
    Delete(DeleteArgs),
    /// Stop the kubelet
    Stop(StopArgs),
    /// Print the shell code that completes commands and flags
    Completion(CompletionArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// Directory of manifests: every file whose name does not begin with a dot
    #[arg(long, value_name = "DIR")]
    pub manifests: PathBuf,
    /// Directory of OCI image layouts and archives (*.tar); an image in it is not pulled from a registry
    #[arg(long, value_name = "DIR", default_value = "/var/lib/hawser-images")]
    pub images: PathBuf,
    #[command(flatten)]
    pub image_limits: runtime::ImageLimits,
    #[command(flatten)]
    pub registries: runtime::RegistryConfig,
    /// Directory of CNI configurations; the first by name is used
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Directory of CNI plugins
    #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
    pub cni_bin_dir: PathBuf,
    /// Directory of container logs
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods")]
    pub log_dir: PathBuf,
    /// This node's name [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Control group of all pods and of the processes that unpack images, absolute within each hierarchy
    #[arg(long, value_name = "PATH", default_value = "/hawser")]
    pub cgroup_root: String,
    /// Maximum number of pods
    #[arg(long, value_name = "N", default_value_t = 110)]
    pub max_pods: u32,
    /// Maximum number of processes and threads per pod; 0: no limit
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub pod_pids_limit: u32,
    /// Filter system calls (seccomp profile RuntimeDefault) of pods without a profile
    #[arg(long)]
    pub seccomp_default: bool,
    /// Size at which a container's log is rotated
    #[arg(long, value_name = "SIZE", default_value = "10Mi", value_parser = size)]
    pub container_log_max_size: u64,
    /// Maximum number of log files per container, including the current one
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(2..))]
    pub container_log_max_files: u16,
    /// Disk usage in percent above which dead containers and unused images are removed; 100: never
    #[arg(long, value_name = "PERCENT", default_value_t = 85, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_high_threshold: u8,
    /// Disk usage in percent at which image removal stops
    #[arg(long, value_name = "PERCENT", default_value_t = 80, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_low_threshold: u8,
    /// Seconds after which an image counts as unused
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub minimum_image_ttl: u64,
    #[command(flatten)]
    pub eviction: EvictionArgs,
    /// Start containers with this OCI runtime (runc, crun, youki) instead of the built-in one
    #[arg(long, value_name = "PROGRAM", conflicts_with = "container_runtime_endpoint")]
    pub oci_runtime: Option<PathBuf>,
    /// Where the kernel refuses to restrict a container's devices, start it without CAP_MKNOD
    #[arg(long, conflicts_with_all = ["oci_runtime", "container_runtime_endpoint"])]
    pub allow_without_device_control: bool,
    /// Use this CRI runtime (unix:///run/containerd/containerd.sock) instead of the embedded one
    #[arg(long, value_name = "SOCKET", value_parser = unix_socket)]
    pub container_runtime_endpoint: Option<PathBuf>,
    #[command(flatten)]
    pub endpoints: EndpointArgs,
    /// Append one JSON line for each finished step to this file
    #[arg(long, value_name = "FILE")]
    pub trace_file: Option<PathBuf>,
    /// What to log to stderr: error, warn, info, debug, trace, or a filter such as kubelet=debug
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
}

/// When pods are evicted although they are within their limits, in kubelet's syntax.
#[derive(Debug, Args)]
pub struct EvictionArgs {
    /// Evict pods at once below these amounts; '' for never. Signals: memory.available, nodefs.available,
    /// nodefs.inodesFree, imagefs.available, imagefs.inodesFree, pid.available
    #[arg(
        long,
        value_name = "SIGNAL<AMOUNT,...",
        default_value = "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%,imagefs.inodesFree<5%",
        value_parser = Thresholds::parse
    )]
    pub eviction_hard: Thresholds,
    /// Evict pods below these amounts after a grace period
    #[arg(long, value_name = "SIGNAL<AMOUNT,...", default_value = "", hide_default_value = true, value_parser = Thresholds::parse)]
    pub eviction_soft: Thresholds,
    /// The grace period of each soft threshold: memory.available=1m30s
    #[arg(long, value_name = "SIGNAL=DURATION,...", default_value = "", hide_default_value = true, value_parser = GracePeriods::parse)]
    pub eviction_soft_grace_period: GracePeriods,
    /// How long the node keeps a condition of pressure that no longer holds
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = durations::not_negative)]
    pub eviction_pressure_transition_period: std::time::Duration,
}

impl EvictionArgs {
    /// The checked form; or what is wrong with the soft thresholds.
    pub fn limits(&self) -> Result<PressureLimits, String> {
        let soft = self.eviction_soft.clone().with_grace(&self.eviction_soft_grace_period)?;
        Ok(PressureLimits {
            thresholds: self.eviction_hard.clone().and(soft),
            transition: self.eviction_pressure_transition_period,
        })
    }
}

/// Selects the kubelet.
#[derive(Debug, Clone, Args)]
pub struct RootDir {
    /// Directory of the kubelet's state
    #[arg(
        long = "root-dir",
        value_name = "DIR",
        env = "HAWSER_ROOT_DIR",
        default_value = "/var/lib/hawser-kubelet"
    )]
    pub path: PathBuf,
}

impl RootDir {
    /// The directory of our own state, beside kubelet's layout.
    pub fn private(&self) -> PathBuf {
        self.path.join("hawser")
    }

    /// The API socket.
    pub fn socket(&self) -> PathBuf {
        sockets::find(&socket_in(&self.path))
    }
}

/// The API socket of the kubelet with this root directory, unless the disk was full at its start.
pub fn socket_in(root_dir: &Path) -> PathBuf {
    root_dir.join("hawser").join("kubelet.sock")
}

/// The socket of the HTTP endpoints, in the same way.
pub fn http_socket_in(root_dir: &Path) -> PathBuf {
    root_dir.join("hawser").join("http.sock")
}

#[derive(Debug, Args)]
pub struct ApplyArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// File, directory (its .yaml, .yml and .json), or - for stdin; may be given more than once
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    pub filenames: Vec<PathBuf>,
    /// Also read the subdirectories of the directory
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// Namespace of objects that name none; refuses those of another one
    #[arg(short, long, value_parser = namespace)]
    pub namespace: Option<String>,
    /// Fields that Kubernetes does not have: refuse their object (strict, true), warn (warn), or drop them (ignore, false)
    #[arg(long, value_name = "HOW", value_enum, hide_possible_values = true, default_value = "strict", default_missing_value = "strict", num_args = 0..=1, require_equals = true)]
    pub validate: Validation,
}

/// What `apply` does about fields that Kubernetes does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Validation {
    #[value(alias = "true")]
    Strict,
    Warn,
    #[value(alias = "false")]
    Ignore,
}

/// Selects objects by what they contain.
#[derive(Debug, Clone, Default, Args)]
pub struct Selection {
    /// Objects with these labels: app=web,tier!=db, 'env in (a,b)', key, '!key'
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub selector: Option<LabelSelector>,
    /// Objects with these fields: metadata.name=web, status.phase!=Running
    #[arg(long, value_name = "SELECTOR")]
    pub field_selector: Option<FieldSelector>,
}

impl Selection {
    /// Whether it requires nothing: `-l ''` is as good as no flag.
    pub(crate) fn is_empty(&self) -> bool {
        self.selector.as_ref().is_none_or(LabelSelector::is_empty)
            && self.field_selector.as_ref().is_none_or(FieldSelector::is_empty)
    }

    pub(crate) fn matches(&self, object: &serde_json::Value) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(object))
            && self.field_selector.as_ref().is_none_or(|selector| selector.matches(object))
    }
}

#[derive(Debug, Args)]
pub struct GetArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    #[command(flatten)]
    pub selection: Selection,
    /// pods, pvc, pv, sc, csidrivers, configmaps, secrets, vs, vsc, vsclass, events or nodes; several with commas; or KIND/NAME
    #[arg(value_name = "KIND")]
    pub kind: String,
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Output format: wide, yaml, json, name, jsonpath=TEMPLATE, or custom-columns=HEADER:.path,...
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,
    /// Omit the table's header
    #[arg(long)]
    pub no_headers: bool,
    /// Add a column with all labels
    #[arg(long)]
    pub show_labels: bool,
    /// Add a column for each of these labels
    #[arg(short = 'L', long, value_name = "KEY", value_delimiter = ',')]
    pub label_columns: Vec<String>,
    /// Show names as KIND/NAME
    #[arg(long)]
    pub show_kind: bool,
    /// Sort by this field: .metadata.creationTimestamp
    #[arg(long, value_name = "PATH", conflicts_with_all = ["watch", "watch_only"])]
    pub sort_by: Option<String>,
    /// List the objects, then print each change
    #[arg(short, long)]
    pub watch: bool,
    /// Print changes only
    #[arg(long)]
    pub watch_only: bool,
    /// Ignore objects that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
}

#[derive(Debug, Args)]
pub struct Scope {
    /// Namespace [default: default]
    #[arg(short, long, value_parser = namespace)]
    pub namespace: Option<String>,
    /// Every namespace
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
}

impl Scope {
    /// The one that was asked for, or the default one.
    pub(crate) fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or(crate::objects::DEFAULT_NAMESPACE)
    }

    /// Empty: every namespace.
    pub(crate) fn wanted(&self) -> &str {
        if self.all_namespaces { "" } else { self.namespace() }
    }

    /// How messages end that nothing is there.
    pub(crate) fn place(&self, is_namespaced: bool) -> String {
        if is_namespaced && !self.all_namespaces {
            format!(" in {} namespace.", self.namespace())
        } else {
            String::new()
        }
    }
}

#[derive(Debug, Args)]
pub struct DescribeArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    #[command(flatten)]
    pub selection: Selection,
    /// pod, pvc, pv, sc, csidriver, configmap, secret, vs, vsc, vsclass or node; or KIND/NAME
    #[arg(value_name = "KIND")]
    pub kind: String,
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// Selects a pod.
#[derive(Debug, Args)]
pub struct PodArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// Namespace
    #[arg(short, long, default_value = crate::objects::DEFAULT_NAMESPACE, value_parser = namespace)]
    pub namespace: String,
    #[arg(value_name = "POD", value_parser = object_name)]
    pub pod: String,
}

/// Selects a container.
#[derive(Debug, Args)]
pub struct ContainerArgs {
    #[command(flatten)]
    pub pod: PodArgs,
    /// Container [default: the first one, or that of the annotation kubectl.kubernetes.io/default-container]
    #[arg(short, long, default_value = "", hide_default_value = true)]
    pub container: String,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub of: ContainerArgs,
    /// Pass stdin to the program
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

#[derive(Debug, Args)]
pub struct AttachArgs {
    #[command(flatten)]
    pub of: ContainerArgs,
    /// Pass stdin to the container
    #[arg(short = 'i', long)]
    pub stdin: bool,
    /// Use this terminal for a container with tty: true
    #[arg(short, long)]
    pub tty: bool,
    /// Print only what the container writes
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct PortForwardArgs {
    #[command(flatten)]
    pub of: PodArgs,
    /// PORT on both sides, LOCAL:REMOTE, or :REMOTE (the kernel chooses the local port)
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    pub ports: Vec<Forward>,
}

/// A port of this machine, and one of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// 0: the kernel chooses it.
    pub local: u16,
    pub remote: u16,
}

impl std::str::FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (local, remote) = match text.split_once(':') {
            None => (text, text),
            Some(("", remote)) => ("0", remote),
            Some(both) => both,
        };
        let local = if local == "0" { 0 } else { numbers::port(local)? };
        Ok(Self { local, remote: numbers::port(remote)? })
    }
}

#[derive(Debug, Args)]
pub struct DeleteArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    #[command(flatten)]
    pub selection: Selection,
    /// pod, pvc, pv, sc, csidriver, configmap, secret, vs, vsc or vsclass; several with commas; or KIND/NAME
    #[arg(value_name = "KIND", required_unless_present = "filenames")]
    pub kind: Option<String>,
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Delete the objects that this file, directory or - (stdin) describes
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with_all = ["kind", "all", "selector", "field_selector", "all_namespaces"])]
    pub filenames: Vec<PathBuf>,
    /// Also read the subdirectories of the directory
    #[arg(short = 'R', long, conflicts_with = "kind")]
    pub recursive: bool,
    /// Delete all objects of the kind in the namespace
    #[arg(long, conflicts_with_all = ["selector", "names"])]
    pub all: bool,
    /// Seconds between SIGTERM and SIGKILL; 0 kills at once [default: the pod's own]
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| numbers::whole::<i64>(text, 0))]
    pub grace_period: Option<i64>,
    /// Kill after one second: --grace-period 1
    #[arg(long, conflicts_with = "grace_period")]
    pub now: bool,
    /// Kill at once: --grace-period 0
    #[arg(long, conflicts_with = "now")]
    pub force: bool,
    /// Wait until the objects are gone; --wait=false returns at once
    #[arg(long, value_name = "BOOL", default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    pub wait: bool,
    /// How long to wait; 0: without limit
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = durations::not_negative)]
    pub timeout: std::time::Duration,
    /// Ignore objects that do not exist
    #[arg(long)]
    pub ignore_not_found: bool,
    /// Print names only
    #[arg(short, long, value_name = "name", value_parser = ["name"])]
    pub output: Option<String>,
}

/// The longest grace period of a pod when the node stops; `--grace-period` changes it.
pub const STOP_GRACE_SECONDS: u64 = 300;

#[derive(Debug, Args)]
pub struct StopArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// Stop every pod and unmount every volume first; otherwise they keep running without a kubelet
    #[arg(long)]
    pub pods: bool,
    /// Maximum grace period of a pod, even if its manifest sets more; 0 kills it at once
    #[arg(long, value_name = "SECONDS", requires = "pods", default_value_t = STOP_GRACE_SECONDS, value_parser = |text: &str| numbers::whole::<u64>(text, 0))]
    pub grace_period: u64,
}

/// An empty one would mean every namespace to the kubelet.
fn namespace(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a namespace has a name".to_owned()) } else { Ok(text.to_owned()) }
}

/// A name, or `KIND/NAME`. An empty name would mean every object to the kubelet.
fn object_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.ends_with('/') {
        return Err("resource name may not be empty".to_owned());
    }
    Ok(text.to_owned())
}

/// A quantity such as `10Mi`, at least one block, so that a line fits.
fn size(text: &str) -> Result<u64, String> {
    let quantity: crate::objects::Quantity =
        text.parse().map_err(|e: crate::objects::QuantityError| e.to_string())?;
    match quantity.value() {
        size @ 4096.. => Ok(size),
        _ => Err("want at least 4Ki".to_owned()),
    }
}

fn unix_socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    if path.starts_with('/') { Ok(path.into()) } else { Err("want unix:///path/to/socket".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// An empty namespace, name or requirement would mean all of them.
    #[test]
    fn empty_words_are_refused_with_their_flag() {
        for (words, flag, value) in [
            ("delete pods --all -n ", "--namespace <NAMESPACE>", ""),
            ("exec web -n  -- sh", "--namespace <NAMESPACE>", ""),
            ("logs web -n ", "--namespace <NAMESPACE>", ""),
            ("cp web:/a b -n ", "--namespace <NAMESPACE>", ""),
            ("delete pods -l ,", "--selector <SELECTOR>", ","),
            ("delete pods -l app=web,", "--selector <SELECTOR>", "app=web,"),
            ("delete pods --field-selector ,", "--field-selector <SELECTOR>", ","),
            ("logs ", "POD", ""),
            ("logs pod/", "POD", "pod/"),
            ("attach ", "POD", ""),
            ("top pod ", "NAME", ""),
        ] {
            let error = Cli::try_parse_from(["hawser-kubelet"].into_iter().chain(words.split(' ')));
            let error = error.unwrap_err().to_string();
            let (said, _) = error.split_once('\n').unwrap();
            assert!(said.contains(flag) && said.contains(&format!("'{value}'")), "{words}: {error}");
        }
    }

    #[test]
    fn delete_waits_by_default() {
        let wait = |words: &str| {
            let Command::Client(command) = Cli::parse_from(words.split(' ')).command else {
                panic!("{words}")
            };
            let ClientCommand::Delete(args) = *command else { panic!("{words}") };
            args.wait
        };
        assert!(wait("hawser-kubelet delete pod web"));
        assert!(wait("hawser-kubelet delete pod web --wait"));
        assert!(!wait("hawser-kubelet delete pod web --wait=false"));
    }
}
