//! The driver's reply to Hello, as a daemon reads it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use linux::chain;
use linux::fd_passing::PacketSocket;
use proto::handover::Role;
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{Assignment, DriverConnection};
use crate::config;
use crate::descriptors::{self, check_fuse_device, check_listener};
use crate::error::{Error, Result};

/// A byte with the number of descriptors, a byte with the kind of each, and the packet. An accepted
/// assignment has a fit descriptor for each role, and a refusal is one line for the driver.
pub fn hello_reply(input: &[u8]) {
    let Some(checked) = checked(input) else { return };
    match checked {
        Ok(assignment) => {
            assert!(assignment.threads.is_none_or(|threads| (1..=config::MAX_THREADS).contains(&threads)));
            assert!(assignment.terms.known_inode_limit > 0);
            let listeners = &assignment.listeners;
            let fit = check_fuse_device(&assignment.fuse_device)
                .and_then(|()| check_listener(&listeners.control, SocketType::SEQPACKET))
                .and_then(|()| check_listener(&listeners.metrics, SocketType::STREAM));
            assert_eq!(fit, Ok(()));
        }
        Err(error) => {
            assert!(matches!(error, Error::Assignment { .. } | Error::Version { .. }), "{error}");
            assert!(!chain(&error).contains('\n'), "{error}");
        }
    }
}

/// `None` for an input without a packet.
fn checked(input: &[u8]) -> Option<Result<Assignment<[OwnedFd; 2]>>> {
    let (count, rest) = input.split_first()?;
    let (kinds, packet) = rest.split_at_checked(usize::from(*count) % (descriptors::MOST + 1))?;
    let descriptors = kinds.iter().map(|kind| descriptor(*kind)).collect();
    let (socket, _driver) = PacketSocket::pair().expect("a pair of sockets");
    let driver = DriverConnection { socket, path: PathBuf::from("/dial") };
    Some(driver.check(packet, descriptors, |_backend, rest| {
        Ok([rest.take(Role::Directory, |_| Ok(()))?, rest.take(Role::UsageFile, |_| Ok(()))?])
    }))
}

fn descriptor(kind: u8) -> OwnedFd {
    let opened = |path| File::open(path).unwrap_or_else(|e| panic!("{path}: {e}")).into();
    match kind % 6 {
        0 => opened("/dev/fuse"),
        1 => listener(SocketType::SEQPACKET),
        2 => listener(SocketType::STREAM),
        3 => opened("/"),
        4 => rustix::fs::memfd_create("usage", MemfdFlags::CLOEXEC).expect("a file in memory"),
        _ => socket(SocketType::SEQPACKET),
    }
}

/// At an abstract address of the kernel's choice (unix(7), "Autobind feature").
fn listener(kind: SocketType) -> OwnedFd {
    let socket = socket(kind);
    rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).expect("an address for a socket");
    rustix::net::listen(&socket, 1).expect("a socket that listens");
    socket
}

fn socket(kind: SocketType) -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_replies_to_hello_hold() {
        ::tests::seeds::run("hello_reply", hello_reply);
    }

    #[test]
    fn the_whole_assignment_among_the_seeds_is_accepted() {
        let seed = include_bytes!("../../../fuzz/seeds/hello_reply/assignment");
        let assignment = checked(seed).unwrap().unwrap();
        assert_eq!((assignment.volume_name.as_str(), assignment.threads), ("v", Some(2)));
    }
}
