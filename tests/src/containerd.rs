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
    program: PathBuf,
    dir: PathBuf,
    snapshotter: String,
}

#[derive(Debug)]
pub struct Settings<'a> {
    pub program: &'a Path,
    /// The directory of the CNI plugins.
    pub plugins: &'a Path,
    /// The directory of CNI configurations.
    pub network: &'a Path,
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
        let config = config_in(dir);
        fs::write(&config, configuration(dir, settings)).context("write containerd's configuration")?;
        let (program, snapshotter) = (settings.program.to_owned(), settings.snapshotter.to_owned());
        let daemon = start_daemon(&program, dir)?;
        let mut this = Self { daemon, program, dir: dir.to_owned(), snapshotter };
        this.wait_until_it_listens()?;
        Ok(this)
    }

    /// SIGKILL; its shims and their containers go on.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()?;
        fs::remove_file(self.socket()).context("remove the socket")
    }

    /// Starts it again after [`Self::kill`].
    pub fn start_again(&mut self) -> Result<()> {
        self.daemon = start_daemon(&self.program, &self.dir)?;
        self.wait_until_it_listens()
    }

    fn wait_until_it_listens(&mut self) -> Result<()> {
        eventually("containerd listens", TIMEOUT, || {
            let ended = self.daemon.ended()?;
            ensure!(ended.is_none(), "containerd ended: {ended:?}");
            ensure!(self.socket().exists(), "{}", self.log_tail());
            Ok(())
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("c.sock")
    }

    pub fn pid(&self) -> i32 {
        self.daemon.pid().as_raw()
    }

    /// Imports an archive and waits until pods can use its image; no registry is asked.
    pub fn import(&self, ctr: &Path, archive: &Path) -> Result<()> {
        let mut words = vec!["images", "import", "--snapshotter", &self.snapshotter];
        let archive = archive.display().to_string();
        words.push(&archive);
        // `unpacking NAME (DIGEST)...done`
        let said = self.ctr(ctr, &words)?;
        let name = said.lines().find_map(|line| line.strip_prefix("unpacking ")?.split(' ').next());
        let name = name.with_context(|| format!("ctr images import {archive}: {said:?}"))?;
        // The CRI plugin hears of the image, and labels it.
        let filter = format!("name=={name},labels.\"io.cri-containerd.image\"==managed");
        eventually(&format!("image {name} is known to CRI"), TIMEOUT, || {
            let known = self.ctr(ctr, &["images", "list", "-q", &filter])?;
            ensure!(known.lines().any(|line| line == name), "{known:?}");
            Ok(())
        })
    }

    /// What `ctr` prints, in the namespace of CRI.
    fn ctr(&self, ctr: &Path, words: &[&str]) -> Result<String> {
        let mut command = Command::new(ctr);
        command.env_clear().env("PATH", STANDARD_PATH).arg("--address").arg(self.socket());
        let output = command.args(["--namespace", "k8s.io"]).args(words).output().context("start ctr")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctr {}: {}: {said}", words.join(" "), output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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

fn config_in(dir: &Path) -> PathBuf {
    dir.join("config.toml")
}

fn start_daemon(program: &Path, dir: &Path) -> Result<Daemon> {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", STANDARD_PATH).current_dir(dir);
    command.arg("--config").arg(config_in(dir));
    Daemon::start("containerd", command, &dir.join("log"))
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

# The layer of a removed container is freed at once, not after 100 changes of containerd's database.
[plugins."io.containerd.gc.v1.scheduler"]
  deletion_threshold = 1

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # A machine without CAP_SYS_RESOURCE cannot lower it.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{network}"
{registries}  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"#,
        dir = dir.display(),
        pause = settings.pause_image,
        plugins = settings.plugins.display(),
        network = settings.network.display(),
        snapshotter = settings.snapshotter,
    )
}
