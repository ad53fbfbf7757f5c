//! Waits for a change of links or addresses, reported by kernel multicast.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::socket::Socket;
use crate::netns::NetNs;
use crate::{Error, Result};

/// The changes that a watching socket receives.
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

/// Reports that something of the watched kind changed in one namespace, but not what: the waiting
/// code reads the state itself.
#[derive(Debug)]
pub struct Changes {
    socket: Socket,
}

impl Changes {
    /// Subscribes in `netns`; `None` means the calling thread's namespace. Reports every change
    /// after it returns.
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

    /// Evaluates `check` now and after every change until it returns a value; `None` after
    /// `timeout`, even while changes go on.
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
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.wait(left)? {
                return Ok(None);
            }
        }
    }

    /// Whether something changed within `timeout`.
    fn wait(&self, timeout: Duration) -> Result<bool> {
        let failed = |e: std::io::Error| Error::new("wait for netlink", "event", e);
        // Rounded up: poll(2) with 0 does not wait.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::Netlink;

    const LOOPBACK: u32 = 1;

    #[test]
    fn the_time_ends_while_changes_go_on() {
        let in_own_namespace = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let host = Netlink::open().unwrap();
            let mut changes = Changes::watch(None, Watch::Links).unwrap();
            let begin = Instant::now();
            let mut is_up = false;
            let found = changes.until(Duration::from_millis(50), || {
                assert!(begin.elapsed() < Duration::from_secs(10), "it goes on");
                is_up = !is_up;
                if is_up {
                    host.set_up(LOOPBACK)?;
                } else {
                    host.set_down(LOOPBACK)?;
                }
                Ok(None::<()>)
            });
            assert_eq!(found.unwrap(), None);
            assert!(begin.elapsed() >= Duration::from_millis(50));
        });
        in_own_namespace.join().unwrap();
    }
}
