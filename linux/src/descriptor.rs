//! What a descriptor's number refers to.

#![expect(unsafe_code, reason = "dup3(2) with a number that another value owns")]

use std::os::fd::{AsRawFd, BorrowedFd};

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
