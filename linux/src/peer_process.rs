//! The process at the other end of a unix socket, as a pidfd.
//!
//! Invariant: the pidfd is of the process that dialled, never of another one
//! that has its pid by now.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt};

use crate::fd_passing::PacketSocket;
use crate::{Error, Result, process};

/// A pidfd of the process that connected; `None` when it has ended and that can be seen.
pub fn peer_pidfd(socket: &PacketSocket) -> Result<Option<OwnedFd>> {
    match getsockopt(socket, sockopt::PeerPidfd) {
        Ok(pidfd) => Ok(Some(pidfd)),
        // Linux 6.5 brought SO_PEERPIDFD.
        Err(Errno::ENOPROTOOPT) => by_credentials(socket),
        Err(e) => Err(Error::new("getsockopt", "SO_PEERPIDFD", e)),
    }
}

/// By the pid that dialled. The connection is looked at after the pid was
/// opened: as long as it is open its owner lives, and so the pid was still its.
/// (A peer that gives its end to another process and ends itself can break
/// this; it would have to have its pid taken again in the instant between.)
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

    /// What fdinfo of a pidfd says.
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
