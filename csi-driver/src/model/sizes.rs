//! The size limits of the specification (CSI spec, "Size limits").

use std::collections::HashMap;

use crate::error::{Error, Result};

/// Limit of a string.
pub(crate) const MAX_STRING_BYTES: usize = 128;
/// Limit of a node id (CSI spec, NodeGetInfo).
pub(crate) const MAX_NODE_ID_BYTES: usize = 256;
/// Limit of a map, keys and values together.
pub(crate) const MAX_MAP_BYTES: usize = 4096;

/// The error does not show the value: it may be a secret, and it is long.
pub(crate) fn bounded(field: &'static str, text: &str) -> Result<()> {
    bounded_by(field, text, MAX_STRING_BYTES)
}

pub(crate) fn bounded_by(field: &'static str, text: &str, most: usize) -> Result<()> {
    if text.len() <= most {
        return Ok(());
    }
    let value = format!("{} bytes", text.len());
    Err(Error::invalid(field, value, format!("at most {most} bytes are allowed")))
}

pub(crate) fn bounded_map(field: &'static str, map: &HashMap<String, String>) -> Result<()> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes <= MAX_MAP_BYTES {
        return Ok(());
    }
    let reason = format!("at most {MAX_MAP_BYTES} bytes of keys and values are allowed");
    Err(Error::invalid(field, format!("{bytes} bytes"), reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_the_specification_and_values_are_not_shown() {
        bounded("f", &"s".repeat(128)).unwrap();
        let message = bounded("f", &"s".repeat(129)).unwrap_err().to_string();
        assert_eq!(message, "f: \"129 bytes\": at most 128 bytes are allowed");
        let map = |bytes: usize| HashMap::from([("key".to_owned(), "s".repeat(bytes - 3))]);
        bounded_map("secrets", &map(4096)).unwrap();
        let message = bounded_map("secrets", &map(4097)).unwrap_err().to_string();
        assert!(message.starts_with("secrets: \"4097 bytes\""), "{message}");
    }
}
