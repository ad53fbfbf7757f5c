//! Pages of sorted lists (CSI spec, ListVolumes and ListSnapshots).

use std::fmt::Display;

use crate::error::{Error, Result};
use crate::model::sizes::MAX_STRING_BYTES;

const TOKEN_VERSION: &str = "v1:";

/// The requested part of a sorted list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Page<I> {
    /// Earlier pages ended with this entry, which may be deleted.
    after: Option<I>,
    /// `None`: all remaining entries.
    limit: Option<usize>,
}

/// `parse` reads an id, the variable part of a token.
pub(crate) fn page<I>(
    max_entries: i32,
    starting_token: &str,
    parse: impl FnOnce(&str) -> Option<I>,
) -> Result<Page<I>> {
    let limit = usize::try_from(max_entries)
        .map_err(|_| Error::invalid("max_entries", max_entries.to_string(), "negative"))?;
    let after = match starting_token {
        "" => None,
        token => Some(token.strip_prefix(TOKEN_VERSION).and_then(parse).ok_or_else(|| Error::BadToken {
            value: trace::shortened(token.to_owned(), MAX_STRING_BYTES),
        })?),
    };
    Ok(Page { after, limit: (limit > 0).then_some(limit) })
}

impl<I: Ord + Display> Page<I> {
    /// The entries of the page and the next page's token, empty after the last page. `sorted` is in
    /// the order of ids.
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
            // The token's entry is deleted meanwhile.
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
}
