//! Every field of the Kubernetes API has a row in docs/FIELDS.md, and the kubelet's reader treats
//! it as its row says.
//!
//! The fields are those of the JSON schemas of `k8s-openapi`, and of `snapshots.rs`. `honoured.yaml` gives each field that
//! has an effect a value; the reader takes it without a warning, and `honoured.rs` names the test of
//! the effect. Any other field is put into one of these documents, and the row is what the reader
//! says of it. So a field that is dropped in silence has no row.

mod documents;
mod honoured;
mod page;
mod schema;
mod snapshots;
mod sources;
mod walk;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kubelet::manifest::{FIELD_TABLE, Verdict};

use crate::documents::Documents;
use crate::honoured::HONOURED;
use crate::walk::{Finding, Outcome, covers};

fn findings() -> Vec<Finding> {
    let documents = Documents::read();
    schema::all().iter().flat_map(|(kind, schema)| walk::fields(*kind, schema, &documents)).collect()
}

#[test]
fn every_field_of_kubernetes_has_a_row() {
    let unclear: Vec<String> = findings()
        .iter()
        .filter_map(|finding| match &finding.outcome {
            Outcome::Unclear(why) => Some(format!("{} {}: {why}", finding.kind, finding.field)),
            Outcome::Honoured(_) | Outcome::Accepted(_) | Outcome::Warned(_) | Outcome::Refused(_) => None,
        })
        .collect();
    assert!(unclear.is_empty(), "fields without a row:\n{}", unclear.join("\n"));
}

#[test]
fn every_row_has_a_field() {
    let findings = findings();
    for row in HONOURED {
        let is_used = findings
            .iter()
            .any(|finding| matches!(finding.outcome, Outcome::Honoured(used) if std::ptr::eq(used, row)));
        assert!(is_used, "no field is honoured by the row {} {}", row.kind, row.field);
    }
    let walked: BTreeSet<_> = findings.iter().map(|finding| finding.kind).collect();
    for rule in FIELD_TABLE.iter().filter(|rule| rule.kind.is_none_or(|kind| walked.contains(&kind))) {
        let is_used = findings.iter().any(|finding| {
            rule.kind.is_none_or(|kind| kind == finding.kind)
                && covers(rule.field, &finding.field)
                && match (rule.verdict, &finding.outcome) {
                    (Verdict::Harmless(reason), Outcome::Accepted(found))
                    | (Verdict::Ignored(reason), Outcome::Warned(found))
                    | (Verdict::Refused(reason), Outcome::Refused(found)) => reason == found,
                    _ => false,
                }
        });
        assert!(is_used, "no field is treated as the row of {} says", rule.field);
    }
}

/// A test that does not exist, or in whose file the field does not occur, tests nothing of it.
#[test]
fn the_test_of_each_honoured_field_names_it() {
    let tests = sources::Tests::read();
    let mut missing = BTreeSet::new();
    for finding in findings() {
        let Outcome::Honoured(row) = finding.outcome else { continue };
        for test in row.tests {
            if !tests.exist(test) {
                missing.insert(format!("no test is called {test}: {} {}", row.kind, row.field));
            }
        }
        if !row.tests.iter().any(|test| tests.name_field(test, &finding.field)) {
            missing.insert(format!("{:?} do not name {} {}", row.tests, finding.kind, finding.field));
        }
    }
    assert!(missing.is_empty(), "{}", Vec::from_iter(missing).join("\n"));
}

#[test]
fn the_page_shows_every_row() {
    let fresh = page::text(&findings());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/FIELDS.md");
    if fs::read_to_string(&path).unwrap_or_default() == fresh {
        return;
    }
    let written = Path::new(env!("CARGO_TARGET_TMPDIR")).join("FIELDS.md");
    fs::write(&written, fresh).expect("the new page is written");
    panic!("docs/FIELDS.md is not up to date. Run: cp {} docs/FIELDS.md", written.display());
}
