//! The space of a file's extended attributes. statx(2) reports their blocks together with those of
//! the content and those allocated ahead, so the attributes themselves are added up.
//!
//! Invariant: attributes for which [`AttributeBlocks::most`] is zero fit into the inode, if ext4
//! and xfs have inodes of the default size.

use std::ffi::{CStr, CString};
use std::os::fd::AsFd;

use linux::fs_at::Xattrs;
use rustix::io::Errno;

use crate::errno::Result;

const EXT4_SUPER_MAGIC: u64 = 0xef53;

/// Most bytes in addition to name and value: ext4 uses 16 bytes for an entry, and rounds name
/// (without a prefix of 5 bytes or more) and value up to four bytes.
const ENTRY_BYTES: usize = 17;
/// The space in an ext4 inode of 256 bytes, without its two headers. An xfs inode has more.
const INODE_BYTES: usize = 88;
/// Fits into an xfs leaf in any case. A larger value gets its own blocks.
const LEAF_BYTES: usize = 3000;
/// More than any inode has: ext4 and xfs have inodes of 2 KiB at most.
const BEYOND_INODES: usize = 2048;

/// The attributes of one file, added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Total {
    /// Names and values.
    bytes: usize,
    entries: usize,
}

/// How many blocks attributes take on this file system.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AttributeBlocks {
    /// ext4: one for all.
    One,
    /// xfs: up to three. Other file systems are treated like it; blocks that they do not allocate
    /// are not charged.
    Several,
}

impl Total {
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    pub(crate) fn with(self, name: &CStr, value_length: usize) -> Self {
        Self { bytes: self.bytes + name.to_bytes().len() + value_length, entries: self.entries + 1 }
    }

    fn in_inode(self) -> usize {
        self.bytes + self.entries * ENTRY_BYTES
    }
}

impl AttributeBlocks {
    pub(crate) fn of_file_system(root: impl AsFd) -> Self {
        match rustix::fs::fstatfs(root) {
            Ok(found) if u64::try_from(found.f_type) == Ok(EXT4_SUPER_MAGIC) => Self::One,
            _ => Self::Several,
        }
    }

    /// Most blocks that these attributes take.
    pub(crate) fn most(self, total: Total) -> u8 {
        match (self, total.in_inode()) {
            (_, 0..=INODE_BYTES) => 0,
            (Self::One, _) | (Self::Several, 0..=LEAF_BYTES) => 1,
            (Self::Several, _) => 3,
        }
    }

    /// Most further blocks needed when `from` becomes `to`.
    pub(crate) fn growth(self, from: Total, to: Total) -> u8 {
        if to.in_inode() <= from.in_inode() {
            return 0;
        }
        let at_least = u8::from(from.in_inode() > BEYOND_INODES);
        self.most(to).saturating_sub(at_least)
    }
}

/// The names. The kernel allows no change of a file's attributes during a request that changes them.
pub(crate) fn names(xattrs: &Xattrs<'_>) -> Result<Vec<CString>> {
    let names = match xattrs.all_names() {
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        names => names?,
    };
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| CString::new(name).map_err(|_| Errno::INVAL)).collect()
}

/// All of `names` but `except`.
pub(crate) fn total(xattrs: &Xattrs<'_>, names: &[CString], except: Option<&CStr>) -> Result<Total> {
    let mut names = names.iter().filter(|name| except != Some(name.as_c_str()));
    names.try_fold(Total::default(), |total, name| Ok(total.with(name, xattrs.size(name)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[usize]) -> Total {
        values.iter().fold(Total::default(), |total, length| total.with(c"user.a", *length))
    }

    #[test]
    fn a_label_and_little_else_fits_the_inode() {
        let label = Total::default().with(c"security.selinux", 40);
        for blocks in [AttributeBlocks::One, AttributeBlocks::Several] {
            assert_eq!(blocks.most(Total::default()), 0);
            assert_eq!(blocks.most(label), 0);
            assert_eq!(blocks.most(of(&[0, 0, 0, 0])), 1, "entries take space too");
            assert_eq!(blocks.most(of(&[200])), 1);
        }
        assert_eq!(AttributeBlocks::One.most(of(&[3900])), 1);
        assert_eq!(AttributeBlocks::Several.most(of(&[3900])), 3);
    }

    #[test]
    fn what_becomes_no_larger_needs_no_room() {
        for blocks in [AttributeBlocks::One, AttributeBlocks::Several] {
            assert_eq!(blocks.growth(of(&[3900]), of(&[3900])), 0);
            assert_eq!(blocks.growth(of(&[10]), of(&[20])), 0, "both fit the inode");
        }
        assert_eq!(AttributeBlocks::One.growth(of(&[10]), of(&[200])), 1);
        assert_eq!(AttributeBlocks::One.growth(of(&[2100]), of(&[3900])), 0, "the one block is there");
        assert_eq!(AttributeBlocks::Several.growth(of(&[2100]), of(&[3900])), 2);
    }
}
