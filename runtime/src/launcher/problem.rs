//! What went wrong, as the outcome pipe carries it.

use crate::error::chain;

pub(super) fn text(error: linux::Error) -> String {
    chain(&error)
}

/// `no such file or directory`, as Go writes it, without the number.
pub(super) fn words(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}
