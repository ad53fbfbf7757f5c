//! Which tests are not run, and which are expected to fail, with the reasons.

use super::super::exception::Exception;

/// Not run anywhere, with the reason.
pub(super) const OMITTED: &[(&str, &str)] = &[];

pub(super) const EXCEPTIONS: &[Exception] = &[];
