//! Whatever a runtime, a person or a broken disk puts before a plugin: an
//! answer, never a panic; and what is read is what was written.

use cni_plugin::conf::Fields;
use cni_plugin::{CniResult, NetConf, ValidAttachments, Version, args};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value};

/// Keys that mean something somewhere, and some that do not.
const KEYS: [&str; 24] = [
    "name",
    "cniVersion",
    "ipam",
    "type",
    "ranges",
    "subnet",
    "prevResult",
    "interfaces",
    "ips",
    "address",
    "routes",
    "dst",
    "dns",
    "nameservers",
    "ip4",
    "ip",
    "gateway",
    "mtu",
    "runtimeConfig",
    "args",
    "cni",
    "scope",
    "cni.dev/valid-attachments",
    "other",
];
const TEXTS: [&str; 10] = [
    "",
    "n",
    "1.1.0",
    "0.2.0",
    "0.3.1",
    "10.0.0.2/24",
    "fd00::/64",
    "10.0.0.1",
    "::ffff:10.0.0.1",
    "\u{212a}\u{0}",
];

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        proptest::sample::select(&TEXTS[..]).prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, |inner| {
        let key = prop_oneof![proptest::sample::select(&KEYS[..]).prop_map(str::to_owned), ".{0,6}"];
        let object =
            vec((key, inner.clone()), 0..6).prop_map(|pairs| Value::Object(pairs.into_iter().collect()));
        prop_oneof![object, vec(inner, 0..4).prop_map(Value::from)]
    })
}

/// A configuration that the protocol's own part accepts, with anything in it.
fn any_configuration() -> impl Strategy<Value = String> {
    let version = proptest::sample::select(&Version::ALL[..]);
    let keys = vec((proptest::sample::select(&KEYS[..]), any_value()), 0..8);
    (version, keys).prop_map(|(version, keys)| {
        let mut object: Map<String, Value> =
            keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        object.insert("name".to_owned(), "n".into());
        object.insert("cniVersion".to_owned(), version.as_str().into());
        Value::Object(object).to_string()
    })
}

/// Asks for every key as everything.
fn ask_for_everything(fields: &Fields<'_>) {
    for key in KEYS {
        drop((fields.string(key), fields.bool(key), fields.u32(key), fields.i64(key)));
        drop((fields.ip(key), fields.cidr(key), fields.strings(key), fields.array(key)));
        drop((fields.objects(key), fields.object_lists(key)));
        if let Ok(Some(inner)) = fields.object(key) {
            ask_for_everything(&inner);
        }
    }
}

fn read_everything(conf: &NetConf) {
    ask_for_everything(&conf.all_fields());
    drop((conf.prev_result(), conf.ipam_type(), ValidAttachments::read(conf)));
}

proptest! {
    #[test]
    fn no_bytes_make_a_plugin_panic(bytes in vec(any::<u8>(), 0..400)) {
        if let Ok(conf) = NetConf::parse(bytes) {
            read_everything(&conf);
        }
    }

    #[test]
    fn no_configuration_makes_a_plugin_panic(text in any_configuration()) {
        read_everything(&NetConf::parse(text.into_bytes()).unwrap());
    }

    #[test]
    fn a_torn_configuration_is_an_error(text in any_configuration(), at in any::<prop::sample::Index>()) {
        let at = at.index(text.len());
        let error = NetConf::parse(text.as_bytes()[..at].to_vec()).unwrap_err();
        prop_assert_eq!(error.code, 6);
    }

    #[test]
    fn a_flipped_byte_makes_nothing_panic(text in any_configuration(), at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = text.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(conf) = NetConf::parse(bytes) {
            read_everything(&conf);
        }
    }

    #[test]
    fn the_case_of_a_key_does_not_matter(key in "[a-zA-Z]{1,12}", upper in vec(any::<bool>(), 12), value: i64) {
        let cased = |c: char, up: bool| if up { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() };
        let written: String = key.chars().zip(upper).map(|(c, up)| cased(c, up)).collect();
        prop_assume!(!["name", "cniversion"].contains(&written.to_lowercase().as_str()));
        let text = format!(r#"{{"name":"n","{written}":{value}}}"#);
        let conf = NetConf::parse(text.into_bytes()).unwrap();
        prop_assert_eq!(conf.all_fields().i64(&key).unwrap(), Some(value));
    }

    #[test]
    fn a_prev_result_is_read_as_a_result(value in any_value(), version in proptest::sample::select(&Version::ALL[..])) {
        let Ok(result) = CniResult::from_json(&value, version) else { return Ok(()) };
        let Ok(written) = result.to_json(version) else { return Ok(()) };
        let text = format!(r#"{{"name":"n","cniVersion":"{version}","prevResult":{written}}}"#);
        let conf = NetConf::parse(text.into_bytes()).unwrap();
        prop_assert_eq!(conf.prev_result().unwrap().unwrap().to_json(version), Ok(written));
    }

    #[test]
    fn no_cni_args_panic(text in ".{0,60}") {
        drop(args::parse(&text, ["MAC", "IP"]));
    }

    #[test]
    fn the_last_value_of_each_cni_arg_counts(
        pairs in vec((proptest::sample::select(&["MAC", "IP", "K8S_POD_NAME"][..]), "[^=;]{0,8}"), 0..6),
    ) {
        let text: String = pairs.iter().map(|(key, value)| format!("{key}={value};")).collect();
        let [mac, ip] = args::parse(&format!("{text}IgnoreUnknown=1"), ["MAC", "IP"]).unwrap();
        let last = |key: &str| pairs.iter().rfind(|(k, _)| *k == key).map(|(_, value)| value.clone());
        prop_assert_eq!((mac, ip), (last("MAC"), last("IP")));
    }
}
