//! Pseudo-terminals (pty(7)).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::{Error, Result};

/// DEVPTS_SUPER_MAGIC (linux/magic.h).
const DEVPTS: i64 = 0x1cd1;
const MULTIPLEXER: &str = "/dev/pts/ptmx";

/// Both ends of a pseudo-terminal.
#[derive(Debug)]
pub struct Terminal {
    pub ours: OwnedFd,
    /// What its programs have as stdin, stdout and stderr.
    pub programs: OwnedFd,
}

impl Terminal {
    /// A new one of the instance of devpts that the calling process sees at /dev/pts, owned by `user`.
    /// A process that changes that directory tree cannot lead this to anything else: `ELOOP` for a link,
    /// `ENODEV` for another file system.
    pub fn open(user: u32) -> Result<Self> {
        let failed = |op: &'static str| move |e: Errno| Error::at(op, Path::new(MULTIPLEXER), e);
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let links = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let ours =
            rustix::fs::openat2(CWD, MULTIPLEXER, flags, Mode::empty(), links).map_err(failed("open"))?;
        let found = rustix::fs::fstatfs(&ours).map_err(failed("statfs"))?;
        if found.f_type != DEVPTS {
            return Err(failed("open")(Errno::NODEV));
        }
        rustix::pty::unlockpt(&ours).map_err(failed("unlock"))?;
        let programs = open_peer(&ours)?;
        let owner = Uid::from_raw(user);
        rustix::fs::fchown(&programs, Some(owner), None::<Gid>).map_err(failed("change the owner of"))?;
        Ok(Self { ours, programs })
    }
}

/// The programs' end of the terminal `ours`, which does not become the controlling one of this process.
pub fn open_peer(ours: impl AsFd) -> Result<OwnedFd> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    rustix::pty::ioctl_tiocgptpeer(ours, flags)
        .map_err(|e| Error::at("open the peer of", Path::new(MULTIPLEXER), e))
}

/// Makes the terminal the controlling one of the calling process, which leads a session without one.
pub fn make_controlling(terminal: impl AsFd) -> Result<()> {
    rustix::process::ioctl_tiocsctty(terminal).map_err(|e| Error::new("set the controlling terminal", "", e))
}

/// Of a terminal's window, in characters. Its foreground processes get SIGWINCH.
pub fn set_size(terminal: impl AsFd, columns: u16, rows: u16) -> Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size).map_err(|e| Error::new("set the size of a terminal", "", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_writes_is_read_at_our_end() {
        let terminal = Terminal::open(1234).unwrap();
        assert_eq!(rustix::fs::fstat(&terminal.programs).unwrap().st_uid, 1234);
        set_size(&terminal.ours, 120, 40).unwrap();
        let size = rustix::termios::tcgetwinsize(&terminal.programs).unwrap();
        assert_eq!((size.ws_col, size.ws_row), (120, 40));
        rustix::io::write(&terminal.programs, b"text\n").unwrap();
        // It comes by way of a queue of the kernel.
        let mut fds = [nix::poll::PollFd::new(terminal.ours.as_fd(), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, nix::poll::PollTimeout::from(10_000_u16)).unwrap();
        let mut seen = [0; 16];
        let length = rustix::io::read(&terminal.ours, &mut seen).unwrap();
        assert_eq!(&seen[..length], b"text\r\n");
    }
}
