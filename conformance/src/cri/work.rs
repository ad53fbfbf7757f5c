//! In a node: the runtime, then critest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ::tests::{Daemon, eventually};
use anyhow::{Context, Result, ensure};

use super::plan::{Plan, Side, Streams};
use super::{images, registry};
use ::tests::containerd::{Containerd, Settings};

const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const TIMEOUT: Duration = Duration::from_secs(30);
/// A whole run takes about three minutes.
const LIMIT: &str = "15m";
const LIMIT_AND_MORE: Duration = Duration::from_secs(16 * 60);

const CONFLIST: &str = r#"{
  "cniVersion": "1.0.0",
  "name": "critest",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "isGateway": true,
      "ipMasq": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.88.0.0/16"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}"#;

pub(super) fn run(plan: &Plan) -> Result<()> {
    match plan.side {
        Side::Hawser => on_hawser(plan),
        Side::Containerd => on_containerd(plan),
    }
}

fn on_hawser(plan: &Plan) -> Result<()> {
    let dir = make_dir(&plan.dir, "r")?;
    let net = make_dir(&dir, "net")?;
    fs::write(net.join("10-critest.conflist"), CONFLIST).context("write the conflist")?;
    let socket = dir.join("r.sock");
    let mut command = command(&plan.runtime, &dir);
    command.arg("--root-dir").arg(dir.join("root")).arg("--socket").arg(&socket);
    command.arg("--images").arg(&plan.images).arg("--no-preload");
    command.arg("--cni-conf-dir").arg(net).arg("--cni-bin-dir").arg(&plan.plugins);
    let mut runtime = Daemon::start("hawser-runtime", command, &dir.join("log"))?;
    eventually("hawser-runtime listens", TIMEOUT, || {
        let ended = runtime.ended()?;
        ensure!(ended.is_none() && socket.exists(), "{}", runtime.output());
        Ok(())
    })?;
    critest(plan, &socket)?;
    let ended = runtime.ended()?;
    ensure!(ended.is_none(), "hawser-runtime ended: {ended:?}\n{}", runtime.output());
    runtime.stop(TIMEOUT).map(drop)
}

fn on_containerd(plan: &Plan) -> Result<()> {
    let dir = make_dir(&plan.dir, "c")?;
    let net = make_dir(&dir, "net")?;
    fs::write(net.join("10-critest.conflist"), CONFLIST).context("write the conflist")?;
    let hosts = dir.join("hosts");
    registry::serve(&plan.images, &hosts)?;
    let containerd = Containerd::start(
        &dir,
        &Settings {
            program: &plan.runtime,
            plugins: &plan.plugins,
            network: &net,
            pause_image: images::PAUSE,
            snapshotter: "overlayfs",
            registries: Some(&hosts),
        },
    )?;
    critest(plan, &containerd.socket()).with_context(|| containerd.log_tail())?;
    containerd.stop()
}

fn make_dir(parent: &Path, name: &str) -> Result<PathBuf> {
    let dir = parent.join(name);
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    Ok(dir)
}

fn command(program: &Path, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", STANDARD_PATH).current_dir(dir);
    command
}

/// Runs the specs. Which of them failed is in the report, which must be there.
fn critest(plan: &Plan, socket: &Path) -> Result<()> {
    let temporary = make_dir(&plan.dir, "tmp")?;
    let config = plan.dir.join("crictl.yaml");
    fs::write(&config, "").with_context(|| config.display().to_string())?;
    let mut command = command(&plan.critest, &plan.dir);
    command.env("TMPDIR", temporary);
    command.arg(format!("--runtime-endpoint=unix://{}", socket.display()));
    command.arg(format!("--config={}", config.display()));
    command.args(["--ginkgo.no-color", "--ginkgo.seed=1", &format!("--ginkgo.timeout={LIMIT}")]);
    command.arg(format!("--ginkgo.json-report={}", plan.report().display()));
    if plan.streams == Streams::WebSocket {
        command.args(["--websocket-exec", "--websocket-attach", "--websocket-portforward"]);
    }
    if let Some(focus) = &plan.focus {
        command.arg(format!("--ginkgo.focus={focus}"));
    }
    let mut critest = Daemon::start("critest", command, &plan.dir.join("critest.log"))?;
    critest.wait(LIMIT_AND_MORE)?;
    ensure!(plan.report().is_file(), "critest left no report:\n{}", critest.output());
    Ok(())
}
