//! csi-sanity of `github.com/kubernetes-csi/csi-test` at our driver: over its
//! socket, with daemons as child processes and real FUSE mounts.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ::tests::lone_driver::{self, LOG, TRACE};
use ::tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use ::tests::{Allowed, Daemon, LeakCheck, Network, Sandbox};
use anyhow::{Context, Result, anyhow, ensure};
use xtask::build::words;
use xtask::progress::{complain, say, step};

use super::report::{Counts, Report};
use crate::ginkgo::quote;

/// Everything that may be opted in to; more may be claimed than the pool has, and
/// four volumes a node are soon reached.
const FLAGS: [&str; 15] = [
    "--warm-daemons",
    "0",
    "--node-id",
    "sanity-node",
    "--pool-capacity",
    "100Gi",
    "--overcommit",
    "10",
    "--attach",
    "--max-volumes",
    "4",
    "--keeper-binary",
    "none",
    "--log",
    "debug",
];
const TIMEOUT: Duration = Duration::from_secs(30);
/// A run takes a minute or two.
const LIMIT: &str = "15m";
/// Secrets that csi-sanity sends, one for each call that may have some.
const SECRETS: [&str; 13] = [
    "CreateVolumeSecret",
    "DeleteVolumeSecret",
    "ControllerPublishVolumeSecret",
    "ControllerUnpublishVolumeSecret",
    "ControllerValidateVolumeCapabilitiesSecret",
    "NodeStageVolumeSecret",
    "NodePublishVolumeSecret",
    "CreateSnapshotSecret",
    "DeleteSnapshotSecret",
    "ControllerExpandVolumeSecret",
    "ControllerModifyVolumeSecret",
    "ListSnapshotsSecret",
    "GetSnapshotSecret",
];
/// Part of each secret's value; must stand in no log.
const MARK: &str = "must-stay-out-of-logs";

/// The pool, and what the classes say.
pub(super) struct Ground {
    pub(super) title: &'static str,
    file_system: FileSystem,
    /// Lines of the StorageClass's and of the VolumeSnapshotClass's parameters.
    volume_class: &'static str,
    snapshot_class: &'static str,
}

pub(super) const GROUNDS: [Ground; 2] = [
    Ground {
        title: "xfs, which shares blocks",
        file_system: FileSystem::Xfs,
        volume_class: "threads: \"2\"\nbackend: local\n",
        snapshot_class: "snapshotMode: reflink\n",
    },
    Ground {
        title: "ext4, by copies",
        file_system: FileSystem::Ext4,
        volume_class: "threads: \"2\"\nbackend: local\nsnapshotMode: blocking-copy\n",
        snapshot_class: "snapshotMode: blocking-copy\n",
    },
];

/// A thread of its own: entering a sandbox is for the thread's whole life.
pub(super) fn run(program: &Path, ground: &Ground, spec: Option<&str>) -> Result<Counts> {
    thread::scope(|scope| {
        let run = scope.spawn(|| in_a_sandbox(program, ground, spec));
        run.join().map_err(|_| anyhow!("the thread of the sandbox panicked"))?
    })
}

fn in_a_sandbox(program: &Path, ground: &Ground, spec: Option<&str>) -> Result<Counts> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let _pool = LoopMount::new(&sandbox, "pool", ground.file_system, IMAGE_BYTES)?;
    let mut driver = step("start hawser-csi", || lone_driver::start(&sandbox, &FLAGS))?;
    let files = Files::write(&sandbox, ground)?;
    // fusectl shows the whole machine's connections.
    let changing = [LOG, TRACE, "fusectl", "sanity", "k/sanity", "pool.img"].map(|name| sandbox.path(name));
    let leaks = LeakCheck::start(&sandbox, Allowed { changing: changing.to_vec(), ..Default::default() })?;

    let report = step("csi-sanity", || ask(&sandbox, program, &files, spec))?;
    for complaint in &report.complaints {
        complain(&format!("FAILED {}\n       {}", complaint.spec, complaint.says.replace('\n', "\n       ")));
    }
    say(&format!("csi-sanity: {}", report.counts));
    ensure!(driver.ended()?.is_none(), "the driver ended:\n{}", tail(&driver.output()));
    step("nothing is left", || leaks.verify(&sandbox, TIMEOUT)).with_context(|| tail(&driver.output()))?;
    step("no secret was logged", || {
        for file in [LOG, TRACE] {
            let text = fs::read_to_string(sandbox.path(file)).with_context(|| file.to_owned())?;
            ensure!(
                !text.contains(MARK),
                "{file} has a secret: {:?}",
                text.lines().find(|line| line.contains(MARK))
            );
        }
        Ok(())
    })?;
    driver.stop(TIMEOUT)?;
    Ok(report.counts)
}

/// What csi-sanity reads and writes.
struct Files {
    dir: PathBuf,
    /// Below the kubelet's directory, where the driver stages and publishes.
    volumes: PathBuf,
    volume_parameters: PathBuf,
    snapshot_parameters: PathBuf,
    secrets: PathBuf,
}

impl Files {
    fn write(sandbox: &Sandbox, ground: &Ground) -> Result<Self> {
        let dir = sandbox.make_dir("sanity")?;
        let volumes = sandbox.make_dir("k/sanity")?;
        let write = |name: &str, text: &str| -> Result<PathBuf> {
            let path = dir.join(name);
            fs::write(&path, text).with_context(|| path.display().to_string())?;
            Ok(path)
        };
        let mut secrets = String::new();
        for key in SECRETS {
            writeln!(secrets, "{key}:\n  secretKey: {MARK}-{key}").context("format a secret")?;
        }
        Ok(Self {
            volume_parameters: write("volume.yaml", ground.volume_class)?,
            snapshot_parameters: write("snapshot.yaml", ground.snapshot_class)?,
            secrets: write("secrets.yaml", &secrets)?,
            dir,
            volumes,
        })
    }
}

fn ask(sandbox: &Sandbox, program: &Path, files: &Files, spec: Option<&str>) -> Result<Report> {
    let option = |name: &str, value: &Path| format!("--{name}={}", value.display());
    let report = files.dir.join("report.json");
    let log = sandbox.path("sanity").join("log");
    let mut command = sandbox.command(program);
    command
        .arg(format!("--csi.endpoint=unix://{}", lone_driver::csi_socket(&sandbox.path("k")).display()))
        // csi-sanity makes these two itself, for each spec anew.
        .arg(option("csi.mountdir", &files.volumes.join("mount")))
        .arg(option("csi.stagingdir", &files.volumes.join("stage")))
        .arg(option("csi.testvolumeparameters", &files.volume_parameters))
        .arg(option("csi.testsnapshotparameters", &files.snapshot_parameters))
        .arg(option("csi.secrets", &files.secrets))
        .args(["--csi.testvolumesize=67108864", "--csi.testvolumeexpandsize=134217728"])
        .args(["--csi.testnodevolumeattachlimit", "--csi.testinvalidlistvolumesstartingtoken=invalid-token"])
        .args(["--ginkgo.no-color", "--ginkgo.v", "--ginkgo.seed=1", &format!("--ginkgo.timeout={LIMIT}")])
        .arg(option("ginkgo.json-report", &report));
    if let Some(spec) = spec {
        command.arg(format!("--ginkgo.focus={}", quote(spec)));
    }
    let line = words(&command);
    let mut run = Daemon::start("csi-sanity", command, &log)?;
    // Its exit code says no more than the report, which also knows why.
    run.wait(Duration::from_secs(16 * 60))?;
    let json = fs::read(&report).with_context(|| format!("{line}\n{}", tail(&run.output())))?;
    Report::parse(&json, spec.is_none())
}

/// The end of a log, without the lines of the HTTP/2 library.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.contains("Connection{peer")).collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
