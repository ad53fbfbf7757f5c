//! The streams of a program, a new one or a container's first, at the keyboard: what `exec` and `attach` share.

use std::io::{self, Write};

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use rustix::termios::{self, OptionalActions, Termios};
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::streams::{Message, Socket, channel, message};
use super::{Error, streams};

pub(super) const PROTOCOL: &str = "v5.channel.k8s.io";

pub(super) const STDIN: u8 = 0;
pub(super) const STDOUT: u8 = 1;
pub(super) const STDERR: u8 = 2;
pub(super) const STATUS: u8 = 3;
const RESIZE: u8 = 4;
pub(super) const CLOSE: u8 = 255;

/// What the command connects with its own stdin, stdout and stderr.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) url: String,
    pub(super) stdin: bool,
    /// The program's terminal has the size of stdin.
    pub(super) sizes: bool,
    /// Stdin is a terminal that passes each key on.
    pub(super) raw: bool,
}

impl Session {
    /// Returns at the program's end.
    pub(super) async fn run(self, out: &mut dyn Write) -> Result<(), Error> {
        let Self { url, stdin, sizes, raw } = self;
        let (to, from) = streams::connect(&url, PROTOCOL).await?.split();
        let raw = raw.then(RawTerminal::enter).transpose().map_err(Error::Terminal)?;
        let sizes =
            sizes.then(|| signal(SignalKind::window_change())).transpose().map_err(Error::Terminal)?;
        let ended = tokio::select! {
            status = receive(from, out) => status,
            problem = send(to, stdin, sizes) => Err(Error::Stream(problem)),
        };
        drop(raw);
        ended
    }
}

/// Returns at the program's end.
async fn receive(mut from: SplitStream<Socket>, out: &mut dyn Write) -> Result<(), Error> {
    let mut status = Vec::new();
    while let Some(received) = from.next().await {
        let received = received.map_err(|source| Error::Stream(Box::new(source)))?;
        match channel(&received) {
            Some((STDOUT, bytes)) => {
                out.write_all(bytes).and_then(|()| out.flush()).map_err(Error::Output)?;
            }
            Some((STDERR, bytes)) => io::stderr().write_all(bytes).map_err(Error::Output)?,
            Some((STATUS, bytes)) => status.extend(bytes),
            Some(_) | None => {}
        }
    }
    outcome(&status)
}

/// The program's end, from what was sent on its channel.
pub(super) fn outcome(status: &[u8]) -> Result<(), Error> {
    serde_json::from_slice::<Status>(status).map_err(Error::Answer)?.outcome()
}

/// Returns when nothing can be sent any more.
async fn send(
    mut to: SplitSink<Socket, Message>,
    has_stdin: bool,
    mut sizes: Option<Signal>,
) -> Box<tokio_tungstenite::tungstenite::Error> {
    let (mut stdin, mut piece) = (has_stdin.then(tokio::io::stdin), vec![0; 32 << 10]);
    let mut next = sizes.is_some().then(size).flatten();
    loop {
        let sending = match next.take() {
            Some(sending) => sending,
            None => tokio::select! {
                length = read(&mut stdin, &mut piece) => match length {
                    0 => {
                        stdin = None;
                        message(CLOSE, &[STDIN])
                    }
                    length => message(STDIN, &piece[..length]),
                },
                () = changed(&mut sizes) => {
                    next = size();
                    continue;
                }
            },
        };
        if let Err(problem) = to.send(sending).await {
            return Box::new(problem);
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
fn size() -> Option<Message> {
    let size = termios::tcgetwinsize(io::stdin()).ok()?;
    let size = serde_json::json!({"Width": size.ws_col, "Height": size.ws_row});
    Some(message(RESIZE, size.to_string().as_bytes()))
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
}
