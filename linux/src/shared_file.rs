//! Files that containers have mounted and that other programs read: a pod's /etc/hosts, termination
//! logs.
//!
//! A container's root user may hold a lease on such a file (fcntl(2), F_SETLEASE), even after the
//! container's end: a descriptor can be passed to another container. A plain open then waits for
//! the holder, up to 45 s (/proc/sys/fs/lease-break-time), and again for the next lease. No open
//! here waits. Later operations may: reads (on XFS), writes and removal take the inode's lock,
//! which a container can hold as long as it runs.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

const NO_WAIT: i32 = libc::O_NONBLOCK | libc::O_NOFOLLOW;

/// Opens the file for reading. `WouldBlock` if a container holds a lease.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(NO_WAIT).open(path)
}

/// Makes a file for a container that has not started. An existing file is replaced, not
/// overwritten: a container may have it open.
pub fn create(path: &Path, content: &str, mode: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).custom_flags(NO_WAIT);
    let mut file = match options.open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            std::fs::remove_file(path)?;
            options.open(path)?
        }
        opened => opened?,
    };
    file.write_all(content.as_bytes())?;
    file.set_permissions(Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[expect(unsafe_code, reason = "no library has F_SETLEASE")]
    fn lease(file: &File, kind: i32) {
        let fcntl = |command, argument: i32| {
            // SAFETY: only integers, and a descriptor that lives here.
            let done = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
        };
        fcntl(libc::F_SETLEASE, kind);
        // So that the holder gets no SIGIO when the lease must end.
        fcntl(libc::F_SETOWN, 0);
    }

    #[test]
    fn a_lease_delays_neither_a_new_file_nor_reading() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        create(&path, "first", 0o644).unwrap();
        let holder = File::open(&path).unwrap();
        lease(&holder, libc::F_RDLCK);
        let begun = std::time::Instant::now();
        create(&path, "2nd", 0o644).unwrap();
        let read = |path: &Path| io::read_to_string(open(path)?);
        assert_eq!(read(&path).unwrap(), "2nd");
        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        lease(&writer, libc::F_WRLCK);
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::WouldBlock);
        create(&path, "3", 0o600).unwrap();
        assert_eq!(read(&path).unwrap(), "3");
        // Each wait would have taken the kernel's 45 s.
        assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_stands_is_replaced_and_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        create(&path, "long before", 0o644).unwrap();
        let mut old = File::open(&path).unwrap();
        create(&path, "x", 0o644).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
        assert_eq!(io::read_to_string(&mut old).unwrap(), "long before");
    }
}
