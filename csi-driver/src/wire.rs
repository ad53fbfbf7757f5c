//! What every request is checked for: the specification's size limits, and pages.

use std::collections::HashMap;
use std::fmt::Display;

use crate::error::{Error, Result};

/// CSI spec, "Size limits": strings.
pub(crate) const MAX_STRING_BYTES: usize = 128;
/// CSI spec, "Size limits": maps, keys and values together.
pub(crate) const MAX_MAP_BYTES: usize = 4096;
const TOKEN_VERSION: &str = "v1:";

/// The value itself is not shown: it may be a secret, and it is long.
pub(crate) fn bounded(field: &'static str, text: &str) -> Result<()> {
    if text.len() <= MAX_STRING_BYTES {
        return Ok(());
    }
    let value = format!("{} bytes", text.len());
    Err(Error::invalid(field, value, format!("at most {MAX_STRING_BYTES} bytes are allowed")))
}

pub(crate) fn bounded_map(field: &'static str, map: &HashMap<String, String>) -> Result<()> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes <= MAX_MAP_BYTES {
        return Ok(());
    }
    let reason = format!("at most {MAX_MAP_BYTES} bytes of keys and values are allowed");
    Err(Error::invalid(field, format!("{bytes} bytes"), reason))
}

/// What of a sorted list is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Page<I> {
    /// Entries up to this one, which may be gone, were on earlier pages.
    after: Option<I>,
    /// `None`: all the rest.
    limit: Option<usize>,
}

/// `parse` reads an id, the part of a token that is not ours.
pub(crate) fn page<I>(
    max_entries: i32,
    starting_token: &str,
    parse: impl FnOnce(&str) -> Option<I>,
) -> Result<Page<I>> {
    let limit = usize::try_from(max_entries)
        .map_err(|_| Error::invalid("max_entries", max_entries.to_string(), "negative"))?;
    let after = match starting_token {
        "" => None,
        token => Some(
            token
                .strip_prefix(TOKEN_VERSION)
                .and_then(parse)
                .ok_or_else(|| Error::BadToken { value: shortened(token.to_owned()) })?,
        ),
    };
    Ok(Page { after, limit: (limit > 0).then_some(limit) })
}

impl<I: Ord + Display> Page<I> {
    /// The entries of the page, and the token for the next one, empty after the
    /// last. `sorted` is in the order of ids.
    pub(crate) fn cut<T>(&self, sorted: Vec<(I, T)>) -> (Vec<(I, T)>, String) {
        let begin = match &self.after {
            Some(after) => sorted.partition_point(|(id, _)| id <= after),
            None => 0,
        };
        let mut rest: Vec<(I, T)> = sorted.into_iter().skip(begin).collect();
        let limit = self.limit.unwrap_or(rest.len());
        let has_more = rest.len() > limit;
        rest.truncate(limit);
        let next = rest.last().filter(|_| has_more).map(|(id, _)| format!("{TOKEN_VERSION}{id}"));
        (rest, next.unwrap_or_default())
    }
}

/// The most characters of a daemon's own words in a message or in the log.
const MAX_FOREIGN_CHARS: usize = 512;

/// What a daemon says of itself, for a message: a daemon is not trusted to be brief, nor
/// to keep to one line.
pub(crate) fn foreign(text: &str) -> String {
    let end = text.char_indices().nth(MAX_FOREIGN_CHARS).map_or(text.len(), |(end, _)| end);
    let dots = if end < text.len() { "..." } else { "" };
    format!("{}{dots}", trace::escaped(&text[..end]))
}

/// A value of a request, for a message.
pub(crate) fn shortened(text: String) -> String {
    trace::shortened(text, MAX_STRING_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &str) -> Option<u32> {
        text.parse().ok()
    }

    #[test]
    fn pages_hold_every_entry_once_though_some_go_in_between() {
        let mut all: Vec<(u32, ())> = (10..20).map(|n| (n, ())).collect();
        let (mut seen, mut token) = (Vec::new(), String::new());
        loop {
            let (entries, next) = page(3, &token, number).unwrap().cut(all.clone());
            seen.extend(entries.into_iter().map(|(id, ())| id));
            if next.is_empty() {
                break;
            }
            // What the token names is deleted.
            all.retain(|(id, ())| format!("v1:{id}") != next);
            token = next;
        }
        assert_eq!(seen, (10..20).collect::<Vec<_>>());
    }

    #[test]
    fn a_page_that_ends_with_the_list_has_no_next() {
        let all: Vec<(u32, ())> = (0..4).map(|n| (n, ())).collect();
        let (entries, next) = page(2, "", number).unwrap().cut(all.clone());
        assert_eq!((entries.len(), next.as_str()), (2, "v1:1"));
        let (entries, next) = page(2, &next, number).unwrap().cut(all.clone());
        assert_eq!((entries.len(), next.as_str()), (2, ""));
        let (entries, next) = page(0, "v1:0", number).unwrap().cut(all);
        assert_eq!((entries.len(), next.as_str()), (3, ""));
    }

    #[test]
    fn a_token_that_was_never_given_is_named() {
        for token in ["invalid-token", "v1:", "v1:x", "v2:1", &"t".repeat(5000)] {
            let error = page(0, token, number).unwrap_err();
            assert!(
                matches!(&error, Error::BadToken { value } if token.starts_with(value.trim_end_matches("..."))),
                "{error}"
            );
        }
        let error = page(-1, "", number).unwrap_err().to_string();
        assert_eq!(error, "max_entries: \"-1\": negative");
    }

    #[test]
    fn a_daemons_words_are_one_short_line() {
        assert_eq!(foreign("no INIT"), "no INIT");
        assert_eq!(foreign("a\nERROR forged\u{1b}[2J"), "a\\nERROR forged\\u{1b}[2J");
        assert_eq!(foreign(&"é".repeat(60_000)), format!("{}...", "é".repeat(512)));
    }

    #[test]
    fn limits_are_those_of_the_specification_and_values_are_not_shown() {
        bounded("f", &"s".repeat(128)).unwrap();
        let message = bounded("f", &"s".repeat(129)).unwrap_err().to_string();
        assert_eq!(message, "f: \"129 bytes\": at most 128 bytes are allowed");
        let map = |bytes: usize| HashMap::from([("key".to_owned(), "s".repeat(bytes - 3))]);
        bounded_map("secrets", &map(4096)).unwrap();
        let message = bounded_map("secrets", &map(4097)).unwrap_err().to_string();
        assert!(message.starts_with("secrets: \"4097 bytes\""), "{message}");
    }
}
