//! A listening socket that is left alone for a while when nobody can be let in.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Out of descriptors or memory, poll(2) would say at once that somebody waits.
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

    /// What to wait for.
    pub(super) fn poll(&self) -> PollFd<'_> {
        let wanted = if self.rests_until.is_none() { PollFlags::IN } else { PollFlags::empty() };
        PollFd::new(&self.fd, wanted)
    }

    /// When to wait no longer.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.rests_until
    }

    /// Whoever dials, if `dialled`.
    pub(super) fn turn(&mut self, dialled: bool, now: Instant) -> Option<OwnedFd> {
        self.rests_until = self.rests_until.filter(|until| *until > now);
        if !dialled {
            return None;
        }
        match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
            Ok(fd) => Some(fd),
            // Gone again.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
            Err(_) => {
                self.rests_until = Some(now + REST);
                None
            }
        }
    }
}
