//! Waiting for a change of links or addresses, by multicast of the kernel.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::socket::Socket;
use crate::netns::NetNs;
use crate::{Error, Result};

/// Which changes a watching socket hears of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    Links,
    Ipv6Addresses,
}

impl Watch {
    /// `enum rtnetlink_groups`.
    fn group(self) -> u32 {
        match self {
            Self::Links => 1,
            Self::Ipv6Addresses => 9,
        }
    }
}

/// Reports that something of the watched sort changed in one namespace, never
/// what: who waits looks again at the state itself.
#[derive(Debug)]
pub struct Changes {
    socket: Socket,
}

impl Changes {
    /// Subscribes in `netns`; `None` means the calling thread's namespace.
    /// Every change after the return is reported.
    pub fn watch(netns: Option<&NetNs>, what: Watch) -> Result<Self> {
        let open = || {
            let mut socket = Socket::open()?;
            socket.join(what.group())?;
            Ok(socket)
        };
        let opened = match netns {
            None => open(),
            Some(netns) => netns.run(open)?,
        };
        let socket = opened
            .map_err(|e: std::io::Error| Error::new("subscribe to netlink", format_args!("{what:?}"), e))?;
        Ok(Self { socket })
    }

    /// Evaluates `check` now and after every change, until it gives a value;
    /// `None` when it has given none in `timeout`.
    pub fn until<T>(
        &mut self,
        timeout: Duration,
        mut check: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(found) = check()? {
                return Ok(Some(found));
            }
            if !self.wait(deadline.saturating_duration_since(Instant::now()))? {
                return Ok(None);
            }
        }
    }

    /// Whether something changed in `timeout`.
    fn wait(&self, timeout: Duration) -> Result<bool> {
        let failed = |e: std::io::Error| Error::new("wait for netlink", "event", e);
        // A started millisecond counts as one: poll(2) with 0 does not wait.
        let millis = timeout.as_nanos().div_ceil(1_000_000);
        let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) => Ok(false),
            Ok(_) => match self.socket.discard() {
                // Changes were lost, so there were some.
                Err(e) if e.raw_os_error() == Some(nix::libc::ENOBUFS) => Ok(true),
                done => done.map(|()| true).map_err(failed),
            },
            Err(Errno::EINTR) => Ok(true),
            Err(e) => Err(failed(e.into())),
        }
    }
}
