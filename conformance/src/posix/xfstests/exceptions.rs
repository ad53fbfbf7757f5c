//! Which tests are not run, and which are expected to fail, with the reasons.

use crate::posix::exception::Exception;

/// Not run anywhere, with the reason.
pub(super) const OMITTED: &[(&str, &str)] = &[];

pub(super) const EXCEPTIONS: &[Exception] = &[];
