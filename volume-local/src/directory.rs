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
    /// The user that opened it.
    uid: u32,
    fd: OwnedFd,
    stream: Mutex<Stream>,
}

#[derive(Debug)]
struct Stream {
    /// Read from the kernel, not yet returned.
    ahead: VecDeque<Entry>,
    /// The cookie of the first entry in `ahead`; `None` if the descriptor is elsewhere.
    position: Option<u64>,
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
    pub(crate) fn new(id: u64, fd: OwnedFd, uid: u32) -> Self {
        Self { id, uid, fd, stream: Mutex::new(Stream { ahead: VecDeque::new(), position: None }) }
    }

    /// Passes entries from the cookie `offset` on to `take`, until it has no space or the directory
    /// ends. `keeps_ahead`: the other entries that were read stay in memory for the next call.
    pub(crate) fn read(
        &self,
        offset: u64,
        keeps_ahead: bool,
        mut take: impl FnMut(&Entry) -> Taken,
    ) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // Zero may also mean rewinddir(3), which must show new entries.
        if offset == 0 || stream.position != Some(offset) {
            rustix::fs::seek(&self.fd, SeekFrom::Start(offset))?;
            *stream = Stream { ahead: VecDeque::new(), position: Some(offset) };
        }
        loop {
            if stream.ahead.is_empty() {
                stream.ahead = self.read_ahead()?;
            }
            let Some(entry) = stream.ahead.front() else { break };
            if take(entry) == Taken::No {
                break;
            }
            stream.position = Some(entry.next);
            stream.ahead.pop_front();
        }
        if !keeps_ahead {
            *stream = Stream { ahead: VecDeque::new(), position: None };
        }
        Ok(())
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

    fn flags_or_user(&self) -> u32 {
        self.uid
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_listing_is_whole_whether_or_not_it_keeps_what_it_has_read_ahead() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let names: BTreeSet<CString> =
            (0..500).map(|number| CString::new(format!("f{number}")).unwrap()).collect();
        for name in &names {
            std::fs::write(directory.path().join(name.to_str().unwrap()), "").unwrap();
        }
        for keeps_ahead in [|_| true, |_| false, |entries: usize| entries.is_multiple_of(2)] {
            let open = std::fs::File::open(directory.path()).unwrap();
            let stream = Directory::new(1, open.into(), 0);
            let (mut found, mut next) = (Vec::new(), 0);
            loop {
                let (before, from, keeps) = (found.len(), next, keeps_ahead(found.len()));
                let take = |entry: &Entry| {
                    // As many as the buffer of a request has room for.
                    if found.len() == before + 7 {
                        return Taken::No;
                    }
                    found.push(entry.name.clone());
                    next = entry.next;
                    Taken::Yes
                };
                stream.read(from, keeps, take).unwrap();
                assert!(keeps || stream.stream.lock().unwrap().ahead.capacity() == 0);
                if found.len() == before {
                    break;
                }
            }
            assert_eq!(found.len(), 502, "with . and ..");
            assert!(names.iter().all(|name| found.contains(name)));
        }
    }
}
