//! Mounts, paths, and system calls that may not return.

pub(crate) mod bounded;
pub(crate) mod host_path;
pub(crate) mod mounts;
pub(crate) mod place;
pub(crate) mod private_dir;
pub(crate) mod release;
pub(crate) mod socket;
