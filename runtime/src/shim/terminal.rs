//! A container's stdin, stdout, stderr and terminal: its sides, and the shim's.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use rustix::fs::OFlags;

use super::error::{Result, ShimError};
use super::log::Stream;
use super::relay::{Relay, pipe};
use super::{descriptors, note};
use crate::error::chain;
use crate::launcher::{StandardStreams, Stdio};

/// The shim's sides of a container's stdin and terminal.
#[derive(Debug, Default)]
pub(super) struct ShimStreams {
    /// Whether clients may write to its stdin.
    has_stdin: bool,
    /// Whether that ends with the first of them.
    stdin_once: bool,
    /// To its stdin, if clients may write to it and it is no terminal. `None` once it has ended.
    stdin: Option<OwnedFd>,
    /// Its terminal comes here.
    socket: Option<UnixStream>,
    /// `None` once the container has ended.
    terminal: Option<OwnedFd>,
    /// The terminal's other end, so that output is read though all programs have closed it.
    peer: Option<OwnedFd>,
}

/// Both sides.
pub(super) struct ContainerStreams {
    pub(super) programs: StandardStreams,
    pub(super) ours: ShimStreams,
    /// The container's output, where the shim reads it. A terminal comes later.
    pub(super) output: Vec<Stream>,
}

/// What is wanted of a container's stdin.
pub(super) struct StdinRequest {
    /// Clients write to it.
    pub(super) has_stdin: bool,
    pub(super) stdin_once: bool,
    /// What becomes its stdin.
    pub(super) given: Option<OwnedFd>,
}

pub(super) fn streams(spec: &Spec, stdin: StdinRequest) -> Result<ContainerStreams> {
    let StdinRequest { has_stdin, stdin_once, given } = stdin;
    let ours = ShimStreams { has_stdin, stdin_once, ..ShimStreams::default() };
    let has_terminal = spec.process().as_ref().and_then(oci_spec::runtime::Process::terminal);
    if has_terminal.unwrap_or(false) {
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        let ours = ShimStreams { socket: Some(socket), ..ours };
        return Ok(ContainerStreams {
            programs: StandardStreams::Terminal(theirs.into()),
            ours,
            output: Vec::new(),
        });
    }
    let (theirs, stdin) = match given {
        None if has_stdin => {
            let (read, write) = pipe().map_err(|e| ShimError::Pipe { name: "stdin", source: e.into() })?;
            (Some(read), Some(write))
        }
        given => (given, None),
    };
    let (own_stdout, stdout) = output_pipe("stdout")?;
    let (own_stderr, stderr) = output_pipe("stderr")?;
    let programs = StandardStreams::Pipes(Stdio { stdin: theirs, stdout, stderr });
    Ok(ContainerStreams {
        programs,
        ours: ShimStreams { stdin, ..ours },
        output: vec![own_stdout, own_stderr],
    })
}

fn failed(source: impl Into<io::Error>) -> ShimError {
    ShimError::Pipe { name: "terminal", source: source.into() }
}

/// A program's new terminal. It was sent before execve(2), so it is there.
pub(super) fn receive(socket: &UnixStream) -> Result<OwnedFd> {
    socket.set_nonblocking(true).map_err(failed)?;
    let mut received = Vec::new();
    // runc sends the name of its device too.
    descriptors::receive(socket, &mut [0; 4096], &mut received, 1).map_err(failed)?;
    let terminal = received.pop().ok_or_else(|| failed(rustix::io::Errno::BADMSG))?;
    let flags = rustix::fs::fcntl_getfl(&terminal).map_err(failed)?;
    rustix::fs::fcntl_setfl(&terminal, flags | OFlags::NONBLOCK).map_err(failed)?;
    Ok(terminal)
}

impl ShimStreams {
    /// The container's output, if it has a terminal that was not taken yet.
    pub(super) fn take_terminal(&mut self) -> Result<Option<Stream>> {
        let Some(socket) = self.socket.take() else { return Ok(None) };
        self.connect_terminal(receive(&socket)?).map(Some)
    }

    /// The container's output.
    pub(super) fn connect_terminal(&mut self, terminal: OwnedFd) -> Result<Stream> {
        // Without it, the output ends when all programs have closed the terminal.
        self.peer = linux::terminal::open_peer(&terminal).inspect_err(|e| note(&chain(e))).ok();
        let copy = rustix::io::fcntl_dupfd_cloexec(&terminal, 0).map_err(failed)?;
        self.terminal = Some(terminal);
        Ok(Stream::new(copy, "stdout"))
    }

    pub(super) fn terminal(&self) -> Option<&OwnedFd> {
        self.terminal.as_ref()
    }

    /// From a client. `None`: the container has no stdin, or none any more; what the client sends is dropped.
    pub(super) fn input_from(&self, socket: OwnedFd) -> Result<Option<Relay>> {
        let failed = |source: rustix::io::Errno| ShimError::Pipe { name: "stdin", source: source.into() };
        let Some(stdin) = self.terminal.as_ref().filter(|_| self.has_stdin).or(self.stdin.as_ref()) else {
            return Ok(None);
        };
        let copy = rustix::io::fcntl_dupfd_cloexec(stdin, 0).map_err(failed)?;
        Relay::input(socket, copy).map(Some).map_err(failed)
    }

    /// A client's stdin has ended. Whether that ends the container's.
    pub(super) fn close_stdin_if_once(&mut self) -> bool {
        let is_over = self.stdin_once && self.terminal.is_none();
        if is_over {
            self.stdin = None;
        }
        is_over
    }

    /// The container has ended.
    pub(super) fn close(&mut self) {
        (self.stdin, self.terminal, self.peer) = (None, None, None);
    }
}

/// The shim's non-blocking read end, and the container's blocking write end.
pub(super) fn output_pipe(name: &'static str) -> Result<(Stream, OwnedFd)> {
    let (ours, theirs) = io::pipe().map_err(|source| ShimError::Pipe { name, source })?;
    let ours = OwnedFd::from(ours);
    rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK)
        .map_err(|e| ShimError::Pipe { name, source: e.into() })?;
    Ok((Stream::new(ours, name), theirs.into()))
}

/// Where an OCI runtime sends a container's terminal (`--console-socket`). Its file is removed with this.
#[derive(Debug)]
pub(super) struct Console {
    listener: UnixListener,
    path: PathBuf,
}

impl Console {
    /// In the bundle, and named relative to it: a socket's path has at most 107 bytes.
    pub(super) const NAME: &str = "console.sock";

    pub(super) fn listen(bundle: &Path) -> Result<Self> {
        let dir = File::open(bundle).map_err(failed)?;
        let short = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(Self::NAME);
        let listener = UnixListener::bind(short).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { listener, path: bundle.join(Self::NAME) })
    }

    /// After the OCI runtime has created the container.
    pub(super) fn receive(&self) -> Result<OwnedFd> {
        let (socket, _) = self.listener.accept().map_err(failed)?;
        receive(&socket)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _removed_with_the_bundle = std::fs::remove_file(&self.path);
    }
}
