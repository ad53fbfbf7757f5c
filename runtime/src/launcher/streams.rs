//! What a program has as stdin, stdout and stderr.

use std::os::fd::{AsFd, OwnedFd};

use linux::process;
use linux::terminal::{self, Terminal};

use super::error::{LaunchError, Result};
use crate::shim::descriptors;

/// The program's sides of pipes.
#[derive(Debug)]
pub(crate) struct Stdio {
    /// `None`: a null device of the container's own, or an empty stream. The host's null device belongs to the root
    /// user, who may be the container's.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// A program's stdin, stdout and stderr.
#[derive(Debug)]
pub(crate) enum StandardStreams {
    Pipes(Stdio),
    /// A new terminal of the container. Its other end is sent to this socket.
    Terminal(OwnedFd),
}

/// Makes a terminal in the container, owned by `user`, the process's stdin, stdout and stderr.
pub(super) fn take_terminal(user: u32, socket: &OwnedFd) -> Result<()> {
    let Terminal { ours, programs } = Terminal::open(user)?;
    descriptors::send(socket, b"t", &[ours.as_fd()])
        .map_err(|e| LaunchError::Io { op: "send the terminal", source: e.into() })?;
    Ok(process::set_stdio(&programs, &programs, &programs)?)
}

/// The process leads a session.
pub(super) fn control_terminal() -> Result<()> {
    Ok(terminal::make_controlling(std::io::stdin())?)
}
