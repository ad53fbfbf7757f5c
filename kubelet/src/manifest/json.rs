//! From a document's tree to its JSON value, with every field.

use serde_json::{Map, Number, Value as Json};

use super::scalar::Scalar;
use super::tree::{Node, Value};

/// The depth of a tree is bounded (`limits`), so this may recurse.
pub(super) fn value(node: &Node<'_>) -> Json {
    match &node.value {
        Value::Scalar(scalar) => scalar_value(scalar),
        Value::Sequence(items) => items.iter().map(|item| value(item)).collect(),
        Value::Mapping(entries) => {
            let fields = entries.iter().map(|(name, field)| (name.clone().into_owned(), value(field)));
            Json::Object(fields.collect::<Map<_, _>>())
        }
    }
}

fn scalar_value(scalar: &Scalar<'_>) -> Json {
    match scalar {
        Scalar::Null => Json::Null,
        Scalar::Bool(flag) => (*flag).into(),
        Scalar::Integer(number) => (*number).into(),
        Scalar::Unsigned(number) => (*number).into(),
        // JSON has no number for infinity: it is written out.
        Scalar::Float(number) => {
            Number::from_f64(*number).map_or_else(|| number.to_string().into(), Json::Number)
        }
        Scalar::Text(text) => text.as_ref().into(),
    }
}
