//! Further programs in running containers: ExecSync, and Exec with a client's streams.
//!
//! The shim starts them, and passes their streams on to sockets of this process.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proto::cri::{ExecRequest, ExecSyncRequest, ExecSyncResponse};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::disk::record::new_id;
use crate::error::{Error, Result, chain};
use crate::runtime::Runtime;
use crate::runtime::state::{Container, Sandbox};
use crate::shim::protocol::{Answer, Call, Exec};
use crate::shim_client::error::ShimProblem;
use crate::shim_client::{START_DEADLINE, ShimClient, unexpected};

/// Of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Size {
    pub(crate) width: u16,
    pub(crate) height: u16,
}

/// Of each stream: kubelet takes messages of up to 16 MiB. The rest is read and discarded.
const MOST_OUTPUT_BYTES: usize = (8 << 20) - 1024;
/// What each stream may always have of that. More is kept only while all calls together keep [`MOST_KEPT_BYTES`]
/// at most: their number has no limit of its own, and programs may write much and then sleep.
const ALWAYS_KEPT_BYTES: usize = 64 << 10;
const MOST_KEPT_BYTES: usize = 256 << 20;
const READ_BYTES: usize = 16 << 10;
/// How long output is waited for after the program has ended: a process that it left behind may keep its
/// streams open.
const AFTER_END: Duration = Duration::from_secs(2);
/// How long a killed program's end is waited for.
const AFTER_KILL: Duration = Duration::from_secs(2);
/// Most output that is read then: what the largest pipe and the sockets may have kept.
const MOST_AFTER_END: usize = 2 << 20;

/// ExecSync: the output and the exit code. After `timeout`, or if the caller goes away, the program and
/// its process group are killed.
pub(crate) async fn sync(runtime: &Arc<Runtime>, request: ExecSyncRequest) -> Result<ExecSyncResponse> {
    let ExecSyncRequest { container_id, cmd, timeout } = request;
    let limit = match u64::try_from(timeout) {
        Ok(0) => None,
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => return Err(Error::invalid("timeout", format!("{timeout} is negative"))),
    };
    let (sandbox, container) = running(runtime, &container_id)?;
    let late = || Error::ExecTimeout { container: container.name(), limit: limit.unwrap_or_default() };
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let ([stdout, theirs], [stderr, their_stderr]) = (pair()?, pair()?);
    let request = ProgramRequest { args: cmd, stdin: false, terminal: false };
    let starting = start(runtime, &sandbox, &container, request, vec![theirs, their_stderr]);
    let mut started = before(deadline, starting).await.ok_or_else(late)??;
    let mut output = Output { stdout: Some(connected(stdout)?), stderr: Some(connected(stderr)?) };
    let mut collected = CollectedOutput::default();
    let Some(ended) = before(deadline, started.until_end(&mut output, &mut collected)).await else {
        started.kill(&mut output).await;
        return Err(late());
    };
    let exit_code = ended?;
    output.drain(&mut collected).await;
    let CollectedOutput { stdout, stderr } = collected;
    Ok(ExecSyncResponse { stdout: stdout.into_bytes(), stderr: stderr.into_bytes(), exit_code })
}

/// `None`: the time was over before.
async fn before<T>(deadline: Option<Instant>, what: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(what.await),
        Some(deadline) => tokio::time::timeout_at(deadline.into(), what).await.ok(),
    }
}

/// Refuses an Exec that cannot be. Returns the container's id.
pub(crate) fn check(runtime: &Runtime, request: &ExecRequest) -> Result<String> {
    if request.cmd.is_empty() {
        return Err(Error::invalid("cmd", "empty"));
    }
    check_streams(request.tty, [request.stdin, request.stdout, request.stderr])?;
    Ok(running(runtime, &request.container_id)?.1.id.clone())
}

/// `wanted`: stdin, stdout and stderr.
pub(crate) fn check_streams(tty: bool, wanted: [bool; 3]) -> Result<()> {
    let [_, _, stderr] = wanted;
    if tty && stderr {
        return Err(Error::invalid("stderr", "a terminal has one output stream, stdout"));
    }
    if wanted == [false; 3] {
        return Err(Error::invalid("stdin", "one of stdin, stdout and stderr is needed"));
    }
    Ok(())
}

pub(crate) fn running(runtime: &Runtime, id: &str) -> Result<(Arc<Sandbox>, Arc<Container>)> {
    let container = runtime.container(id)?;
    let state = container.state();
    if !state.is_running() {
        let (id, state) = (container.id.clone(), state.cri().as_str_name().to_owned());
        return Err(Error::WrongState { kind: "container", id, state, wanted: "running" });
    }
    Ok((runtime.sandbox(&container.record.sandbox_id)?, container))
}

/// Of which stream a piece of output is. A terminal has stdout alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Stdout,
    Stderr,
}

/// The runtime's sides of a client's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    /// `None`: the program reads /dev/null, or a terminal that says nothing.
    pub(crate) stdin: Option<mpsc::Receiver<Vec<u8>>>,
    /// The last one counts.
    pub(crate) sizes: Option<watch::Receiver<Option<Size>>>,
    pub(crate) output: mpsc::Sender<(Taken, Vec<u8>)>,
}

/// Exec: runs a program with a client's streams. Returns its exit code. If this is dropped, or the client
/// takes no more output, the program and its process group are killed.
pub(crate) async fn streamed(
    runtime: &Arc<Runtime>,
    container_id: &str,
    args: Vec<String>,
    terminal: bool,
    streams: Streams,
) -> Result<i32> {
    let Streams { stdin, sizes, output: to } = streams;
    let (sandbox, container) = running(runtime, container_id)?;
    let request = ProgramRequest { args, stdin: stdin.is_some() && !terminal, terminal };
    let [ours, theirs] = pair()?;
    let mut sockets = vec![theirs];
    let (output, input) = if terminal {
        let input = ours.try_clone().map_err(socket_failed)?;
        (Output { stdout: Some(connected(ours)?), stderr: None }, Some(input))
    } else {
        let [stderr, their_stderr] = pair()?;
        sockets.push(their_stderr);
        let mut input = None;
        if stdin.is_some() {
            let [ours, theirs] = pair()?;
            sockets.push(theirs);
            input = Some(ours);
        }
        (Output { stdout: Some(connected(ours)?), stderr: Some(connected(stderr)?) }, input)
    };
    let mut started = start(runtime, &sandbox, &container, request, sockets).await?;
    // They end with this.
    let mut beside = JoinSet::new();
    if let (Some(pieces), Some(input)) = (stdin, input) {
        beside.spawn(write(connected(input)?, pieces));
    }
    if let Some(sizes) = sizes {
        let id = started.program.id.clone();
        let call =
            move |Size { width, height }| Call::ResizeExec { exec: id.clone(), columns: width, rows: height };
        beside.spawn(resize(Arc::clone(&started.program.shim), call, sizes));
    }
    let (mut output, mut to) = (output, Client(to));
    let code = started.until_end(&mut output, &mut to).await?;
    output.drain(&mut to).await;
    Ok(code)
}

pub(crate) async fn write(mut input: UnixStream, mut pieces: mpsc::Receiver<Vec<u8>>) {
    while let Some(piece) = pieces.recv().await {
        if input.write_all(&piece).await.is_err() {
            return; // the program reads no more
        }
    }
    let _program_has_ended = input.shutdown().await;
}

/// `call`: the one for each size.
pub(crate) async fn resize(
    shim: Arc<ShimClient>,
    call: impl Fn(Size) -> Call,
    mut sizes: watch::Receiver<Option<Size>>,
) {
    while sizes.changed().await.is_ok() {
        let Some(size) = *sizes.borrow_and_update() else { continue };
        if let Err(error) = shim.call(call(size)).await {
            tracing::debug!(error = %chain(&error), "the size of a terminal");
        }
    }
}

/// What is to run.
struct ProgramRequest {
    args: Vec<String>,
    stdin: bool,
    terminal: bool,
}

/// A program that runs.
struct Started {
    program: Program,
    ended: oneshot::Receiver<i32>,
    container: String,
}

async fn start(
    runtime: &Arc<Runtime>,
    sandbox: &Sandbox,
    container: &Container,
    request: ProgramRequest,
    sockets: Vec<OwnedFd>,
) -> Result<Started> {
    let ProgramRequest { args, stdin, terminal } = request;
    if args.is_empty() {
        return Err(Error::invalid("cmd", "empty"));
    }
    let failed = |source| Error::Exec { container: container.name(), source };
    let shim = sandbox.shim().ok_or(Error::Task { task: "shim" })?;
    if !shim.can_exec() {
        return Err(failed(ShimProblem::CannotExec));
    }
    let id = new_id()?;
    let ended = runtime.execs.expect(&id, &sandbox.id);
    let program = Program { runtime: Arc::clone(runtime), shim, id: id.clone() };
    let call = Call::Exec(Exec { exec: id, container: container.id.clone(), args, terminal, stdin });
    // A task of its own: if the caller has gone, the program is killed after it was started.
    let asked = tokio::spawn(async move {
        let descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let answer = program.shim.ask(call, &descriptors, START_DEADLINE).await;
        (program, answer)
    });
    match asked.await.map_err(|_| Error::Task { task: "exec" })? {
        (program, Ok(Answer::Done)) => Ok(Started { program, ended, container: container.name() }),
        (_, Ok(other)) => Err(failed(unexpected(&other))),
        (_, Err(problem)) => Err(failed(problem)),
    }
}

impl Started {
    /// The exit code. What the program has written until then is in the streams.
    async fn until_end(&mut self, output: &mut Output, to: &mut impl Sink) -> Result<i32> {
        let container = self.container.clone();
        let lost = |_| Error::Exec { container: container.clone(), source: ShimProblem::Ended };
        let code = loop {
            tokio::select! {
                piece = output.next() => {
                    let Some((from, bytes)) = piece else { break (&mut self.ended).await.map_err(lost)? };
                    if !to.take(from, bytes).await {
                        // The client takes no more: dropping the program kills it.
                        return Err(Error::Exec { container, source: ShimProblem::Ended });
                    }
                }
                code = &mut self.ended => break code.map_err(lost)?,
            }
        };
        self.program.has_ended();
        Ok(code)
    }

    /// Kills the program, and waits until it has ended, so that what runs next in the
    /// container does not meet it. A program that cannot end (in the kernel's uninterruptible sleep) is left to
    /// the shim.
    async fn kill(&mut self, output: &mut Output) {
        kill(&self.program.shim, &self.program.id).await;
        let mut dropped = CollectedOutput::default();
        let ended = self.until_end(output, &mut dropped);
        if !matches!(tokio::time::timeout(AFTER_KILL, ended).await, Ok(Ok(_))) {
            tracing::warn!(container = self.container, "a program that was killed has not ended");
        }
    }
}

/// Killed when this is dropped, unless it has ended.
struct Program {
    runtime: Arc<Runtime>,
    shim: Arc<ShimClient>,
    id: String,
}

impl Program {
    fn has_ended(&mut self) {
        self.id.clear();
    }
}

/// Kills a program and its process group.
async fn kill(shim: &ShimClient, id: &str) {
    if let Err(error) = shim.call(Call::KillExec { exec: id.to_owned() }).await {
        tracing::warn!(error = %chain(&error), "kill a program that exec has started");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.id.is_empty() {
            return;
        }
        self.runtime.execs.forget(&self.id);
        let (shim, id) = (Arc::clone(&self.shim), std::mem::take(&mut self.id));
        tokio::spawn(async move { kill(&shim, &id).await });
    }
}

/// Who takes a program's output.
trait Sink {
    /// `false`: the client takes no more.
    async fn take(&mut self, from: Taken, bytes: Vec<u8>) -> bool;
}

#[derive(Debug, Default)]
struct CollectedOutput {
    stdout: CollectedStream,
    stderr: CollectedStream,
}

impl Sink for CollectedOutput {
    async fn take(&mut self, from: Taken, bytes: Vec<u8>) -> bool {
        let kept = if from == Taken::Stdout { &mut self.stdout } else { &mut self.stderr };
        kept.take(&bytes);
        true
    }
}

#[derive(Debug, Default)]
struct CollectedStream {
    bytes: Vec<u8>,
    /// Of [`KEPT_BYTES`].
    shared: usize,
    is_cut: bool,
}

/// Of all streams, without what each may always have.
static KEPT_BYTES: AtomicUsize = AtomicUsize::new(0);

impl CollectedStream {
    fn take(&mut self, bytes: &[u8]) {
        if self.is_cut {
            return;
        }
        let fitting = bytes.len().min(MOST_OUTPUT_BYTES - self.bytes.len());
        let after = self.bytes.len() + fitting;
        let beyond = after.saturating_sub(self.bytes.len().max(ALWAYS_KEPT_BYTES));
        self.is_cut = !self.shares(beyond);
        let kept = if self.is_cut { fitting - beyond } else { fitting };
        self.bytes.extend_from_slice(&bytes[..kept]);
    }

    /// Whether all streams together may keep so much more.
    fn shares(&mut self, bytes: usize) -> bool {
        let take = |kept: usize| Some(kept + bytes).filter(|&kept| kept <= MOST_KEPT_BYTES);
        let is_taken = KEPT_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        self.shared += if is_taken { bytes } else { 0 };
        is_taken
    }

    fn into_bytes(mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for CollectedStream {
    fn drop(&mut self) {
        KEPT_BYTES.fetch_sub(self.shared, Ordering::Relaxed);
    }
}

struct Client(mpsc::Sender<(Taken, Vec<u8>)>);

impl Sink for Client {
    async fn take(&mut self, from: Taken, bytes: Vec<u8>) -> bool {
        self.0.send((from, bytes)).await.is_ok()
    }
}

/// The streams that have not ended.
pub(crate) struct Output {
    pub(crate) stdout: Option<UnixStream>,
    pub(crate) stderr: Option<UnixStream>,
}

impl Output {
    /// After the program's end. A process that it left behind may keep its streams open.
    async fn drain(&mut self, to: &mut impl Sink) {
        let (mut left, mut remaining) = (MOST_AFTER_END, AFTER_END);
        loop {
            let begun = Instant::now();
            let Ok(Some((from, bytes))) = tokio::time::timeout(remaining, self.next()).await else { return };
            // Without the time that a slow client takes.
            remaining = remaining.saturating_sub(begun.elapsed());
            left = left.saturating_sub(bytes.len());
            if !to.take(from, bytes).await || left == 0 {
                return;
            }
        }
    }

    /// `None`: all have ended. Nothing is lost if this is dropped before.
    pub(crate) async fn next(&mut self) -> Option<(Taken, Vec<u8>)> {
        while self.stdout.is_some() || self.stderr.is_some() {
            let (from, piece) = tokio::select! {
                piece = read_some(self.stdout.as_ref()) => (Taken::Stdout, piece),
                piece = read_some(self.stderr.as_ref()) => (Taken::Stderr, piece),
            };
            match piece {
                Some(bytes) => return Some((from, bytes)),
                None if from == Taken::Stdout => self.stdout = None,
                None => self.stderr = None,
            }
        }
        None
    }
}

/// `None` at the end of the stream. Waits without end if there is none.
async fn read_some(stream: Option<&UnixStream>) -> Option<Vec<u8>> {
    let Some(stream) = stream else { return std::future::pending().await };
    loop {
        stream.readable().await.ok()?;
        let mut bytes = vec![0; READ_BYTES];
        match stream.try_read(&mut bytes) {
            Ok(0) => return None,
            Ok(length) => {
                bytes.truncate(length);
                return Some(bytes);
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => return None,
        }
    }
}

fn socket_failed(source: std::io::Error) -> Error {
    Error::io("make", Path::new("a socket for a program's stream"), source)
}

/// This process's end, and the shim's.
pub(crate) fn pair() -> Result<[OwnedFd; 2]> {
    let (ours, theirs) = StdStream::pair().map_err(socket_failed)?;
    Ok([ours.into(), theirs.into()])
}

pub(crate) fn connected(socket: OwnedFd) -> Result<UnixStream> {
    let stream = StdStream::from(socket);
    stream.set_nonblocking(true).map_err(socket_failed)?;
    UnixStream::from_std(stream).map_err(socket_failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_all_calls_share_what_is_beyond_the_first_part_of_each() {
        let full = || {
            let mut stream = CollectedStream::default();
            stream.take(&vec![1; MOST_OUTPUT_BYTES + 1]);
            stream
        };
        let mut all: Vec<_> = (0..40).map(|_| full()).collect();
        let lengths: Vec<_> = all.iter().map(|stream| stream.bytes.len()).collect();
        let kept: usize = lengths.iter().sum();
        assert!(kept <= MOST_KEPT_BYTES + 40 * ALWAYS_KEPT_BYTES, "{kept}");
        assert_eq!((lengths[0], lengths[39]), (MOST_OUTPUT_BYTES, ALWAYS_KEPT_BYTES));
        let mut cut = all.pop().unwrap();
        all.clear();
        cut.take(&[2]);
        assert_eq!(cut.bytes.len(), ALWAYS_KEPT_BYTES, "nothing follows what was left out");
        drop(cut);
        assert_eq!(KEPT_BYTES.load(Ordering::Relaxed), 0);
    }
}
