//! From a document's tree to a Kubernetes object, in one pass: fields that the
//! object does not have are put down on the way, with their values.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use serde::Deserializer;
use serde::de::value::BorrowedStrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::path::{FieldPath, Segment};
use super::scalar::Scalar;
use super::tree::{Node, Position, Value};

/// A longer word is none that any field supports.
const VARIANT_BYTES: usize = 64;

/// Field of each object that no manifest decides: the kubelet writes it, and a Kubernetes may have written another.
const STATUS: &str = "status";

/// A field that the object's type does not have.
#[derive(Debug)]
pub(super) struct Unknown<'de> {
    pub(super) path: FieldPath,
    pub(super) node: &'de Node<'de>,
}

/// Why a tree is no object of the type.
#[derive(Debug)]
pub(super) struct ReadError {
    message: String,
    /// Without the value that was found, if `message` has it.
    without_value: Option<String>,
    at: Option<Position>,
    /// The innermost segment comes first.
    path: Vec<Segment>,
}

/// A [`ReadError`] with the whole path of its field.
#[derive(Debug)]
pub(super) struct Located {
    pub(super) at: Option<Position>,
    pub(super) field: FieldPath,
    pub(super) message: String,
}

impl ReadError {
    /// `hides_values`: of a Secret.
    pub(super) fn located(mut self, hides_values: bool) -> Located {
        self.path.reverse();
        let message = match self.without_value {
            Some(message) if hides_values => message,
            _ => self.message,
        };
        Located { at: self.at, field: self.path.into(), message }
    }

    /// The first place that is named is the innermost.
    fn at(mut self, node: &Node<'_>) -> Self {
        self.at.get_or_insert(node.at);
        self
    }

    /// `kind` stands for `value` where values are hidden, and where there is none.
    fn about(problem: &str, value: Option<&str>, kind: &str, expected: &str) -> Self {
        let without = format!("{problem}: {kind}, {expected}");
        let message =
            value.map_or_else(|| without.clone(), |value| format!("{problem}: {value}, {expected}"));
        Self { message, without_value: Some(without), at: None, path: Vec::new() }
    }

    fn inside(mut self, segment: Segment) -> Self {
        self.path.push(segment);
        self
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ReadError {}

impl de::Error for ReadError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self { message: message.to_string(), without_value: None, at: None, path: Vec::new() }
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let expected = in_words(&expected.to_string());
        let (kind, value) = match found {
            Unexpected::Unit => ("null", None),
            Unexpected::Seq => ("a list", None),
            Unexpected::Map => ("a mapping of fields", None),
            Unexpected::Str(text) => ("a string", Some(format!("string {text:?}"))),
            Unexpected::Float(number) => ("a number", Some(number.to_string())),
            Unexpected::Bool(_) => ("a boolean", Some(found.to_string())),
            Unexpected::Unsigned(_) | Unexpected::Signed(_) => ("a number", Some(found.to_string())),
            _ => ("another type", Some(found.to_string())),
        };
        Self::about("invalid type", value.as_deref(), kind, &format!("expected {expected}"))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let expected = in_words(&expected.to_string());
        Self::about("invalid value", Some(&found.to_string()), "this value", &format!("expected {expected}"))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let supported = format!("supported values: {}", expected.join(", "));
        // Its end would hide the rest.
        let shown = format!("{:?}", &variant[..variant.floor_char_boundary(VARIANT_BYTES)]);
        Self::about("Unsupported value", Some(&shown), "this value", &supported)
    }
}

/// What a type of Rust expects, for a reader of YAML.
fn in_words(expected: &str) -> String {
    let whole = |from: i128, to: i128| format!("a whole number from {from} to {to}");
    match expected {
        "u8" => whole(0, u8::MAX.into()),
        "u16" => whole(0, u16::MAX.into()),
        "u32" => whole(0, u32::MAX.into()),
        "i32" => whole(i32::MIN.into(), i32::MAX.into()),
        "u64" | "usize" => "a whole number that is not negative".to_owned(),
        "i64" => "a whole number".to_owned(),
        "f32" | "f64" => "a number".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a mapping of fields".to_owned(),
        name if name.starts_with("enum ") => "one word".to_owned(),
        name if name.starts_with("struct ") => "a mapping of fields".to_owned(),
        other => other.to_owned(),
    }
}

/// Reads the object and every field that it does not have.
pub(super) fn object<'de, T: DeserializeOwned>(
    root: &'de Node<'de>,
) -> Result<(T, Vec<Unknown<'de>>), ReadError> {
    let unknown = RefCell::new(Vec::new());
    let reader = Reader { node: root, trail: &Trail::Root, unknown: &unknown };
    let object = T::deserialize(reader).map_err(|error| error.at(root))?;
    Ok((object, unknown.into_inner()))
}

/// The way to a node; becomes a path only where one is needed.
#[derive(Debug)]
enum Trail<'p> {
    Root,
    Key(&'p Trail<'p>, &'p str),
    Index(&'p Trail<'p>, usize),
}

impl Trail<'_> {
    fn to_path(&self) -> FieldPath {
        let mut segments = Vec::new();
        let mut trail = self;
        loop {
            trail = match trail {
                Trail::Root => break,
                Trail::Key(parent, key) => {
                    segments.push(Segment::Key((*key).to_owned()));
                    parent
                }
                Trail::Index(parent, index) => {
                    segments.push(Segment::Index(*index));
                    parent
                }
            };
        }
        segments.reverse();
        segments.into()
    }
}

#[derive(Clone, Copy)]
struct Reader<'p, 'de> {
    node: &'de Node<'de>,
    trail: &'p Trail<'p>,
    unknown: &'p RefCell<Vec<Unknown<'de>>>,
}

impl<'de> Reader<'_, 'de> {
    fn text<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar(Scalar::Text(text)) => visitor.visit_borrowed_str(text),
            // As in Go: null leaves a string empty.
            Value::Scalar(Scalar::Null) => visitor.visit_borrowed_str(""),
            Value::Scalar(scalar) => Err(de::Error::custom(format_args!(
                "invalid type: {}, expected a string: put it in quotes",
                scalar.type_name()
            ))),
            Value::Sequence(_) | Value::Mapping(_) => self.deserialize_any(visitor),
        }
    }
}

impl<'de> Deserializer<'de> for Reader<'_, 'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar(Scalar::Null) => visitor.visit_unit(),
            Value::Scalar(Scalar::Bool(flag)) => visitor.visit_bool(*flag),
            // An unsigned field accepts a number only as an unsigned one.
            Value::Scalar(Scalar::Integer(number)) => match u64::try_from(*number) {
                Ok(number) => visitor.visit_u64(number),
                Err(_) => visitor.visit_i64(*number),
            },
            Value::Scalar(Scalar::Unsigned(number)) => visitor.visit_u64(*number),
            Value::Scalar(Scalar::Float(number)) => visitor.visit_f64(*number),
            Value::Scalar(Scalar::Text(text)) => visitor.visit_borrowed_str(text),
            Value::Sequence(items) => visitor.visit_seq(Items { reader: self, items, index: 0 }),
            Value::Mapping(entries) => visitor.visit_map(Entries { reader: self, entries, index: 0 }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar(Scalar::Null) => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.text(visitor)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.text(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Scalar(Scalar::Text(text)) => {
                visitor.visit_enum(BorrowedStrDeserializer::<ReadError>::new(text))
            }
            Value::Scalar(Scalar::Null) => visitor.visit_enum(BorrowedStrDeserializer::<ReadError>::new("")),
            _ => self.text(visitor),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_newtype_struct(self)
    }

    /// What a type asks to skip is a field that it does not have.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.unknown.borrow_mut().push(Unknown { path: self.trail.to_path(), node: self.node });
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct identifier
    }
}

struct Items<'p, 'de> {
    reader: Reader<'p, 'de>,
    items: &'de [Rc<Node<'de>>],
    index: usize,
}

impl<'de> SeqAccess<'de> for Items<'_, 'de> {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        let Some(node) = self.items.get(self.index) else { return Ok(None) };
        let (index, trail) = (self.index, Trail::Index(self.reader.trail, self.index));
        self.index += 1;
        let reader = Reader { node, trail: &trail, unknown: self.reader.unknown };
        let item = seed.deserialize(reader).map_err(|error| error.at(node).inside(Segment::Index(index)))?;
        Ok(Some(item))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len() - self.index)
    }
}

struct Entries<'p, 'de> {
    reader: Reader<'p, 'de>,
    entries: &'de [(std::borrow::Cow<'de, str>, Rc<Node<'de>>)],
    index: usize,
}

impl<'de> MapAccess<'de> for Entries<'_, 'de> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        let is_read = |key: &str| key != STATUS || !matches!(self.reader.trail, Trail::Root);
        let rest = self.entries.get(self.index..).unwrap_or_default();
        let Some(skipped) = rest.iter().position(|(key, _)| is_read(key)) else { return Ok(None) };
        self.index += skipped;
        let key = &rest[skipped].0;
        seed.deserialize(BorrowedStrDeserializer::new(key)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let (key, node) = self
            .entries
            .get(self.index)
            .expect("serde asks for a value only after next_key_seed gave its key");
        self.index += 1;
        let reader =
            Reader { node, trail: &Trail::Key(self.reader.trail, key), unknown: self.reader.unknown };
        seed.deserialize(reader)
            .map_err(|error| error.at(node).inside(Segment::Key(key.clone().into_owned())))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.entries.len() - self.index)
    }
}
