//! The fields of a kind, from the top: each is honoured, or is what the reader says of it. Below a
//! field that the reader does not know there is nothing to look at.

use kubelet::manifest::{FIELD_TABLE, Verdict};
use kubelet::objects::Kind;
use serde_json::{Value, json};

use crate::documents::{Answer, Documents};
use crate::honoured::{self, Row};
use crate::schema::Schema;

/// A field without fields below, or one that the reader does not know.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// `spec.containers[*].image`
    pub(crate) field: String,
    pub(crate) outcome: Outcome,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    Honoured(&'static Row),
    /// Taken in silence, since nothing is lost: this is why.
    Accepted(String),
    /// Taken with a warning.
    Warned(String),
    Refused(String),
    /// No row says what becomes of it: the reader's answer.
    Unclear(String),
}

/// A value for a field that a value of its type alone would not do for.
fn special(kind: Kind, field: &str) -> Option<Value> {
    match (kind, field) {
        // Its default is true.
        (Kind::Pod, "spec.hostUsers") => Some(json!(false)),
        // Its name alone is refused.
        (Kind::PersistentVolume, "spec.csi.controllerPublishSecretRef") => {
            Some(json!({"name": "key", "namespace": "vault"}))
        }
        // The reader knows the words.
        (Kind::VolumeSnapshotContent, "spec.sourceVolumeMode") => Some(json!("Filesystem")),
        (Kind::CsiDriver, "spec.volumeLifecycleModes") => Some(json!(["Persistent"])),
        _ => None,
    }
}

pub(crate) fn fields(kind: Kind, schema: &Schema, documents: &Documents) -> Vec<Finding> {
    let mut walk = Walk { kind, schema, documents, findings: Vec::new() };
    walk.object("", schema.root());
    walk.findings
}

struct Walk<'a> {
    kind: Kind,
    schema: &'a Schema,
    documents: &'a Documents,
    findings: Vec<Finding>,
}

impl Walk<'_> {
    fn object(&mut self, at: &str, schema: &Value) {
        let schema_of = self.schema;
        for (name, field) in schema_of.fields(schema) {
            let path = if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") };
            self.field(path, field);
        }
    }

    fn field(&mut self, path: String, schema: &Value) {
        if !self.documents.have(self.kind, &path) {
            let outcome = self.unhonoured(&path, schema);
            return self.findings.push(Finding { kind: self.kind, field: path, outcome });
        }
        let (inner, below) = match self.schema.items(schema) {
            Some(items) => (items, format!("{path}[*]")),
            None => (schema, path.clone()),
        };
        if self.schema.fields(inner).is_empty() {
            let outcome = match (honoured::row_of(self.kind, &path), harmless(self.kind, &path)) {
                (Some(row), None) => Outcome::Honoured(row),
                (None, None) => {
                    Outcome::Unclear("honoured.yaml has it, and honoured.rs names no test".to_owned())
                }
                (_, Some(_)) => Outcome::Unclear("the kubelet's table calls it harmless".to_owned()),
            };
            self.findings.push(Finding { kind: self.kind, field: path, outcome });
        } else {
            self.object(&below, inner);
        }
    }

    fn unhonoured(&self, path: &str, schema: &Value) -> Outcome {
        let value = special(self.kind, path).unwrap_or_else(|| self.schema.sample(schema));
        let Some((answer, field)) = self.documents.answer_to(self.kind, path, value) else {
            return Outcome::Unclear("no document has the object around it".to_owned());
        };
        self.judge(path, &field, &answer)
    }

    fn judge(&self, path: &str, field: &str, answer: &Answer) -> Outcome {
        let refusal = answer.errors.iter().find_map(|error| {
            let message = error.strip_prefix(field)?.strip_prefix(": ")?;
            let refused = message.strip_prefix("not supported: ").or(message.strip_prefix("Forbidden: "));
            let rule = message.strip_prefix("Invalid value: ").and_then(|rest| rest.split_once(": "));
            refused.or(rule.map(|(_, rule)| rule).filter(|rule| rule.starts_with("must not be set")))
        });
        let warning = format!(": {field} is not supported: ");
        let effect =
            answer.warnings.iter().find_map(|text| text.split_once(&warning).map(|(_, effect)| effect));
        match (refusal, effect, harmless(self.kind, path)) {
            (Some(reason), _, _) => Outcome::Refused(reason.to_owned()),
            (None, Some(effect), _) if answer.errors.is_empty() => Outcome::Warned(effect.to_owned()),
            (None, None, Some(reason)) if answer.errors.is_empty() => Outcome::Accepted(reason.to_owned()),
            _ => Outcome::Unclear(format!(
                "the reader drops it or says something else: {:?} {:?}",
                answer.errors, answer.warnings
            )),
        }
    }
}

/// Why the field is taken in silence, as the kubelet's table says.
fn harmless(kind: Kind, field: &str) -> Option<&'static str> {
    let mut rules = FIELD_TABLE.iter().filter(|rule| rule.kind.is_none_or(|its| its == kind));
    let rule = rules.find(|rule| covers(rule.field, field))?;
    match rule.verdict {
        Verdict::Harmless(reason) => Some(reason),
        Verdict::Ignored(_) | Verdict::Refused(_) => None,
    }
}

/// Whether the row's field is `field`, or is above it. Rows of containers hold for init containers.
pub(crate) fn covers(row: &str, field: &str) -> bool {
    let field = field.replacen("spec.initContainers", "spec.containers", 1);
    let row = row.replacen("spec.initContainers", "spec.containers", 1);
    field.strip_prefix(&row).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}
