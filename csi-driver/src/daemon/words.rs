//! What a daemon says of itself.

/// The most characters of a daemon's own words in a message or in the log.
const MAX_FOREIGN_CHARS: usize = 512;

/// What a daemon says of itself, for a message: a daemon is not trusted to be brief, nor
/// to keep to one line.
pub(crate) fn foreign(text: &str) -> String {
    let end = text.char_indices().nth(MAX_FOREIGN_CHARS).map_or(text.len(), |(end, _)| end);
    let dots = if end < text.len() { "..." } else { "" };
    format!("{}{dots}", trace::escaped(&text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemons_words_are_one_short_line() {
        assert_eq!(foreign("no INIT"), "no INIT");
        assert_eq!(foreign("a\nERROR forged\u{1b}[2J"), "a\\nERROR forged\\u{1b}[2J");
        assert_eq!(foreign(&"é".repeat(60_000)), format!("{}...", "é".repeat(512)));
    }
}
