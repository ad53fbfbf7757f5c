//! Configuration of programs: ConfigMap and Secret.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Kind, ObjectMeta, null_as_default, object};

/// The values of one object, in bytes (kubernetes, pkg/apis/core: `MaxSecretSize`; keys do not count).
pub const MAX_CONFIGURATION_BYTES: usize = 1 << 20;

/// The type of a Secret that names none.
const OPAQUE: &str = "Opaque";

/// The content of a key: base64 with padding in JSON, as Kubernetes writes `[]byte`.
///
/// It may be a secret, so `Debug` prints the length only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut text = String::deserialize(deserializer)?;
        // As in Go's encoding/base64: a value may be wrapped.
        text.retain(|letter| !matches!(letter, '\r' | '\n'));
        let decoded = STANDARD.decode(text);
        // The decoder's own message contains a byte of what may be a secret.
        decoded.map(Self).map_err(|_| serde::de::Error::custom("Invalid value: must be base64 with padding"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMap {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub data: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub binary_data: BTreeMap<String, Bytes>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub immutable: bool,
}

object!(ConfigMap, Kind::ConfigMap);

impl ConfigMap {
    /// Every key with its content, in order.
    pub fn entries(&self) -> BTreeMap<&str, &[u8]> {
        let texts = self.data.iter().map(|(key, text)| (key.as_str(), text.as_bytes()));
        texts.chain(self.binary_data.iter().map(|(key, bytes)| (key.as_str(), bytes.0.as_slice()))).collect()
    }
}

/// `Debug` prints keys and lengths, never values.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    #[serde(default, rename = "type", deserialize_with = "null_as_default")]
    pub secret_type: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub data: BTreeMap<String, Bytes>,
    /// Only written by clients: `take_string_data` moves it to `data`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_as_default")]
    pub string_data: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not", deserialize_with = "null_as_default")]
    pub immutable: bool,
}

object!(Secret, Kind::Secret);

impl Secret {
    /// Moves `string_data` to `data`, where it wins, and names the type of a Secret without one.
    pub(crate) fn take_string_data(&mut self) {
        let texts = std::mem::take(&mut self.string_data);
        self.data.extend(texts.into_iter().map(|(key, text)| (key, Bytes(text.into_bytes()))));
        if self.secret_type.is_empty() {
            OPAQUE.clone_into(&mut self.secret_type);
        }
    }

    /// Every key with its content, in order.
    pub fn entries(&self) -> BTreeMap<&str, &[u8]> {
        self.data.iter().map(|(key, bytes)| (key.as_str(), bytes.0.as_slice())).collect()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret")
            .field("namespace", &self.metadata.namespace)
            .field("name", &self.metadata.name)
            .field("type", &self.secret_type)
            .field("data", &self.data)
            .field("string_data", &self.string_data.keys())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn secret(more: serde_json::Value) -> serde_json::Result<Secret> {
        let mut whole = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}});
        whole.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        from_value(whole)
    }

    #[test]
    fn string_data_wins_over_data_and_is_not_kept() {
        let mut secret =
            secret(json!({"data": {"a": "b2xk", "b": "AP8="}, "stringData": {"a": "new"}})).unwrap();
        secret.take_string_data();
        assert_eq!(secret.entries(), BTreeMap::from([("a", &b"new"[..]), ("b", &[0, 0xff])]));
        assert_eq!((secret.secret_type.as_str(), secret.string_data.len()), ("Opaque", 0));
        let written = serde_json::to_value(&secret).unwrap();
        assert_eq!(written["data"], json!({"a": "bmV3", "b": "AP8="}));
    }

    #[test]
    fn no_message_about_a_secret_contains_its_values() {
        let secret = secret(json!({"data": {"key": "aHVzaA=="}, "stringData": {"other": "hush"}})).unwrap();
        let shown = format!("{secret:?}");
        assert!(shown.contains("key") && shown.contains("4 bytes") && !shown.contains("hush"), "{shown}");
        let error = serde_json::from_value::<Bytes>(json!("hush!")).unwrap_err().to_string();
        assert_eq!(error, "Invalid value: must be base64 with padding");
    }

    #[test]
    fn wrapped_base64_is_read_as_kubernetes_reads_it() {
        assert_eq!(from_value::<Bytes>(json!("aGVs\nbG8=\r\n")).unwrap(), Bytes(b"hello".to_vec()));
        from_value::<Bytes>(json!("aGVs bG8=")).unwrap_err();
    }
}
