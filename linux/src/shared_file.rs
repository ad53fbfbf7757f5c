//! Files that containers have mounted, and others still write: a pod's /etc/hosts, termination logs.
//!
//! Root in a container may hold a lease on such a file (fcntl(2), F_SETLEASE), also after its end:
//! a descriptor may be sent to another container. A plain open waits for the holder, up to 45 s
//! (/proc/sys/fs/lease-break-time), and again with the next lease. So nothing here waits.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

const NO_WAIT: i32 = libc::O_NONBLOCK | libc::O_NOFOLLOW;

/// To be read. `WouldBlock` where a container holds a lease.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(NO_WAIT).open(path)
}

/// Rewrites the file in place: containers have its inode mounted. Where one of them holds a lease
/// on it, or runs it as a program, the next container gets a new file.
pub fn write(path: &Path, content: &str, mode: u32) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(NO_WAIT);
    let mut file = match options.open(path) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ExecutableFileBusy) => {
            std::fs::remove_file(path)?;
            options.create_new(true).open(path)?
        }
        opened => opened?,
    };
    file.set_len(0)?;
    file.write_all(content.as_bytes())?;
    file.set_permissions(Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use super::*;

    #[expect(unsafe_code, reason = "no library has F_SETLEASE")]
    fn lease(file: &File, kind: i32) {
        let fcntl = |command, argument: i32| {
            // SAFETY: only integers, and a descriptor that lives here.
            let done = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
        };
        fcntl(libc::F_SETLEASE, kind);
        // No SIGIO for the holder when the lease is to end.
        fcntl(libc::F_SETOWN, 0);
    }

    #[test]
    fn a_container_that_runs_it_as_a_program_keeps_its_file_and_the_next_one_gets_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        // By a process of its own: a child of another test must not inherit the open file.
        assert!(Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap().success());
        let mut program = Command::new(&path).arg("1000").spawn().unwrap();
        write(&path, "new", 0o644).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        program.kill().unwrap();
        program.wait().unwrap();
    }

    #[test]
    fn a_lease_delays_neither_writing_nor_reading() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        write(&path, "first", 0o644).unwrap();
        let holder = File::open(&path).unwrap();
        lease(&holder, libc::F_RDLCK);
        let begun = std::time::Instant::now();
        write(&path, "2nd", 0o644).unwrap();
        let read = |path: &Path| io::read_to_string(open(path)?);
        assert_eq!(read(&path).unwrap(), "2nd");
        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        lease(&writer, libc::F_WRLCK);
        assert_eq!(read(&path).unwrap_err().kind(), ErrorKind::WouldBlock);
        write(&path, "3", 0o600).unwrap();
        assert_eq!(read(&path).unwrap(), "3");
        // Each wait would have taken the kernel's 45 s.
        assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_file_is_rewritten_in_place() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        write(&path, "long before", 0o644).unwrap();
        let inode = path.metadata().unwrap().ino();
        write(&path, "x", 0o644).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
        assert_eq!(path.metadata().unwrap().ino(), inode);
    }
}
