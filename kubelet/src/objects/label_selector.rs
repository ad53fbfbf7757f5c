//! Which objects a selector means, by their labels.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::null_as_default;

/// Every requirement must hold; an empty selector matches every object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LabelSelector {
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub match_labels: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub match_expressions: Vec<LabelRequirement>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelRequirement {
    pub key: String,
    pub operator: LabelOperator,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub values: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LabelOperator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

impl LabelSelector {
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|LabelRequirement { key, operator, values }| {
                operator.holds(labels.get(key).map(String::as_str), values)
            })
    }
}

impl LabelOperator {
    /// For the value of a label, if an object has it. As in Kubernetes, `NotIn` also holds for objects
    /// without the label.
    pub(crate) fn holds(self, value: Option<&str>, values: &[String]) -> bool {
        let is_one = |value: &str| values.iter().any(|one| one == value);
        match self {
            Self::In => value.is_some_and(is_one),
            Self::NotIn => !value.is_some_and(is_one),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_requirement_must_hold() {
        let labels = BTreeMap::from([("tier".to_owned(), "gold".to_owned())]);
        for (selector, matches) in [
            (r"{}", true),
            (r#"{"matchLabels": {"tier": "gold"}}"#, true),
            (r#"{"matchLabels": {"tier": "gold", "zone": "a"}}"#, false),
            (
                r#"{"matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold", "iron"]}]}"#,
                true,
            ),
            (r#"{"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["gold"]}]}"#, false),
            (r#"{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}"#, true),
            (r#"{"matchExpressions": [{"key": "tier", "operator": "Exists"}]}"#, true),
            (r#"{"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}"#, false),
        ] {
            let parsed: LabelSelector = serde_json::from_str(selector).unwrap();
            assert_eq!(parsed.matches(&labels), matches, "{selector}");
        }
    }
}
