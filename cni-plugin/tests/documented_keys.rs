//! The keys that every plugin shares stand in docs/CNI.md, and are read.

use cni_plugin::conf::COMMON_KEYS;
use cni_plugin::{CniResult, NetConf, ValidAttachments, Version};
use serde_json::{Value, json};
use tests::cni_keys::{assert_documented, assert_read};

fn read(configuration: &Value) -> Result<(), String> {
    let conf = NetConf::parse(configuration.to_string().into_bytes()).map_err(|e| e.to_string())?;
    conf.prev_result().map_err(|e| e.to_string())?;
    ValidAttachments::read(&conf).map(drop).map_err(|e| e.to_string())
}

#[test]
fn the_document_has_the_keys_of_every_configuration_and_each_is_read() {
    assert_documented("Keys of every configuration", COMMON_KEYS);
    let mut base = json!({
        "cniVersion": "1.1.0",
        "name": "n",
        "prevResult": {"ips": [{"address": "10.0.0.2/24"}], "routes": [{"dst": "0.0.0.0/0"}]}
    });
    let (old, others): (Vec<&str>, Vec<&str>) =
        COMMON_KEYS.iter().partition(|key| key.starts_with("cni.dev/attachments"));
    base["cni.dev/attachments"] = json!([{"containerID": "c", "ifname": "eth0"}]);
    assert_read(&old, &base, read);
    base["cni.dev/valid-attachments"] = json!([{"containerID": "c", "ifname": "eth0"}]);
    assert_read(&others, &base, read);
}

#[test]
fn the_keys_of_a_prev_result_are_those_of_a_whole_result() {
    let whole = json!({
        "cniVersion": "1.1.0",
        "interfaces": [{
            "name": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1500, "sandbox": "/n", "socketPath": "/s", "pciID": "p"
        }],
        "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 0}],
        "routes": [{
            "dst": "0.0.0.0/0", "gw": "10.0.0.1", "mtu": 1, "advmss": 1, "priority": 1, "table": 1, "scope": 0
        }],
        "dns": {"nameservers": ["10.0.0.1"], "domain": "d", "search": ["s"], "options": ["o"]}
    });
    let written = CniResult::from_json(&whole, Version::V1_1_0).unwrap().to_json(Version::V1_1_0).unwrap();
    assert_eq!(written, whole);
    let mut keys = Vec::new();
    leaves(&written, "prevResult", &mut keys);
    let mut of_table: Vec<&str> =
        COMMON_KEYS.iter().copied().filter(|key| key.starts_with("prevResult.")).collect();
    keys.sort();
    of_table.sort_unstable();
    assert_eq!(keys, of_table);
}

fn leaves(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, value)| leaves(value, &format!("{path}.{key}"), found));
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            items.iter().for_each(|item| leaves(item, &format!("{path}[]"), found));
        }
        _ => found.push(path.to_owned()),
    }
}
