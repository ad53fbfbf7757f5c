//! Bytes on their way between a stream of a program and a socket of the runtime.
//!
//! The runtime never has a program's pipe: a process can hold the kernel's lock on it (splice(2) from a
//! silent socket), and would stop the runtime. Here it stops its own pod.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

/// In one turn.
const PIECE_BYTES: usize = 64 << 10;
/// What is moved after a program's end: more than the largest pipe has. A process that the program left behind may
/// write without end.
const MOST_PIECES: usize = 64;

#[derive(Debug)]
pub(super) struct Relay {
    is_input: bool,
    from: File,
    to: File,
    /// Read, and not written yet.
    waiting: Vec<u8>,
    /// At the last look there was nothing to read.
    is_dry: bool,
    /// Pieces that [`Self::finish`] still reads.
    left: usize,
    /// Nothing more comes.
    has_ended: bool,
}

impl Relay {
    /// To a program.
    pub(super) fn input(from: OwnedFd, to: OwnedFd) -> rustix::io::Result<Self> {
        Self::new(true, from, to)
    }

    /// From a program.
    pub(super) fn output(from: OwnedFd, to: OwnedFd) -> rustix::io::Result<Self> {
        Self::new(false, from, to)
    }

    fn new(is_input: bool, from: OwnedFd, to: OwnedFd) -> rustix::io::Result<Self> {
        for end in [&from, &to] {
            let flags = rustix::fs::fcntl_getfl(end)?;
            rustix::fs::fcntl_setfl(end, flags | OFlags::NONBLOCK)?;
        }
        let (from, to) = (from.into(), to.into());
        Ok(Self {
            is_input,
            from,
            to,
            waiting: Vec::new(),
            is_dry: false,
            left: MOST_PIECES,
            has_ended: false,
        })
    }

    pub(super) fn is_input(&self) -> bool {
        self.is_input
    }

    /// Whether the sender has ended, and all has been moved. `false` after the receiver has gone.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended && self.waiting.is_empty()
    }

    /// Whether who sends has closed its end altogether.
    pub(super) fn sender_has_gone(&self) -> bool {
        has_gone(self.from.as_fd())
    }

    /// Whether all that there was has been moved.
    pub(super) fn is_empty(&self) -> bool {
        self.is_dry && self.waiting.is_empty()
    }

    /// Steps until all that there is has been moved, or the receiver takes no more. As [`Self::step`].
    pub(super) fn finish(&mut self) -> bool {
        loop {
            let will_read = self.waiting.is_empty();
            if will_read && self.left == 0 {
                // The rest is not the program's.
                self.is_dry = true;
                return true;
            }
            self.left -= usize::from(will_read);
            let goes_on = self.step();
            if !goes_on || self.is_empty() || !self.waiting.is_empty() {
                return goes_on;
            }
        }
    }

    /// What to wait for. With nothing to write, the end of the receiver.
    pub(super) fn interest(&self) -> Vec<PollFd<'_>> {
        if self.waiting.is_empty() {
            vec![
                PollFd::new(self.from.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.to.as_fd(), PollFlags::empty()),
            ]
        } else {
            vec![PollFd::new(self.to.as_fd(), PollFlags::POLLOUT)]
        }
    }

    /// Moves what can be moved without a wait. `false`: all has been moved, or the receiver has gone.
    pub(super) fn step(&mut self) -> bool {
        if self.waiting.is_empty() && !self.has_ended {
            let mut piece = vec![0; PIECE_BYTES];
            let read = self.from.read(&mut piece);
            self.is_dry = read.as_ref().is_err_and(|e| e.kind() == ErrorKind::WouldBlock);
            match read {
                Ok(0) => self.has_ended = true,
                Ok(length) => {
                    piece.truncate(length);
                    self.waiting = piece;
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // EIO of a terminal: all programs have closed it.
                Err(_) => self.has_ended = true,
            }
        }
        while !self.waiting.is_empty() {
            match self.to.write(&self.waiting) {
                Ok(length) => drop(self.waiting.drain(..length)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        if self.has_ended && self.waiting.is_empty() {
            // Another relay may have the same socket.
            let _a_pipe_is_closed = rustix::net::shutdown(&self.to, Shutdown::Write);
            return false;
        }
        !has_gone(self.to.as_fd())
    }
}

pub(super) fn has_gone(receiver: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(receiver, PollFlags::empty())];
    let found = nix::poll::poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    found && fds[0].revents().is_some_and(|flags| flags.intersects(PollFlags::POLLERR | PollFlags::POLLHUP))
}

/// Both ends of a new pipe, of which the program gets one: to read from, to write to.
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn all_is_moved_in_order_and_the_end_follows() {
        let (read, mut write) = std::io::pipe().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut relay = Relay::output(read.into(), theirs.into()).unwrap();
        let sent: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let copy = sent.clone();
        let writer = std::thread::spawn(move || write.write_all(&copy).unwrap());
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            ours.read_to_end(&mut all).unwrap();
            all
        });
        while {
            let mut fds = relay.interest();
            nix::poll::poll(&mut fds, PollTimeout::NONE).unwrap();
            relay.step()
        } {}
        writer.join().unwrap();
        assert!(reader.join().unwrap() == sent);
    }

    #[test]
    fn what_others_write_after_the_end_is_moved_for_a_while_only() {
        let (read, mut write) = std::io::pipe().unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut relay = Relay::output(read.into(), theirs.into()).unwrap();
        // As a reader that takes as much as the socket has, each time.
        let mut moved = 0;
        for _ in 0..10 * MOST_PIECES {
            write.write_all(&[7; PIECE_BYTES]).unwrap();
            assert!(relay.finish());
            if relay.is_empty() {
                break;
            }
            let mut piece = vec![0; PIECE_BYTES];
            moved += ours.read(&mut piece).unwrap();
        }
        assert!(relay.is_empty(), "after {moved} bytes");
    }

    #[test]
    fn it_ends_when_the_receiver_has_gone_though_nothing_is_sent() {
        let (read, _write) = std::io::pipe().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut relay = Relay::output(read.into(), theirs.into()).unwrap();
        assert!(relay.step());
        drop(ours);
        let mut fds = relay.interest();
        nix::poll::poll(&mut fds, PollTimeout::NONE).unwrap();
        assert!(!relay.step());
    }
}
