//! A program in a container whose streams are those of this process's tasks.

use std::cell::Cell;
use std::io::{self, Write};
use std::time::Duration;

use proto::kubelet::ExecRequest;
use proto::kubelet::kubelet_client::KubeletClient;
use runtime::spdy_client::{Output, StreamsRequest};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::super::printable::printable;
use super::super::program::{self, Input, Receiver, Sender};
use super::super::remote_command::{end, outcome, unless_ended};
use crate::cli::{Error, StreamProblem};

/// A container whose streams rest that long has stopped.
const IDLE: Duration = Duration::from_secs(60);
/// Of a program's stderr; the rest is dropped.
const STDERR_BYTES: usize = 64 << 10;
/// Of a program's status.
const STATUS_BYTES: usize = 64 << 10;
/// How long a program may go on whose output is not wanted any more, and how much it may write. tar writes zeros
/// after an archive's end, up to a whole record.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const TRAILING_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Container {
    pub(super) kubelet: KubeletClient<Channel>,
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: String,
}

/// Since when nothing has moved; `None` while this side is the one that waits for the disk.
type Idle = Cell<Option<Instant>>;

impl Container {
    /// Returns at the program's end. Its stderr is this command's.
    pub(super) async fn run(
        &self,
        command: &[&str],
        input: Option<mpsc::Receiver<Vec<u8>>>,
        output: Option<mpsc::Sender<Vec<u8>>>,
    ) -> Result<(), Error> {
        let request = ExecRequest {
            namespace: self.namespace.clone(),
            pod: self.pod.clone(),
            container: self.container.clone(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            stdin: input.is_some(),
            tty: false,
        };
        let streams = StreamsRequest { stdin: request.stdin, stdout: true, stderr: true, tty: false };
        let mut kubelet = self.kubelet.clone();
        let url = kubelet.exec(request.clone()).await?.into_inner().url;
        let again = async move || Ok(kubelet.exec(request).await?.into_inner().url);
        let (to, from) = program::connect(url, again, streams).await?;
        let idle = Cell::new(Some(Instant::now()));
        tokio::select! {
            ended = end(receive(from, output, &idle), send(to, input, &idle)) => ended,
            () = rests(&idle) => Err(Error::Stalled { program: command[0].to_owned(), seconds: IDLE.as_secs() }),
        }
    }

    /// What it means that tar could not be started.
    pub(super) fn needs_tar(&self, error: Error) -> Error {
        match error {
            Error::Exec { message } => {
                Error::NoTar { pod: self.pod.clone(), container: self.container.clone(), message }
            }
            other => other,
        }
    }
}

/// Returns at the program's end. A program whose output is not wanted any more is read a little longer, since
/// it may report a failure; if it goes on then, that is a success.
async fn receive(
    mut from: Receiver,
    mut output: Option<mpsc::Sender<Vec<u8>>>,
    idle: &Idle,
) -> Result<(), Error> {
    let (mut status, mut said, mut trailing) = (Vec::new(), 0, 0);
    let mut must_end = None;
    loop {
        let next = from.next();
        let received = match must_end {
            None => next.await,
            Some(at) => match tokio::time::timeout_at(at, next).await {
                Ok(received) => received,
                Err(_elapsed) if status.is_empty() => return Ok(()),
                Err(_elapsed) => return outcome(&status),
            },
        };
        let Some(received) = unless_ended(received, &status)? else { return outcome(&status) };
        match received {
            Output::Stdout(bytes) if must_end.is_some() => {
                trailing += bytes.len();
                if trailing > TRAILING_BYTES {
                    return Ok(());
                }
            }
            Output::Stdout(bytes) => {
                idle.set(None);
                if let Some(wanted) = &output
                    && wanted.send(bytes).await.is_err()
                {
                    output = None;
                    must_end = Some(Instant::now() + ENDS_WITHIN);
                }
            }
            Output::Stderr(bytes) => {
                let shown = &bytes[..bytes.len().min(STDERR_BYTES - said)];
                said += shown.len();
                let text = String::from_utf8_lossy(shown);
                let _no_reader = write!(io::stderr(), "{}", printable(&text));
            }
            Output::Status(bytes) => status.extend(&bytes[..bytes.len().min(STATUS_BYTES - status.len())]),
        }
        idle.set(Some(Instant::now()));
    }
}

/// Returns when nothing can be sent any more.
async fn send(mut to: Sender, mut input: Option<mpsc::Receiver<Vec<u8>>>, idle: &Idle) -> StreamProblem {
    loop {
        let sending = match &mut input {
            None => return std::future::pending().await,
            Some(pieces) => {
                idle.set(None);
                match pieces.recv().await {
                    Some(piece) => Input::Stdin(piece),
                    None => {
                        input = None;
                        Input::StdinEnd
                    }
                }
            }
        };
        idle.set(Some(Instant::now()));
        if let Err(problem) = to.send(sending).await {
            return problem;
        }
        idle.set(Some(Instant::now()));
    }
}

/// Returns when nothing has moved for [`IDLE`].
async fn rests(idle: &Idle) {
    loop {
        match idle.get() {
            Some(since) if since.elapsed() >= IDLE => return,
            Some(since) => tokio::time::sleep_until(since + IDLE).await,
            None => tokio::time::sleep(IDLE).await,
        }
    }
}
