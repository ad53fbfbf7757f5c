//! What csi-sanity says it did, from ginkgo's JSON report.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use anyhow::{Context, Result};

use crate::ginkgo::{self, Spec};

/// Specs that may be skipped or pend, by the reason that csi-sanity gives.
const LATER: [Later; 10] = [
    Later { says: "GroupControllerService not supported", specs: 6, since: "group snapshots come later" },
    Later { says: "Modify volume not supported", specs: 1, since: MODIFY },
    Later { says: "Modify Volume not supported", specs: 1, since: MODIFY },
    Later { says: "ControllerModifyVolume not supported", specs: 6, since: MODIFY },
    Later { says: "ControllerGetVolumeHealth not supported", specs: 2, since: SINCE_1_13 },
    Later { says: "ControllerListVolumeHealth not supported", specs: 1, since: SINCE_1_13 },
    Later { says: "NodeGetVolumeHealth not supported", specs: 2, since: SINCE_1_13 },
    Later { says: "NodeGetStorageHealth not supported", specs: 1, since: SINCE_1_13 },
    Later { says: "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported", specs: 1, since: SINCE_1_13 },
    Later { says: PENDING, specs: 1, since: "upstream has marked it so" },
];
const MODIFY: &str = "VolumeAttributesClass comes later";
const SINCE_1_13: &str = "of CSI 1.13";
/// In place of a reason.
const PENDING: &str = "pending";

struct Later {
    says: &'static str,
    specs: usize,
    since: &'static str,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// A spec that did not end as it should, with what was said about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) spec: String,
    pub(super) says: String,
}

#[derive(Debug)]
pub(super) struct Report {
    pub(super) counts: Counts,
    /// Failures, and skipped specs that are not in the list of allowed ones.
    pub(super) complaints: Vec<Complaint>,
}

impl Report {
    /// `is_whole`: nothing was left out on purpose, so each allowance must be used up.
    pub(super) fn parse(json: &[u8], is_whole: bool) -> Result<Self> {
        let specs = ginkgo::specs(json).context("the report of csi-sanity")?;
        let mut report = Self { counts: Counts::default(), complaints: Vec::new() };
        let mut skipped: BTreeMap<&str, Vec<&Spec>> = BTreeMap::new();
        for spec in &specs {
            match spec.state.as_str() {
                "passed" => report.counts.passed += 1,
                "pending" => skipped.entry(PENDING).or_default().push(spec),
                // Left out by the focus.
                "skipped" if spec.failure.is_none() || spec.says().is_empty() => {}
                "skipped" => skipped.entry(spec.says()).or_default().push(spec),
                state => report.complain(spec.name(), format!("{state}: {}", spec.says_in_short())),
            }
        }
        for (says, specs) in &skipped {
            report.counts.skipped += specs.len();
            if !LATER.iter().any(|later| later.says == *says && later.specs >= specs.len()) {
                for spec in specs {
                    report.complain(spec.name(), format!("skipped: {says}"));
                }
            }
        }
        for later in LATER.iter().filter(|_| is_whole) {
            let found = skipped.get(later.says).map_or(0, Vec::len);
            if found < later.specs {
                let says = format!("{found} specs are left of {} ({})", later.specs, later.since);
                report.complain(format!("allowance {:?}", later.says), says);
            }
        }
        Ok(report)
    }

    fn complain(&mut self, spec: String, says: String) {
        self.counts.failed += 1;
        self.complaints.push(Complaint { spec, says });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(text: &str, state: &str, message: &str) -> Value {
        json!({
            "ContainerHierarchyTexts": ["Node Service", ""],
            "LeafNodeText": text,
            "State": state,
            "Failure": {"Message": message, "Location": {"FileName": "node.go"}},
        })
    }

    fn parse(specs: Vec<Value>, is_whole: bool) -> Report {
        let json = json!([{"SuiteDescription": "CSI Driver Test Suite", "SpecReports": specs}]);
        Report::parse(json.to_string().as_bytes(), is_whole).unwrap()
    }

    #[test]
    fn failures_are_told_with_the_whole_name_of_their_spec() {
        let report =
            parse(vec![spec("works", "passed", ""), spec("fails", "panicked", "why\n  {\n  s: {\n")], false);
        assert_eq!(report.counts, Counts { passed: 1, failed: 1, skipped: 0 });
        let complaint = Complaint { spec: "Node Service fails".to_owned(), says: "panicked: why".to_owned() };
        assert_eq!(report.complaints, [complaint]);
    }

    #[test]
    fn only_what_is_in_the_table_may_be_skipped() {
        let allowed = spec("groups", "skipped", "GroupControllerService not supported");
        let report = parse(vec![allowed, spec("pages", "pending", "")], false);
        assert_eq!(report.counts, Counts { passed: 0, failed: 0, skipped: 2 });
        let report = parse(vec![spec("clones", "skipped", "Volume Cloning not supported")], false);
        assert_eq!(report.complaints[0].says, "skipped: Volume Cloning not supported");
        let pending = parse(vec![spec("one", "pending", ""), spec("two", "pending", "")], false);
        assert_eq!(pending.counts.failed, 2, "one more than the table has");
    }

    #[test]
    fn an_allowance_that_nothing_needs_is_a_failure_of_a_whole_run_only() {
        let specs = || vec![spec("works", "passed", ""), spec("focused out", "skipped", "")];
        assert_eq!(parse(specs(), false).counts, Counts { passed: 1, failed: 0, skipped: 0 });
        assert_eq!(parse(specs(), true).counts.failed, LATER.len());
    }

    #[test]
    fn a_report_without_specs_is_no_success() {
        let error = format!("{:#}", Report::parse(b"[]", false).unwrap_err());
        assert!(error.contains("no spec"), "{error}");
    }
}
