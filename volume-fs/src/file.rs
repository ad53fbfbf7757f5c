//! Files, in types that the FUSE side and a backend share. None of them belongs to FUSE.

use std::ffi::OsStr;
use std::time::{Duration, SystemTime};

/// The kernel's number for a file of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The volume's root (`FUSE_ROOT_ID` of linux/fuse.h).
    pub const ROOT: Self = Self(1);
}

/// An open file or directory. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// The answer to an open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    pub handle: Handle,
    /// `Some`: the kernel reads and writes the backing file that the keeper has registered under this
    /// number. All opens of one file at the same time must have the same.
    pub backing: Option<BackingId>,
    /// The kernel may use what it has read of the file before. No effect with `backing`.
    pub keeps_pages: bool,
    /// The backend may have an error to report at each close(2) ([`crate::backend::Backend::flush`]).
    pub reports_close: bool,
}

/// The answer to an open of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedDirectory {
    pub handle: Handle,
    /// The kernel may keep what it reads of the directory through this handle, and use what it has kept. Only
    /// for the sole handle of a directory that changes only by requests: a listing that continues in the
    /// kernel's copy does not check whether another one read that part before a change (fs/fuse/readdir.c).
    pub keeps_listing: bool,
}

/// The kernel's number of a backing file (FUSE_DEV_IOC_BACKING_OPEN), above zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackingId(pub u32);

impl Opened {
    /// The daemon answers reads and writes.
    pub fn by_daemon(handle: Handle) -> Self {
        Self { handle, backing: None, keeps_pages: false, reports_close: true }
    }
}

/// A name in a directory. The kernel sends one component; a backend checks that too.
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

/// How long the kernel may use what it was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Validity {
    /// For one second. Then it asks again.
    Second,
    /// Until it makes a change itself, or is notified ([`crate::notifications::Kernel`]).
    Endless,
}

impl Validity {
    /// Long enough, and no number that the kernel's clock cannot take.
    const ENDLESS: Duration = Duration::from_secs(u32::MAX as u64);

    pub(crate) fn duration(self) -> Duration {
        match self {
            Self::Second => Duration::from_secs(1),
            Self::Endless => Self::ENDLESS,
        }
    }
}

/// The attributes of a file, as in stat(2).
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
    /// In units of 512 bytes.
    pub blocks: u64,
    pub block_bytes: u32,
    /// The number of a device node, in the kernel's encoding.
    pub device: u32,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    pub changed: SystemTime,
    pub born: SystemTime,
    pub valid: Validity,
}

/// A file that is reported to the kernel. Each report counts as a lookup, until the kernel forgets
/// it.
#[derive(Debug)]
pub struct Known {
    pub attributes: Attributes,
    /// Distinguishes successive files with the same node id.
    pub generation: u64,
    /// That the name is this file's.
    pub name_valid: Validity,
}

/// The answer to a lookup.
#[derive(Debug)]
pub enum LookedUp {
    Found(Known),
    /// The directory has no such name.
    Missing(Validity),
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

/// The statistics of the volume, as in statvfs(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistics {
    pub block_bytes: u64,
    /// The unit of the three block counts.
    pub fragment_bytes: u64,
    pub blocks: u64,
    pub free_blocks: u64,
    /// Blocks available to unprivileged users.
    pub available_blocks: u64,
    pub inodes: u64,
    pub free_inodes: u64,
    pub longest_name: u64,
}
