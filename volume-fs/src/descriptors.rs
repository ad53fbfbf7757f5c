//! The descriptors of an Assignment, each checked against its role.

use std::os::fd::OwnedFd;

use proto::handover::Role;
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// The most that a packet may carry.
pub(crate) const MOST: usize = 16;

/// Major and minor number of /dev/fuse (Documentation/admin-guide/devices.txt).
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// The wrong field of an Assignment, and the reason.
pub type Wrong = (&'static str, String);

#[derive(Debug)]
pub struct Descriptors(Vec<(Role, OwnedFd)>);

impl Descriptors {
    /// `roles` from the message, `descriptors` from the packet.
    pub(crate) fn new(roles: &[i32], descriptors: Vec<OwnedFd>) -> Result<Self, Wrong> {
        let wrong = |reason| ("descriptors", reason);
        if roles.len() != descriptors.len() {
            return Err(wrong(format!("{} roles for {} descriptors", roles.len(), descriptors.len())));
        }
        let mut found: Vec<(Role, OwnedFd)> = Vec::new();
        for (number, descriptor) in roles.iter().zip(descriptors) {
            match Role::try_from(*number) {
                Ok(Role::Unspecified) | Err(_) => return Err(wrong(format!("{number} is not a known role"))),
                Ok(role) if found.iter().any(|(other, _)| *other == role) => {
                    return Err(wrong(format!("two have {}", role.as_str_name())));
                }
                Ok(role) => found.push((role, descriptor)),
            }
        }
        Ok(Self(found))
    }

    /// Duplicates of those that a successor of the daemon needs: all but the sockets, which each
    /// daemon gets anew.
    pub(crate) fn for_successor(&self) -> Result<Vec<(Role, OwnedFd)>, Wrong> {
        let is_socket =
            |role: &Role| matches!(role, Role::ControlListener | Role::MetricsListener | Role::Keeper);
        let left = self.0.iter().filter(|(role, _)| !is_socket(role));
        let duplicates = left.map(|(role, fd)| {
            fd.try_clone().map(|fd| (*role, fd)).map_err(|e| (role.as_str_name(), format!("duplicate: {e}")))
        });
        duplicates.collect()
    }

    pub(crate) fn has(&self, role: Role) -> bool {
        self.0.iter().any(|(found, _)| *found == role)
    }

    /// Removes the descriptor with that role, if `check` accepts it.
    pub fn take(
        &mut self,
        role: Role,
        check: impl FnOnce(&OwnedFd) -> Result<(), String>,
    ) -> Result<OwnedFd, Wrong> {
        let wrong = |reason| (role.as_str_name(), reason);
        let Some(at) = self.0.iter().position(|(found, _)| *found == role) else {
            return Err(wrong("no descriptor has this role".to_owned()));
        };
        let (_, descriptor) = self.0.swap_remove(at);
        check(&descriptor).map_err(wrong)?;
        Ok(descriptor)
    }
}

pub(crate) fn check_fuse_device(fd: &OwnedFd) -> Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::CharacterDevice || device != FUSE_DEVICE {
        return Err(format!("not /dev/fuse but {kind:?}, device {}:{}", device.0, device.1));
    }
    Ok(())
}

/// For [`Descriptors::take`]: a connected unix socket of packets.
pub(crate) fn check_packet_socket(fd: &OwnedFd) -> Result<(), String> {
    check_socket(fd, SocketType::SEQPACKET)?;
    match sockopt::socket_acceptconn(fd) {
        Ok(false) => Ok(()),
        Ok(true) => Err("a socket that listens".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

/// For [`Descriptors::take`]: a listening unix socket of this type.
pub(crate) fn check_listener(fd: &OwnedFd, wanted: SocketType) -> Result<(), String> {
    check_socket(fd, wanted)?;
    match sockopt::socket_acceptconn(fd) {
        Ok(true) => Ok(()),
        Ok(false) => Err("a socket that does not listen".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn check_socket(fd: &OwnedFd, wanted: SocketType) -> Result<(), String> {
    let refused = |e: Errno| format!("not a socket: {e}");
    let (domain, kind) =
        (sockopt::socket_domain(fd).map_err(refused)?, sockopt::socket_type(fd).map_err(refused)?);
    if domain != AddressFamily::UNIX || kind != wanted {
        return Err(format!("not a unix socket of {wanted:?} but {domain:?}, {kind:?}"));
    }
    Ok(())
}
