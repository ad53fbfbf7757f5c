//! The streams of a program, a new one or a container's first: the remote command protocols of Kubernetes (k8s.io/apimachinery, remotecommand).
//!
//! A client has up to five streams: stdin, stdout, stderr, sizes of the terminal, and one that gets a
//! `Status` object as JSON at the end.

pub(super) mod by_spdy;
pub(super) mod by_websocket;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use proto::cri::{AttachRequest, ExecRequest};
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;

use super::BoxedError;
use super::idle::Activity;
use super::probe::{Probe, give};
use crate::calls::attach::attached;
use crate::calls::exec::{Size, Streams, Taken, streamed};
use crate::error::{Error, chain};
use crate::runtime::Runtime;

/// kubelet's `streamCreationTimeout`.
const STREAMS_TIMEOUT: Duration = Duration::from_secs(30);
/// Of stdin, that the program has not read.
const MOST_PIECES: usize = 4;
/// Of an incomplete size.
const MOST_SIZE_BYTES: usize = 1024;

/// What a client's streams are connected with.
#[derive(Debug)]
pub(super) enum Command {
    Exec(ExecRequest),
    Attach(AttachRequest),
}

impl Command {
    /// The first part of the URL's path.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Exec(_) => "exec",
            Self::Attach(_) => "attach",
        }
    }

    fn container_id(&self) -> &str {
        match self {
            Self::Exec(request) => &request.container_id,
            Self::Attach(request) => &request.container_id,
        }
    }

    /// Stdin, stdout and stderr, as far as the client wants them.
    fn streams(&self) -> [bool; 3] {
        match self {
            Self::Exec(request) => [request.stdin, request.stdout, request.stderr],
            Self::Attach(request) => [request.stdin, request.stdout, request.stderr],
        }
    }

    fn tty(&self) -> bool {
        match self {
            Self::Exec(request) => request.tty,
            Self::Attach(request) => request.tty,
        }
    }

    /// The exit code; of a container's first program, 0.
    async fn run(self, runtime: &Arc<Runtime>, streams: Streams) -> Result<i32, Error> {
        match self {
            Self::Exec(ExecRequest { container_id, cmd, tty, .. }) => {
                streamed(runtime, &container_id, cmd, tty, streams).await
            }
            Self::Attach(request) => attached(runtime, &request, streams).await.map(|()| 0),
        }
    }
}

/// What a client sends.
#[derive(Debug)]
enum Event {
    Stdin(Vec<u8>),
    /// Nothing more comes for stdin.
    StdinEnd,
    /// A part of the stream of sizes.
    Sizes(Vec<u8>),
}

/// Reads from a client.
trait Incoming: Send + 'static {
    /// `None`: the client has gone. Messages of the connection itself are answered before this returns.
    fn next(&mut self) -> impl Future<Output = Result<Option<Event>, BoxedError>> + Send;
}

/// Writes to a client.
trait Outgoing: Probe + 'static {
    /// What the client does not want is dropped.
    fn output(&mut self, from: Taken, bytes: Vec<u8>) -> impl Future<Output = io::Result<()>> + Send;

    /// The last message.
    fn end(&mut self, status: String) -> impl Future<Output = io::Result<()>> + Send;
}

/// A client whose streams are known.
struct Client<I, O> {
    incoming: I,
    outgoing: Arc<Mutex<O>>,
    has_stdin: bool,
    has_sizes: bool,
}

impl<I: Incoming, O: Outgoing> Client<I, O> {
    /// Connects the command with the client's streams, and reports its end to the client.
    async fn run(self, runtime: &Arc<Runtime>, command: Command) {
        let (kind, container_id) = (command.kind(), command.container_id().to_owned());
        let Self { incoming, outgoing, has_stdin, has_sizes } = self;
        let (stdin, stdin_receiver) = mpsc::channel(MOST_PIECES);
        let (sizes, size_receiver) = watch::channel(None);
        let (output, pieces) = mpsc::channel(MOST_PIECES);
        let streams = Streams {
            stdin: has_stdin.then_some(stdin_receiver),
            sizes: has_sizes.then_some(size_receiver),
            output,
        };
        let activity = Arc::new(Activity::begins());
        // It ends with this.
        let mut reading = JoinSet::new();
        reading.spawn(read(incoming, Arc::clone(&outgoing), stdin, sizes, Arc::clone(&activity)));
        let finished = finish(command.run(runtime, streams), pass_on(pieces, &outgoing, &activity));
        let finished = tokio::select! {
            finished = finished => finished,
            // A program that exec has started is killed with what is dropped here.
            _gone = reading.join_next() => {
                return tracing::debug!(container = container_id, "{kind}: the client has gone");
            }
        };
        let Some(code) = finished else {
            return tracing::debug!(container = container_id, "{kind}: the client takes no output");
        };
        let status = status(code).to_string();
        let ended = async { outgoing.lock().await.end(status).await };
        if !matches!(tokio::time::timeout(STREAMS_TIMEOUT, ended).await, Ok(Ok(()))) {
            return tracing::debug!(
                container = container_id,
                "{kind}: the client does not take the exit code"
            );
        }
        // The client closes when it has read all.
        let _or_it_does_not = tokio::time::timeout(STREAMS_TIMEOUT, reading.join_next()).await;
    }
}

/// Runs both. `None`: the client does not take the last output.
async fn finish<T>(
    running: impl Future<Output = T>,
    passing_on: impl Future<Output = io::Result<()>>,
) -> Option<T> {
    tokio::pin!(running, passing_on);
    tokio::select! {
        code = &mut running => {
            let passed_on = tokio::time::timeout(STREAMS_TIMEOUT, passing_on).await;
            passed_on.is_ok().then_some(code)
        }
        // It drops what `running` sends to.
        _ended = &mut passing_on => Some(running.await),
    }
}

/// Returns at the end of the output, or when the client takes no more: then the program ends, too.
async fn pass_on<O: Outgoing>(
    mut pieces: mpsc::Receiver<(Taken, Vec<u8>)>,
    outgoing: &Mutex<O>,
    activity: &Activity,
) -> io::Result<()> {
    while let Some((from, bytes)) = pieces.recv().await {
        outgoing.lock().await.output(from, bytes).await?;
        activity.note();
    }
    Ok(())
}

/// Passes on what the client sends, until it has gone or is idle.
async fn read<O: Outgoing>(
    mut incoming: impl Incoming,
    outgoing: Arc<Mutex<O>>,
    stdin: mpsc::Sender<Vec<u8>>,
    sizes: watch::Sender<Option<Size>>,
    activity: Arc<Activity>,
) {
    let (mut stdin, mut incomplete) = (Some(stdin), Vec::new());
    loop {
        match activity.wait_for(incoming.next()).await {
            Some(Ok(Some(Event::Stdin(bytes)))) => {
                if let Some(stdin) = &stdin
                    && !bytes.is_empty()
                    && give(stdin, bytes, &outgoing).await.is_err()
                {
                    return;
                }
            }
            Some(Ok(Some(Event::StdinEnd))) => stdin = None,
            Some(Ok(Some(Event::Sizes(bytes)))) => {
                incomplete.extend(bytes);
                if let Some(size) = take_sizes(&mut incomplete).pop() {
                    sizes.send_replace(Some(size));
                }
            }
            Some(Ok(None)) | None => return,
            Some(Err(error)) => return tracing::debug!(error = %chain(&*error), "read from a client"),
        }
    }
}

/// The complete objects; the rest stays. What is no size is dropped.
fn take_sizes(bytes: &mut Vec<u8>) -> Vec<Size> {
    let mut found = serde_json::Deserializer::from_slice(bytes).into_iter::<Size>();
    let (mut sizes, mut is_wrong) = (Vec::new(), false);
    for size in found.by_ref() {
        match size {
            Ok(size) => sizes.push(size),
            Err(error) => {
                is_wrong = !error.is_eof();
                break;
            }
        }
    }
    let read = found.byte_offset();
    if is_wrong || bytes.len() - read > MOST_SIZE_BYTES {
        bytes.clear();
    } else {
        bytes.drain(..read);
    }
    sizes
}

/// metav1.Status, as kubectl reads it.
fn status(code: Result<i32, Error>) -> Value {
    match code {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("command terminated with non-zero exit code: exit status {code}"),
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(error) => json!({
            "metadata": {},
            "status": "Failure",
            "message": chain(&error),
            "reason": "InternalError",
            "code": 500,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_taken_when_they_are_complete() {
        let mut bytes = br#"{"Width":80,"Height":24}{"Width":1"#.to_vec();
        assert_eq!(take_sizes(&mut bytes), [Size { width: 80, height: 24 }]);
        bytes.extend(br#"20,"Height":40} "#);
        assert_eq!(take_sizes(&mut bytes), [Size { width: 120, height: 40 }]);
        for wrong in ["[1]", "{\"Width\":99999,\"Height\":1}", &"{".repeat(2000)] {
            let mut bytes = wrong.as_bytes().to_vec();
            assert_eq!(take_sizes(&mut bytes), []);
            assert!(bytes.is_empty(), "{wrong}");
        }
    }

    #[test]
    fn the_exit_code_is_where_kubectl_looks_for_it() {
        assert_eq!(status(Ok(0)), json!({"metadata": {}, "status": "Success"}));
        let seven = status(Ok(7));
        assert_eq!(seven["reason"], "NonZeroExitCode");
        assert_eq!(seven["details"]["causes"][0], json!({"reason": "ExitCode", "message": "7"}));
    }
}
