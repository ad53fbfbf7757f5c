//! The kubelet and the driver: started apart from the terminal, and asked whether they work.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ::tests::eventually;
use anyhow::{Context, Result, bail, ensure};

use super::driver;
use super::helper;
use super::place::Place;
use super::prepare;
use super::processes;
use super::record::Record;

pub(super) const KUBELET: &str = "hawser-kubelet";
pub(super) use super::driver::PROGRAM as DRIVER;
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// For one command of the kubelet, so that one that hangs is an error.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// kubelet's default for memory. On the disk of a desk, a tenth of it may be more than is ever free.
const EVICTION: &str = "memory.available<100Mi,nodefs.available<1Gi,nodefs.inodesFree<1%";
/// What the kubelet logs when it has registered a driver.
const REGISTERED: &str = "driver registered";
/// Lines of a daemon's log that an error shows.
const LOG_LINES: usize = 15;

/// Whether both daemons run, and the kubelet has the class: the last thing that `up` makes.
pub(super) fn are_up(place: &Place) -> Result<bool> {
    let run = is_running(place, KUBELET)? && is_running(place, DRIVER)?;
    Ok(run && client(place, &["get", "storageclass", "hawser"]).is_ok())
}

fn is_running(place: &Place, program: &str) -> Result<bool> {
    let pids = processes::of_program(place, program)?;
    // The commands of `hawser-kubelet`, and its shims, run the same program.
    let is_daemon = |pid: &i32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        program != KUBELET || words.split(|byte| *byte == 0).nth(1) == Some(b"run")
    };
    Ok(pids.iter().any(is_daemon))
}

/// Starts the daemons that do not run, and waits until a claim can be provisioned.
pub(super) fn ensure_running(place: &Place, record: &Record) -> Result<()> {
    let length_before = log_of(place, KUBELET).len();
    let mut started = Vec::new();
    if !is_running(place, KUBELET)? {
        started.push((KUBELET, start(place, KUBELET, kubelet(place, record))?));
    }
    let answers = || client(place, &["get", "pods", "-A"]);
    wait_for(place, "the kubelet answers", &mut started, answers)?;
    if !is_running(place, DRIVER)? {
        started.push((DRIVER, start(place, DRIVER, driver(place)?)?));
    }
    if started.is_empty() {
        return Ok(());
    }
    wait_for(place, "the kubelet has registered the driver", &mut started, || {
        let log = log_of(place, KUBELET);
        ensure!(log.get(length_before..).unwrap_or(&log).contains(REGISTERED), "it has not");
        Ok(())
    })
}

/// The StorageClass, and the CSIDriver object.
pub(super) fn apply_class(place: &Place) -> Result<()> {
    let file = place.dir().join(prepare::CLASS).display().to_string();
    client(place, &["apply", "-f", &file])
}

/// Runs a command of the kubelet.
pub(super) fn client(place: &Place, words: &[&str]) -> Result<()> {
    let output = helper::output(Command::new(place.command()).args(words), b"", CLIENT_TIMEOUT)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "hawser-kubelet {}: {}", words.join(" "), stderr.trim());
    Ok(())
}

fn kubelet(place: &Place, record: &Record) -> Command {
    let mut command = Command::new(place.program(KUBELET));
    command.arg("run").arg("--root-dir").arg(place.kubelet());
    command.arg("--manifests").arg(place.manifests()).arg("--images").arg(place.images());
    command.arg("--cni-conf-dir").arg(place.network()).arg("--cni-bin-dir").arg(place.programs());
    command.arg("--log-dir").arg(place.pod_logs()).arg("--cgroup-root").arg(&record.cgroup);
    command.args(["--eviction-hard", EVICTION]);
    // For messages that say what to type.
    command.env("HAWSER_COMMAND", place.command());
    command
}

fn driver(place: &Place) -> Result<Command> {
    let mut command = Command::new(place.program(DRIVER));
    command.args(driver::arguments(place)?);
    Ok(command)
}

/// Starts a daemon in a process group of its own, so that Ctrl-C at the terminal does not reach it.
fn start(place: &Place, name: &str, mut command: Command) -> Result<Child> {
    let path = place.log_of(name);
    let log = File::options().append(true).create(true).open(&path);
    let log = log.with_context(|| path.display().to_string())?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("duplicate the log's descriptor")?)
        .stderr(log);
    command.current_dir("/").process_group(0);
    command.spawn().with_context(|| format!("start {}", command.get_program().display()))
}

/// Waits until `look` succeeds, or a daemon that was started has ended.
fn wait_for(
    place: &Place,
    what: &str,
    started: &mut [(&str, Child)],
    mut look: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut ended = None;
    eventually(what, START_TIMEOUT, || {
        for (name, child) in started.iter_mut() {
            if let Some(status) = child.try_wait().with_context(|| format!("wait for {name}"))? {
                ended = Some(format!("{name} ended with {status}: {}", last_lines(place, name)));
                return Ok(());
            }
        }
        look().with_context(|| last_lines(place, started.last().map_or(KUBELET, |(name, _)| name)))
    })?;
    ended.map_or(Ok(()), |problem| bail!("{problem}"))
}

fn log_of(place: &Place, name: &str) -> String {
    let log = fs::read(place.log_of(name)).unwrap_or_default();
    String::from_utf8_lossy(&log).into_owned()
}

fn last_lines(place: &Place, name: &str) -> String {
    let log = log_of(place, name);
    let lines: Vec<&str> = log.lines().collect();
    let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
    format!("the end of {}:\n{}\n", place.log_of(name).display(), last.join("\n"))
}
