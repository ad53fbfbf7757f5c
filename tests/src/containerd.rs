//! A private containerd: its root, state, socket and network configuration are in a directory of the caller's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Daemon, eventually};
use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Of the programs that it starts.
const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug)]
pub struct Containerd {
    daemon: Daemon,
    dir: PathBuf,
}

#[derive(Debug)]
pub struct Settings<'a> {
    pub program: &'a Path,
    /// The directory of the CNI plugins.
    pub plugins: &'a Path,
    /// The only network configuration.
    pub conflist: &'a str,
    pub pause_image: &'a str,
    pub snapshotter: &'a str,
    /// `hosts.toml` of each registry is in a directory below this one.
    pub registries: Option<&'a Path>,
}

/// Shims' sockets, runc's state and network namespaces lie in /run with every configuration,
/// libcni's cache and host-local's leases in /var/lib/cni: this mount namespace gets its own.
pub fn hide_run_and_var_lib() -> Result<()> {
    for dir in ["/run", "/var/lib"] {
        linux::mount::mount_fs("tmpfs", "private", Path::new(dir), MountFlags::default(), "")
            .with_context(|| format!("a private {dir}"))?;
    }
    Ok(())
}

impl Containerd {
    /// Up and answering. `dir` exists.
    pub fn start(dir: &Path, settings: &Settings<'_>) -> Result<Self> {
        let net = dir.join("net");
        fs::create_dir(&net).with_context(|| net.display().to_string())?;
        fs::write(net.join("10-containerd-net.conflist"), settings.conflist).context("write the conflist")?;
        let config = dir.join("config.toml");
        fs::write(&config, configuration(dir, settings)).context("write containerd's configuration")?;
        let mut command = Command::new(settings.program);
        command.env_clear().env("PATH", STANDARD_PATH).current_dir(dir);
        command.arg("--config").arg(&config);
        let daemon = Daemon::start("containerd", command, &dir.join("log"))?;
        let mut this = Self { daemon, dir: dir.to_owned() };
        eventually("containerd listens", TIMEOUT, || {
            let ended = this.daemon.ended()?;
            ensure!(ended.is_none(), "containerd ended: {ended:?}");
            ensure!(this.socket().exists(), "{}", this.log_tail());
            Ok(())
        })?;
        Ok(this)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("c.sock")
    }

    pub fn pid(&self) -> i32 {
        self.daemon.pid().as_raw()
    }

    /// Imports an archive, for pods; no registry is asked.
    pub fn import(&self, ctr: &Path, archive: &Path) -> Result<()> {
        let mut command = Command::new(ctr);
        command.env_clear().env("PATH", STANDARD_PATH).arg("--address").arg(self.socket());
        command.args(["--namespace", "k8s.io", "images", "import", "--snapshotter", "native"]);
        let output = command.arg(archive).output().context("start ctr")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "ctr images import {}: {}: {words}",
            archive.display(),
            output.status
        );
        Ok(())
    }

    /// The end of its log, for the error message.
    pub fn log_tail(&self) -> String {
        let log = self.daemon.output();
        let lines: Vec<&str> = log.lines().collect();
        format!("last lines of containerd's log:\n{}", lines[lines.len().saturating_sub(25)..].join("\n"))
    }

    pub fn stop(mut self) -> Result<()> {
        self.daemon.stop(TIMEOUT).map(drop)
    }
}

fn configuration(dir: &Path, settings: &Settings<'_>) -> String {
    let registries = settings.registries.map_or_else(String::new, |hosts| {
        format!(
            "  [plugins.\"io.containerd.grpc.v1.cri\".registry]\n    config_path = \"{}\"\n",
            hosts.display()
        )
    });
    format!(
        r#"version = 2
root = "{dir}/root"
state = "{dir}/state"
# opt makes a directory in /opt; the rest needs devices or file systems that are not here.
disabled_plugins = [
  "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{dir}/c.sock"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # A machine without CAP_SYS_RESOURCE cannot lower it.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{dir}/net"
{registries}  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"#,
        dir = dir.display(),
        pause = settings.pause_image,
        plugins = settings.plugins.display(),
        snapshotter = settings.snapshotter,
    )
}
