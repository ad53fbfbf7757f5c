//! What a request asks for, beside the files that it names. Flags are the kernel's own, in the
//! types of rustix.

use rustix::fs::Timestamps;

use crate::file::Handle;

/// What a file is to be created with, as asked for: the umask is not applied (FUSE_DONT_MASK).
#[derive(Debug, Clone, Copy)]
pub struct Permissions {
    pub mode: u32,
    pub umask: u32,
}

/// What mknod may create. Devices are refused before a backend is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Regular,
    Fifo,
    Socket,
}

/// The part of setattr that is asked for. None at all is how FUSE_HANDLE_KILLPRIV_V2 says
/// "clear suid and sgid".
#[derive(Debug, Default)]
pub struct Changes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub times: Option<Timestamps>,
}

/// One end of copy_file_range.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub handle: Handle,
    pub offset: u64,
}

/// The data of a write.
#[derive(Debug, Clone, Copy)]
pub struct Data<'a> {
    pub offset: u64,
    pub bytes: &'a [u8],
    /// The writer may not keep suid and sgid (FUSE_WRITE_KILL_SUIDGID).
    pub clears_setid: bool,
}

/// The answer to getxattr and listxattr.
#[derive(Debug)]
pub enum Xattr {
    /// The caller asked how large its buffer has to be.
    Size(usize),
    Value(Vec<u8>),
}
