//! An object's document as it was applied, with every field.

use std::fmt;
use std::sync::Arc;

use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::Kind;

/// What the kubelet writes in `metadata`; `status` is its own as well.
const OWN_METADATA: [&str; 5] =
    ["uid", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"];

/// A JSON object, in the order of its text. Clones share it.
///
/// It is kept as text: a tree of values takes several times the memory.
#[derive(Clone)]
pub struct Document(Arc<str>);

impl Document {
    pub(crate) fn new(value: &Value) -> Self {
        Self(value.to_string().into())
    }

    pub fn value(&self) -> Value {
        serde_json::from_str(&self.0).expect("it was written by new()")
    }

    /// Adds to `object`, which was read from this document, the fields that it lacks. A field
    /// that both have is as in `object`: the kubelet acts on that.
    pub(crate) fn complete(&self, object: &mut Value, kind: Kind) {
        let mut given = self.value();
        drop_own_fields(&mut given, object, kind);
        add(object, given);
    }
}

/// It may be a Secret's, so only its length is shown.
impl fmt::Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Document({} bytes)", self.0.len())
    }
}

/// The order of fields means nothing.
impl PartialEq for Document {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0 || self.value() == other.value()
    }
}

impl Eq for Document {}

impl Serialize for Document {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        if !value.is_object() {
            return Err(D::Error::invalid_type(Unexpected::Other("a JSON value"), &"a document with fields"));
        }
        Ok(Self::new(&value))
    }
}

/// Removes what the kubelet alone decides, so that its absence in `object` counts.
fn drop_own_fields(given: &mut Value, object: &Value, kind: Kind) {
    let Value::Object(fields) = given else { return };
    fields.shift_remove("status");
    if kind == Kind::Secret {
        // `data` has it.
        fields.shift_remove("stringData");
    }
    if let Some(Value::Object(metadata)) = fields.get_mut("metadata") {
        for name in OWN_METADATA {
            metadata.shift_remove(name);
        }
        if !kind.is_namespaced() {
            metadata.shift_remove("namespace");
        }
    }
    if kind == Kind::PersistentVolume
        && let Some(Value::Object(spec)) = fields.get_mut("spec")
    {
        match spec.get_mut("claimRef") {
            Some(Value::Object(claim)) if object["spec"].get("claimRef").is_some() => {
                claim.shift_remove("uid");
            }
            _ => drop(spec.shift_remove("claimRef")),
        }
    }
}

fn add(object: &mut Value, given: Value) {
    match (object, given) {
        (Value::Object(fields), Value::Object(given)) => {
            for (name, value) in given {
                match fields.get_mut(&name) {
                    Some(field) => add(field, value),
                    // As in Kubernetes: null is an absent field.
                    None if value.is_null() => {}
                    None => drop(fields.insert(name, value)),
                }
            }
        }
        (Value::Array(items), Value::Array(given)) if items.len() == given.len() => {
            items.iter_mut().zip(given).for_each(|(item, given)| add(item, given));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn complete(mut object: Value, document: &Value, kind: Kind) -> Value {
        Document::new(document).complete(&mut object, kind);
        object
    }

    #[test]
    fn fields_of_the_document_are_added_below_fields_that_the_kubelet_acts_on() {
        let object = json!({"spec": {"containers": [{"name": "a", "cpu": "1"}, {"name": "b"}], "grace": 30}});
        let document = json!({"spec": {
            "containers": [{"name": "a", "cpu": 1, "probe": {"port": 80, "odd": null}}, {"name": "b", "tty": true}],
            "grace": null, "none": null, "hostNetwork": false, "list": [1],
        }});
        assert_eq!(
            complete(object, &document, Kind::Pod),
            json!({"spec": {
                "containers": [
                    {"name": "a", "cpu": "1", "probe": {"port": 80, "odd": null}}, {"name": "b", "tty": true},
                ],
                "grace": 30, "hostNetwork": false, "list": [1],
            }})
        );
    }

    #[test]
    fn what_the_kubelet_alone_decides_is_not_taken_from_the_document() {
        let document = json!({
            "metadata": {"name": "v", "namespace": "n", "uid": "u", "deletionTimestamp": "t", "x": 1},
            "spec": {"claimRef": {"name": "c", "uid": "old", "resourceVersion": "7"}},
            "status": {"phase": "Bound"},
        });
        let free = json!({"metadata": {"name": "v"}, "spec": {}});
        assert_eq!(
            complete(free, &document, Kind::PersistentVolume),
            json!({"metadata": {"name": "v", "x": 1}, "spec": {}})
        );
        let reserved = json!({"metadata": {"name": "v"}, "spec": {"claimRef": {"name": "c"}}});
        assert_eq!(
            complete(reserved, &document, Kind::PersistentVolume)["spec"],
            json!({"claimRef": {"name": "c", "resourceVersion": "7"}})
        );
    }
}
