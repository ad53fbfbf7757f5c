//! The streams of a program, a new one or a container's first, at the keyboard: what `exec` and `attach` share.

use std::io::{self, Write};
use std::pin::pin;

use runtime::spdy_client::{Output, StreamsRequest};
use rustix::termios::{self, OptionalActions, Termios};
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::program::{self, Input, Receiver, Sender};
use super::{Error, StreamProblem};

/// What the command connects with its own stdin, stdout and stderr.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) url: String,
    pub(super) stdin: bool,
    /// The program has a terminal.
    pub(super) tty: bool,
    /// The program's terminal has the size of stdin.
    pub(super) sizes: bool,
    /// Stdin is a terminal that passes each key on.
    pub(super) raw: bool,
}

impl Session {
    /// Returns at the program's end. `again` asks for another URL.
    pub(super) async fn run(
        self,
        again: impl AsyncFnOnce() -> Result<String, Error>,
        out: &mut dyn Write,
    ) -> Result<(), Error> {
        let Self { url, stdin, tty, sizes, raw } = self;
        let streams = StreamsRequest { stdin, stdout: true, stderr: !tty, tty };
        let (to, from) = program::connect(url, again, streams).await?;
        let raw = raw.then(RawTerminal::enter).transpose().map_err(Error::Terminal)?;
        let sizes =
            sizes.then(|| signal(SignalKind::window_change())).transpose().map_err(Error::Terminal)?;
        let ended = end(receive(from, out), send(to, stdin, sizes)).await;
        drop(raw);
        ended
    }
}

/// The program's end, as it was received. A program that has ended, or that reads no further, may take
/// nothing more before that: an error in sending counts only if no end is received.
pub(super) async fn end(
    receiving: impl Future<Output = Result<(), Error>>,
    sending: impl Future<Output = StreamProblem>,
) -> Result<(), Error> {
    let mut receiving = pin!(receiving);
    let problem = tokio::select! {
        ended = &mut receiving => return ended,
        problem = sending => problem,
    };
    match receiving.await {
        Err(Error::Answer(_)) => Err(Error::Stream(problem)),
        ended => ended,
    }
}

/// Returns at the program's end.
async fn receive(mut from: Receiver, out: &mut dyn Write) -> Result<(), Error> {
    let mut status = Vec::new();
    while let Some(received) = unless_ended(from.next().await, &status)? {
        match received {
            Output::Stdout(bytes) => {
                out.write_all(&bytes).and_then(|()| out.flush()).map_err(Error::Output)?;
            }
            Output::Stderr(bytes) => io::stderr().write_all(&bytes).map_err(Error::Output)?,
            Output::Status(bytes) => status.extend(bytes),
        }
    }
    outcome(&status)
}

/// The status is the last that is sent: an error after it is the end.
pub(super) fn unless_ended(
    received: Result<Option<Output>, Error>,
    status: &[u8],
) -> Result<Option<Output>, Error> {
    if status.is_empty() { received } else { received.or(Ok(None)) }
}

/// The program's end, from what was sent on its channel.
pub(super) fn outcome(status: &[u8]) -> Result<(), Error> {
    serde_json::from_slice::<Status>(status).map_err(Error::Answer)?.outcome()
}

/// Returns when nothing can be sent any more.
async fn send(mut to: Sender, has_stdin: bool, mut sizes: Option<Signal>) -> StreamProblem {
    let (mut stdin, mut piece) = (has_stdin.then(tokio::io::stdin), vec![0; 32 << 10]);
    let mut next = sizes.is_some().then(size).flatten();
    loop {
        let sending = match next.take() {
            Some(sending) => sending,
            None => tokio::select! {
                length = read(&mut stdin, &mut piece) => match length {
                    0 => {
                        stdin = None;
                        Input::StdinEnd
                    }
                    length => Input::Stdin(piece[..length].to_vec()),
                },
                () = changed(&mut sizes) => {
                    next = size();
                    continue;
                }
            },
        };
        if let Err(problem) = to.send(sending).await {
            return problem;
        }
    }
}

/// 0 at the end. Waits without end if there is none.
async fn read(stdin: &mut Option<tokio::io::Stdin>, piece: &mut [u8]) -> usize {
    match stdin {
        Some(stdin) => stdin.read(piece).await.unwrap_or(0),
        None => std::future::pending().await,
    }
}

async fn changed(sizes: &mut Option<Signal>) {
    let changed = match sizes {
        Some(sizes) => sizes.recv().await,
        None => None,
    };
    if changed.is_none() {
        std::future::pending::<()>().await;
    }
}

/// `None`: stdin is no terminal.
fn size() -> Option<Input> {
    let size = termios::tcgetwinsize(io::stdin()).ok()?;
    let size = serde_json::json!({"Width": size.ws_col, "Height": size.ws_row});
    Some(Input::Size(size.to_string()))
}

/// metav1.Status, as far as the end of a program has it.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Status {
    status: String,
    message: String,
    details: Details,
}

impl Default for Status {
    fn default() -> Self {
        Self { status: "Failure".to_owned(), message: String::new(), details: Details::default() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    causes: Vec<Cause>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cause {
    reason: String,
    message: String,
}

impl Status {
    fn outcome(self) -> Result<(), Error> {
        if self.status == "Success" {
            return Ok(());
        }
        let code = self.details.causes.iter().find(|cause| cause.reason == "ExitCode");
        match code.and_then(|cause| cause.message.parse().ok()) {
            Some(code) => Err(Error::Exited { code }),
            None => Err(Error::Exec { message: self.message }),
        }
    }
}

/// The terminal passes each key on, until this is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> io::Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _has_gone = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{SinkExt, StreamExt};
    use hyper::header::{HeaderValue, SEC_WEBSOCKET_PROTOCOL};
    use tokio::net::TcpListener;
    use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

    use super::super::streams::{Message, message};
    use super::*;

    #[test]
    fn the_end_of_a_program_is_the_end_of_the_command() {
        let outcome = |text: &str| serde_json::from_str::<Status>(text).unwrap().outcome();
        outcome(r#"{"metadata":{},"status":"Success"}"#).unwrap();
        let seven = r#"{"status":"Failure","reason":"NonZeroExitCode","message":"command terminated",
            "details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#;
        assert!(matches!(outcome(seven), Err(Error::Exited { code: 7 })));
        let other = r#"{"status":"Failure","message":"no such file","reason":"InternalError","code":500}"#;
        assert!(matches!(outcome(other), Err(Error::Exec { message }) if message == "no such file"));
        assert!(outcome("{}").is_err());
    }

    #[tokio::test]
    async fn an_end_that_is_received_counts_more_than_what_could_not_be_sent() {
        let lost = async || StreamProblem::from(io::Error::from(io::ErrorKind::BrokenPipe));
        let ended_as = async |status: &'static [u8]| {
            let received = async {
                tokio::task::yield_now().await;
                outcome(status)
            };
            end(received, lost()).await
        };
        let two = br#"{"status":"Failure","details":{"causes":[{"reason":"ExitCode","message":"2"}]}}"#;
        assert!(matches!(ended_as(two).await, Err(Error::Exited { code: 2 })));
        assert!(matches!(ended_as(b"").await, Err(Error::Stream(_))));
    }

    /// Sends a status and the end, and closes without reading.
    async fn serve_an_end(listener: TcpListener) {
        let (stream, _client) = listener.accept().await.unwrap();
        #[expect(clippy::result_large_err, reason = "the types are tungstenite's")]
        let agree = |_: &Request, mut answer: Response| -> Result<Response, ErrorResponse> {
            answer
                .headers_mut()
                .insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static("v5.channel.k8s.io"));
            Ok(answer)
        };
        let mut socket = tokio_tungstenite::accept_hdr_async(stream, agree).await.unwrap();
        // Some of the input has arrived, so that the close is a reset.
        let _input = socket.next().await.unwrap().unwrap();
        let status = br#"{"details":{"causes":[{"reason":"ExitCode","message":"3"}]}}"#;
        let of_status = 3;
        socket.send(message(of_status, status)).await.unwrap();
        socket.send(Message::Close(None)).await.unwrap();
    }

    #[tokio::test]
    async fn an_end_counts_though_the_server_takes_no_more_input() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/exec", listener.local_addr().unwrap());
        let server = tokio::spawn(serve_an_end(listener));
        let streams = StreamsRequest { stdin: true, stdout: true, stderr: true, tty: false };
        let again = async || panic!("the first attempt is answered");
        let (mut to, from) = program::connect(url, again, streams).await.unwrap();
        let receiving = async {
            // The input is sent until the connection is reset.
            server.await.unwrap();
            receive(from, &mut Vec::new()).await
        };
        let sending = async {
            loop {
                if let Err(problem) = to.send(Input::Stdin(vec![0; 32 << 10])).await {
                    return problem;
                }
            }
        };
        let ended = end(receiving, sending).await;
        assert!(matches!(ended, Err(Error::Exited { code: 3 })), "{ended:?}");
    }
}
