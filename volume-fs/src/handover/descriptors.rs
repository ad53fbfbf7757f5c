//! The descriptors of an Assignment, each of which is what its role says.

use std::os::fd::OwnedFd;

use proto::handover::Role;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// As many as a packet may carry.
pub(super) const MOST: usize = 16;

/// Major and minor number of /dev/fuse (Documentation/admin-guide/devices.txt).
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// Where an Assignment is wrong, and how.
pub(super) type Wrong = (&'static str, String);

#[derive(Debug)]
pub(super) struct Descriptors(Vec<(Role, OwnedFd)>);

impl Descriptors {
    /// `roles` as the message has them, `descriptors` as the packet has.
    pub(super) fn new(roles: &[i32], descriptors: Vec<OwnedFd>) -> Result<Self, Wrong> {
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

    /// The descriptor with that role, if it is what the role says.
    pub(super) fn take(&mut self, role: Role) -> Result<OwnedFd, Wrong> {
        let wrong = |reason| (role.as_str_name(), reason);
        let Some(at) = self.0.iter().position(|(found, _)| *found == role) else {
            return Err(wrong("no descriptor has this role".to_owned()));
        };
        let (_, descriptor) = self.0.swap_remove(at);
        match role {
            Role::Unspecified => Ok(()),
            Role::FuseDevice => check_fuse_device(&descriptor),
            Role::ControlListener => check_listener(&descriptor, SocketType::SEQPACKET),
            Role::MetricsListener => check_listener(&descriptor, SocketType::STREAM),
            Role::Directory => check_directory(&descriptor),
            Role::UsageFile => check_usage_file(&descriptor),
        }
        .map_err(wrong)?;
        Ok(descriptor)
    }
}

fn check_fuse_device(fd: &OwnedFd) -> std::result::Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::CharacterDevice || device != FUSE_DEVICE {
        return Err(format!("not /dev/fuse but {kind:?}, device {}:{}", device.0, device.1));
    }
    Ok(())
}

/// Where `..` leads anywhere but back, the whole host would be in the volume.
fn check_directory(fd: &OwnedFd) -> std::result::Result<(), String> {
    let seen = |name: &str| {
        rustix::fs::statx(fd, name, AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID)
            .map_err(|e| e.to_string())
    };
    let (own, parent) = (seen("")?, seen("..")?);
    let identity = |s: &rustix::fs::Statx| (s.stx_dev_major, s.stx_dev_minor, s.stx_ino, s.stx_mnt_id);
    if identity(&own) != identity(&parent) {
        return Err("not the root of a detached mount: .. leads out of the volume".to_owned());
    }
    Ok(())
}

fn check_listener(fd: &OwnedFd, wanted: SocketType) -> std::result::Result<(), String> {
    let refused = |e: Errno| format!("not a socket: {e}");
    let (domain, kind) =
        (sockopt::socket_domain(fd).map_err(refused)?, sockopt::socket_type(fd).map_err(refused)?);
    if domain != AddressFamily::UNIX || kind != wanted {
        return Err(format!("not a unix socket of {wanted:?} but {domain:?}, {kind:?}"));
    }
    match sockopt::socket_acceptconn(fd) {
        Ok(true) => Ok(()),
        Ok(false) => Err("a socket that does not listen".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

fn check_usage_file(fd: &OwnedFd) -> std::result::Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| e.to_string())?;
    if kind != FileType::RegularFile || flags & OFlags::RWMODE != OFlags::RDWR {
        return Err(format!("not a regular file open for reading and writing but {kind:?}, {flags:?}"));
    }
    Ok(())
}
