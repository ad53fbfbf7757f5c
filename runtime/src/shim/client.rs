//! The shim's side of one connection.
//!
//! Invariant: a descriptor belongs to the request that it came with. The connection ends if that
//! request does not declare it, and the descriptor is closed.

use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use super::descriptors;
use super::protocol::{MOST_DESCRIPTORS, Message, Request};

/// A client with more unread answers is disconnected.
const MAX_UNREAD_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Client {
    socket: UnixStream,
    unparsed: Vec<u8>,
    /// They came with requests in `unparsed`.
    unclaimed: Vec<OwnedFd>,
    /// Some that came with them were lost.
    is_cut: bool,
    unsent: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) request: Request,
    /// `None`: this process has too many to take them.
    pub(crate) descriptors: Option<Vec<OwnedFd>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidRequest {
    #[error("parse a request")]
    Parse {
        #[source]
        source: serde_json::Error,
    },
    #[error("descriptors of a request: more than {most}")]
    TooMany { most: usize },
    #[error("descriptors of a request: {declared} declared, {came} came")]
    TooFew { declared: usize, came: usize },
    #[error("descriptors of a request: {more} more than declared")]
    Undeclared { more: usize },
}

impl Client {
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, unparsed: Vec::new(), unclaimed: Vec::new(), is_cut: false, unsent: Vec::new() })
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// `false`: the client has disconnected, or does not read its answers.
    pub(crate) fn send(&mut self, message: &Message) -> bool {
        let line = serde_json::to_vec(message).expect("messages have string keys");
        self.unsent.extend_from_slice(&line);
        self.unsent.push(b'\n');
        self.flush() && self.unsent.len() <= MAX_UNREAD_BYTES
    }

    /// `false`: the client has disconnected.
    pub(super) fn flush(&mut self) -> bool {
        while !self.unsent.is_empty() {
            match self.socket.write(&self.unsent) {
                Ok(length) => drop(self.unsent.drain(..length)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// `false`: the client has disconnected. After an error, the shim disconnects it.
    pub(crate) fn read(&mut self, received: &mut Vec<Received>) -> Result<bool, InvalidRequest> {
        let (mut buffer, earlier) = ([0; 16 * 1024], received.len());
        loop {
            match descriptors::receive(&self.socket, &mut buffer, &mut self.unclaimed, MOST_DESCRIPTORS) {
                Ok(descriptors::Received { bytes: 0, .. }) => return Ok(false),
                Ok(descriptors::Received { bytes, is_cut }) => {
                    self.unparsed.extend_from_slice(&buffer[..bytes]);
                    self.is_cut |= is_cut;
                }
                Err(Errno::WOULDBLOCK) => return Ok(true),
                Err(Errno::BADMSG) => return Err(InvalidRequest::TooMany { most: MOST_DESCRIPTORS }),
                Err(_) => return Ok(false),
            }
            // After each receive, so that no more than one request's descriptors wait.
            self.parse(received)?;
            // They are used, or closed, before others come: poll(2) reports what is left.
            if received
                .iter()
                .skip(earlier)
                .any(|received| !matches!(received.descriptors.as_deref(), Some([])))
            {
                return Ok(true);
            }
        }
    }

    fn parse(&mut self, received: &mut Vec<Received>) -> Result<(), InvalidRequest> {
        while let Some(end) = self.unparsed.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.unparsed.drain(..=end).collect();
            let request: Request =
                serde_json::from_slice(&line).map_err(|source| InvalidRequest::Parse { source })?;
            let (declared, came) = (request.descriptors, self.unclaimed.len());
            if declared > 0 && std::mem::take(&mut self.is_cut) {
                self.unclaimed.clear();
                received.push(Received { request, descriptors: None });
                continue;
            }
            if declared > came {
                return Err(InvalidRequest::TooFew { declared, came });
            }
            received
                .push(Received { request, descriptors: Some(self.unclaimed.drain(..declared).collect()) });
        }
        let more = self.unclaimed.len();
        if more > MOST_DESCRIPTORS || (more > 0 && self.unparsed.is_empty()) {
            return Err(InvalidRequest::Undeclared { more });
        }
        Ok(())
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read};

    use super::*;

    const NONE: &[u8] = b"{\"id\":1,\"call\":\"list\"}\n";
    const ONE: &[u8] = b"{\"id\":1,\"descriptors\":1,\"call\":\"list\"}\n";

    fn pair() -> (UnixStream, Client) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        (theirs, Client::new(ours).unwrap())
    }

    /// Sends the pipe's writing end, whose other copies are closed.
    fn send(socket: &UnixStream, bytes: &[u8], writer: PipeWriter, copies: usize) {
        let sent = descriptors::send(socket, bytes, &vec![writer.as_fd(); copies]);
        assert_eq!(sent.unwrap(), bytes.len());
    }

    fn assert_closed(mut reader: PipeReader) {
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("every writing end is closed");
    }

    #[test]
    fn each_of_several_requests_has_its_own_descriptor() {
        let (socket, mut client) = pair();
        let (mut first, writer) = io::pipe().unwrap();
        let (mut second, another) = io::pipe().unwrap();
        (&socket).write_all(NONE).unwrap();
        send(&socket, ONE, writer, 1);
        // In two parts: the descriptor comes with the first.
        let (beginning, rest) = ONE.split_at(9);
        send(&socket, beginning, another, 1);
        let mut received = Vec::new();
        assert!(client.read(&mut received).unwrap());
        assert_eq!(received.len(), 2, "the third is incomplete");
        (&socket).write_all(rest).unwrap();
        assert!(client.read(&mut received).unwrap());
        let counts: Vec<usize> =
            received.iter().map(|received| received.descriptors.as_ref().unwrap().len()).collect();
        assert_eq!(counts, [0, 1, 1]);
        for (received, text) in received.into_iter().skip(1).zip(["first", "second"]) {
            let [descriptor] = <[OwnedFd; 1]>::try_from(received.descriptors.unwrap()).unwrap();
            PipeWriter::from(descriptor).write_all(text.as_bytes()).unwrap();
        }
        for (reader, wanted) in [(&mut first, "first"), (&mut second, "second")] {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            assert_eq!(text, wanted);
        }
    }

    #[test]
    fn descriptors_that_no_request_declares_are_an_error_and_closed() {
        let undeclared = "descriptors of a request: 1 more than declared";
        let too_many = "descriptors of a request: more than 3";
        for (line, copies, problem) in
            [(NONE, 1, undeclared), (ONE, 2, undeclared), (ONE, 4, too_many), (ONE, 200, too_many)]
        {
            let (socket, mut client) = pair();
            let (reader, writer) = io::pipe().unwrap();
            send(&socket, line, writer, copies);
            assert_eq!(client.read(&mut Vec::new()).unwrap_err().to_string(), problem);
            drop(client);
            assert_closed(reader);
        }
    }

    #[test]
    fn descriptors_without_an_end_of_their_line_are_an_error_and_closed() {
        let (socket, mut client) = pair();
        let (reader, writer) = io::pipe().unwrap();
        send(&socket, b"{", writer.try_clone().unwrap(), 1);
        for _ in 1..MOST_DESCRIPTORS {
            assert!(client.read(&mut Vec::new()).unwrap(), "the line may end");
            send(&socket, b" ", writer.try_clone().unwrap(), 1);
        }
        assert!(client.read(&mut Vec::new()).unwrap(), "the line may end");
        send(&socket, b" ", writer, 1);
        client.read(&mut Vec::new()).unwrap_err();
        drop(client);
        assert_closed(reader);
    }

    #[test]
    fn a_request_that_declares_a_descriptor_and_has_none_is_an_error() {
        let (socket, mut client) = pair();
        (&socket).write_all(ONE).unwrap();
        let mut received = Vec::new();
        let error = client.read(&mut received).unwrap_err();
        assert_eq!(error.to_string(), "descriptors of a request: 1 declared, 0 came");
        assert!(received.is_empty());
    }
}
