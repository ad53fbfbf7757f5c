//! Makes text from pods safe for a terminal, which acts on control characters.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes control characters except line breaks (`^[` for ESC, `\u{9b}` beyond ASCII), and
/// characters that reorder or hide others.
pub(super) fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |letter, shown| match u8::try_from(letter) {
        Ok(byte) if byte.is_ascii() => shown.extend(['^', char::from(byte ^ 0x40)]),
        _ => write!(shown, "{}", letter.escape_unicode()).expect("a String takes any text"),
    })
}

/// Escapes such characters within the strings of JSON, where they may be as they are: it stays the same JSON.
pub(super) fn printable_json(json: &str) -> Cow<'_, str> {
    escaped(json, |letter, shown| {
        for unit in letter.encode_utf16(&mut [0; 2]) {
            write!(shown, "\\u{unit:04x}").expect("a String takes any text");
        }
    })
}

/// `escape` appends what is shown for a character that must not reach a terminal.
fn escaped(text: &str, escape: impl Fn(char, &mut String)) -> Cow<'_, str> {
    let is_harmless = |letter: char| letter == '\n' || !(letter.is_control() || is_unseen(letter));
    if text.chars().all(is_harmless) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        if is_harmless(letter) {
            shown.push(letter);
        } else {
            escape(letter, &mut shown);
        }
    }
    Cow::Owned(shown)
}

/// Invisible characters (Unicode category Cf) that can reorder or hide text. The soft hyphen and
/// the joiners are part of words, so they are not included.
pub(super) fn is_unseen(letter: char) -> bool {
    matches!(letter,
        '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
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
        assert_eq!(printable("a\u{202e}b\u{2066}"), "a\\u{202e}b\\u{2066}");
        assert_eq!(printable_line("a\n\u{1b}b"), "a\\n^[b");
    }

    #[test]
    fn json_is_the_same_without_control_characters() {
        let value = serde_json::json!({"a\u{9b}2J": ["\u{7f}\u{1b}\n", "größe \u{202e} \u{e0041}"]});
        let text = format!("{value:#}");
        let shown = printable_json(&text);
        assert!(shown.contains("\\u009b2J") && shown.contains("\\u007f\\u001b\\n"), "{shown}");
        assert!(shown.contains("größe \\u202e \\udb40\\udc41"), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
        assert!(matches!(printable_json("{\n}\n"), Cow::Borrowed(_)));
    }
}
