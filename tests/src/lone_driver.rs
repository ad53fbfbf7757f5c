//! hawser-csi in a sandbox without a kubelet: its daemons are child processes,
//! and its kubelet directory is shared as a kubelet makes it.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::node::DRIVER;
use crate::{Daemon, Sandbox, binaries, eventually};

const TIMEOUT: Duration = Duration::from_secs(30);

/// What the driver appends its log and its spans to, in the sandbox.
pub const LOG: &str = "driver.log";
pub const TRACE: &str = "trace.jsonl";

/// Starts the driver over the sandbox's directory `pool`, and waits until it serves.
pub fn start(sandbox: &Sandbox, flags: &[&str]) -> Result<Daemon> {
    let kubelet_dir = sandbox.make_dir("k")?;
    linux::mount::make_shared(Path::new("/")).context("make / shared")?;
    linux::mount::bind(&kubelet_dir, &kubelet_dir).context("bind the kubelet's directory")?;
    linux::mount::make_shared(&kubelet_dir).context("make the kubelet's directory shared")?;
    let mut command = sandbox.command(&binaries::find("hawser-csi")?);
    command.args(["--driver-name", DRIVER, "--launcher", "process"]).args(flags);
    command.arg("--volume-binary").arg(binaries::find("hawser-volume")?);
    command.arg("--cgroup-root").arg(sandbox.volumes_cgroup_root());
    for (flag, name) in [
        ("--kubelet-dir", "k"),
        ("--pool", "pool"),
        ("--state-dir", "state"),
        ("--run-dir", "run"),
        ("--trace-file", TRACE),
    ] {
        command.arg(flag).arg(sandbox.path(name));
    }
    let mut driver = Daemon::start("hawser-csi", command, &sandbox.path(LOG))?;
    eventually("the driver serves", TIMEOUT, || {
        ensure!(driver.ended()?.is_none(), "it ended:\n{}", driver.output());
        let registration = kubelet_dir.join("plugins_registry").join(format!("{DRIVER}-reg.sock"));
        for socket in [csi_socket(&kubelet_dir), registration] {
            UnixStream::connect(&socket).with_context(|| socket.display().to_string())?;
        }
        Ok(())
    })?;
    Ok(driver)
}

/// Where a driver serves CSI below this kubelet directory.
pub fn csi_socket(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins").join(DRIVER).join("csi.sock")
}
