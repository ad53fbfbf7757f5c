//! What docs/CRI.md expects to fail or to be skipped, and how a run differs from it.

use std::fmt;
use std::fs;
use std::ops::AddAssign;

use ::tests::binaries::workspace_root;
use anyhow::{Context, Result, bail, ensure};

use super::outcome::{Outcome, Outcomes};

/// The file with the table, from the workspace's root.
const PAGE: &str = "docs/CRI.md";
/// The first line of the table.
const HEADING: &str = "| spec | | reason |";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Failed,
    Skipped,
}

/// A row of the table.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    /// The whole name.
    spec: String,
    kind: Kind,
    reason: String,
}

#[derive(Debug)]
pub(super) struct Expected(Vec<Row>);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    /// Also specs that do not fail, or are not skipped, as the table expects.
    pub(super) failed: usize,
    pub(super) excepted: usize,
    pub(super) skipped: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.excepted += other.excepted;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, excepted, skipped } = self;
        write!(f, "{passed} passed, {failed} failed, {excepted} failed as expected, {skipped} skipped")
    }
}

impl Expected {
    pub(super) fn read() -> Result<Self> {
        let page = workspace_root().join(PAGE);
        let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        Self::parse(&text).with_context(|| page.display().to_string())
    }

    fn parse(page: &str) -> Result<Self> {
        let mut lines = page.lines().skip_while(|line| *line != HEADING);
        ensure!(lines.next().is_some(), "no line is {HEADING:?}");
        let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
        let rows = rows.map(|line| row(line).with_context(|| format!("row {line:?}")));
        Ok(Self(rows.collect::<Result<_>>()?))
    }

    /// Compares a run on our runtime with the table, and with the same specs on `reference`. `is_whole`: the focus
    /// leaves no spec out, so each row must be needed.
    pub(super) fn judge(
        &self,
        run: &Outcomes,
        reference: Option<&Outcomes>,
        is_whole: bool,
    ) -> (Counts, Vec<String>) {
        let (mut counts, mut complaints) = (Counts::default(), Vec::new());
        for (spec, outcome) in run.iter() {
            let row = self.0.iter().find(|row| row.spec == spec);
            let complaint = match (outcome, row) {
                (Outcome::Passed, None) => {
                    counts.passed += 1;
                    continue;
                }
                (Outcome::Failed(_), Some(Row { kind: Kind::Failed, .. }))
                    if reference.is_some_and(|reference| reference.has_passed(spec)) =>
                {
                    format!("FAILED {spec}: it is expected to fail, but containerd passes it")
                }
                (Outcome::Failed(_), Some(Row { kind: Kind::Failed, .. })) => {
                    counts.excepted += 1;
                    continue;
                }
                (Outcome::Skipped(_), Some(Row { kind: Kind::Skipped, .. })) => {
                    counts.skipped += 1;
                    continue;
                }
                (Outcome::Passed, Some(row)) => {
                    format!("{spec} passes: remove its row from {PAGE} ({})", row.reason)
                }
                (Outcome::Failed(text), _) => format!("FAILED {spec}\n       {}", indented(text)),
                (Outcome::Skipped(text), _) => {
                    format!("{spec} is skipped, and {PAGE} does not expect it: {}", indented(text))
                }
            };
            counts.failed += 1;
            complaints.push(complaint);
        }
        for row in self.0.iter().filter(|row| is_whole && run.get(&row.spec).is_none()) {
            counts.failed += 1;
            complaints.push(format!("{PAGE} has a row for {:?}, and critest has no such spec", row.spec));
        }
        (counts, complaints)
    }
}

fn indented(text: &str) -> String {
    text.replace('\n', "\n       ")
}

/// ``| `spec` | failed | reason |``; a bar within a cell is `\|`.
fn row(line: &str) -> Result<Row> {
    let cells: Vec<String> =
        line.replace("\\|", "\0").split('|').map(|cell| cell.trim().replace('\0', "|")).collect();
    let [_, spec, kind, reason, _] = &cells[..] else { bail!("not three cells") };
    let spec = spec
        .strip_prefix('`')
        .and_then(|spec| spec.strip_suffix('`'))
        .context("a spec without backquotes")?;
    let kind = match kind.as_str() {
        "failed" => Kind::Failed,
        "skipped" => Kind::Skipped,
        kind => bail!("{kind:?} is neither failed nor skipped"),
    };
    ensure!(!reason.is_empty(), "no reason");
    Ok(Row { spec: spec.to_owned(), kind, reason: reason.clone() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const PAGE: &str = "# CRI

| spec | | reason |
|---|---|---|
| `Pod bad` | failed | the kernel |
| `Uid\\|Username later` | skipped | not yet |

| more | | here |
| `x` | | |
";

    fn outcomes(specs: &[(&str, &str)]) -> Outcomes {
        let spec = |(name, state): &(&str, &str)| -> Value {
            json!({"LeafNodeText": name, "LeafNodeType": "It", "State": state, "Failure": {"Message": "why"}})
        };
        let specs: Vec<Value> = specs.iter().map(spec).collect();
        Outcomes::parse(json!([{"SpecReports": specs}]).to_string().as_bytes()).unwrap()
    }

    const AS_EXPECTED: [(&str, &str); 3] =
        [("Pod good", "passed"), ("Pod bad", "failed"), ("Uid|Username later", "skipped")];

    #[test]
    fn a_run_as_the_page_expects_it_gives_no_complaint() {
        let expected = Expected::parse(PAGE).unwrap();
        let (counts, complaints) = expected.judge(&outcomes(&AS_EXPECTED), None, true);
        assert_eq!(counts, Counts { passed: 1, failed: 0, excepted: 1, skipped: 1 });
        assert_eq!(complaints, Vec::<String>::new());
    }

    #[test]
    fn what_containerd_passes_must_not_fail() {
        let expected = Expected::parse(PAGE).unwrap();
        let reference = outcomes(&[("Pod bad", "passed")]);
        let (counts, complaints) = expected.judge(&outcomes(&AS_EXPECTED), Some(&reference), true);
        assert_eq!((counts.failed, counts.excepted), (1, 0));
        assert_eq!(complaints, ["FAILED Pod bad: it is expected to fail, but containerd passes it"]);
    }

    #[test]
    fn each_difference_from_the_page_fails() {
        let expected = Expected::parse(PAGE).unwrap();
        let run = outcomes(&[("Pod good", "failed"), ("Pod bad", "passed"), ("Pod new", "skipped")]);
        let (counts, complaints) = expected.judge(&run, None, true);
        assert_eq!(counts, Counts { failed: 4, ..Counts::default() });
        assert_eq!(complaints[0], "Pod bad passes: remove its row from docs/CRI.md (the kernel)");
        assert_eq!(complaints[1], "FAILED Pod good\n       failed: why");
        assert_eq!(complaints[2], "Pod new is skipped, and docs/CRI.md does not expect it: why");
        assert!(complaints[3].ends_with("critest has no such spec"), "{complaints:?}");
        let (counts, _) = expected.judge(&run, None, false);
        assert_eq!(counts.failed, 3, "a run with a focus needs no row");
    }

    #[test]
    fn a_row_that_cannot_be_read_is_an_error() {
        for line in
            ["| `a` | broken | why |", "| `a` | failed | |", "| a | failed | why |", "| `a` | failed |"]
        {
            let page = format!("{HEADING}\n|---|---|---|\n{line}\n");
            let error = Expected::parse(&page).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }

    #[test]
    fn the_page_can_be_read() {
        Expected::read().unwrap();
    }
}
