//! How each spec of a run ended.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::ginkgo;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed(String),
    /// By critest, for this reason.
    Skipped(String),
}

/// By the whole names of specs. Those that the focus leaves out are not there.
#[derive(Debug, Default)]
pub(super) struct Outcomes(BTreeMap<String, Outcome>);

impl Outcomes {
    pub(super) fn parse(json: &[u8]) -> Result<Self> {
        let mut outcomes = BTreeMap::new();
        for spec in ginkgo::specs(json).context("the report of critest")? {
            let outcome = match spec.state.as_str() {
                "passed" if spec.is_of_the_suite() => continue,
                "passed" => Outcome::Passed,
                "pending" => Outcome::Skipped("pending".to_owned()),
                "skipped" if spec.says().is_empty() => continue,
                "skipped" => Outcome::Skipped(spec.says().to_owned()),
                state => Outcome::Failed(format!("{state}: {}", spec.says_in_short())),
            };
            let name = spec.name();
            let former = outcomes.insert(name.clone(), outcome);
            ensure!(former.is_none(), "two specs have the name {name:?}");
        }
        Ok(Self(outcomes))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn get(&self, spec: &str) -> Option<&Outcome> {
        self.0.get(spec)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Outcome)> {
        self.0.iter().map(|(name, outcome)| (name.as_str(), outcome))
    }

    pub(super) fn has_passed(&self, spec: &str) -> bool {
        self.get(spec) == Some(&Outcome::Passed)
    }

    /// As `N passed, N failed, N skipped`.
    pub(super) fn sums(&self) -> String {
        let count = |is: fn(&Outcome) -> bool| self.0.values().filter(|outcome| is(outcome)).count();
        format!(
            "{} passed, {} failed, {} skipped",
            count(|outcome| matches!(outcome, Outcome::Passed)),
            count(|outcome| matches!(outcome, Outcome::Failed(_))),
            count(|outcome| matches!(outcome, Outcome::Skipped(_)))
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(name: &str, state: &str, message: &str) -> Value {
        json!({
            "ContainerHierarchyTexts": ["[k8s.io] Pod"],
            "LeafNodeText": name,
            "LeafNodeType": "It",
            "State": state,
            "Failure": {"Message": message},
        })
    }

    fn parse(specs: Vec<Value>) -> Result<Outcomes> {
        Outcomes::parse(json!([{"SpecReports": specs}]).to_string().as_bytes())
    }

    #[test]
    fn specs_outside_of_the_focus_are_not_there() {
        let outcomes =
            parse(vec![spec("a", "passed", ""), spec("b", "skipped", ""), spec("c", "skipped", "no")]);
        let outcomes = outcomes.unwrap();
        assert!(outcomes.has_passed("[k8s.io] Pod a"));
        assert_eq!(outcomes.get("[k8s.io] Pod b"), None);
        assert_eq!(outcomes.get("[k8s.io] Pod c"), Some(&Outcome::Skipped("no".to_owned())));
        assert_eq!(outcomes.sums(), "1 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn a_suite_that_cannot_be_set_up_has_failed() {
        let mut before = spec("", "failed", "no socket");
        before["LeafNodeType"] = json!("BeforeSuite");
        let outcomes = parse(vec![before]).unwrap();
        assert_eq!(outcomes.get("[k8s.io] Pod"), Some(&Outcome::Failed("failed: no socket".to_owned())));
    }

    #[test]
    fn a_report_without_specs_is_an_error() {
        assert!(parse(vec![spec("a", "skipped", "")]).unwrap().is_empty());
        let error = format!("{:#}", parse(Vec::new()).unwrap_err());
        assert_eq!(error, "the report of critest: it has no spec");
    }

    #[test]
    fn two_specs_of_one_name_are_an_error() {
        let error = parse(vec![spec("a", "passed", ""), spec("a", "failed", "")]).unwrap_err().to_string();
        assert_eq!(error, "two specs have the name \"[k8s.io] Pod a\"");
    }
}
