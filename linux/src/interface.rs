//! Small queries about network interfaces by ioctl. netlink answers each with the link's whole
//! description, whose parsing costs a short-lived program more than all its other work.

#![expect(unsafe_code, reason = "ioctl has no safe wrapper for interface requests")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::{Error, Result};

/// The interfaces of one network namespace (netdevice(7)).
#[derive(Debug)]
pub struct Interfaces {
    socket: OwnedFd,
}

impl Interfaces {
    /// Always queries the namespace of the thread that called this.
    pub fn open() -> Result<Self> {
        let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
        Ok(Self { socket: socket.map_err(|e| Error::new("open socket", "for interface requests", e))? })
    }

    pub fn exists(&self, name: &str) -> Result<bool> {
        match self.ask(libc::SIOCGIFINDEX, name) {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(false),
            Err(e) => Err(Error::new("look up interface", name, e)),
        }
    }

    /// Whether it is administratively up. `ENODEV` if it does not exist.
    pub fn is_up(&self, name: &str) -> Result<bool> {
        let answer = self.ask(libc::SIOCGIFFLAGS, name);
        let answer = answer.map_err(|e| Error::new("read flags of interface", name, e))?;
        // SAFETY: a success has written this member.
        let flags = unsafe { answer.ifr_ifru.ifru_flags };
        Ok(i32::from(flags) & libc::IFF_UP != 0)
    }

    /// The MAC of an Ethernet interface. `ENODEV` if it does not exist.
    pub fn mac(&self, name: &str) -> Result<[u8; 6]> {
        let answer = self.ask(libc::SIOCGIFHWADDR, name);
        let answer = answer.map_err(|e| Error::new("read address of interface", name, e))?;
        // SAFETY: a success has written this member.
        let [a, b, c, d, e, f, ..] = unsafe { answer.ifr_ifru.ifru_hwaddr }.sa_data;
        Ok([a, b, c, d, e, f].map(libc::c_char::cast_unsigned))
    }

    fn ask(&self, what: libc::c_ulong, name: &str) -> io::Result<libc::ifreq> {
        // SAFETY: an ifreq is plain data, for which all zero bytes are a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return Err(Errno::ENODEV.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        // SAFETY: the kernel reads the name, which ends with a zero byte, and
        // writes its answer into a request that lives through the call.
        let done = unsafe { libc::ioctl(self.socket.as_raw_fd(), what as libc::Ioctl, &raw mut request) };
        Errno::result(done)?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_not_there_is_told_from_one_that_is() {
        let interfaces = Interfaces::open().unwrap();
        assert!(interfaces.exists("lo").unwrap());
        interfaces.is_up("lo").unwrap();
        assert_eq!(interfaces.mac("lo").unwrap(), [0; 6]);
        for name in ["nothing-here", "much-too-long-for-a-name"] {
            assert!(!interfaces.exists(name).unwrap());
            assert_eq!(interfaces.is_up(name).unwrap_err().errno(), Errno::ENODEV);
            assert_eq!(interfaces.mac(name).unwrap_err().errno(), Errno::ENODEV);
        }
    }
}
