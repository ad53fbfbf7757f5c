//! Reads JSON text as the reference does (Go's `encoding/json` into structures): invalid UTF-8
//! becomes U+FFFD. Of two keys that differ only in case, the later one is used, except that `null`
//! does not reset a value and two objects are merged.
//!
//! Stricter than Go: nesting to 127 levels, numbers within a double, no unpaired surrogates.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The only value in `text`.
pub(crate) fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    let text = String::from_utf8_lossy(text);
    serde_json::from_str::<Folded>(&text).map(|folded| folded.0)
}

/// Whether Go accepts `written` as the key `wanted`, which is ASCII: K and S each have a third
/// form, the Kelvin sign and the long s.
pub(crate) fn same_key(written: &str, wanted: &str) -> bool {
    written.chars().map(fold).eq(wanted.chars().map(fold))
}

fn fold(c: char) -> char {
    match c {
        '\u{212a}' => 'k',
        '\u{17f}' => 's',
        c => c.to_ascii_lowercase(),
    }
}

struct Folded(Value);

impl<'de> Deserialize<'de> for Folded {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Folded)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        // "-0" is parsed as a double, but is an integer.
        let whole = value == 0.0 && value.is_sign_negative();
        Ok(if whole { 0.into() } else { Number::from_f64(value).map_or(Value::Null, Value::Number) })
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Folded(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        let mut spelled: BTreeMap<String, String> = BTreeMap::new();
        while let Some((key, Folded(value))) = pairs.next_entry::<String, Folded>()? {
            let first = spelled.entry(key.chars().map(fold).collect()).or_insert_with(|| key.clone());
            put(&mut object, first, value);
        }
        Ok(object.into())
    }
}

fn put(object: &mut Map<String, Value>, key: &str, value: Value) {
    match (object.get_mut(key), value) {
        (None, value) => {
            object.insert(key.to_owned(), value);
        }
        (Some(_), Value::Null) => {}
        (Some(Value::Object(former)), Value::Object(later)) => {
            for (key, value) in later {
                let written = former.keys().find(|written| same_key(written, &key)).cloned();
                put(former, written.as_ref().unwrap_or(&key), value);
            }
        }
        (Some(former), value) => *former = value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> String {
        parse(text.as_bytes()).unwrap().to_string()
    }

    #[test]
    fn later_keys_count_null_takes_nothing_back_and_objects_become_one() {
        assert_eq!(read(r#"{"a":1,"A":2,"b":3,"B":null}"#), r#"{"a":2,"b":3}"#);
        assert_eq!(read(r#"{"a":{"x":1,"Y":2},"a":{"y":3,"z":[1]}}"#), r#"{"a":{"x":1,"Y":3,"z":[1]}}"#);
        assert_eq!(read(r#"{"a":null,"a":[1],"a":[2]}"#), r#"{"a":[2]}"#);
    }

    #[test]
    fn the_kelvin_sign_and_the_long_s_are_letters_of_keys() {
        assert!(same_key("i\u{17f}Gateway", "isGateway") && same_key("vlanTrun\u{212a}", "vlantrunk"));
        assert!(!same_key("\u{e9}", "e") && !same_key("is", "i") && !same_key("ı", "i"));
    }

    #[test]
    fn text_is_mended_and_what_follows_the_value_is_refused() {
        assert_eq!(parse(b"[\"a\xffb\"]").unwrap(), serde_json::json!(["a\u{fffd}b"]));
        for wrong in ["", " ", "{} x", "{}{}", "\u{feff}{}", "[01]", "[\"\t\"]", r#"["\x"]"#] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
        assert_eq!(read(" {}\r\n\t"), "{}");
    }

    #[test]
    fn what_go_takes_and_this_does_not() {
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        parse(nested(127).as_bytes()).unwrap();
        for wrong in [nested(128), "1e999".to_owned(), r#""\ud800""#.to_owned()] {
            assert!(parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
