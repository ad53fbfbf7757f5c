//! The documents of `honoured.yaml`, and what the reader says once one more field is in them.

use kubelet::manifest::parse;
use kubelet::objects::Kind;
use serde_json::Value;

const TEXT: &str = include_str!("honoured.yaml");

pub(crate) struct Documents(Vec<(Kind, Value)>);

/// What the reader says of a text with one document.
pub(crate) struct Answer {
    pub(crate) errors: Vec<String>,
    pub(crate) warnings: Vec<String>,
}

impl Documents {
    pub(crate) fn read() -> Self {
        let parsed = parse(TEXT.as_bytes(), "honoured.yaml");
        assert_eq!(parsed.errors, [], "each document is valid");
        let documents = parsed.manifests.iter().map(|manifest| {
            assert_eq!(manifest.warnings, [""; 0], "fields with an effect have no warning");
            (manifest.object.kind(), manifest.document.value())
        });
        Self(documents.collect())
    }

    /// Whether a document has a value at `field` that asks for something.
    pub(crate) fn have(&self, kind: Kind, field: &str) -> bool {
        self.places(kind, field)
            .any(|(document, place)| document.pointer(&place).is_some_and(|value| !is_empty(value)))
    }

    /// What the reader says of a document with this field, and how it calls the field. `None` if no
    /// document has the object that it would be in.
    pub(crate) fn answer_to(&self, kind: Kind, field: &str, value: Value) -> Option<(Answer, String)> {
        let (parent, name) = field.rsplit_once('.').unwrap_or(("", field));
        let (document, place) = self.places(kind, parent).next()?;
        let mut document = document.clone();
        document.pointer_mut(&place).expect("the place of an object")[name] = value;
        let parsed = parse(document.to_string().as_bytes(), "field.json");
        let warnings = parsed.manifests.iter().flat_map(|manifest| &manifest.warnings);
        let answer = Answer {
            errors: parsed.errors.iter().map(|error| error.message.clone()).collect(),
            warnings: warnings.cloned().collect(),
        };
        Some((answer, shown(&format!("{place}/{name}"))))
    }

    /// Every JSON pointer that the pattern stands for.
    fn places<'a>(&'a self, kind: Kind, field: &'a str) -> impl Iterator<Item = (&'a Value, String)> {
        let documents = self.0.iter().filter(move |(its, _)| *its == kind);
        documents.flat_map(move |(_, document)| {
            let mut places = vec![String::new()];
            for part in field.split('.').filter(|part| !part.is_empty()) {
                let (name, is_list) = part.strip_suffix("[*]").map_or((part, false), |name| (name, true));
                places =
                    places.into_iter().flat_map(|place| inside(document, &place, name, is_list)).collect();
            }
            places.into_iter().map(move |place| (document, place))
        })
    }
}

fn inside(document: &Value, place: &str, name: &str, is_list: bool) -> Vec<String> {
    let place = format!("{place}/{name}");
    match document.pointer(&place) {
        None => Vec::new(),
        Some(list) if is_list => {
            let items = list.as_array().map_or(0, Vec::len);
            (0..items).map(|index| format!("{place}/{index}")).collect()
        }
        Some(_) => vec![place],
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// `/spec/containers/0/image` as the reader writes it: `spec.containers[0].image`.
fn shown(pointer: &str) -> String {
    let mut shown = String::new();
    for part in pointer.split('/').skip(1) {
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            shown += &format!("[{part}]");
        } else {
            shown += if shown.is_empty() { "" } else { "." };
            shown += part;
        }
    }
    shown
}
