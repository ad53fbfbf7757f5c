//! Identifies this boot of this machine.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc::O_NONBLOCK;
use nix::sys::utsname::uname;

use crate::index::format::{boot, machine};

/// The ids of the machine and of the boot.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) boot_id: PathBuf,
    pub(crate) machine_id: PathBuf,
    /// Empty if unknown.
    pub(crate) name: String,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            boot_id: PathBuf::from("/proc/sys/kernel/random/boot_id"),
            machine_id: PathBuf::from("/etc/machine-id"),
            name: uname().map(|names| names.nodename().to_string_lossy().into_owned()).unwrap_or_default(),
        }
    }
}

impl Host {
    /// See [`boot`].
    pub(crate) fn boot(&self) -> u64 {
        boot(&first_bytes(&self.boot_id))
    }

    /// See [`machine`].
    pub(crate) fn machine(&self) -> u64 {
        machine(&first_bytes(&self.machine_id), &self.name)
    }
}

/// More bytes than an id has; empty if it cannot be read.
fn first_bytes(path: &Path) -> String {
    let mut bytes = [0; 64];
    let length = open_regular(path).and_then(|mut file| file.read(&mut bytes)).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

/// Does not block on a FIFO, which would block all calls of the network.
fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn a_fifo_in_a_files_place_is_unreadable_and_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let host = |machine_id: &str| Host {
            machine_id: dir.path().join(machine_id),
            name: "node".to_owned(),
            ..Host::default()
        };
        std::fs::write(dir.path().join("id"), "8ae42f1c5a1f4bd4a7cd5d7e7c4a1b52\n").unwrap();
        nix::unistd::mkfifo(&dir.path().join("fifo"), Mode::S_IRUSR).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let fifo = host("fifo");
        std::thread::spawn(move || sender.send(fifo.machine()).unwrap());
        let found = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!(found, host("missing").machine());
        assert_ne!(found, host("id").machine());
    }
}
