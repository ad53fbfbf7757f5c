//! Where the data of volumes is.

pub(crate) mod pool;
