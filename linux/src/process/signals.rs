//! The signals that this process gets: blocked and read from a descriptor, awaited, or reset for a
//! program.

#![expect(unsafe_code, reason = "sigaction has no safe wrapper")]

use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal};

use crate::{Error, Result};

/// Blocks `signals` and returns a non-blocking descriptor that is readable when one is pending.
pub fn signal_descriptor(signals: &[Signal]) -> Result<nix::sys::signalfd::SignalFd> {
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    let set: SigSet = signals.iter().copied().collect();
    set.thread_block().map_err(|e| Error::new("block signals", format!("{signals:?}"), e))?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(|e| Error::new("signalfd", format!("{signals:?}"), e))
}

/// A signal that this thread waits for. It may be one that has no effect otherwise, as for the first process of a pid
/// namespace. The signal is blocked until the drop, which must be on the same thread.
#[derive(Debug)]
pub struct SignalWait {
    signal: Signal,
    pending: nix::sys::signalfd::SignalFd,
}

impl SignalWait {
    pub fn block(signal: Signal) -> Result<Self> {
        Ok(Self { signal, pending: signal_descriptor(&[signal])? })
    }

    /// Blocks until the signal is pending, which is then taken (`true`), or until `fd` is readable or closed (`false`).
    /// If both are so, the result is `false`, and the signal has its usual effect after the drop.
    pub fn precedes(&self, fd: impl AsFd) -> Result<bool> {
        let mut waited = [fd.as_fd(), self.pending.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let polled = loop {
            match nix::poll::poll(&mut waited, PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                polled => break polled,
            }
        };
        polled.map_err(|e| Error::new("poll", format!("for {}", self.signal), e))?;
        if waited[0].any().unwrap_or(true) {
            return Ok(false);
        }
        let taken = self.pending.read_signal().map_err(|e| Error::new("read", "signalfd", e))?;
        Ok(taken.is_some())
    }
}

impl Drop for SignalWait {
    fn drop(&mut self) {
        let blocked: SigSet = [self.signal].into_iter().collect();
        // It fails only for an invalid argument.
        let _unblocked = blocked.thread_unblock();
    }
}

/// Unblocks every signal and resets it to its default, as programs expect: Rust's runtime ignores
/// SIGPIPE, and ignored signals survive execve(2).
pub fn reset_signals() -> Result<()> {
    for signal in Signal::iterator() {
        if matches!(signal, Signal::SIGKILL | Signal::SIGSTOP) {
            continue;
        }
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: SIG_DFL runs no code of ours.
        unsafe { nix::sys::signal::sigaction(signal, &default) }
            .map_err(|e| Error::new("reset signal", signal, e))?;
    }
    nix::sys::signal::sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)
        .map_err(|e| Error::new("unblock signals", "", e))
}
