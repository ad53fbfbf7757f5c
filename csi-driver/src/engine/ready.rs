//! Whether all that the next calls need is there.

/// What cannot be used, and why: the same for all who asked.
#[derive(Debug, Clone)]
pub(crate) struct Unready {
    pub(crate) what: &'static str,
    pub(crate) reason: String,
}
