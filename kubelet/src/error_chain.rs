//! An error and its causes in one line: `add container: create bridge: EPERM`.

use std::error::Error;

pub(crate) fn text(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
