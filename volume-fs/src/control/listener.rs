//! A listening socket that is ignored for a while after a failed accept.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Without descriptors or memory, poll(2) would report the waiting connection again at once.
const REST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Listener {
    fd: OwnedFd,
    rests_until: Option<Instant>,
}

impl Listener {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self { fd, rests_until: None }
    }

    /// The event to wait for.
    pub(super) fn poll(&self) -> PollFd<'_> {
        let wanted = if self.rests_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        PollFd::new(&self.fd, wanted)
    }

    /// The end of the pause, if there is one.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.rests_until
    }

    /// Accepts a connection, if `dialled`.
    pub(super) fn turn(&mut self, dialled: bool, now: Instant) -> Option<OwnedFd> {
        self.rests_until = self.rests_until.filter(|until| *until > now);
        if !dialled {
            return None;
        }
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            Ok(fd) => Some(fd),
            // The peer has disconnected.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
            Err(_) => {
                self.rests_until = Some(now + REST);
                None
            }
        }
    }
}
