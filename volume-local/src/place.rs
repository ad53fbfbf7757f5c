//! Where a file is found by name.

use std::ffi::{CStr, CString};

/// The longest name that a volume has, also if the backing file system has longer ones (ntfs, vfat): the
/// state table has room for no more.
pub(crate) const MOST_NAME_BYTES: usize = 255;

/// The directory and name at which a file was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) directory: u64,
    pub(crate) name: CString,
}

/// Whether this may be the name of a file in a directory. A path could lead out of the volume.
pub(crate) fn is_name(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    !matches!(bytes, b"" | b"." | b"..") && !bytes.contains(&b'/') && bytes.len() <= MOST_NAME_BYTES
}
