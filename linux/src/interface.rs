//! One question about a network interface that is not worth a netlink socket's
//! answer of a kilobyte.

#![expect(unsafe_code, reason = "ioctl has no safe wrapper for interface requests")]

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::{Error, Result};

/// Whether the interface called `name` of the calling thread's namespace is
/// administratively up (`SIOCGIFFLAGS`, netdevice(7)). `ENODEV` when there is none.
pub fn is_up(name: &str) -> Result<bool> {
    flags(name)
        .map(|flags| i32::from(flags) & libc::IFF_UP != 0)
        .map_err(|e| Error::new("read flags of interface", name, e))
}

fn flags(name: &str) -> io::Result<libc::c_short> {
    // SAFETY: an ifreq is plain data, for which all zero bytes are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(Errno::ENODEV.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the kernel reads the name, which ends with a zero byte, and
    // writes the flags of a request that lives through the call.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) };
    Errno::result(done)?;
    // SAFETY: a success has written this member.
    Ok(unsafe { request.ifr_ifru.ifru_flags })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_not_there_is_told_from_one_that_is() {
        is_up("lo").unwrap();
        assert_eq!(is_up("nothing-here").unwrap_err().errno(), Errno::ENODEV);
        assert_eq!(is_up("much-too-long-for-a-name").unwrap_err().errno(), Errno::ENODEV);
    }
}
