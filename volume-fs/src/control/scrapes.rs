//! The metrics listener: HTTP/1.0; every GET is answered with the metrics.
//!
//! Each connection has one request and one answer, and is closed after a second in any case.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::listener::Listener;

const MOST_CONNECTIONS: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(1);
const MOST_REQUEST_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct Scrapes {
    listener: Listener,
    connections: Vec<Connection>,
}

#[derive(Debug)]
struct Connection {
    fd: OwnedFd,
    ends: Instant,
    asked: Vec<u8>,
}

/// What to do with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    NotYet,
    Get,
    SomethingElse,
}

impl Scrapes {
    pub(super) fn new(listener: OwnedFd) -> Self {
        Self { listener: Listener::new(listener), connections: Vec::new() }
    }

    /// The events to wait for.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let connections = self.connections.iter().map(|one| PollFd::new(&one.fd, PollFlags::IN));
        std::iter::once(self.listener.poll()).chain(connections)
    }

    /// The time at which the next connection must be closed, or the listener's pause ends.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.connections.iter().map(|one| one.ends).chain(self.listener.ends()).min()
    }

    /// `ready`: which of [`Self::fds`] are ready.
    pub(super) fn turn(&mut self, ready: &[bool], now: Instant, metrics: impl Fn() -> String) {
        let Some((dialled, ready)) = ready.split_first() else { return };
        let mut ready = ready.iter();
        self.connections.retain_mut(|one| {
            let ready = ready.next().is_some_and(|ready| *ready);
            one.ends > now && (!ready || one.goes_on(&metrics))
        });
        if let Some(fd) = self.listener.turn(*dialled, now) {
            if self.connections.len() == MOST_CONNECTIONS {
                self.connections.remove(0);
            }
            self.connections.push(Connection { fd, ends: now + TIMEOUT, asked: Vec::new() });
        }
    }
}

impl Connection {
    /// Reads, and answers a complete request. Returns whether the connection stays open.
    fn goes_on(&mut self, metrics: impl Fn() -> String) -> bool {
        let mut buffer = [0_u8; MOST_REQUEST_BYTES];
        match rustix::net::recv(&self.fd, &mut buffer, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) | Ok((_, 0)) => return false,
            Ok((_, length)) => self.asked.extend_from_slice(&buffer[..length.min(buffer.len())]),
        }
        let answer = match asked(&self.asked) {
            Asked::NotYet => return true,
            Asked::Get => answer("200 OK", &metrics()),
            Asked::SomethingElse => answer("400 Bad Request", "GET alone is answered\n"),
        };
        // The answer fits into the socket's buffer; otherwise the reader gets a part of it.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Err(error) = rustix::net::send(&self.fd, answer.as_bytes(), flags) {
            tracing::debug!(%error, "a scraper has gone");
        }
        false
    }
}

fn asked(request: &[u8]) -> Asked {
    if !request.starts_with(&b"GET "[..request.len().min(4)]) || request.len() > MOST_REQUEST_BYTES {
        Asked::SomethingElse
    } else if request.windows(4).any(|end| end == b"\r\n\r\n") {
        Asked::Get
    } else {
        Asked::NotYet
    }
}

fn answer(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_get_is_complete_at_its_empty_line_and_nothing_else_is_answered() {
        assert_eq!(asked(b"G"), Asked::NotYet);
        assert_eq!(asked(b"GET /metrics HTTP/1.1\r\nHost: x\r\n"), Asked::NotYet);
        assert_eq!(asked(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), Asked::Get);
        assert_eq!(asked(b"POST / HTTP/1.0\r\n\r\n"), Asked::SomethingElse);
        let endless = [b"GET /".as_slice(), &[b'a'; MOST_REQUEST_BYTES]].concat();
        assert_eq!(asked(&endless), Asked::SomethingElse);
    }
}
