//! `cargo xtask`: the one entry for developers of Hawser and for CI. Short tasks
//! are modules of this program; the others are programs that it starts.
//!
//! Invariant: a command exits 0 only if everything it says it does was done and
//! verified; what is missing on the machine is an error that names it.

mod check;
mod demo;
mod install;
mod launch;
mod local_node;
mod test;
mod test_over_containerd;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use xtask::progress::{exit_code, say};

use self::launch::launch;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    about = "Build, show, check, test and measure Hawser",
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run two pods that share a volume and talk over the bridge, and take everything down again
    Demo(DemoArguments),
    /// Start a node on this machine to try things with, and print what to type next
    Up(local_node::UpArguments),
    /// Remove the node of `up` without a trace: pods, volumes, network, directory
    Down(local_node::Directory),
    /// Run rustfmt, clippy and rustdoc with warnings as errors; check licences and sources of dependencies
    Check {
        /// Also fetch the advisory database from github.com, and fail for vulnerable, unsound,
        /// unmaintained or yanked dependencies. Run it before each release; CI does not
        #[arg(long)]
        advisories: bool,
    },
    /// Run all tests: unit, kernel and end-to-end tests. Needs root
    Test {
        /// Only tests whose name contains this
        filter: Option<String>,
        /// Kill daemon, keeper and driver five times as often, and run the load test for ten minutes
        #[arg(long)]
        long: bool,
        /// Which CRI runtime the nodes of the end-to-end tests have. `containerd`: only the tests of the
        /// kubelet run, over Debian's containerd and runc
        #[arg(long, value_enum, default_value_t = RuntimeName::Embedded, conflicts_with = "long")]
        runtime: RuntimeName,
    },
    /// Run the conformance tests against third-party software; install it, or report what is missing
    #[command(disable_help_flag = true)]
    Conformance(Passed),
    /// Run the tests on kernels of distributions, under QEMU, with cgroup v2 alone (docs/LAB.md)
    #[command(disable_help_flag = true)]
    Lab(Passed),
    /// Measure speed and memory (docs/BENCHMARKS.md)
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Put the CNI plugins into a node's plugin directory; those that are there are kept beside them
    Install {
        /// The node's plugin directory
        #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
        cni_bin_dir: PathBuf,
        /// Undo it: restore what was there before
        #[arg(long)]
        put_back: bool,
    },
}

/// What the program that does the task parses, `--help` among it.
#[derive(Debug, clap::Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
struct DemoArguments {
    /// Use the machine's own network namespace
    #[arg(long)]
    host_network: bool,
    /// Take bridge, host-local and loopback from here [default: ours]
    #[arg(long, value_name = "DIR")]
    cni_bin_dir: Option<PathBuf>,
    /// Start containers with this OCI runtime, such as runc [default: the built-in one]
    #[arg(long, value_name = "PROGRAM")]
    oci_runtime: Option<PathBuf>,
    /// How the driver starts the volume's daemon
    #[arg(long, value_enum, default_value_t = LauncherName::Manifest)]
    launcher: LauncherName,
    /// Also run a pod that streams blocks and keeps a database, and kill its mount pod, the keeper and
    /// the driver ten times meanwhile
    #[arg(long)]
    chaos: bool,
    /// Leave the directory with images, logs and traces behind, and print where
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RuntimeName {
    Embedded,
    Containerd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LauncherName {
    /// A static pod of the node's kubelet
    Manifest,
    /// A child process of the driver
    Process,
}

fn main() -> ExitCode {
    // `cargo xtask demo -- --keep` and `cargo xtask demo --keep` mean the same.
    let words = std::env::args_os().enumerate().filter(|(at, word)| *at != 2 || word != "--");
    let Some(task) = Arguments::parse_from(words.map(|(_, word)| word)).task else {
        say(&Arguments::command().render_help().to_string());
        return ExitCode::SUCCESS;
    };
    let done = match task {
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Up(arguments) => local_node::up(&arguments),
        Task::Down(directory) => local_node::down(&directory),
        Task::Check { advisories } => check::run(advisories),
        Task::Test { filter, long, runtime: RuntimeName::Embedded } => test::run(filter.as_deref(), long),
        Task::Test { filter, runtime: RuntimeName::Containerd, .. } => {
            test_over_containerd::run(filter.as_deref())
        }
        Task::Conformance(passed) => launch("conformance", "conformance", &passed.arguments),
        Task::Lab(passed) => launch("conformance", "lab", &passed.arguments),
        Task::Bench(passed) => launch("bench", "bench", &passed.arguments),
        Task::Install { cni_bin_dir, put_back } => install::run(&cni_bin_dir, put_back),
    };
    exit_code(done)
}
