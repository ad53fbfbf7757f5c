//! Connections of FUSE by their numbers, which the kernel gives again.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};

use linux::mount::{
    FuseConnections, FuseMountOptions, FuseName, MountFlags, UnmountMode, id_of, minor_of, move_mount,
    new_fuse, open_fuse_device, unmount,
};
use rustix::fs::{AtFlags, StatxFlags};

/// A connection that is mounted nowhere, and its number. It ends with both values.
fn connection() -> (File, std::os::fd::OwnedFd, u32) {
    let device = open_fuse_device().unwrap();
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: false, default_permissions: false };
    let tree = new_fuse(&device, FuseName { source: "unserved", subtype: "test" }, options).unwrap();
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

/// Answers requests until one for attributes, with a size that no file has. The layouts are
/// those of linux/fuse.h: the length, the error and the request's number first.
fn serve_nonsense(mut device: File) -> File {
    const FUSE_GETATTR: u32 = 3;
    const FUSE_INIT: u32 = 26;
    let mut request = vec![0; 1 << 18];
    loop {
        let length = device.read(&mut request).unwrap();
        assert!(length >= 40);
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (kind, number) = (word(4), &request[8..16]);
        let mut answer = vec![0_u8; 16];
        answer[8..16].copy_from_slice(number);
        match kind {
            FUSE_INIT => {
                let mut init = [0_u8; 64];
                init[0..4].copy_from_slice(&7_u32.to_ne_bytes());
                init[4..8].copy_from_slice(&31_u32.to_ne_bytes());
                init[20..24].copy_from_slice(&4096_u32.to_ne_bytes());
                answer.extend(init);
            }
            FUSE_GETATTR => {
                let mut attributes = [0_u8; 104];
                attributes[16..24].copy_from_slice(&1_u64.to_ne_bytes());
                attributes[24..32].copy_from_slice(&((1_u64 << 63) + 5).to_ne_bytes());
                attributes[76..80].copy_from_slice(&0o040_755_u32.to_ne_bytes());
                answer.extend(attributes);
            }
            _ => answer[4..8].copy_from_slice(&(-libc::ENOSYS).to_ne_bytes()),
        }
        let length = u32::try_from(answer.len()).unwrap();
        answer[0..4].copy_from_slice(&length.to_ne_bytes());
        device.write_all(&answer).unwrap();
        if kind == FUSE_GETATTR {
            return device;
        }
    }
}

/// The kernel gives up an inode of which a daemon has told nonsense: each look at it is EIO.
#[test]
fn a_mount_whose_daemon_tells_nonsense_of_its_root_is_known() {
    let device = open_fuse_device().unwrap();
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: true, default_permissions: false };
    let tree = new_fuse(&device, FuseName { source: "nonsense", subtype: "test" }, options).unwrap();
    let (minor, id) = (minor_of(&tree).unwrap(), id_of(&tree).unwrap());
    let target = tempfile::tempdir().unwrap();
    move_mount(&tree, target.path()).unwrap();
    let daemon = std::thread::spawn(|| serve_nonsense(File::from(device)));
    let look = || rustix::fs::statx(&tree, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
    assert_eq!(look().unwrap_err(), rustix::io::Errno::IO);
    let _device = daemon.join().unwrap();
    assert_eq!(look().unwrap_err(), rustix::io::Errno::IO, "from now on");
    let found = (minor_of(&tree), id_of(&tree), unmount(target.path(), UnmountMode::Detach));
    assert_eq!((found.0.unwrap(), found.1.unwrap()), (minor, id));
    found.2.unwrap();
}
