//! The runtime's side of a shim: starting it, calling it, receiving its messages.

pub(crate) mod error;
mod processes;

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use linux::process;
use linux::rootfs::EmptyMounts;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::oneshot;

use crate::blocking::blocking;
use crate::disk::record;
use crate::error::{Error, Result};
use crate::reexec::{SHIM_NAME, own_program};
use crate::shim::descriptors;
use crate::shim::protocol::{Answer, Call, HoldPids, Message, Request, ShimConfig, ShimStatus};
use error::ShimProblem;
pub(crate) use processes::shims_of;

const SOCKET: &str = "shim.sock";
/// Starting a container takes mounts and an execve; longer waits mean that it hangs.
pub(crate) const START_DEADLINE: Duration = Duration::from_secs(60);
/// All other calls work in memory. A pod can keep its shim from answering: a process with an output
/// pipe of a container can hold the kernel's lock on it (splice(2) from a silent socket), and the
/// shim waits for that lock when it reads or closes the pipe.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(3);
/// After its last answer a shim only exits.
const END_DEADLINE: Duration = Duration::from_secs(5);

/// Longest line of a shim; its messages are more than a hundred times shorter.
const MAX_LINE_BYTES: u64 = 1 << 20;
const MAX_SHOWN_BYTES: usize = 256;

/// A process, identified by its pid and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: i32,
    /// Clock ticks since boot.
    pub(crate) start_time: u64,
}

impl ProcessId {
    /// `None` if there is no such process.
    fn of(pid: i32) -> Result<Option<Self>> {
        Ok(process::start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// `None` if it has ended.
    pub(crate) fn open(self) -> Result<Option<OwnedFd>> {
        let pidfd = process::open_pidfd(self.pid)?;
        // Compared after the pidfd was opened: so both belong to the same process.
        let is_same = process::start_time(self.pid)? == Some(self.start_time);
        Ok(pidfd.filter(|_| is_same))
    }
}

/// Receives the messages of shims, including answers to Start, in order.
pub(crate) trait Listener: Send + Sync + 'static {
    fn heard(&self, sandbox: &str, message: &Message);
    /// A connection that [`connect`] has returned ended: the shim is gone.
    fn lost(&self, sandbox: &str);
}

#[derive(Debug)]
pub(crate) struct ShimClient {
    sandbox: String,
    process: ProcessId,
    writer: Arc<tokio::sync::Mutex<OwnedWriteHalf>>,
    receives_descriptors: bool,
    can_exec: bool,
    can_attach: bool,
    can_hold_pids: bool,
    next_id: AtomicU64,
    waiting: Arc<Waiting>,
}

/// The callers that wait for answers, by the numbers of their requests.
type Waiting = Mutex<HashMap<u64, oneshot::Sender<Answer>>>;

/// Starts the shim of the sandbox in `dir`. [`connect`] may follow at once.
pub(crate) fn start(sandbox: &str, dir: &Path, config: &ShimConfig) -> Result<ProcessId> {
    let failed = |source| Error::Shim { sandbox: sandbox.to_owned(), source };
    record::save(&dir.join("shim.json"), config)?;
    // Bound here and inherited, so that clients can connect at once.
    let socket = in_directory(dir, |path| StdListener::bind(path))
        .map_err(|e| Error::io("bind", &dir.join(SOCKET), e))?;
    let log_path = dir.join("shim.log");
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&log_path)
        .map_err(|e| Error::io("open", &log_path, e))?;
    let child = Command::new(own_program()?)
        .arg0(SHIM_NAME)
        .arg(dir)
        .stdin(Stdio::from(OwnedFd::from(socket)))
        .stdout(empty_mounts()?)
        .stderr(log)
        .spawn()
        .map_err(|source| failed(ShimProblem::Start { source }))?;
    let pid = child.id().cast_signed();
    children().insert(sandbox.to_owned(), child);
    ProcessId::of(pid)?.ok_or_else(|| failed(ShimProblem::EndedAtOnce))
}

/// Children of this process that are not reaped yet, by sandbox. No descriptor shows their end, since
/// every plugin that is started closes all descriptors: their connection shows it.
fn children() -> MutexGuard<'static, BTreeMap<String, Child>> {
    static CHILDREN: Mutex<BTreeMap<String, Child>> = Mutex::new(BTreeMap::new());
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reaps the sandbox's shim once it has ended, after its connection. That may last: the shim waits for
/// a pipe that another pod holds, or is traced.
fn reap(sandbox: &str) {
    let Some(mut child) = children().remove(sandbox) else { return };
    tokio::spawn(async move {
        let mut pause = Duration::from_millis(2);
        while let Ok(None) = child.try_wait() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    });
}

/// A descriptor of the [`EmptyMounts`] of all shims, which the first call makes.
pub(crate) fn empty_mounts() -> Result<OwnedFd> {
    static MOUNTS: OnceLock<EmptyMounts> = OnceLock::new();
    let mounts = match MOUNTS.get() {
        Some(mounts) => mounts,
        None => {
            let made = EmptyMounts::make()?;
            MOUNTS.get_or_init(|| made)
        }
    };
    let copy = mounts.as_fd().try_clone_to_owned();
    copy.map_err(|e| Error::io("duplicate mount namespace", Path::new("/"), e))
}

/// Connects to the shim of the sandbox in `dir`, which an earlier runtime may have started. Waits
/// up to `limit` for its containers' statuses; `listener` receives later exits.
pub(crate) async fn connect(
    sandbox: &str,
    dir: &Path,
    listener: Arc<dyn Listener>,
    limit: Duration,
) -> Result<(ShimClient, BTreeMap<String, ShimStatus>)> {
    let failed = |e| Error::io("connect", &dir.join(SOCKET), e);
    let stream = match in_directory(dir, |path| StdStream::connect(path)) {
        Ok(stream) => stream,
        Err(e) => {
            reap(sandbox);
            return Err(match e.kind() {
                // Its socket was bound before it was started.
                std::io::ErrorKind::ConnectionRefused => {
                    Error::Shim { sandbox: sandbox.to_owned(), source: ShimProblem::Ended }
                }
                _ => failed(e),
            });
        }
    };
    stream.set_nonblocking(true).map_err(failed)?;
    let (reader, writer) = UnixStream::from_std(stream).map_err(failed)?.into_split();
    let waiting: Arc<Waiting> = Arc::default();
    let (established, is_established) = oneshot::channel();
    let (of, answered) = (sandbox.to_owned(), Arc::clone(&waiting));
    tokio::spawn(async move {
        listen(&of, reader, &answered, &*listener).await;
        reap(&of);
        answered.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // An attempt that has failed ends its own connection, and the shim may run.
        if is_established.await.is_ok() {
            listener.lost(&of);
        }
    });
    let mut client = ShimClient {
        sandbox: sandbox.to_owned(),
        process: ProcessId { pid: 0, start_time: 0 },
        writer: Arc::new(tokio::sync::Mutex::new(writer)),
        receives_descriptors: false,
        can_exec: false,
        can_attach: false,
        can_hold_pids: false,
        next_id: AtomicU64::new(0),
        waiting,
    };
    match client.call_within(Call::List, limit).await? {
        Answer::Containers { pid, receives_descriptors, can_exec, can_attach, can_hold_pids, containers } => {
            client.receives_descriptors = receives_descriptors;
            client.can_exec = can_exec;
            client.can_attach = can_attach;
            client.can_hold_pids = can_hold_pids;
            client.process = ProcessId::of(pid)?.ok_or_else(|| client.failed(ShimProblem::Ended))?;
            let _is_read_by_the_task = established.send(());
            Ok((client, containers))
        }
        other => Err(client.failed(unexpected(&other))),
    }
}

/// A socket's path has at most 107 bytes; through the directory's descriptor, every path is short.
fn in_directory<T>(dir: &Path, act: impl FnOnce(&Path) -> std::io::Result<T>) -> std::io::Result<T> {
    let dir = File::open(dir)?;
    act(&PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(SOCKET))
}

impl ShimClient {
    /// A shim of an earlier version cannot start further programs.
    pub(crate) fn can_exec(&self) -> bool {
        self.can_exec
    }

    /// Nor start a container with a terminal, or with stdin.
    pub(crate) fn can_attach(&self) -> bool {
        self.can_attach
    }

    /// A shim of an earlier version starts containers in no PID namespace but a new one and the host's: it would
    /// take another one's for the host's.
    pub(crate) fn check_joins_pids(&self) -> Result<()> {
        if self.can_hold_pids { Ok(()) } else { Err(self.failed(ShimProblem::CannotHoldPids)) }
    }

    /// Starts the process that holds the pod's PID namespace, if there is none yet. Returns its pid.
    pub(crate) async fn hold_pids(&self, asked: HoldPids) -> Result<i32> {
        self.check_joins_pids()?;
        match self.call_within(Call::HoldPids(asked), START_DEADLINE).await? {
            Answer::Holds { pid } => Ok(pid),
            other => Err(self.failed(unexpected(&other))),
        }
    }

    pub(crate) async fn call(&self, call: Call) -> Result<Answer> {
        self.call_within(call, ANSWER_DEADLINE).await
    }

    pub(crate) async fn call_within(&self, call: Call, limit: Duration) -> Result<Answer> {
        self.ask(call, &[], limit).await.map_err(|source| self.failed(source))
    }

    /// Sends a call and waits. The shim gets duplicates of the descriptors. A refusal is an `Err`
    /// with the shim's message.
    pub(crate) async fn ask(
        &self,
        call: Call,
        descriptors: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> std::result::Result<Answer, ShimProblem> {
        if !descriptors.is_empty() && !self.receives_descriptors {
            return Err(ShimProblem::NoDescriptors);
        }
        let copies =
            descriptors.iter().map(|fd| fd.try_clone_to_owned()).collect::<std::io::Result<Vec<_>>>();
        let copies = copies.map_err(|source| ShimProblem::Send { source })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, sender);
        let request = Request { id, descriptors: descriptors.len(), call };
        let mut line = serde_json::to_vec(&request).expect("requests have string keys");
        line.push(b'\n');
        let (mut wanted, _while_the_caller_waits) = oneshot::channel::<()>();
        let (writer, has_descriptors) = (Arc::clone(&self.writer), !copies.is_empty());
        // To the end of the line, also if the caller has gone: half a line would end the connection, and
        // with it the pod. A pod that stops its shim lets no descriptors wait here.
        let sending = tokio::spawn(async move {
            let mut writer = tokio::select! {
                writer = writer.lock_owned() => writer,
                () = wanted.closed(), if has_descriptors => return Err(std::io::ErrorKind::Interrupted.into()),
            };
            let descriptors: Vec<BorrowedFd<'_>> = copies.iter().map(AsFd::as_fd).collect();
            send(&mut writer, &line, &descriptors).await
        });
        let answer = async {
            let sent = sending.await.unwrap_or_else(|_| Err(std::io::ErrorKind::Interrupted.into()));
            sent.map_err(|source| ShimProblem::Send { source })?;
            receiver.await.map_err(|_sender_dropped| ShimProblem::Ended)
        };
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(Answer::Refused { problem })) => Err(ShimProblem::Refused { problem }),
            Ok(answer) => answer,
            Err(_elapsed) => {
                self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                Err(ShimProblem::NoAnswer { limit })
            }
        }
    }

    /// Sends Shutdown and waits until the shim has ended.
    pub(crate) async fn shut_down(&self) -> Result<()> {
        let asked = self.call(Call::Shutdown).await;
        let Some(pidfd) = self.process.open()? else { return Ok(()) };
        if asked.is_ok() && wait_for_end(&pidfd, END_DEADLINE).await? {
            return Ok(());
        }
        process::signal_pidfd(&pidfd, libc::SIGKILL)?;
        // A shim that waits for a pipe held by another pod ends with that pod; it holds nothing
        // else.
        wait_for_end(&pidfd, END_DEADLINE).await.map(drop)
    }

    fn failed(&self, source: ShimProblem) -> Error {
        Error::Shim { sandbox: self.sandbox.clone(), source }
    }
}

pub(crate) fn unexpected(answer: &Answer) -> ShimProblem {
    ShimProblem::UnexpectedAnswer { answer: format!("{answer:?}") }
}

async fn send(
    writer: &mut OwnedWriteHalf,
    line: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let mut sent = 0;
    if !descriptors.is_empty() {
        let socket: &UnixStream = (*writer).as_ref();
        let send = || Ok(descriptors::send(socket, line, descriptors)?);
        sent = socket.async_io(Interest::WRITABLE, send).await?;
    }
    writer.write_all(&line[sent..]).await
}

/// `false` if it has not ended within `deadline`.
pub(crate) async fn wait_for_end(pidfd: &OwnedFd, deadline: Duration) -> Result<bool> {
    let own = pidfd.try_clone().map_err(|e| Error::io("clone", Path::new("pidfd"), e))?;
    blocking("wait for a process", move || Ok(process::wait_for_end(own, deadline)?)).await
}

/// `None` at the end of the connection, and for a line that is too long, which ends the connection.
async fn next_line(reader: &mut (impl AsyncBufRead + Unpin)) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    reader.take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await.ok()?;
    (line.pop() == Some(b'\n')).then_some(line)
}

/// Returns at the end of the connection.
async fn listen(sandbox: &str, reader: OwnedReadHalf, waiting: &Waiting, listener: &dyn Listener) {
    // Small, since there is one for each pod and messages are short.
    let mut reader = BufReader::with_capacity(1024, reader);
    while let Some(line) = next_line(&mut reader).await {
        let Ok(message) = serde_json::from_slice::<Message>(&line) else {
            let line = String::from_utf8_lossy(&line[..line.len().min(MAX_SHOWN_BYTES)]);
            tracing::warn!(sandbox, %line, "cannot parse a shim's message");
            continue;
        };
        // Before the caller continues: later messages on this connection must come after the
        // answer.
        listener.heard(sandbox, &message);
        if let Message::Answer { id, answer } = message
            && let Some(sender) = waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
        {
            // The caller may have stopped waiting.
            let _receiver_gone = sender.send(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::launcher::Overlay;
    use crate::shim::client::{Client, Received};
    use crate::shim::protocol::Start;

    struct Deaf;

    impl Listener for Deaf {
        fn heard(&self, _sandbox: &str, _message: &Message) {}
        fn lost(&self, _sandbox: &str) {}
    }

    /// The answer to List.
    fn nothing_runs(receives_descriptors: bool) -> Answer {
        Answer::Containers {
            pid: std::process::id().cast_signed(),
            receives_descriptors,
            can_exec: false,
            can_attach: false,
            can_hold_pids: false,
            containers: BTreeMap::new(),
        }
    }

    /// Connects to the shim's side of the protocol, which answers List itself and has `answer` for
    /// all other requests.
    async fn connected(
        receives_descriptors: bool,
        mut answer: impl FnMut(Received) -> Answer + Send + 'static,
    ) -> ShimClient {
        let dir = tempfile::tempdir().unwrap();
        let listener = in_directory(dir.path(), |path| StdListener::bind(path)).unwrap();
        std::thread::spawn(move || {
            let mut client = Client::new(listener.accept().unwrap().0).unwrap();
            let mut alive = true;
            while alive {
                poll(&mut [PollFd::new(client.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
                let mut received = Vec::new();
                alive = client.read(&mut received).unwrap();
                for request in received {
                    let id = request.request.id;
                    let answer = match request.request.call {
                        Call::List => nothing_runs(receives_descriptors),
                        _ => answer(request),
                    };
                    assert!(client.send(&Message::Answer { id, answer }));
                }
            }
        });
        connect("sandbox", dir.path(), Arc::new(Deaf), ANSWER_DEADLINE).await.unwrap().0
    }

    fn start_with_layers(lower: Vec<PathBuf>) -> Call {
        let overlay =
            Overlay { lower, upper: "/upper".into(), work: "/work".into(), directories: Vec::new() };
        Call::Start(Start {
            container: "c".into(),
            log: None,
            overlay,
            allow_without_device_control: false,
            stdin: false,
            stdin_once: false,
        })
    }

    /// The shim reads from the descriptor, and its refusal has what it read.
    #[tokio::test]
    async fn the_shim_reads_from_the_pipe_that_was_sent_with_a_request_of_any_length() {
        let client = connected(true, |received| {
            let mut problem = String::new();
            let pipe = received.descriptors.unwrap().pop().unwrap();
            File::from(pipe).read_to_string(&mut problem).unwrap();
            Answer::Refused { problem }
        })
        .await;
        for layers in [0, 10_000] {
            let (reader, mut writer) = std::io::pipe().unwrap();
            write!(writer, "text beside {layers} layers").unwrap();
            drop(writer);
            let call = start_with_layers(vec!["/var/lib/hawser-runtime/images/layers".into(); layers]);
            let answer = client.ask(call, &[reader.as_fd()], ANSWER_DEADLINE).await;
            assert_eq!(answer.unwrap_err().to_string(), format!("text beside {layers} layers"));
        }
    }

    #[tokio::test]
    async fn a_shim_of_an_earlier_version_gets_no_descriptors_and_answers_other_calls() {
        let client = connected(false, |_| Answer::Done).await;
        let (reader, _writer) = std::io::pipe().unwrap();
        let call = || start_with_layers(Vec::new());
        let refused = client.ask(call(), &[reader.as_fd()], ANSWER_DEADLINE).await.unwrap_err();
        assert!(matches!(refused, ShimProblem::NoDescriptors), "{refused}");
        assert_eq!(client.ask(call(), &[], ANSWER_DEADLINE).await.unwrap(), Answer::Done);
    }

    /// An attempt that fails, and one that is made. The listener hears the end of the second one only.
    #[tokio::test]
    async fn only_the_end_of_a_connection_that_was_established_counts_as_the_end_of_the_shim() {
        #[derive(Default)]
        struct Ends(std::sync::atomic::AtomicU32);
        impl Listener for Ends {
            fn heard(&self, _sandbox: &str, _message: &Message) {}
            fn lost(&self, _sandbox: &str) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let listener = in_directory(dir.path(), |path| StdListener::bind(path)).unwrap();
        let shim = std::thread::spawn(move || {
            for answer in [Answer::Done, nothing_runs(false)] {
                let mut client = Client::new(listener.accept().unwrap().0).unwrap();
                let mut received = Vec::new();
                while received.is_empty() {
                    poll(&mut [PollFd::new(client.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
                    assert!(client.read(&mut received).unwrap());
                }
                assert!(client.send(&Message::Answer { id: received[0].request.id, answer }));
            }
        });
        let ends = Arc::new(Ends::default());
        for (fails, wanted) in [(true, 0), (false, 1)] {
            let connected = connect("sandbox", dir.path(), ends.clone(), ANSWER_DEADLINE).await;
            assert_eq!(connected.is_err(), fails);
            drop(connected);
            // The task of the connection has it until its end.
            while Arc::strong_count(&ends) > 1 {
                tokio::task::yield_now().await;
            }
            assert_eq!(ends.0.load(Ordering::Relaxed), wanted);
        }
        shim.join().unwrap();
    }

    #[tokio::test]
    async fn a_line_without_an_end_ends_the_connection_within_its_limit() {
        let mut sent: &[u8] = b"{\"a\":1}\nrest";
        assert_eq!(next_line(&mut sent).await.as_deref(), Some(&b"{\"a\":1}"[..]));
        assert_eq!(next_line(&mut sent).await, None, "cut short by the end");
        let mut endless = BufReader::new(tokio::io::repeat(b'x'));
        assert_eq!(next_line(&mut endless).await, None);
    }
}
