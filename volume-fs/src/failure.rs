//! The failure of a request: an errno for the application, and a reason for the log if the errno is
//! not enough.

use std::error::Error;

use rustix::io::Errno;

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug)]
pub struct Failure {
    errno: Errno,
    reason: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    /// A failure whose `reason` is logged, since the application sees only the errno.
    pub fn because(errno: Errno, reason: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { errno, reason: Some(reason.into()) }
    }

    pub fn errno(&self) -> Errno {
        self.errno
    }

    pub(crate) fn reason(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.reason.as_deref()
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { errno, reason: None }
    }
}
