//! What a check of a container found.

/// kubelet's bound of output and bodies that are kept.
pub(super) const MOST_OUTPUT_BYTES: usize = 10 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Success,
    /// A success that may be a mistake.
    Warning(String),
    Failure(String),
}

/// At most [`MOST_OUTPUT_BYTES`] of `bytes`, as text.
pub(super) fn kept(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(MOST_OUTPUT_BYTES)]).into_owned()
}
