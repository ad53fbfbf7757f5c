//! Finds the line of a field that parsed well but is wrong for another reason.
//!
//! The parser tells places only in its errors, so this reads the document once
//! more and raises one on arrival at the field.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::path::{FieldPath, Segment};

/// Line and column of `field`, from 1; of the nearest enclosing field if it is missing.
pub(super) fn locate(text: &str, field: &FieldPath) -> Option<(usize, usize)> {
    let search = Search { rest: field.segments() };
    let arrival = search.deserialize(serde_yaml_ng::Deserializer::from_str(text)).err()?;
    let location = arrival.location()?;
    Some((location.line(), location.column()))
}

/// Always fails: at the field, or where the way to it ends.
#[derive(Clone, Copy)]
struct Search<'a> {
    rest: &'a [Segment],
}

impl<'de> DeserializeSeed<'de> for Search<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.rest.first() {
            None => deserializer.deserialize_any(Arrived),
            Some(Segment::Key(_)) => deserializer.deserialize_map(self),
            Some(Segment::Index(_)) => deserializer.deserialize_seq(self),
        }
    }
}

impl<'de> Visitor<'de> for Search<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the way to the field")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match self.rest {
                [Segment::Key(wanted), rest @ ..] if *wanted == key => {
                    map.next_value_seed(Search { rest })?;
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Err(A::Error::custom("missing"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let [Segment::Index(wanted), rest @ ..] = self.rest else {
            return Err(A::Error::custom("no sequence"));
        };
        for _ in 0..*wanted {
            seq.next_element::<IgnoredAny>()?;
        }
        seq.next_element_seed(Search { rest })?;
        Err(A::Error::custom("missing"))
    }
}

/// Fails on whatever value it meets, so that the parser tells its place.
struct Arrived;

impl Visitor<'_> for Arrived {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing more")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "spec:\n  containers:\n  - name: a\n    image: x\n  - name: b\n";

    #[test]
    fn a_field_is_found_by_its_path() {
        let second = FieldPath::root().below("spec.containers").index(1);
        assert_eq!(locate(TEXT, &second.key("name")), Some((5, 11)));
        assert_eq!(
            locate(TEXT, &FieldPath::root().below("spec.containers").index(0).key("image")),
            Some((4, 12))
        );
    }

    #[test]
    fn a_missing_field_is_looked_for_in_its_parent() {
        let second = FieldPath::root().below("spec.containers").index(1);
        assert_eq!(locate(TEXT, &second.key("image")), Some((5, 5)));
    }
}
