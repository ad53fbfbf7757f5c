//! Processes that are not children of this driver. The pid and the start time identify one, so a
//! reused pid is not mistaken for the old process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::model::launch::ProcessId;

const SIGKILL: i32 = 9;
/// SIGKILL cannot be refused, but a process in uninterruptible sleep ends late.
const AFTER_KILL: Duration = Duration::from_secs(5);
/// A daemon that cannot end ([`ProcessId::cannot_end`]) is looked for this often.
const LOOK: Duration = Duration::from_millis(200);

impl ProcessId {
    /// The process that has `pid` now, if any.
    pub(crate) fn of(pid: i32) -> linux::Result<Option<Self>> {
        Ok(linux::process::start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// The process behind a pidfd; `None` if it has ended.
    pub(crate) fn behind(pidfd: &OwnedFd) -> linux::Result<Option<Self>> {
        let fdinfo = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
        let text =
            linux::procfs::read(Path::new(&fdinfo)).map_err(|e| linux::Error::new("read", &fdinfo, e))?;
        let pid =
            text.lines().find_map(|line| line.strip_prefix("Pid:")).and_then(|pid| pid.trim().parse().ok());
        // -1 once it was reaped, 0 in another pid namespace.
        let Some(process) = pid.filter(|pid| *pid > 0).map(Self::of).transpose()?.flatten() else {
            return Ok(None);
        };
        // Checked afterwards: only then the pid was still its own.
        Ok((!wait_for_exit(pidfd, Duration::ZERO)?).then_some(process))
    }

    /// A pidfd of this very process; `None` if it is gone.
    pub(crate) fn open(self) -> linux::Result<Option<OwnedFd>> {
        let pidfd = linux::process::open_pidfd(self.pid)?;
        // Checked after the open: only then does /proc show the pidfd's process.
        let is_same = Self::of(self.pid)? == Some(self);
        Ok(pidfd.filter(|_| is_same))
    }

    /// Whether it still runs. A zombie does not, nor one that [cannot end](Self::cannot_end).
    pub(crate) fn is_alive(self) -> linux::Result<bool> {
        Ok(!self.is_gone_within(Duration::ZERO)?)
    }

    /// Whether it was killed, and does not end before its successor has answered the requests of its
    /// connection: the kernel waits for them to make what the daemon has notified it of. Such a daemon
    /// does nothing more.
    pub(crate) fn cannot_end(self) -> linux::Result<bool> {
        // Checked afterwards: only then the pid was still its own.
        Ok(linux::process::only_notifies_fuse(self.pid) && Self::of(self.pid)? == Some(self))
    }

    /// Kills it without waiting. A process that is gone is a success.
    pub(crate) fn kill(self) -> linux::Result<()> {
        match self.open()? {
            Some(pidfd) => linux::process::signal_pidfd(&pidfd, SIGKILL).map(drop),
            None => Ok(()),
        }
    }

    /// Waits up to `limit` for its end. True if it is gone.
    pub(crate) fn is_gone_within(self, limit: Duration) -> linux::Result<bool> {
        match self.open()? {
            Some(pidfd) => self.has_ended_within(&pidfd, limit),
            None => Ok(true),
        }
    }

    /// Waits `grace` for it to end by itself, then kills it. True if it is gone.
    pub(crate) fn end(self, grace: Duration) -> linux::Result<bool> {
        let Some(pidfd) = self.open()? else { return Ok(true) };
        if wait_for_exit(pidfd.as_fd(), grace)? {
            return Ok(true);
        }
        linux::process::signal_pidfd(&pidfd, SIGKILL)?;
        self.has_ended_within(&pidfd, AFTER_KILL)
    }

    fn has_ended_within(self, pidfd: &OwnedFd, limit: Duration) -> linux::Result<bool> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if wait_for_exit(pidfd.as_fd(), left.min(LOOK))? || self.cannot_end()? {
                return Ok(true);
            }
            if left.is_zero() {
                return Ok(false);
            }
        }
    }
}

/// A pidfd is readable once its process has ended, reaped or not.
fn wait_for_exit(pidfd: impl AsFd, timeout: Duration) -> linux::Result<bool> {
    poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], timeout).map(|ready| ready > 0)
}

/// poll(2) until one is ready or `timeout` is over. Returns how many are ready.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> linux::Result<usize> {
    let deadline = Instant::now() + timeout;
    loop {
        // Rounded up: otherwise the loop could wake just before the deadline and spin.
        let left = deadline.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match nix::poll::poll(fds, timeout) {
            Ok(ready) => return Ok(usize::try_from(ready).unwrap_or_default()),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(linux::Error::new("poll", format!("{} descriptors", fds.len()), e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_lives_until_it_is_ended_and_its_pid_alone_is_not_the_process() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        assert!(process.is_alive().unwrap());
        let pidfd = process.open().unwrap().unwrap();
        assert_eq!(ProcessId::behind(&pidfd).unwrap(), Some(process));
        let other = ProcessId { start_time: process.start_time + 1, ..process };
        assert!(!other.is_alive().unwrap());
        assert!(other.end(Duration::ZERO).unwrap(), "not the same process: gone");
        assert!(process.is_alive().unwrap());
        assert!(process.end(Duration::ZERO).unwrap());
        assert!(!process.is_alive().unwrap(), "a zombie is not alive");
        assert_eq!(ProcessId::behind(&pidfd).unwrap(), None, "a zombie");
        child.wait().unwrap();
        assert_eq!(ProcessId::behind(&pidfd).unwrap(), None);
        assert!(!process.is_alive().unwrap());
    }
}
