//! Text of pods for a terminal, which acts on control characters.

use std::borrow::Cow;
use std::fmt::Write;

/// Control characters but line breaks as a reader can see them: `^[` for ESC, `\u{9b}` for those
/// beyond ASCII.
pub(super) fn printable(text: &str) -> Cow<'_, str> {
    let is_harmless = |letter: char| !letter.is_control() || letter == '\n';
    if text.chars().all(is_harmless) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        match u8::try_from(letter) {
            _ if is_harmless(letter) => shown.push(letter),
            Ok(byte) if byte.is_ascii() => shown.extend(['^', char::from(byte ^ 0x40)]),
            _ => write!(shown, "{}", letter.escape_unicode()).expect("a String takes any text"),
        }
    }
    Cow::Owned(shown)
}

/// [`printable`], on one line.
pub(super) fn printable_line(text: &str) -> Cow<'_, str> {
    let shown = printable(text);
    if shown.contains('\n') { Cow::Owned(shown.replace('\n', "\\n")) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_character() {
        assert_eq!(printable("größe\n2"), "größe\n2");
        assert!(matches!(printable("plain"), Cow::Borrowed("plain")));
        assert_eq!(printable("\u{1b}[2J\0\u{7f}\t\r\u{9b}x"), "^[[2J^@^?^I^M\\u{9b}x");
        assert_eq!(printable_line("a\n\u{1b}b"), "a\\n^[b");
    }
}
