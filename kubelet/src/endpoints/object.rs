//! Objects of JSON as kubelet writes them.

use serde_json::Value;

/// Without fields that have no value, as the API omits them.
pub(super) fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    let fields = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(fields.collect())
}
