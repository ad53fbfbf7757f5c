//! An open directory: entries read ahead from the backing directory, and the cookie at which the
//! next request continues.
//!
//! Invariant: cookies are the backing file system's own (d_off). So a reader that continues after
//! entries were created and removed misses no entry that existed throughout, and sees none twice.

use std::collections::VecDeque;
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FileType, RawDir, SeekFrom};
use volume_fs::backend::Taken;

use crate::errno::Result;
use crate::handles::OfNode;

const READ_AHEAD_BYTES: usize = 32 * 1024;

#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) id: u64,
    fd: OwnedFd,
    stream: Mutex<Stream>,
}

#[derive(Debug)]
struct Stream {
    /// Read from the kernel, not yet returned.
    ahead: VecDeque<Entry>,
    /// The cookie of the first entry in `ahead`.
    position: u64,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) inode: u64,
    pub(crate) kind: FileType,
    pub(crate) name: CString,
    /// The cookie of the entry after this one.
    pub(crate) next: u64,
}

impl Directory {
    /// `fd` must be open for reading.
    pub(crate) fn new(id: u64, fd: OwnedFd) -> Self {
        Self { id, fd, stream: Mutex::new(Stream { ahead: VecDeque::new(), position: 0 }) }
    }

    /// Passes entries from the cookie `offset` on to `take`, until it has no space or the directory
    /// ends.
    pub(crate) fn read(&self, offset: u64, mut take: impl FnMut(&Entry) -> Taken) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // Zero may also mean rewinddir(3), which must show new entries.
        if offset == 0 || offset != stream.position {
            rustix::fs::seek(&self.fd, SeekFrom::Start(offset))?;
            *stream = Stream { ahead: VecDeque::new(), position: offset };
        }
        loop {
            if stream.ahead.is_empty() {
                stream.ahead = self.read_ahead()?;
            }
            let Some(entry) = stream.ahead.front() else { return Ok(()) };
            if take(entry) == Taken::No {
                return Ok(());
            }
            stream.position = entry.next;
            stream.ahead.pop_front();
        }
    }

    /// The entries of one getdents64(2); none at the end.
    fn read_ahead(&self) -> Result<VecDeque<Entry>> {
        let mut buffer = vec![MaybeUninit::uninit(); READ_AHEAD_BYTES];
        let mut raw = RawDir::new(&self.fd, &mut buffer);
        let mut entries = VecDeque::new();
        while let Some(entry) = raw.next() {
            let entry = entry?;
            entries.push_back(Entry {
                inode: entry.ino(),
                kind: entry.file_type(),
                name: entry.file_name().to_owned(),
                next: entry.next_entry_cookie(),
            });
            if raw.is_buffer_empty() {
                break;
            }
        }
        Ok(entries)
    }
}

impl OfNode for Directory {
    fn node(&self) -> u64 {
        self.id
    }

    /// Every directory is opened in the same way.
    fn flags(&self) -> u32 {
        0
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
