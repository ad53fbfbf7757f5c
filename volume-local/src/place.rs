//! Where a file is found by name.

use std::ffi::CString;

/// The directory and name at which a file was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) directory: u64,
    pub(crate) name: CString,
}
