//! The program of the keeper: connecting to it, and starting it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keeper::client::Client;
use linux::cgroup::{Cgroup, Hierarchies, Limits};
use nix::errno::Errno;

use crate::config::{KeeperPod, KeeperProgram, KeeperStart};

/// For connecting and for each call: the keeper waits for nothing.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Many times what it needs with all the removed files that it can hold.
const MEMORY_BYTES: i64 = 128 << 20;
const TASKS: i64 = 16;
/// From its start until it answers.
const START: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(5);

/// `None` if the process is there and does not answer. Fails if it cannot be started.
pub(super) fn connect_or_start(program: &KeeperProgram) -> linux::Result<Option<Client>> {
    let found = match connect(program) {
        Ok(client) => Ok(client),
        Err(error) if is_gone(&error) => match &program.start {
            KeeperStart::Program { binary, cgroup } => {
                start(binary, cgroup.as_deref(), &program.socket)?;
                wait_for(program)
            }
            KeeperStart::Pod(pod) => {
                write_manifest(pod, &program.socket);
                Err(error)
            }
            KeeperStart::Elsewhere => Err(error),
        },
        Err(error) => Err(error),
    };
    Ok(found
        .inspect_err(|error| tracing::debug!(error = linux::chain(error), "the keeper does not answer"))
        .ok())
}

/// The kubelet starts it, and starts it again. A keeper that may hold something is not replaced here.
fn write_manifest(pod: &KeeperPod, socket: &Path) {
    if listens(socket) {
        return;
    }
    if let Err(error) = pod.ensure() {
        tracing::error!(error = linux::chain(&error), "no kubelet starts the keeper's pod");
    }
}

fn wait_for(program: &KeeperProgram) -> Result<Client, keeper::Error> {
    let deadline = Instant::now() + START;
    loop {
        match connect(program) {
            // No event tells when a socket listens.
            Err(error) if is_gone(&error) && Instant::now() < deadline => {
                std::thread::park_timeout(RETRY);
            }
            other => return other,
        }
    }
}

/// Nothing listens, or what has listened is ending.
fn is_gone(error: &keeper::Error) -> bool {
    matches!(error, keeper::Error::Connect { .. } | keeper::Error::Closed { .. })
}

/// Whether there may be a process that listens, even one that does not answer.
pub(super) fn listens(socket: &Path) -> bool {
    match Client::connect(socket, Duration::from_millis(1)) {
        Err(keeper::Error::Connect { cause }) => {
            !matches!(cause.errno(), Errno::ENOENT | Errno::ECONNREFUSED)
        }
        Ok(_) | Err(_) => true,
    }
}

/// A process that listens may be stopped, so it must answer too. From here on it gives no volume to a
/// daemon.
fn connect(program: &KeeperProgram) -> Result<Client, keeper::Error> {
    let mut client = Client::connect(&program.socket, TIMEOUT)?;
    match client.attend() {
        Ok(()) => Ok(client),
        Err(keeper::Error::Version { .. }) => {
            tracing::warn!("the keeper is of an earlier version: it serves no takeover while no driver runs");
            // Its answer has left the connection as it was.
            client.ping().map(|_| client)
        }
        Err(error) => Err(error),
    }
}

/// Starts the keeper, which makes a session of its own, so that no signal to the driver's group reaches
/// it. It may outlive this driver; the process that adopts orphans then becomes its parent.
fn start(binary: &Path, cgroup: Option<&Path>, socket: &Path) -> linux::Result<()> {
    let mut command = Command::new(binary);
    command.arg("--socket").arg(socket).env_clear().stdin(Stdio::null()).stdout(Stdio::null());
    command.current_dir("/");
    let group = cgroup.and_then(|path| logged(make_group(path)));
    let mut child = spawn_in(group.as_ref(), command).map_err(|e| linux::Error::at("start", binary, e))?;
    tracing::info!(pid = child.id(), socket = %socket.display(), "the keeper was started");
    // Reaps it if it ends while this driver runs.
    std::thread::Builder::new()
        .name("keeper".to_owned())
        .spawn(move || {
            let _reaped = child.wait();
        })
        .map(drop)
        .map_err(|e| linux::Error::at("watch", binary, e))
}

fn make_group(path: &Path) -> linux::Result<Cgroup> {
    let limits = Limits { memory_bytes: Some(MEMORY_BYTES), pids: Some(TASKS), ..Limits::default() };
    let (group, unmet) = Hierarchies::detect()?.create(path, &limits)?;
    for limit in unmet {
        tracing::warn!(limit, "the keeper runs without this limit");
    }
    Ok(group)
}

/// A thread that joins the group starts the process, since on cgroup v1 a child begins in the groups of
/// its parent's thread.
fn spawn_in(group: Option<&Cgroup>, mut command: Command) -> std::io::Result<Child> {
    let spawn = move || {
        logged(group.map_or(Ok(()), Cgroup::join_as_thread));
        let child = command.spawn()?;
        logged(group.map_or(Ok(()), |group| group.admit(child.id().cast_signed())));
        Ok(child)
    };
    let ended = std::thread::scope(|scope| scope.spawn(spawn).join());
    ended.unwrap_or_else(|_panic| Err(std::io::Error::other("the thread that starts it has panicked")))
}

/// What ends the driver's group would end the keeper too; it works all the same.
fn logged<T>(result: linux::Result<T>) -> Option<T> {
    result
        .inspect_err(|error| {
            tracing::warn!(error = linux::chain(error), "the keeper stays in the driver's control group");
        })
        .ok()
}
