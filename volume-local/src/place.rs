//! Where a file is found by name.

use std::ffi::{CStr, CString};

/// The directory and name at which a file was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) directory: u64,
    pub(crate) name: CString,
}

/// Whether this is the name of a file in a directory. A path could lead out of the volume.
pub(crate) fn is_name(name: &CStr) -> bool {
    !matches!(name.to_bytes(), b"" | b"." | b"..") && !name.to_bytes().contains(&b'/')
}
