//! A further static program in a running container: by a CRI call, by our client, and by crun in a container of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ::tests::manifests::Pod;
use ::tests::{Node, NodeOptions, Sandbox, binaries, mounts};
use anyhow::{Context, Result, anyhow, ensure};
use linux::mount::UnmountMode;
use nix::sched::CloneFlags;
use proto::cri::runtime_service_client::RuntimeServiceClient;
use proto::cri::{ExecSyncRequest, ListContainersRequest};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use xtask::foreign::debian_program;
use xtask::progress::step;

use crate::rows::{Bar, Row, milliseconds};
use crate::scene::on_new_disk;

const PROGRAM: [&str; 3] = ["/demo-app", "print", "x"];
/// Of a further program, in seconds.
const LIMIT: i64 = 10;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const CRUN_CONTAINER: &str = "hawser-bench";

pub(super) fn scene(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let options = on_new_disk(sandbox, NodeOptions::default())?;
    let node = step("start hawser-kubelet", || Node::start(sandbox, options))?;
    node.put_manifest("pod.yaml", &Pod::new("exec", &["sleep", "forever"]).yaml())?;
    node.wait_for_phase("exec", "Running")?;
    let mut runtime = Cri::connect(&node.root_dir().join("hawser/runtime.sock"))?;
    let bundle = sandbox.make_dir("crun")?;
    let rows = thread::scope(|scope| {
        let (ask, requests) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let crun = scope.spawn(move || crun_thread(&bundle, &requests, &answer));
        let crun_exec = || answers.recv().context("crun's thread has ended")?;
        step("start a container of crun", || crun_exec().map(drop))?;
        let rows = step("run a program in each, in turn", || {
            in_turn(&node, &mut runtime, runs, || {
                ask.send(()).context("crun's thread has ended")?;
                crun_exec()
            })
        });
        drop(ask);
        crun.join().map_err(|_| anyhow!("crun's thread panicked"))??;
        rows
    })?;
    node.stop()?;
    Ok(rows)
}

fn in_turn(
    node: &Node<'_>,
    runtime: &mut Cri,
    runs: usize,
    mut crun_exec: impl FnMut() -> Result<Duration>,
) -> Result<Vec<Row>> {
    let (mut by_call, mut by_client, mut by_crun) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..=runs {
        let times = [
            timed(|| runtime.exec())?,
            timed(|| node.client(&[&["exec", "exec", "--"], &PROGRAM[..]].concat()).map(drop))?,
            crun_exec()?,
        ];
        if run > 0 {
            for (samples, took) in [&mut by_call, &mut by_client, &mut by_crun].into_iter().zip(times) {
                samples.push(milliseconds(took));
            }
        }
    }
    Ok(vec![
        Row::new("exec of a static program: ExecSync", "ms", by_call, Some(Bar::AtMost(6.0))),
        Row::new("exec of a static program: hawser-kubelet exec", "ms", by_client, None),
        Row::new("exec of a static program: crun exec", "ms", by_crun, None),
    ])
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed())
}

/// A connection to the runtime inside the kubelet, and its only container.
#[derive(Debug)]
struct Cri {
    tokio: Runtime,
    runtime: RuntimeServiceClient<Channel>,
    container: String,
}

impl Cri {
    fn connect(socket: &Path) -> Result<Self> {
        let tokio =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
        let endpoint = Endpoint::from_shared(format!("unix:{}", socket.display()))?;
        let (runtime, containers) = tokio.block_on(async {
            let mut runtime = RuntimeServiceClient::new(endpoint.connect().await?);
            let containers = runtime.list_containers(ListContainersRequest::default()).await?;
            anyhow::Ok((runtime, containers.into_inner().containers))
        })?;
        let container = containers.into_iter().next().context("the runtime has no container")?.id;
        Ok(Self { tokio, runtime, container })
    }

    fn exec(&mut self) -> Result<()> {
        let request = ExecSyncRequest {
            container_id: self.container.clone(),
            cmd: PROGRAM.map(str::to_owned).to_vec(),
            timeout: LIMIT,
        };
        let ended = self.tokio.block_on(self.runtime.exec_sync(request)).context("ExecSync")?.into_inner();
        ensure!((ended.exit_code, &ended.stdout[..]) == (0, b"x\n"), "ExecSync: {ended:?}");
        Ok(())
    }
}

/// A container that crun has made from its own default specification.
#[derive(Debug)]
struct Crun {
    program: PathBuf,
    state: PathBuf,
}

impl Crun {
    /// Makes a container in a mount namespace of the calling thread's own, without the hierarchy of cgroup v2: crun
    /// refuses a machine that has controllers in both versions.
    fn start(bundle: &Path) -> Result<Self> {
        linux::process::unshare(CloneFlags::CLONE_NEWNS)?;
        linux::mount::make_private(Path::new("/"))?;
        let unified = Path::new("/sys/fs/cgroup/unified");
        if mounts()?.iter().any(|mount| mount.mount_point == unified) {
            linux::mount::unmount(unified, UnmountMode::Detach)?;
        }
        let root = bundle.join("rootfs");
        for dir in ["", "proc", "dev", "sys", "tmp"] {
            fs::create_dir_all(root.join(dir)).context("the container's directories")?;
        }
        fs::copy(binaries::find("demo-app")?, root.join("demo-app")).context("copy demo-app")?;
        // A mount, which runtimes change their root to.
        linux::mount::bind(&root, &root)?;
        let this = Self { program: debian_program("crun", "crun")?, state: bundle.join("state") };
        this.run(this.command().arg("spec").current_dir(bundle))?;
        let file = bundle.join("config.json");
        let mut config: Value =
            serde_json::from_str(&fs::read_to_string(&file)?).context("crun's config.json")?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["/demo-app", "sleep", "forever"]);
        fs::write(&file, config.to_string()).context("write config.json")?;
        let log = fs::File::create(bundle.join("log")).context("crun's log")?;
        let mut run = this.command();
        run.args(["run", "--detach", "--bundle"]).arg(bundle).arg(CRUN_CONTAINER);
        let status = run.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).status()?;
        ensure!(status.success(), "crun run: {status}: {}", fs::read_to_string(bundle.join("log"))?);
        Ok(this)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().env("PATH", PATH).arg("--root").arg(&self.state);
        command
    }

    fn run(&self, command: &mut Command) -> Result<String> {
        let output = command.output().context("start crun")?;
        let words = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{command:?}: {}: {words}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn exec(&self) -> Result<()> {
        let said = self.run(self.command().args(["exec", CRUN_CONTAINER]).args(PROGRAM))?;
        ensure!(said == "x\n", "crun exec: {said:?}");
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.run(self.command().args(["delete", "--force", CRUN_CONTAINER])).map(drop)
    }
}

/// The container's thread: its mount namespace is not the other threads'.
fn crun_thread(bundle: &Path, requests: &Receiver<()>, answers: &Sender<Result<Duration>>) -> Result<()> {
    let started = Crun::start(bundle);
    let (crun, said) = match started {
        Ok(crun) => (Some(crun), Ok(Duration::ZERO)),
        Err(error) => (None, Err(error)),
    };
    answers.send(said)?;
    let Some(crun) = crun else { return Ok(()) };
    while requests.recv().is_ok() {
        answers.send(timed(|| crun.exec()))?;
    }
    crun.stop()
}
