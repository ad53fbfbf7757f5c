//! The usage file of a volume: its daemon's count, kept for the next daemon.
//!
//! 64 bytes, little endian: magic, clean, used bytes, used inodes, boot id, FNV-1a of the rest. The
//! count is valid only if a daemon ended cleanly during this boot.
//!
//! Where the kernel counts, the driver writes its count here for the daemon, with another magic.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::backend::copies::Count;

const MAGIC: &[u8; 8] = b"HAWSUSE1";
/// Of a count by the kernel.
const KERNELS_MAGIC: &[u8; 8] = b"HAWSKRN1";
const BYTES: usize = 64;
const SUMMED: usize = 56;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Opens the file, and creates it if it is missing: a volume's daemon writes it. Does not wait for
/// a process that holds a lease on it (fcntl(2), F_SETLEASE).
pub(super) fn open(path: &Path) -> linux::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| linux::Error::at("open", path, e))
}

/// `None` if the tree must be counted.
pub(super) fn read(file: &OwnedFd) -> linux::Result<Option<Count>> {
    let mut found = [0; BYTES];
    let length = rustix::io::pread(file, &mut found, 0).map_err(|e| linux::Error::new("read", "usage", e))?;
    if length != BYTES {
        return Ok(None);
    }
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| found[at + i]));
    let count = Count { bytes: number(16), inodes: number(24) };
    Ok((found == of(count)?).then_some(count))
}

/// Writes the file as a daemon that ends cleanly does.
pub(super) fn write(file: &OwnedFd, count: Count) -> linux::Result<()> {
    write_all(file.as_fd(), &of(count)?).map_err(|e| linux::Error::new("write", "usage", e))
}

/// Writes what the kernel counts, unless it is there. A daemon that reads half of it notices.
pub(super) fn publish(file: &OwnedFd, count: Count) -> linux::Result<()> {
    let wanted = content(KERNELS_MAGIC, count)?;
    let mut found = [0; BYTES];
    if rustix::io::pread(file, &mut found, 0) == Ok(BYTES) && found == wanted {
        return Ok(());
    }
    write_all(file.as_fd(), &wanted).map_err(|e| linux::Error::new("write", "usage", e))
}

fn write_all(file: impl AsFd, content: &[u8]) -> Result<(), Errno> {
    // One block: written completely or not at all.
    match rustix::io::pwrite(file, content, 0)? {
        written if written == content.len() => Ok(()),
        _ => Err(Errno::IO),
    }
}

fn of(count: Count) -> linux::Result<[u8; BYTES]> {
    content(MAGIC, count)
}

fn content(magic: &[u8; 8], count: Count) -> linux::Result<[u8; BYTES]> {
    let mut content = [0; BYTES];
    content[..8].copy_from_slice(magic);
    content[8] = 1;
    content[16..24].copy_from_slice(&count.bytes.to_le_bytes());
    content[24..32].copy_from_slice(&count.inodes.to_le_bytes());
    content[32..48].copy_from_slice(&boot_id()?.to_be_bytes());
    let sum = fnv1a(&content[..SUMMED]);
    content[SUMMED..].copy_from_slice(&sum.to_le_bytes());
    Ok(content)
}

/// Identifies this boot: a daemon's writes before a reboot may not have reached the disk.
fn boot_id() -> linux::Result<u128> {
    let path = Path::new(BOOT_ID);
    let text = std::fs::read_to_string(path).map_err(|e| linux::Error::at("read", path, e))?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16).map_err(|_| linux::Error::at("understand", path, Errno::INVAL))
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = OwnedFd::from(std::fs::File::create_new(dir.path().join("usage")).unwrap());
        let reopened = || {
            let file = std::fs::File::options().read(true).write(true).open(dir.path().join("usage"));
            OwnedFd::from(file.unwrap())
        };
        assert_eq!(read(&reopened()).unwrap(), None, "empty");
        let count = Count { bytes: 1 << 40, inodes: 77 };
        write(&file, count).unwrap();
        assert_eq!(read(&reopened()).unwrap(), Some(count));
        publish(&file, count).unwrap();
        assert_eq!(read(&reopened()).unwrap(), None, "the kernel's count is no daemon's");
        for byte in [0, 8, 17, 25, 40, 63] {
            let mut content = of(count).unwrap();
            content[byte] ^= 1;
            write_all(&file, &content).unwrap();
            assert_eq!(read(&reopened()).unwrap(), None, "byte {byte}");
        }
    }
}
