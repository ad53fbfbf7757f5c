//! The parameters of requests, in addition to the files that they name. Flags have the kernel's
//! values, in rustix's types.

use linux::credentials::Caller;
use rustix::fs::Timestamps;

use crate::file::Handle;

/// Identifies a request on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestId {
    /// Above zero, and never used for another request of the connection.
    pub number: u64,
    /// The kernel has sent it before, to a daemon that has ended without an answer. That one may
    /// have begun or even finished it.
    pub resent: bool,
}

/// Whose request it is.
#[derive(Debug, Clone, Copy)]
pub struct Requester {
    pub id: RequestId,
    pub caller: Caller,
}

/// The requested permissions of a new file; the umask is not applied (FUSE_DONT_MASK).
#[derive(Debug, Clone, Copy)]
pub struct Permissions {
    pub mode: u32,
    pub umask: u32,
}

/// The file types that mknod may create. Devices are refused before the backend is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Regular,
    Fifo,
    Socket,
}

/// The requested parts of setattr. FUSE_HANDLE_KILLPRIV_V2 requests none to clear suid and sgid.
#[derive(Debug, Default)]
pub struct Changes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub times: Option<Timestamps>,
}

/// The source or the target of copy_file_range.
#[derive(Debug, Clone, Copy)]
pub struct Position {
    pub handle: Handle,
    pub offset: u64,
}

/// The data of a write.
#[derive(Debug, Clone, Copy)]
pub struct Data<'a> {
    pub offset: u64,
    pub bytes: &'a [u8],
    pub by: Caller,
    /// The write must clear suid and sgid (FUSE_WRITE_KILL_SUIDGID).
    pub clears_setid: bool,
    /// The kernel writes back its pages: what was stored in a shared mapping, or with the writeback cache
    /// what write(2) left there.
    pub from_pages: bool,
}

/// The answer to getxattr and listxattr.
#[derive(Debug)]
pub enum Xattr {
    /// The required buffer size.
    Size(usize),
    Value(Vec<u8>),
}
