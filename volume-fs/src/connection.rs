//! Opens fuser's session on a connection, whether or not the kernel has its answer to FUSE_INIT
//! already.
//!
//! fuser expects FUSE_INIT as the first request. So it gets the request through a pair of sockets
//! that plays the kernel. A new connection's answer is passed on to the kernel. A connection that is
//! continued keeps the answer that the kernel got from the first daemon: this daemon must be able to
//! serve on its terms ([`terms`]). Then the real connection takes the place of fuser's socket.

mod terms;

use std::os::fd::{AsFd, OwnedFd};

use fuser::{Filesystem, Session, SessionACL};
use linux::fd_passing::PacketSocket;
use rustix::io::Errno;

use crate::backend::Backend;
use crate::filesystem::{Adapter, InitOnly, Wanted};
use crate::notifications;
use crate::state::{InitExchange, StateTable};
use crate::{Error, Result};

/// Above FUSE_MIN_READ_BUFFER and a write of the size that counts before FUSE_INIT.
const READ_BYTES: usize = 64 * 1024;

/// struct fuse_in_header, then struct fuse_init_in: u32 major, minor, max_readahead, flags, flags2.
const HEADER_BYTES: usize = 40;
const OPCODE_AT: usize = 4;
const FUSE_INIT: u32 = 26;
const FUSE_MAJOR: u32 = 7;
/// FUSE_HAS_RESEND is bit 39 of the flags, so bit 7 of flags2.
const HAS_RESEND: u32 = 1 << (39 - 32);
/// struct fuse_out_header has `unique` at this offset, the request too.
const UNIQUE: std::ops::Range<usize> = 8..16;

/// An open session, and whether the kernel can send its requests again (Linux 6.9).
pub(crate) struct Opened<B: Backend> {
    pub(crate) session: Session<Adapter<B>>,
    pub(crate) has_resend: bool,
    /// Names of flags that this daemon would ask for, and the connection lacks.
    pub(crate) needs_new_stage: Vec<String>,
}

/// Checks that this daemon can continue the connection. Changes nothing, and asks the kernel nothing.
pub(crate) fn check(wanted: Wanted, table: &StateTable, threads: usize) -> Result<()> {
    let earlier = table.exchange()?;
    check_init(&earlier.request)?;
    let (_session, answer) = handshake(InitOnly(wanted), wanted, &earlier.request, threads)?;
    terms::compare(&answer, &earlier.answer).map(drop)
}

/// How a connection comes to this daemon.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Beginning<'a> {
    /// This daemon answers FUSE_INIT, and records that in the table for a successor.
    New(Option<&'a StateTable>),
    /// An earlier daemon has answered FUSE_INIT, as the table records.
    Continued(&'a StateTable),
}

pub(crate) fn open<B: Backend>(
    filesystem: Adapter<B>,
    wanted: Wanted,
    device: &OwnedFd,
    threads: usize,
    beginning: Beginning<'_>,
) -> Result<Opened<B>> {
    let (session, has_resend, needs_new_stage) = match beginning {
        Beginning::Continued(table) => {
            let earlier = table.take_over()?;
            let has_resend = check_init(&earlier.request)?;
            let (session, answer) = handshake(filesystem, wanted, &earlier.request, threads)?;
            (session, has_resend, terms::compare(&answer, &earlier.answer)?)
        }
        Beginning::New(table) => {
            let request = read_init(device)?;
            let has_resend = check_init(&request)?;
            let (session, answer) = handshake(filesystem, wanted, &request, threads)?;
            let written = rustix::io::retry_on_intr(|| rustix::io::write(device, &answer));
            written.map_err(|e| Error::Handshake { source: e.into() })?;
            if let Some(table) = table {
                table.record(&InitExchange { request, answer })?;
            }
            (session, has_resend, Vec::new())
        }
    };
    linux::descriptor::replace(session.as_fd(), device.as_fd())
        .map_err(|source| Error::Kernel { step: "session", source })?;
    Ok(Opened { session, has_resend, needs_new_stage })
}

/// Makes the kernel send again what the earlier daemon had read and not answered.
pub(crate) fn resend(device: &OwnedFd) -> Result<()> {
    let message = notifications::resend_message();
    rustix::io::retry_on_intr(|| rustix::io::write(device, &message)).map(drop).map_err(|e| Error::Kernel {
        step: "send requests again",
        source: linux::Error::new("write", "/dev/fuse", e),
    })
}

fn read_init(device: &OwnedFd) -> Result<Vec<u8>> {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match rustix::io::read(device, &mut buffer[..]) {
            // ENOENT: the request was interrupted (fuse_dev_do_read).
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(errno) => return Err(Error::Handshake { source: errno.into() }),
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
        }
    }
}

/// Whether the kernel has FUSE_HAS_RESEND.
fn check_init(request: &[u8]) -> Result<bool> {
    let wrong = |what: String| Error::Handshake { source: std::io::Error::other(what) };
    let number = |at: usize| {
        let bytes = request.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes)
    };
    match (number(OPCODE_AT), number(HEADER_BYTES)) {
        (Some(FUSE_INIT), Some(FUSE_MAJOR)) => {}
        (Some(FUSE_INIT), Some(major)) => {
            return Err(wrong(format!("the kernel speaks version {major} of FUSE, not {FUSE_MAJOR}")));
        }
        (opcode, _) => return Err(wrong(format!("the first request is {opcode:?}, not FUSE_INIT"))),
    }
    // Kernels before 5.17 have no flags2.
    Ok(number(HEADER_BYTES + 16).unwrap_or_default() & HAS_RESEND != 0)
}

/// fuser's session on a socket, and its answer to `request`, without the flags that cannot be.
fn handshake<F: Filesystem>(
    filesystem: F,
    wanted: Wanted,
    request: &[u8],
    threads: usize,
) -> Result<(Session<F>, Vec<u8>)> {
    let failed = |source| Error::Kernel { step: "session", source };
    let (kernel, daemon) = PacketSocket::pair().map_err(failed)?;
    kernel.send(request, &[]).map_err(failed)?;
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(threads);
    let session = Session::from_fd(filesystem, daemon.into(), SessionACL::All, config)
        .map_err(|source| Error::Handshake { source })?;
    let mut answer = kernel.receive().map_err(failed)?.unwrap_or_default();
    if answer.get(UNIQUE) != request.get(UNIQUE) {
        return Err(Error::Handshake { source: std::io::Error::other("no answer to FUSE_INIT") });
    }
    terms::take_out(&mut answer, wanted.refuses());
    Ok((session, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(major: u32, flags2: Option<u32>) -> Vec<u8> {
        let mut request = vec![0; HEADER_BYTES];
        request[OPCODE_AT..OPCODE_AT + 4].copy_from_slice(&FUSE_INIT.to_ne_bytes());
        [major, 36, 0, 0].iter().for_each(|number| request.extend(number.to_ne_bytes()));
        request.extend(flags2.iter().flat_map(|flags| flags.to_ne_bytes()));
        request
    }

    #[test]
    fn only_a_kernel_that_offers_it_can_send_requests_again() {
        assert!(check_init(&init(7, Some(HAS_RESEND | 1))).unwrap());
        assert!(!check_init(&init(7, Some(1))).unwrap());
        assert!(!check_init(&init(7, None)).unwrap());
    }

    #[test]
    fn what_is_not_fuse_init_of_version_7_is_refused() {
        check_init(&init(8, None)).unwrap_err();
        check_init(&[0; 104]).unwrap_err();
        check_init(&[]).unwrap_err();
    }
}
