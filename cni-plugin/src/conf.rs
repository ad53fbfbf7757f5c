//! Reading JSON the way the reference does: keys match without regard to case,
//! `null` is absent, unknown keys are tolerated, a later duplicate wins. A
//! value of the wrong type is an error that names the key and the value.

use std::net::IpAddr;
use std::str::FromStr;

use ipnetwork::IpNetwork;
use serde_json::{Map, Value};

use crate::{CniError, Version, code};

/// An object within the configuration; knows where it stands (`ipam.ranges[0]`).
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// `path` is empty for the whole document.
    pub fn of(value: &'a Value, path: impl Into<String>) -> Result<Self, CniError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// Where `key` of this object stands in the document.
    pub fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of `key` unless absent or `null`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let found = self.map.iter().rev().find(|(k, _)| k.eq_ignore_ascii_case(key)).map(|(_, v)| v);
        found.filter(|value| !value.is_null())
    }

    pub fn string(&self, key: &str) -> Result<Option<String>, CniError> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// Absent counts as `false`.
    pub fn bool(&self, key: &str) -> Result<bool, CniError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn u32(&self, key: &str) -> Result<Option<u32>, CniError> {
        self.typed(key, "a number from 0 to 4294967295", |v| {
            v.as_u64().and_then(|number| u32::try_from(number).ok())
        })
    }

    pub fn i64(&self, key: &str) -> Result<Option<i64>, CniError> {
        self.typed(key, "a whole number", Value::as_i64)
    }

    /// An empty string counts as absent.
    pub fn ip(&self, key: &str) -> Result<Option<IpAddr>, CniError> {
        Ok(self.typed(key, "an IP address", |v| optional(v, |text| text.parse().ok()))?.flatten())
    }

    /// An address with its prefix length (`10.1.0.2/16`). An empty string
    /// counts as absent.
    pub fn cidr(&self, key: &str) -> Result<Option<IpNetwork>, CniError> {
        Ok(self.typed(key, "an address in CIDR notation", |v| optional(v, parse_cidr))?.flatten())
    }

    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, CniError> {
        self.get(key).map(|value| Fields::of(value, self.path_of(key))).transpose()
    }

    /// The elements with their places; absent counts as empty.
    pub fn array(&self, key: &str) -> Result<Vec<(String, &'a Value)>, CniError> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(value) => elements(value, &self.path_of(key)),
        }
    }

    pub fn objects(&self, key: &str) -> Result<Vec<Fields<'a>>, CniError> {
        self.array(key)?.into_iter().map(|(path, value)| Fields::of(value, path)).collect()
    }

    pub fn strings(&self, key: &str) -> Result<Vec<String>, CniError> {
        self.array(key)?
            .into_iter()
            .map(|(path, value)| {
                value.as_str().map(str::to_owned).ok_or_else(|| wrong(&path, "a string", value))
            })
            .collect()
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CniError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.path_of(key), wanted, value))
    }
}

/// The elements of an array with their places (`ranges[1]`).
pub fn elements<'a>(value: &'a Value, path: &str) -> Result<Vec<(String, &'a Value)>, CniError> {
    match value {
        Value::Array(items) => {
            Ok(items.iter().enumerate().map(|(i, item)| (format!("{path}[{i}]"), item)).collect())
        }
        other => Err(wrong(path, "a list", other)),
    }
}

/// An address with a decimal prefix length.
pub fn parse_cidr(text: &str) -> Option<IpNetwork> {
    let (_, prefix_len) = text.split_once('/')?;
    let decimal = !prefix_len.is_empty() && prefix_len.bytes().all(|byte| byte.is_ascii_digit());
    decimal.then(|| IpNetwork::from_str(text).ok()).flatten()
}

fn optional<T>(value: &Value, parse: impl FnOnce(&str) -> Option<T>) -> Option<Option<T>> {
    match value.as_str()? {
        "" => Some(None),
        text => parse(text).map(Some),
    }
}

fn wrong(path: &str, wanted: &str, found: &Value) -> CniError {
    let what = if path.is_empty() { "the document" } else { path };
    CniError::config(format_args!("{what}: expected {wanted}, found {found}"))
}

/// The part of the configuration that is the same for all plugins, and the
/// whole of it as it came.
#[derive(Clone, Debug)]
pub struct NetConf {
    /// Non-empty, starts with a letter or digit, goes on with `_`, `.`, `-` too.
    pub name: String,
    pub cni_version: Version,
    /// As received: delegates get the same bytes.
    pub stdin: Vec<u8>,
    document: Value,
}

impl NetConf {
    /// Parses and checks what the protocol itself needs. The version comes
    /// last: it is the only thing wrong with a configuration of a newer one.
    pub(crate) fn parse(stdin: Vec<u8>) -> Result<Self, CniError> {
        let undecodable = |why: &dyn std::fmt::Display| {
            CniError::new(code::DECODING_FAILURE, format_args!("error unmarshall network config: {why}"))
        };
        let document: Value = serde_json::from_slice(&stdin).map_err(|e| undecodable(&e))?;
        let fields = Fields::of(&document, "").map_err(|e| undecodable(&e.msg))?;
        let name = fields.string("name").map_err(|e| undecodable(&e.msg))?.unwrap_or_default();
        if name.is_empty() {
            return Err(CniError::config("missing network name"));
        }
        if !crate::invocation::is_identifier(&name) {
            return Err(CniError::config("invalid characters found in network name").with_details(&name));
        }
        let asked = fields.string("cniVersion").map_err(|e| {
            CniError::new(
                code::DECODING_FAILURE,
                format_args!("decoding version from network config: {}", e.msg),
            )
        })?;
        let asked =
            asked.filter(|version| !version.is_empty()).unwrap_or_else(|| Version::V0_1_0.to_string());
        let cni_version = Version::parse(&asked).ok_or_else(|| {
            CniError::new(code::INCOMPATIBLE_CNI_VERSION, "incompatible CNI versions")
                .with_details(format_args!("config is {asked:?}, plugin supports {}", quoted(&Version::ALL)))
        })?;
        Ok(Self { name, cni_version, stdin, document })
    }

    /// The whole configuration.
    pub fn fields(&self) -> Fields<'_> {
        match &self.document {
            Value::Object(map) => Fields { map, path: String::new() },
            _ => unreachable!("parse() accepts objects only"),
        }
    }

    /// `ipam.type`; `None` when there is none, which means layer 2 only.
    pub fn ipam_type(&self) -> Result<Option<String>, CniError> {
        let Some(ipam) = self.fields().object("ipam")? else { return Ok(None) };
        Ok(ipam.string("type")?.filter(|kind| !kind.is_empty()))
    }

    /// The result of the plugins before this one in the chain.
    pub fn prev_result(&self) -> Result<Option<crate::CniResult>, CniError> {
        let Some(value) = self.fields().get("prevResult") else { return Ok(None) };
        crate::CniResult::from_json(value, self.cni_version).map(Some)
    }
}

/// `["0.3.1" "0.4.0"]`, as the reference prints lists of strings.
fn quoted(versions: &[Version]) -> String {
    let each: Vec<String> = versions.iter().map(|version| format!("{:?}", version.as_str())).collect();
    format!("[{}]", each.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NetConf, CniError> {
        NetConf::parse(text.as_bytes().to_vec())
    }

    #[test]
    fn keys_match_without_case_and_the_last_duplicate_wins() {
        let conf = parse(r#"{"NAME":"n","CniVersion":"1.0.0","mtu":1,"MTU":2,"x":null}"#).unwrap();
        assert_eq!((conf.name.as_str(), conf.cni_version), ("n", Version::V1_0_0));
        assert_eq!(conf.fields().u32("mtu").unwrap(), Some(2));
        assert_eq!(conf.fields().string("x").unwrap(), None);
    }

    #[test]
    fn a_wrong_type_names_key_and_value() {
        let conf = parse(r#"{"name":"n","ipam":{"ranges":[[{"subnet":7}]]}}"#).unwrap();
        let err = conf.fields().bool("name").unwrap_err();
        assert_eq!((err.code, err.msg.as_str()), (7, r#"name: expected true or false, found "n""#));
        let ipam = conf.fields().object("ipam").unwrap().unwrap();
        let (path, set) = ipam.array("ranges").unwrap().remove(0);
        let (path, range) = elements(set, &path).unwrap().remove(0);
        let err = Fields::of(range, path).unwrap().cidr("subnet").unwrap_err();
        assert_eq!(err.msg, "ipam.ranges[0][0].subnet: expected an address in CIDR notation, found 7");
    }

    #[test]
    fn the_protocol_fields_are_checked_in_the_reference_order() {
        let failure = |text: &str| {
            let err = parse(text).unwrap_err();
            (err.code, err.msg, err.details)
        };
        assert_eq!(failure("{").0, 6);
        assert_eq!(failure("[]").0, 6);
        assert_eq!(failure("{}"), (7, "missing network name".into(), String::new()));
        assert_eq!(failure(r#"{"name":"a/b"}"#).1, "invalid characters found in network name");
        let (code, msg, details) = failure(r#"{"name":"a","cniVersion":"9.0.0"}"#);
        assert_eq!((code, msg.as_str()), (1, "incompatible CNI versions"));
        assert_eq!(
            details,
            r#"config is "9.0.0", plugin supports ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#
        );
        assert_eq!(parse(r#"{"name":"a"}"#).unwrap().cni_version, Version::V0_1_0);
    }

    #[test]
    fn cidr_needs_a_decimal_prefix_and_keeps_host_bits() {
        assert_eq!(parse_cidr("10.1.0.2/16").unwrap().to_string(), "10.1.0.2/16");
        assert_eq!(parse_cidr("10.1.0.2"), None);
        assert_eq!(parse_cidr("10.1.0.0/255.255.0.0"), None);
        assert_eq!(parse_cidr("10.1.0.0/33"), None);
    }
}
