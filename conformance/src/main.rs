//! `cargo xtask conformance`: our programs beside other people's. What a suite needs is
//! installed from Debian's packages and the Go module proxy, into `target/`
//! where it can be, or named as missing.

mod cni;
mod cri;
mod csi;
mod ginkgo;
mod posix;

use std::path::Path;
use std::process::{Command, ExitCode};

use ::tests::binaries::{self, target_dir, workspace_root};
use anyhow::Result;
use clap::{Parser, ValueEnum};
use xtask::build::{self, cargo, require_root};
use xtask::foreign::{REFERENCE_PLUGINS, debian_program, go, reference_plugins};
use xtask::progress::{exit_code, part};

/// Against third-party software; installs it or reports what is missing
#[derive(Debug, Parser)]
#[command(bin_name = "xtask conformance")]
struct Arguments {
    /// Default: all but posix and lab
    name: Option<Suite>,
    /// Of suites `cni`, `cri`, `csi` and `posix`: only scenarios, specs or volumes whose name contains this
    scenario: Option<String>,
    /// Of suite `cri`: leave the directories with logs and reports, and print where they are
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    built: posix::Built,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The demo with the reference CNI plugins, and with runc
    Demo,
    /// A Go program registers the driver as kubelet's plugin manager does
    Registration,
    /// The four CNI plugins beside the reference's, instead of them and together with them
    Cni,
    /// csi-sanity at our driver, on a pool that shares blocks and on one that does not; csi-test's mock driver under our kubelet
    Csi,
    /// critest at our runtime, by SPDY and by WebSocket, and at containerd (docs/CRI.md)
    Cri,
    /// Tests of file systems that you have built, in volumes on each file system
    Posix,
    /// Our tests on kernels of distributions (docs/LAB.md); by its name only, since emulation takes long
    Lab,
}

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|first| first == posix::MOUNT_COMMAND) {
        return exit_code(posix::mount(std::env::args_os().skip(1)));
    }
    if std::env::args_os().nth(1).is_some_and(|first| first == cri::NODE_COMMAND) {
        return exit_code(cri::enter_node(std::env::args_os().skip(2)));
    }
    exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    require_root("conformance")?;
    let (only, scenario) = (arguments.name, arguments.scenario.as_deref());
    let by_name_only = [Suite::Posix, Suite::Lab];
    let is_asked = |suite: &Suite| only.map_or(!by_name_only.contains(suite), |only| only == *suite);
    let suites = Suite::value_variants().iter().filter(|suite| is_asked(suite));
    for suite in suites {
        match suite {
            Suite::Demo => demo()?,
            Suite::Registration => part("registration by a Go client", registration)?,
            Suite::Cni => cni::run(scenario)?,
            Suite::Csi => csi::run(scenario)?,
            Suite::Cri => cri::run(scenario, arguments.keep)?,
            Suite::Posix => posix::run(&arguments.built, scenario)?,
            Suite::Lab => build::run(cargo().args(["xtask", "lab"]))?,
        }
    }
    Ok(())
}

fn demo() -> Result<()> {
    let plugins = part(&format!("reference CNI plugins {REFERENCE_PLUGINS}"), reference_plugins)?;
    part("demo with the reference CNI plugins", || demo_with("--cni-bin-dir", &plugins))?;
    let runc = part("runc", || debian_program("runc", "runc"))?;
    part("demo with runc", || demo_with("--oci-runtime", &runc))
}

/// A process of its own: a demo moves its process into namespaces.
fn demo_with(option: &str, value: &Path) -> Result<()> {
    let bin_dir = build::products()?;
    let mut demo = cargo();
    build::run(demo.args(["xtask", "demo", option]).arg(value).env("HAWSER_BIN_DIR", bin_dir))
}

fn registration() -> Result<()> {
    let go = go()?;
    let source = workspace_root().join("tests/conformance/registration");
    let client = target_dir().join("conformance/registration");
    build::run(Command::new(go).arg("build").arg("-o").arg(&client).arg(".").current_dir(source))?;
    part("build the static binaries", build::products)?;
    let mut command = Command::new(client);
    build::run(command.arg(binaries::find("hawser-csi")?))
}
