//! Reads the configuration as the reference does: keys match case-insensitively, `null` means
//! absent, unknown keys are accepted. A value of the wrong type is an error that names the key and
//! the value; its code is the reference's, 999.
//!
//! A parser sees only the keys of its [`Keys`], a table that a test compares with docs/CNI.md.

use std::net::IpAddr;
use std::str::FromStr;

use ipnetwork::IpNetwork;
use serde_json::{Map, Value};

use crate::{CniError, Version, code, json};

/// All keys that a parser reads, each as a path: `ipam.ranges[][].subnet`; `[]` is an element of a
/// list.
pub type Keys = &'static [&'static str];

/// The keys of every configuration, with `prevResult` in its newest form.
pub const COMMON_KEYS: Keys = &[
    "name",
    "cniVersion",
    "prevResult.cniVersion",
    "prevResult.interfaces[].name",
    "prevResult.interfaces[].mac",
    "prevResult.interfaces[].mtu",
    "prevResult.interfaces[].sandbox",
    "prevResult.interfaces[].socketPath",
    "prevResult.interfaces[].pciID",
    "prevResult.ips[].address",
    "prevResult.ips[].gateway",
    "prevResult.ips[].interface",
    "prevResult.routes[].dst",
    "prevResult.routes[].gw",
    "prevResult.routes[].mtu",
    "prevResult.routes[].advmss",
    "prevResult.routes[].priority",
    "prevResult.routes[].table",
    "prevResult.routes[].scope",
    "prevResult.dns.nameservers",
    "prevResult.dns.domain",
    "prevResult.dns.search",
    "prevResult.dns.options",
    "cni.dev/valid-attachments[].containerID",
    "cni.dev/valid-attachments[].ifname",
    "cni.dev/attachments[].containerID",
    "cni.dev/attachments[].ifname",
];

/// An object in the configuration, with its path (`ipam.ranges[0]`).
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    /// `None`: `null`, which Go reads as an object without keys.
    map: Option<&'a Map<String, Value>>,
    path: String,
    /// `None`: every key may be read.
    keys: Option<Keys>,
}

impl<'a> Fields<'a> {
    /// All keys of an object. `path` is empty for the whole document.
    pub fn of(value: &'a Value, path: impl Into<String>) -> Result<Self, CniError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { map: Some(map), path, keys: None }),
            Value::Null => Ok(Self { map: None, path, keys: None }),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// The path of `key` of this object in the document.
    pub fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of `key`, unless it is absent, `null`, or may not be read.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        if !self.keys.is_none_or(|keys| is_among(keys, &self.path_of(key))) {
            return None;
        }
        let same = self.map?.iter().filter(|(written, _)| json::same_key(written, key));
        same.map(|(_, value)| value).rfind(|value| !value.is_null())
    }

    /// Whether the key is present, also with `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.is_some_and(|map| map.keys().any(|written| json::same_key(written, key)))
    }

    pub fn string(&self, key: &str) -> Result<Option<String>, CniError> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// An absent key is `false`.
    pub fn bool(&self, key: &str) -> Result<bool, CniError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn u32(&self, key: &str) -> Result<Option<u32>, CniError> {
        self.typed(key, "a number from 0 to 4294967295", |v| {
            v.as_u64().and_then(|number| u32::try_from(number).ok())
        })
    }

    /// Go's `int`, which excludes `1.0` and `1e3`.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, CniError> {
        self.typed(key, "a whole number", Value::as_i64)
    }

    /// An empty string means absent; an IPv4 address in IPv6 notation is that IPv4 address.
    pub fn ip(&self, key: &str) -> Result<Option<IpAddr>, CniError> {
        let Some(text) = self.string(key)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        match text.parse::<IpAddr>() {
            Ok(ip) => Ok(Some(ip.to_canonical())),
            Err(_) => Err(self.malformed(key, format_args!("invalid IP address: {text}"))),
        }
    }

    /// An address with its prefix length (`10.1.0.2/16`); unlike an address, it may not be empty.
    pub fn cidr(&self, key: &str) -> Result<Option<IpNetwork>, CniError> {
        let Some(text) = self.string(key)? else { return Ok(None) };
        let malformed = || self.malformed(key, format_args!("invalid CIDR address: {text}"));
        parse_cidr(&text).map(Some).ok_or_else(malformed)
    }

    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, CniError> {
        self.get(key).map(|value| self.part(value, self.path_of(key))).transpose()
    }

    /// The elements with their paths; an absent list is empty.
    pub fn array(&self, key: &str) -> Result<Vec<(String, &'a Value)>, CniError> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(value) => elements(value, &self.path_of(key)),
        }
    }

    pub fn objects(&self, key: &str) -> Result<Vec<Fields<'a>>, CniError> {
        self.array(key)?.into_iter().map(|(path, value)| self.part(value, path)).collect()
    }

    /// A list of lists of objects.
    pub fn object_lists(&self, key: &str) -> Result<Vec<Vec<Fields<'a>>>, CniError> {
        let list = |(path, list): (String, &'a Value)| {
            let items = elements(list, &path)?;
            items.into_iter().map(|(path, value)| self.part(value, path)).collect()
        };
        self.array(key)?.into_iter().map(list).collect()
    }

    /// A `null` element is an empty string.
    pub fn strings(&self, key: &str) -> Result<Vec<String>, CniError> {
        let text = |(path, value): (String, &Value)| match value {
            Value::String(text) => Ok(text.clone()),
            Value::Null => Ok(String::new()),
            other => Err(wrong(&path, "a string", other)),
        };
        self.array(key)?.into_iter().map(text).collect()
    }

    fn part(&self, value: &'a Value, path: String) -> Result<Fields<'a>, CniError> {
        Ok(Fields { keys: self.keys, ..Fields::of(value, path)? })
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

    /// The reference's message; the details have the path.
    fn malformed(&self, key: &str, msg: std::fmt::Arguments<'_>) -> CniError {
        CniError::internal(msg).with_details(self.path_of(key))
    }
}

/// Whether `path`, which has indices, is one of `keys` or leads to one.
fn is_among(keys: Keys, path: &str) -> bool {
    let mut is_index = false;
    let without_indices: String = path
        .chars()
        .filter(|c| {
            is_index &= *c != ']';
            let stays = !is_index;
            is_index |= *c == '[';
            stays
        })
        .collect();
    keys.iter().any(|key| {
        key.strip_prefix(&without_indices).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    })
}

/// The elements of an array with their paths (`ranges[1]`); `null` has none.
fn elements<'a>(value: &'a Value, path: &str) -> Result<Vec<(String, &'a Value)>, CniError> {
    match value {
        Value::Array(items) => {
            Ok(items.iter().enumerate().map(|(i, item)| (format!("{path}[{i}]"), item)).collect())
        }
        Value::Null => Ok(Vec::new()),
        other => Err(wrong(path, "a list", other)),
    }
}

/// An address with a decimal prefix length.
pub fn parse_cidr(text: &str) -> Option<IpNetwork> {
    let (_, prefix_len) = text.split_once('/')?;
    let decimal = !prefix_len.is_empty() && prefix_len.bytes().all(|byte| byte.is_ascii_digit());
    decimal.then(|| IpNetwork::from_str(text).ok()).flatten()
}

fn wrong(path: &str, wanted: &str, found: &Value) -> CniError {
    let what = if path.is_empty() { "the document" } else { path };
    CniError::internal(format_args!("{what}: expected {wanted}, found {}", shown(found)))
}

/// The beginning of a value, enough to recognize it.
fn shown(value: &Value) -> String {
    const MOST: usize = 100;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The part of the configuration that all plugins share, and the whole original text.
#[derive(Clone, Debug)]
pub struct NetConf {
    /// Not empty; starts with a letter or digit, which may be followed by `_`, `.` and `-` too.
    pub name: String,
    pub cni_version: Version,
    /// As received: delegates get the same bytes.
    pub stdin: Vec<u8>,
    document: Value,
}

impl NetConf {
    /// Parses and validates what the protocol itself needs. Checks the version last: in a newer
    /// configuration, only the version is wrong.
    pub fn parse(stdin: Vec<u8>) -> Result<Self, CniError> {
        let undecodable = |why: &dyn std::fmt::Display| {
            CniError::new(code::DECODING_FAILURE, format_args!("error unmarshall network config: {why}"))
        };
        let document = json::parse(&stdin).map_err(|e| match stdin.trim_ascii() {
            [] => undecodable(&e).with_details(
                "stdin: expected the configuration, one object with \"cniVersion\", \"name\" and \"type\", found nothing",
            ),
            _ => undecodable(&e),
        })?;
        let fields = Fields::of(&document, "").map_err(|e| undecodable(&e.msg))?;
        let name = fields.string("name").map_err(|e| undecodable(&e.msg))?.unwrap_or_default();
        if name.is_empty() {
            return Err(CniError::config("missing network name"));
        }
        if !crate::invocation::is_identifier(&name) {
            return Err(CniError::config("invalid characters found in network name").with_details(&name));
        }
        let version = fields.string("cniVersion").map_err(|e| {
            CniError::new(
                code::DECODING_FAILURE,
                format_args!("decoding version from network config: {}", e.msg),
            )
        })?;
        let version = version.filter(|text| !text.is_empty()).unwrap_or_else(|| Version::V0_1_0.to_string());
        let cni_version = Version::parse(&version).ok_or_else(|| {
            CniError::new(code::INCOMPATIBLE_CNI_VERSION, "incompatible CNI versions").with_details(
                format_args!("config is {version:?}, plugin supports {}", quoted(&Version::ALL)),
            )
        })?;
        Ok(Self { name, cni_version, stdin, document })
    }

    /// The whole configuration; a parser reads only these keys.
    pub fn fields(&self, keys: Keys) -> Fields<'_> {
        Fields { keys: Some(keys), ..self.all_fields() }
    }

    /// The whole configuration, for callers without a table.
    pub fn all_fields(&self) -> Fields<'_> {
        Fields { map: self.document.as_object(), path: String::new(), keys: None }
    }

    /// `ipam.type`; `None` if it is absent, which means layer 2 only.
    pub fn ipam_type(&self) -> Result<Option<String>, CniError> {
        let Some(ipam) = self.all_fields().object("ipam")? else { return Ok(None) };
        Ok(ipam.string("type")?.filter(|kind| !kind.is_empty()))
    }

    /// The result of the previous plugins in the chain, in the form of the configuration's version.
    pub fn prev_result(&self) -> Result<Option<crate::CniResult>, CniError> {
        let unreadable =
            |e: CniError| CniError { msg: format!("could not parse prevResult: {}", e.msg), ..e };
        let Some(fields) = self.all_fields().object("prevResult").map_err(unreadable)? else {
            return Ok(None);
        };
        crate::CniResult::from_prev_result(&fields, self.cni_version).map(Some).map_err(unreadable)
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
    fn an_empty_stdin_is_told_what_belongs_there() {
        for text in ["", " \n"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.code, code::DECODING_FAILURE);
            assert!(error.details.starts_with("stdin: expected the configuration"), "{error}");
        }
        assert_eq!(parse("{").unwrap_err().details, "");
    }

    #[test]
    fn keys_match_without_case_and_the_last_duplicate_wins() {
        let conf = parse(r#"{"NAME":"n","CniVersion":"1.0.0","mtu":1,"MTU":2,"x":null}"#).unwrap();
        assert_eq!((conf.name.as_str(), conf.cni_version), ("n", Version::V1_0_0));
        assert_eq!(conf.all_fields().u32("mtu").unwrap(), Some(2));
        assert_eq!(conf.all_fields().string("x").unwrap(), None);
    }

    #[test]
    fn a_wrong_type_names_key_and_value() {
        let conf = parse(r#"{"name":"n","ipam":{"ranges":[[{"subnet":7}]]}}"#).unwrap();
        let err = conf.all_fields().bool("name").unwrap_err();
        assert_eq!((err.code, err.msg.as_str()), (999, r#"name: expected true or false, found "n""#));
        let ipam = conf.all_fields().object("ipam").unwrap().unwrap();
        let range = ipam.object_lists("ranges").unwrap().remove(0).remove(0);
        let err = range.cidr("subnet").unwrap_err();
        assert_eq!(err.msg, "ipam.ranges[0][0].subnet: expected a string, found 7");
    }

    #[test]
    fn malformed_addresses_have_the_references_words_and_the_place() {
        let conf = parse(r#"{"name":"n","ipam":{"subnet":"10.1.2.0","gateway":"x","rangeEnd":""}}"#).unwrap();
        let ipam = conf.all_fields().object("ipam").unwrap().unwrap();
        let words = |err: CniError| (err.code, err.msg, err.details);
        assert_eq!(
            words(ipam.cidr("subnet").unwrap_err()),
            (999, "invalid CIDR address: 10.1.2.0".into(), "ipam.subnet".into())
        );
        assert_eq!(
            words(ipam.ip("gateway").unwrap_err()),
            (999, "invalid IP address: x".into(), "ipam.gateway".into())
        );
        assert_eq!(ipam.ip("rangeEnd").unwrap(), None);
        assert_eq!(ipam.cidr("rangeEnd").unwrap_err().msg, "invalid CIDR address: ");
    }

    #[test]
    fn numbers_are_gos_ints() {
        let conf = parse(r#"{"name":"n","a":-0,"b":1.0,"c":1e3,"d":9223372036854775808,"e":-7}"#).unwrap();
        let fields = conf.all_fields();
        assert_eq!((fields.i64("a").unwrap(), fields.i64("e").unwrap()), (Some(0), Some(-7)));
        for key in ["b", "c", "d"] {
            assert_eq!(fields.i64(key).unwrap_err().code, 999, "{key}");
        }
        assert_eq!(fields.i64("b").unwrap_err().msg, "b: expected a whole number, found 1.0");
    }

    #[test]
    fn null_is_a_document_a_list_and_an_element_without_content() {
        assert_eq!(parse("null").unwrap_err().msg, "missing network name");
        let conf = parse(r#"{"name":"n","l":[null,"x"],"o":[null],"n":null}"#).unwrap();
        assert_eq!(conf.all_fields().strings("l").unwrap(), ["", "x"]);
        assert_eq!(conf.all_fields().objects("o").unwrap()[0].string("x").unwrap(), None);
        assert!(conf.all_fields().array("n").unwrap().is_empty());
    }

    #[test]
    fn a_prev_result_has_the_shape_of_the_configurations_version() {
        let prev_result = |version: &str, prev: &str| {
            let text = format!(r#"{{"name":"n","cniVersion":"{version}","prevResult":{prev}}}"#);
            parse(&text).unwrap().prev_result().map(|result| result.unwrap().ips.len()).map_err(|e| e.msg)
        };
        let newest = r#"{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2/24"}]}"#;
        assert_eq!(prev_result("1.0.0", newest), Ok(1));
        assert_eq!(prev_result("0.2.0", r#"{"cniVersion":"","ip4":{"ip":"10.0.0.2/24"}}"#), Ok(1));
        assert_eq!(
            prev_result("0.4.0", newest).unwrap_err(),
            "could not parse prevResult: result type supports [0.3.0 0.3.1 0.4.0] but unmarshalled CNIVersion is \"1.1.0\""
        );
        assert_eq!(
            prev_result("0.2.0", newest).unwrap_err(),
            "could not parse prevResult: result type supports [ 0.1.0 0.2.0] but unmarshalled CNIVersion is \"1.1.0\""
        );
        assert_eq!(prev_result("1.1.0", "{}"), Ok(0));
    }

    #[test]
    fn only_keys_of_the_table_are_read() {
        const KEYS: Keys = &["ipam.ranges[][].subnet", "mtu"];
        let text = r#"{"name":"n","mtu":1,"vlan":2,"ipam":{"type":"x","ranges":[[],[{"subnet":"s","gateway":"g"}]]}}"#;
        let conf = parse(text).unwrap();
        let fields = conf.fields(KEYS);
        assert_eq!((fields.u32("mtu").unwrap(), fields.u32("vlan").unwrap()), (Some(1), None));
        assert_eq!((fields.string("name").unwrap(), fields.string("ipa").unwrap()), (None, None));
        let ipam = fields.object("ipam").unwrap().unwrap();
        assert_eq!(ipam.string("type").unwrap(), None);
        let range = ipam.object_lists("ranges").unwrap().remove(1).remove(0);
        assert_eq!(range.string("subnet").unwrap(), Some("s".to_owned()));
        assert_eq!(range.string("gateway").unwrap(), None);
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
