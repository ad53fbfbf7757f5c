//! Who serves and holds a volume, without a look at the applications: /proc entries of a process that
//! waits for a daemon may wait too.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use keeper::client::Client;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::Pid;
use serde_json::Value;
use tests::csi::scene::Scene;

use crate::TIMEOUT;

const KEEPER_TIMEOUT: Duration = Duration::from_secs(2);

/// Who holds all volumes' connections besides their daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holders {
    pub(crate) keeper: bool,
    pub(crate) driver: bool,
}

/// As `hawser-csi mounts` shows them. A daemon may be killed only while there is another holder, and a
/// holder only while there are two.
pub(crate) fn holders(scene: &Scene, volume_ids: &[&str]) -> Holders {
    let mounts = scene.mounts().unwrap_or_default();
    let is_holder = |mount: &Value, who: &str| {
        mount["holders"].as_array().is_some_and(|all| all.iter().any(|holder| holder == who))
    };
    let holds = |who: &str| {
        let is_held = |id: &&str| mounts.iter().any(|mount| mount["volume"] == **id && is_holder(mount, who));
        volume_ids.iter().all(is_held)
    };
    Holders { keeper: holds("keeper"), driver: holds("driver") }
}

fn keeper_client(scene: &Scene) -> Option<Client> {
    Client::connect(&scene.sandbox.path("run/keeper/keeper.sock"), KEEPER_TIMEOUT).ok()
}

/// How many files without a name the keeper holds for daemons.
pub(crate) fn removed_files(scene: &Scene) -> Option<u32> {
    keeper_client(scene)?.ping().ok().map(|counts| counts.removed)
}

/// The process that listens on the keeper's socket.
pub(crate) fn keeper(scene: &Scene) -> Option<i32> {
    let client = keeper_client(scene)?;
    getsockopt(&client.as_fd(), PeerCredentials).ok().map(|peer| peer.pid())
}

/// As the driver's journal records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Daemon {
    pub(crate) pid: i32,
    /// Of the FUSE connection.
    pub(crate) minor: u64,
}

fn stage(scene: &Scene, volume_id: &str) -> Option<Value> {
    let boots = fs::read_dir(scene.sandbox.path("state/boots")).ok()?.flatten();
    let file: PathBuf =
        boots.map(|boot| boot.path().join(format!("{volume_id}.jsonl"))).find(|file| file.exists())?;
    let text = fs::read_to_string(file).ok()?;
    // The last line may be unfinished.
    let mut records = text.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    records.next().map(|record| record["stage"].clone())
}

/// The daemon that serves the volume, dead or alive.
pub(crate) fn daemon(scene: &Scene, volume_id: &str) -> Option<Daemon> {
    let serving = &stage(scene, volume_id)?["serving"];
    let pid = serving["daemon"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok())?;
    Some(Daemon { pid, minor: serving["connection_minor"].as_u64()? })
}

/// The process that was started to serve the volume next.
pub(crate) fn launched(scene: &Scene, volume_id: &str) -> Option<i32> {
    let launch = &stage(scene, volume_id)?["launch"];
    let pid = launch.as_object()?.values().find_map(|launch| launch["pid"].as_i64());
    pid.and_then(|pid| i32::try_from(pid).ok())
}

pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// What a process has open and has no name any more.
pub(crate) fn nameless_files(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    files.filter(|file| file.to_string_lossy().ends_with("(deleted)")).collect()
}

/// Requests that wait on a connection.
pub(crate) fn waiting(scene: &Scene, minor: u64) -> u64 {
    let file = scene.sandbox.path("fusectl").join(minor.to_string()).join("waiting");
    fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// SIGKILL, and dead when this returns. False if it was dead before.
pub(crate) fn kill_now(pid: i32) -> bool {
    let Some(pidfd) = linux::process::open_pidfd(pid).unwrap() else { return false };
    let was_alive = linux::process::signal_pidfd(&pidfd, Signal::SIGKILL as i32).unwrap();
    assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap(), "process {pid} survives SIGKILL");
    was_alive
}

pub(crate) fn stop(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    tests::wait_until_stopped(pid, TIMEOUT).unwrap();
}
