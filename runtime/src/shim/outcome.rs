//! Whether a child becomes its program.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};

use super::error::ShimError;
use super::protocol::{Exited, Message, START_ERROR_CODE, ShimStatus, container_dir, now};
use super::{Caller, Shim, note};
use crate::disk::record;
use crate::error::chain;

const MOST_SAID_BYTES: usize = 4 << 20;

/// A child between clone3(2) and execve(2): the client that asked, and the outcome pipe.
#[derive(Debug)]
pub(super) struct Starting {
    pub(super) caller: Caller,
    outcome: File,
    said: Vec<u8>,
    pub(super) warnings: Vec<String>,
    /// For the program, in the order of their arrival.
    pub(super) signals: Vec<i32>,
}

/// What the outcome pipe has said so far.
pub(super) enum Outcome {
    Unknown,
    Runs,
    Failed(ShimError),
}

impl Starting {
    pub(super) fn new(caller: Caller, outcome: File, warnings: Vec<String>) -> Self {
        Self { caller, outcome, said: Vec::new(), warnings, signals: Vec::new() }
    }

    /// Called when the pipe is readable or closed.
    pub(super) fn read(&mut self) -> Outcome {
        let mut buffer = [0; 4096];
        match self.outcome.read(&mut buffer) {
            Ok(0) if self.said.is_empty() => Outcome::Runs,
            Ok(0) => {
                let said = String::from_utf8_lossy(&self.said).into_owned();
                Outcome::Failed(ShimError::Child { said })
            }
            Ok(length) => {
                // Who traces the child may write without end.
                let room = MOST_SAID_BYTES.saturating_sub(self.said.len());
                self.said.extend_from_slice(&buffer[..length.min(room)]);
                Outcome::Unknown
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Outcome::Unknown,
            Err(source) => Outcome::Failed(ShimError::Outcome { source }),
        }
    }
}

impl AsFd for Starting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outcome.as_fd()
    }
}

impl Shim {
    /// A runtime that has connected since the call takes the container for a running one; the record is for
    /// one that connects later. The caller gets an answer.
    pub(super) fn report_failed_start(
        &mut self,
        id: &str,
        status: ShimStatus,
        problem: &ShimError,
        caller: Caller,
    ) {
        let start_problem = Some(problem.shortened());
        let exit = Exited { code: START_ERROR_CODE, finished_at: now(), oom_killed: false, start_problem };
        let status = ShimStatus { exit: Some(exit), ..status };
        let path = container_dir(&self.dir, id).join("status.json");
        if let Err(error) = record::save(&path, &status) {
            note(&chain(&error));
        }
        let others = self.clients.keys().copied().filter(|client| *client != caller.client);
        let message = Message::Exited { container: id.to_owned(), status };
        for client in others.collect::<Vec<_>>() {
            self.send(client, &message);
        }
    }
}
