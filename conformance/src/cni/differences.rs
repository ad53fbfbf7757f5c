//! Where Hawser differs from the reference on purpose: a scenario names the
//! row of the table in docs/CNI.md, the place, and what each side gives there.

use std::collections::BTreeSet;
use std::fs;

use ::tests::binaries::workspace_root;
use anyhow::{Context, Result, ensure};

const DOCUMENT: &str = "docs/CNI.md";
const HEADING: &str = "Deliberate differences";

/// In each pattern a `*` stands for any text.
#[derive(Debug, Clone)]
pub(super) struct Difference {
    /// The row's id in the table.
    pub(super) id: &'static str,
    /// `N VERB container/place`, as the comparison prints it.
    pub(super) at: String,
    /// `None`: nothing is there.
    pub(super) reference: Option<String>,
    pub(super) ours: Option<String>,
    /// Instead: what both give is the same but for lines of ours like this.
    pub(super) extra_lines: Option<String>,
}

impl Difference {
    pub(super) fn new(id: &'static str, at: impl Into<String>) -> Self {
        Self { id, at: at.into(), reference: None, ours: None, extra_lines: None }
    }

    pub(super) fn reference(self, gives: impl Into<String>) -> Self {
        Self { reference: Some(gives.into()), ..self }
    }

    pub(super) fn ours(self, gives: impl Into<String>) -> Self {
        Self { ours: Some(gives.into()), ..self }
    }

    pub(super) fn extra_lines(self, like: impl Into<String>) -> Self {
        Self { extra_lines: Some(like.into()), ..self }
    }

    /// Whether this is the difference that was found.
    pub(super) fn covers(&self, at: &str, reference: Option<&str>, ours: Option<&str>) -> bool {
        let given = |wanted: &Option<String>, found: Option<&str>| match (wanted, found) {
            (Some(pattern), Some(found)) => matches(pattern, found),
            (None, None) => true,
            _ => false,
        };
        if !matches(&self.at, at) {
            return false;
        }
        if let Some(like) = &self.extra_lines {
            let (Some(reference), Some(ours)) = (reference, ours) else { return false };
            return ours.lines().filter(|line| !matches(like, line)).eq(reference.lines());
        }
        given(&self.reference, reference) && given(&self.ours, ours)
    }
}

/// Whether `text` is `pattern`, in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The ids of the table's rows.
pub(super) fn table() -> Result<BTreeSet<String>> {
    let path = workspace_root().join(DOCUMENT);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let ids = ids(&text);
    ensure!(!ids.is_empty(), "{DOCUMENT} has no table under a heading \"{HEADING}\"");
    Ok(ids)
}

/// The first cells of the first table under the heading, without its head.
fn ids(document: &str) -> BTreeSet<String> {
    let is_heading = |line: &&str| line.starts_with('#') && line.trim_start_matches('#').trim() == HEADING;
    let mut lines = document.lines();
    let _heading = lines.find(is_heading);
    let table = lines.skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = table.skip(2).filter_map(|row| row.split('|').nth(1));
    cells.map(|id| id.trim().trim_matches('`').to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        assert!(matches("1 ADD c1/*/exit", "1 ADD c1/bridge/exit"));
        assert!(matches("*", ""));
        assert!(matches("a*b*", "a-b"));
        assert!(!matches("a*b", "a-b-"));
        assert!(!matches("a", "ab"));
        assert!(!matches("ab*b", "ab"));
    }

    #[test]
    fn ids_are_the_first_cells_of_the_table() {
        let document = "# CNI\n| no | table |\n|-|-|\n| x | y |\n\n## Deliberate differences\nWords.\n\n\
                        | id | what |\n|---|---|\n| `one` | a |\n| two | b |\n\n| three | c |\n";
        assert_eq!(ids(document), BTreeSet::from(["one".to_owned(), "two".to_owned()]));
    }
}
