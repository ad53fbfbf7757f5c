//! Text that comes from a daemon.

/// Most characters of a daemon's text in a message or log line.
const MAX_CHARS: usize = 512;

/// Makes a daemon's text fit for a message: a daemon is not trusted to be brief or to keep to one
/// line.
pub(crate) fn abridged(text: &str) -> String {
    let end = text.char_indices().nth(MAX_CHARS).map_or(text.len(), |(end, _)| end);
    let dots = if end < text.len() { "..." } else { "" };
    format!("{}{dots}", trace::escaped(&text[..end]))
}

/// For tests and fuzz targets: a message with a daemon's text in it is one line of bounded length.
#[cfg(any(test, fuzzing))]
pub(crate) fn assert_is_fit(message: &str) {
    const ESCAPED_CHAR_BYTES: usize = 10;
    const REST_BYTES: usize = 1024;
    assert!(message.len() <= MAX_CHARS * ESCAPED_CHAR_BYTES + REST_BYTES, "{message}");
    assert!(!message.contains(char::is_control), "{message:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemons_words_are_one_short_line() {
        assert_eq!(abridged("no INIT"), "no INIT");
        assert_eq!(abridged("a\nERROR forged\u{1b}[2J"), "a\\nERROR forged\\u{1b}[2J");
        assert_eq!(abridged(&"é".repeat(60_000)), format!("{}...", "é".repeat(512)));
    }
}
