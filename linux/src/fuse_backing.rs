//! Files that the kernel reads and writes for a FUSE connection without its daemon (FUSE_PASSTHROUGH,
//! Linux 6.9). Registering one needs CAP_SYS_ADMIN in the first user namespace
//! (fs/fuse/backing.c, `fuse_backing_open`).

#![expect(unsafe_code, reason = "names the structure of FUSE_DEV_IOC_BACKING_OPEN")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::credentials::{Caller, CapabilitySet, FsIds, ReducedSets};
use crate::error::Error;
use crate::ioctl::Request;
use crate::mount::{self, FuseMountOptions, FuseName, MountFlags};

/// `struct fuse_backing_map` of linux/fuse.h.
#[repr(C)]
#[derive(Debug)]
struct BackingMap {
    fd: i32,
    flags: u32,
    padding: u64,
}

// SAFETY: the structure that linux/fuse.h names for the request, without a pointer; the kernel writes
// nothing to it.
const BACKING_OPEN: Request<BackingMap> = unsafe { Request::new(0x4010_e501) };
// SAFETY: a number, which the kernel only reads.
const BACKING_CLOSE: Request<u32> = unsafe { Request::new(0x4004_e502) };

/// An unprivileged user: of no file system's reserved blocks.
const OWNER: Caller = Caller { uid: 65534, gid: 65534 };

/// `FUSE_PASSTHROUGH` of linux/fuse.h (bit 37), in the second word of flags.
const PASSTHROUGH: u32 = 1 << 5;
/// Of FUSE_INIT: the second word of flags, behind `struct fuse_in_header` (40 bytes) and the first four words of
/// `struct fuse_init_in`. Kernels before Linux 5.17 send no second word.
const FLAGS2: std::ops::Range<usize> = 56..60;
/// The kernel refuses shorter reads (`FUSE_MIN_READ_BUFFER`).
const REQUEST_BYTES: usize = 8192;
/// The kernel queues FUSE_INIT before the mount returns.
const INIT_TIMEOUT_MILLIS: u16 = 5000;

/// Whether this kernel has FUSE_PASSTHROUGH (Linux 6.9, `CONFIG_FUSE_PASSTHROUGH`). It says so in the FUSE_INIT of
/// each connection (fs/fuse/inode.c, `fuse_new_init`), so this makes one, which is mounted nowhere.
///
/// # Errors
///
/// /dev/fuse is missing or out of reach, or the caller may not mount.
pub fn is_supported() -> crate::Result<bool> {
    let device = mount::open_fuse_device()?;
    let name = FuseName { source: "hawser", subtype: "hawser" };
    let options =
        FuseMountOptions { flags: MountFlags::default(), allow_other: false, default_permissions: false };
    let _mount = mount::new_fuse(&device, name, options)?;
    let failed = |e: Errno| Error::new("read FUSE_INIT from", "/dev/fuse", e);
    let mut readable = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
    match poll(&mut readable, PollTimeout::from(INIT_TIMEOUT_MILLIS)) {
        Ok(0) => return Err(failed(Errno::ETIMEDOUT)),
        // The read waits if there is nothing yet.
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => return Err(failed(e)),
    }
    let mut request = [0; REQUEST_BYTES];
    let length = nix::unistd::read(&device, &mut request).map_err(failed)?;
    Ok(offers_passthrough(&request[..length]))
}

fn offers_passthrough(init: &[u8]) -> bool {
    let flags2 = init.get(FLAGS2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
    flags2 & PASSTHROUGH != 0
}

/// Registers files from the thread that made it, which has the credentials of backing files until its drop.
///
/// The kernel reads and writes a backing file with the credentials of its registration. They have no
/// capability that changes what a file system does: with CAP_FSETID, set-id bits would survive a write, with
/// CAP_SYS_RESOURCE ext4 would ignore quotas, and root may use reserved blocks.
#[derive(Debug)]
pub struct Registrar {
    _sets: ReducedSets,
    _ids: FsIds,
}

impl Registrar {
    /// # Errors
    ///
    /// `EPERM`: this thread may not change its credentials.
    pub fn on_this_thread() -> Result<Self, Errno> {
        let ids = FsIds::set(OWNER)?;
        // A change to another fsuid has taken the file capabilities from the effective set (capabilities(7)). With
        // this one the thread still looks into directories of any user.
        let sets = ReducedSets::keeping(CapabilitySet::DAC_READ_SEARCH, CapabilitySet::SYS_RESOURCE)?;
        Ok(Self { _sets: sets, _ids: ids })
    }

    /// Registers `file` with the connection; the number that names it there. The file's access mode does
    /// not limit that of later opens: the caller checks it.
    ///
    /// # Errors
    ///
    /// `EPERM`: the connection has no passthrough, or this thread lacks CAP_SYS_ADMIN. `EOPNOTSUPP`: a file
    /// that cannot be read or written in this way. `ELOOP`: a file on a stacked file system.
    pub fn register(&self, connection: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, Errno> {
        let mut map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        let number = BACKING_OPEN.send_for_number(connection, &mut map);
        number.map_err(|e| Errno::from_raw(e.raw_os_error()))
    }
}

/// Ends a registration. Files that are open stay open. May take as long as a close of the file.
///
/// # Errors
///
/// `ENOENT`: no file has this number.
pub fn unregister(connection: impl AsFd, number: u32) -> Result<(), Errno> {
    let mut number = number;
    BACKING_CLOSE.send(connection, &mut number).map_err(|e| Errno::from_raw(e.raw_os_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FUSE_INIT with these two words of flags, as Linux 6.18 sends it.
    fn init(flags: u32, flags2: u32) -> Vec<u8> {
        let words = [104, 26, 2, 0, 0, 0, 0, 0, 0, 0, 7, 45, 0x2_0000, flags, flags2];
        words.into_iter().chain([0; 11]).flat_map(u32::to_ne_bytes).collect()
    }

    #[test]
    fn the_offer_is_in_the_second_word_of_flags() {
        let bit = 1 << 5;
        assert!(offers_passthrough(&init(0, bit)));
        assert!(!offers_passthrough(&init(0, !bit)));
        assert!(!offers_passthrough(&init(!0, 0)));
        // Of a kernel without the second word.
        assert!(!offers_passthrough(&init(!0, !0)[..56]));
    }

    #[test]
    fn a_kernel_that_registers_files_says_so() {
        // Debian keeps the configuration in /boot, other kernels in /proc, and some nowhere.
        let script = "zcat /proc/config.gz 2> /dev/null || cat /boot/config-$(uname -r)";
        let config = std::process::Command::new("sh").args(["-c", script]).output().unwrap();
        let is_supported = is_supported().unwrap();
        if config.status.success() {
            let config = String::from_utf8(config.stdout).unwrap();
            let has_option = config.lines().any(|line| line == "CONFIG_FUSE_PASSTHROUGH=y");
            assert_eq!(is_supported, has_option);
            return;
        }
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
        let is_6_9 = (numbers.next(), numbers.next()) >= (Some(6), Some(9));
        assert!(is_6_9 || !is_supported, "{release}");
    }
}
