//! The program of the keeper: connecting to it, and starting it.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use keeper::client::Client;

use crate::config::KeeperProgram;

/// For connecting and for each call: the keeper waits for nothing.
const TIMEOUT: Duration = Duration::from_secs(2);
/// From its start until it answers.
const START: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(5);

/// `None` if the process is there and does not answer. Fails if it cannot be started.
pub(super) fn connect_or_start(program: &KeeperProgram) -> linux::Result<Option<Client>> {
    let found = match connect(program) {
        Ok(client) => Ok(client),
        Err(error) if is_gone(&error) => {
            start(program)?;
            wait_for(program)
        }
        Err(error) => Err(error),
    };
    Ok(found
        .inspect_err(|error| tracing::error!(error = linux::chain(error), "the keeper does not answer"))
        .ok())
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

/// A process that listens may be stopped, so it must answer too.
fn connect(program: &KeeperProgram) -> Result<Client, keeper::Error> {
    let mut client = Client::connect(&program.socket, TIMEOUT)?;
    client.ping()?;
    Ok(client)
}

/// Starts the keeper in a process group of its own, so that no signal to the driver's group reaches it.
/// The keeper may outlive this driver; the process that adopts orphans then becomes its parent.
fn start(program: &KeeperProgram) -> linux::Result<()> {
    let KeeperProgram { binary, socket } = program;
    let mut command = Command::new(binary);
    command.arg("--socket").arg(socket).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(|e| linux::Error::at("start", binary, e))?;
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
