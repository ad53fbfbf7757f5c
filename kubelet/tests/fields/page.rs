//! docs/FIELDS.md.

use std::collections::BTreeSet;
use std::fmt::Write;

use kubelet::objects::Kind;

use crate::honoured::Row;
use crate::schema;
use crate::walk::{Finding, Outcome};

const HEAD: &str = "\
# The fields of the Kubernetes API

This page is generated. `cargo test -p kubelet --test fields` compares it with the JSON schemas of Kubernetes 1.36, with the fields of
snapshots (external-snapshotter v8), and with what the kubelet's reader says of each field; if it is out of date, the test prints the
command that brings it up to date.

- **honoured**: the field has its effect. The last column names the tests; `grep -rn NAME` finds them. The names in braces are the
  fields in it that have no row of their own.
- **accepted**: taken in silence, since nothing is lost.
- **warning**: the object is taken, and an event `UnsupportedField` names the field.
- **refused**: the object is not taken, and the error names the field.

A row holds for everything below its field that has no row of its own. `[*]` is any item of a list. Rows of `spec.containers` hold for
`spec.initContainers` too, unless these have a row of their own. Values may be refused although their field is honoured.
";

pub(crate) fn text(findings: &[Finding]) -> String {
    let mut page = HEAD.to_owned();
    for (kind, _) in schema::all() {
        let ours: Vec<&Finding> = findings.iter().filter(|finding| finding.kind == kind).collect();
        section(&mut page, kind, &ours);
    }
    page
}

fn section(page: &mut String, kind: Kind, findings: &[&Finding]) {
    let _infallible = write!(page, "\n## {kind}\n\n| field | | test, or reason |\n|---|---|---|\n");
    let mut is_written = BTreeSet::new();
    for finding in findings.iter().filter(|finding| !is_as_in_containers(finding, findings)) {
        let (word, reason) = match &finding.outcome {
            Outcome::Honoured(row) => {
                if is_written.insert(row.field) {
                    honoured(page, row, findings);
                }
                continue;
            }
            Outcome::Accepted(reason) => ("accepted", reason),
            Outcome::Warned(effect) => ("warning", effect),
            Outcome::Refused(reason) => ("refused", reason),
            Outcome::Unclear(reason) => ("unclear", reason),
        };
        let _infallible = writeln!(page, "| `{}` | {word} | {reason} |", finding.field);
    }
}

/// One line for all fields of a row.
fn honoured(page: &mut String, row: &Row, findings: &[&Finding]) {
    let below: BTreeSet<&str> = findings
        .iter()
        .filter(|finding| matches!(finding.outcome, Outcome::Honoured(its) if std::ptr::eq(its, row)))
        .filter_map(|finding| finding.field.strip_prefix(row.field))
        .filter_map(|rest| rest.trim_start_matches("[*]").strip_prefix('.')?.split(['.', '[']).next())
        .collect();
    let below = Vec::from_iter(below).join(", ");
    let below = if below.is_empty() { below } else { format!(" {{ {below} }}") };
    let tests: Vec<String> = row.tests.iter().map(|test| format!("`{test}`")).collect();
    let _infallible = writeln!(page, "| `{}`{below} | honoured | {} |", row.field, tests.join(", "));
}

/// Whether a field of init containers is treated as that of containers is.
fn is_as_in_containers(finding: &Finding, findings: &[&Finding]) -> bool {
    finding.field.starts_with("spec.initContainers")
        && findings.iter().any(|other| {
            other.field == finding.field.replacen("initContainers", "containers", 1)
                && other.outcome == finding.outcome
        })
}
