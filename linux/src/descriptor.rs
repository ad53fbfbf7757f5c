//! What a descriptor's number refers to.

#![expect(unsafe_code, reason = "numbers that another value owns, or none yet")]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;

use crate::{Error, Result};

/// From here on `number` refers to the open file of `source`, close-on-exec. What it referred to is
/// closed. Its owner stays its owner.
pub fn replace(number: BorrowedFd<'_>, source: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: both numbers are open, as their borrows prove, and the owner of `number` still owns an
    // open descriptor of that number afterwards.
    let replaced = unsafe { libc::dup3(source.as_raw_fd(), number.as_raw_fd(), libc::O_CLOEXEC) };
    Errno::result(replaced).map(drop).map_err(|e| Error::new("dup3", "a descriptor", e))
}

/// Takes `count` descriptors that the process was started with, from number `first` on, and makes them
/// close-on-exec. Must be called before the process opens anything, since any of these numbers that is
/// not open would be given to what it opens. `EBADF` if one is not open; `EALREADY` at a second call.
pub fn take_inherited(first: i32, count: i32) -> Result<Vec<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let failed = |e| Error::new("take", "inherited descriptors", e);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(failed(Errno::EALREADY));
    }
    let numbers = first..first.checked_add(count).ok_or_else(|| failed(Errno::EBADF))?;
    for number in numbers.clone() {
        // SAFETY: it changes a flag of a number, and fails if the number is not open.
        let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        Errno::result(set).map_err(failed)?;
    }
    // SAFETY: all are open, and no value owns them: they were open when the process started, and this
    // is the only call.
    Ok(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn the_number_refers_to_the_other_open_file() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        replace(file.as_fd(), writer.as_fd()).unwrap();
        drop(writer);
        file.write_all(b"through the pipe").unwrap();
        drop(file);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through the pipe");
    }
}
