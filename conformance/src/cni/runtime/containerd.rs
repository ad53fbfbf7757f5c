//! containerd of our own: its root, state, socket, network configuration and
//! everything that it puts into /run and /var/lib are the sandbox's.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::tests::image::{Program, write_archive_with_arguments};
use ::tests::{Daemon, Sandbox, binaries, eventually};
use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;

use super::cri::{APP_IMAGE, PAUSE_IMAGE};

const TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct Containerd {
    daemon: Daemon,
    dir: PathBuf,
    content: PathBuf,
    path: String,
}

impl Containerd {
    /// Up and answering. `conflist` is the only network configuration.
    pub(super) fn start(sandbox: &Sandbox, program: &Path, plugins: &Path, conflist: &str) -> Result<Self> {
        // Shims' sockets, runc's state and network namespaces lie in /run whatever the
        // configuration says, libcni's cache and host-local's leases in /var/lib/cni.
        for dir in ["/run", "/var/lib"] {
            linux::mount::mount_fs("tmpfs", "private", Path::new(dir), MountFlags::default(), "")
                .with_context(|| format!("a private {dir}"))?;
        }
        let dir = sandbox.make_dir("c")?;
        let net = sandbox.make_dir("c/net")?;
        fs::write(net.join("10-containerd-net.conflist"), conflist).context("write the conflist")?;
        let config = dir.join("config.toml");
        fs::write(&config, configuration(&dir, plugins)).context("write containerd's configuration")?;
        let mut command = sandbox.command(program);
        command.arg("--config").arg(&config);
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned();
        let daemon = Daemon::start("containerd", command, &dir.join("log"))?;
        let mut this = Self { daemon, dir, content: sandbox.path("content"), path };
        eventually("containerd listens", TIMEOUT, || {
            let ended = this.daemon.ended()?;
            ensure!(ended.is_none(), "containerd ended: {ended:?}");
            ensure!(this.socket().exists(), "{}", this.log_tail());
            Ok(())
        })?;
        Ok(this)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.join("c.sock")
    }

    pub(super) fn pid(&self) -> i32 {
        self.daemon.pid().as_raw()
    }

    /// The directory that pods serve.
    pub(super) fn content(&self) -> PathBuf {
        self.content.clone()
    }

    /// The image of the pods' own container and the one of what runs in them,
    /// both of one static program; no registry is asked.
    pub(super) fn import_images(&self, ctr: &Path) -> Result<()> {
        let program = binaries::find("demo-app")?;
        for (image, arguments) in [(PAUSE_IMAGE, &["sleep", "forever"][..]), (APP_IMAGE, &[])] {
            let archive = self.dir.join("image.tar");
            let program = Program { image, binary: &program, path: "demo-app", directories: &["data"] };
            write_archive_with_arguments(&program, arguments, &archive)?;
            let mut command = std::process::Command::new(ctr);
            command.env_clear().env("PATH", &self.path).arg("--address").arg(self.socket());
            command.args(["--namespace", "k8s.io", "images", "import", "--snapshotter", "native"]);
            let output = command.arg(&archive).output().context("start ctr")?;
            let words = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "ctr images import {image}: {}: {words}", output.status);
        }
        Ok(())
    }

    /// The end of its log, for the error message.
    pub(super) fn log_tail(&self) -> String {
        let log = self.daemon.output();
        let lines: Vec<&str> = log.lines().collect();
        format!("last lines of containerd's log:\n{}", lines[lines.len().saturating_sub(25)..].join("\n"))
    }

    pub(super) fn stop(mut self) -> Result<()> {
        self.daemon.stop(TIMEOUT).map(drop)
    }
}

fn configuration(dir: &Path, plugins: &Path) -> String {
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
  sandbox_image = "{PAUSE_IMAGE}"
  # A machine without CAP_SYS_RESOURCE cannot lower it.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{dir}/net"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"#,
        dir = dir.display(),
        plugins = plugins.display(),
    )
}
