//! `kind: List`, which `kubectl get -o yaml` writes: each item is a document.

use super::ManifestError;
use super::document::Document;
use super::limits::DOCUMENTS;
use super::path::{FieldPath, Segment};
use super::scalar::Scalar;
use super::tree::Value;

const LIST: &str = "List";

/// The documents of `document`: the items of a list, or itself.
pub(super) fn parts(document: Document<'_>) -> Result<Vec<Document<'_>>, ManifestError> {
    let field = |name: &str| FieldPath::root().key(name);
    if document.text(&field("kind")) != Some(LIST) {
        return Ok(vec![document]);
    }
    let error = |name: &str, message: &str| Err(document.error_at(&field(name), None, message));
    if document.text(&field("apiVersion")) != Some("v1") {
        return error("apiVersion", "Required value: v1");
    }
    match document.root().get(&Segment::Key("items".to_owned())).map(|node| &node.value) {
        Some(Value::Sequence(items)) if items.len() > DOCUMENTS => {
            error("items", &format!("Too many: {}: must have at most {DOCUMENTS} items", items.len()))
        }
        Some(Value::Sequence(items)) => {
            Ok(items.iter().map(|item| document.part(std::rc::Rc::clone(item))).collect())
        }
        None | Some(Value::Scalar(Scalar::Null)) => Ok(Vec::new()),
        Some(_) => error("items", "Invalid value: the items of a list are a sequence"),
    }
}
