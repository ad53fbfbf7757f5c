//! `--field-selector`: the fields that the API server selects by, and no others.

use std::str::FromStr;

use serde_json::Value;

use crate::objects::Kind;

/// All of them must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSelector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    field: String,
    value: String,
    is_equal: bool,
}

/// A field that objects of a kind are not selected by.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("field label not supported: {field} (kind {kind} has {})", fields(*kind).join(", "))]
pub struct UnknownField {
    kind: Kind,
    field: String,
}

/// (kubernetes, pkg/apis/core/v1: `AddFieldLabelConversionsForPod` and its neighbours)
fn fields(kind: Kind) -> Vec<&'static str> {
    let own: &[&str] = match kind {
        Kind::Pod => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.nominatedNodeName",
        ],
        Kind::Event => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "reason",
            "source",
            "type",
        ],
        Kind::Secret => &["type"],
        _ => &[],
    };
    let namespace: &[&str] = if kind.is_namespaced() { &["metadata.namespace"] } else { &[] };
    [&["metadata.name"], namespace, own].concat()
}

impl FieldSelector {
    /// Whether every object has these fields.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn check(&self, kind: Kind) -> Result<(), UnknownField> {
        match self.0.iter().find(|one| !fields(kind).contains(&one.field.as_str())) {
            Some(one) => Err(UnknownField { kind, field: one.field.clone() }),
            None => Ok(()),
        }
    }

    /// A field that is missing is empty, or false.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|one| {
            // An event's source is its component.
            let path = if one.field == "source" { "source.component" } else { &one.field };
            let found = path.split('.').try_fold(object, |value, name| value.get(name));
            let is = match found {
                Some(Value::String(text)) => *text == one.value,
                Some(Value::Bool(flag)) => flag.to_string() == one.value,
                Some(_) => false,
                None => one.value.is_empty() || one.value == "false",
            };
            is == one.is_equal
        })
    }
}

impl FromStr for FieldSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let parts = text.split(',').map(str::trim);
        let requirement = |part: &str| {
            let operators = [("!=", false), ("==", true), ("=", true)];
            let found = operators.into_iter().find_map(|(operator, is_equal)| {
                part.split_once(operator).map(|(field, value)| (field, value, is_equal))
            });
            let (field, value, is_equal) =
                found.ok_or_else(|| format!("invalid selector: {part:?}; can't understand {part:?}"))?;
            Ok(Requirement { field: field.trim().to_owned(), value: value.trim().to_owned(), is_equal })
        };
        parts.map(requirement).collect::<Result<_, String>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_selected_by_fields() {
        let pod = json!({"metadata": {"name": "web", "namespace": "default"},
            "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}});
        for (selector, expected) in [
            ("", true),
            ("metadata.name=web", true),
            ("metadata.name!=web", false),
            ("status.phase==Running,spec.nodeName=n1", true),
            ("status.phase=Failed", false),
            ("status.podIP=", true),
            ("status.podIP!=", false),
            ("spec.hostNetwork=false", true),
            ("spec.hostNetwork=true", false),
        ] {
            let selected: FieldSelector = selector.parse().unwrap();
            selected.check(Kind::Pod).unwrap();
            assert_eq!(selected.matches(&pod), expected, "{selector}");
        }
        let event =
            json!({"type": "Warning", "source": {"component": "kubelet"}, "involvedObject": {"name": "web"}});
        let selector: FieldSelector = "type=Warning,source=kubelet,involvedObject.name=web".parse().unwrap();
        selector.check(Kind::Event).unwrap();
        assert!(selector.matches(&event));
    }

    #[test]
    fn other_fields_are_refused() {
        let selector: FieldSelector = "spec.image=x".parse().unwrap();
        let error = selector.check(Kind::Pod).unwrap_err().to_string();
        assert!(
            error.starts_with("field label not supported: spec.image (kind Pod has metadata.name, "),
            "{error}"
        );
        let error = selector.check(Kind::StorageClass).unwrap_err().to_string();
        assert_eq!(error, "field label not supported: spec.image (kind StorageClass has metadata.name)");
        for selector in ["metadata.name", ",", "metadata.name=a,", ", metadata.name=a"] {
            assert!(selector.parse::<FieldSelector>().is_err(), "{selector}");
        }
    }
}
