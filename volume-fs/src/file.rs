//! Files as the FUSE side and the file system behind it speak of them. No type of FUSE's is
//! among these.

use std::time::SystemTime;

/// The node id of the volume's root (`FUSE_ROOT_ID` of linux/fuse.h).
pub(crate) const ROOT: u64 = 1;

/// An open file or directory. Numbers are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Handle(pub(crate) u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharacterDevice,
    BlockDevice,
}

/// What stat(2) shows of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attributes {
    /// The node id, which is also `st_ino`.
    pub(crate) id: u64,
    pub(crate) kind: FileKind,
    /// Permissions with set-id and sticky bits: 12 bits.
    pub(crate) mode: u16,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) bytes: u64,
    /// Of 512 bytes.
    pub(crate) blocks: u64,
    pub(crate) block_bytes: u32,
    /// Of a device node, as the kernel encodes it on the wire.
    pub(crate) device: u32,
    pub(crate) accessed: SystemTime,
    pub(crate) modified: SystemTime,
    pub(crate) changed: SystemTime,
    pub(crate) born: SystemTime,
}

/// A file of which the kernel is told, with what tells two lives of its number apart.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) attributes: Attributes,
    pub(crate) generation: u64,
}
