//! A pidfd of the process at the other end of a unix socket.
//!
//! Invariant: the pidfd belongs to the process that connected, never to another one that reuses its
//! pid.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};

use crate::fd_passing::PacketSocket;
use crate::{Error, Result, process};

/// A pidfd of the process that connected; `None` if it has detectably ended.
pub fn peer_pidfd(socket: &PacketSocket) -> Result<Option<OwnedFd>> {
    match getsockopt(socket, sockopt::PeerPidfd) {
        Ok(pidfd) => Ok(Some(pidfd)),
        // SO_PEERPIDFD exists since Linux 6.5.
        Err(Errno::ENOPROTOOPT) => by_credentials(socket),
        // It was reaped (before Linux 6.16).
        Err(Errno::EINVAL | Errno::ESRCH) => Ok(None),
        Err(e) => Err(Error::new("getsockopt", "SO_PEERPIDFD", e)),
    }
}

/// Uses the pid of the connecting process. After opening its pidfd, this checks that the connection
/// is still open: then its owner is alive, and the pid was still its own. (This fails only if the
/// peer passes its socket to another process, ends, and its pid is reused in between.)
fn by_credentials(socket: &PacketSocket) -> Result<Option<OwnedFd>> {
    let pidfd = process::open_pidfd(socket.peer()?.pid)?;
    Ok(pidfd.filter(|_| !hung_up(socket)))
}

fn hung_up(socket: &PacketSocket) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let closed = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut fds, PollTimeout::ZERO).is_err()
        || fds[0].revents().is_none_or(|found| found.intersects(closed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// The pid in a pidfd's fdinfo.
    fn pid_of(pidfd: &OwnedFd) -> i32 {
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn the_dialler_is_found_with_and_without_the_kernels_help() {
        let (_ours, theirs) = PacketSocket::pair().unwrap();
        let own = std::process::id().cast_signed();
        assert_eq!(pid_of(&peer_pidfd(&theirs).unwrap().unwrap()), own);
        assert_eq!(pid_of(&by_credentials(&theirs).unwrap().unwrap()), own);
    }

    #[test]
    fn without_the_kernels_help_a_closed_connection_is_a_process_that_ended() {
        let (ours, theirs) = PacketSocket::pair().unwrap();
        drop(ours);
        assert!(by_credentials(&theirs).unwrap().is_none());
    }
}
