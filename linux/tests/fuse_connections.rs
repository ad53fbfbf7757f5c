//! Connections of FUSE by their numbers, which the kernel gives again.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs::File;
use std::io::{ErrorKind, Read};

use linux::mount::{FuseConnections, FuseMountOptions, MountFlags, minor_of, new_fuse, open_fuse_device};

/// A connection that is mounted nowhere, and its number. It ends with both values.
fn connection() -> (File, std::os::fd::OwnedFd, u32) {
    let device = open_fuse_device().unwrap();
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: false, default_permissions: false };
    let tree = new_fuse(&device, ("unserved", "test"), options).unwrap();
    rustix::fs::fcntl_setfl(&device, rustix::fs::OFlags::NONBLOCK).unwrap();
    let minor = minor_of(&tree).unwrap();
    (File::from(device), tree, minor)
}

fn is_aborted(device: &mut File) -> bool {
    let mut request = vec![0; 1 << 16];
    match device.read(&mut request) {
        Ok(_) => false,
        Err(e) if e.kind() == ErrorKind::WouldBlock => false,
        Err(_) => true,
    }
}

#[test]
fn an_abort_meets_no_connection_that_got_its_number_later() {
    let connections = FuseConnections::open().unwrap();
    // Another program may get the number in between.
    for _ in 0..100 {
        let (device, tree, minor) = connection();
        let first = connections.connection(minor).unwrap().expect("it is there");
        drop((device, tree));
        let (mut device, _tree, number) = connection();
        if number != minor {
            continue;
        }
        first.abort().unwrap();
        assert!(!is_aborted(&mut device), "a connection that the handle was not of");
        connections.connection(number).unwrap().expect("it is there").abort().unwrap();
        assert!(is_aborted(&mut device));
        return;
    }
    panic!("the kernel gave no number twice");
}

#[test]
fn a_number_that_no_connection_has_is_none() {
    let connections = FuseConnections::open().unwrap();
    assert!(connections.connection(u32::MAX).unwrap().is_none());
    assert_eq!(connections.waiting(u32::MAX).unwrap(), None);
}
