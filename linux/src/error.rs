//! One error for everything the kernel refuses: which operation, on what, why.

use std::fmt::Display;
use std::io;
use std::path::Path;

use nix::errno::Errno;

pub type Result<T> = std::result::Result<T, Error>;

/// A refused system call. Shown as `bind mount /a -> /b: Device or resource busy (os error 16)`
/// when printed with its source.
#[derive(Debug, thiserror::Error)]
#[error("{op} {object}")]
pub struct Error {
    /// What was tried, in words: `bind mount`.
    pub op: &'static str,
    /// On what: a path, a name, `source -> target`.
    pub object: String,
    #[source]
    pub source: io::Error,
}

impl Error {
    pub fn new(op: &'static str, object: impl Display, source: impl Into<io::Error>) -> Self {
        Self { op, object: object.to_string(), source: source.into() }
    }

    /// The same for the commonest object, a path.
    pub fn at(op: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::new(op, path.display(), source)
    }

    /// The errno behind it; `EIO` where the cause is no system call's.
    pub fn errno(&self) -> Errno {
        self.source.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
    }
}
