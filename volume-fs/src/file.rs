//! Files, as the FUSE side and a backend speak of them. No type of FUSE's is among these.

use std::ffi::OsStr;
use std::time::SystemTime;

/// The number by which the kernel knows a file of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The volume's root (`FUSE_ROOT_ID` of linux/fuse.h).
    pub const ROOT: Self = Self(1);
}

/// An open file or directory. Numbers are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// A name in a directory. The kernel sends one component; a backend checks it all the same.
#[derive(Debug, Clone, Copy)]
pub struct Name<'a> {
    pub directory: NodeId,
    pub name: &'a OsStr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
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
pub struct Attributes {
    /// Also `st_ino`.
    pub id: NodeId,
    pub kind: FileKind,
    /// Permissions with set-id and sticky bits: 12 bits.
    pub mode: u16,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub bytes: u64,
    /// Of 512 bytes.
    pub blocks: u64,
    pub block_bytes: u32,
    /// Of a device node, as the kernel encodes it on the wire.
    pub device: u32,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    pub changed: SystemTime,
    pub born: SystemTime,
}

/// A file of which the kernel is told. Each time counts as a lookup, until it is forgotten.
#[derive(Debug)]
pub struct Known {
    pub attributes: Attributes,
    /// Tells two lives of one node id apart.
    pub generation: u64,
}

/// An entry of a directory.
#[derive(Debug)]
pub struct Listed<'a> {
    pub id: NodeId,
    pub kind: FileKind,
    pub name: &'a OsStr,
    /// The offset of the entry after this one.
    pub next: u64,
}

/// What statvfs(3) shows of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    pub block_bytes: u64,
    /// The unit of the three numbers of blocks.
    pub fragment_bytes: u64,
    pub blocks: u64,
    pub free_blocks: u64,
    /// For users without privileges.
    pub available_blocks: u64,
    pub inodes: u64,
    pub free_inodes: u64,
    pub longest_name: u64,
}
