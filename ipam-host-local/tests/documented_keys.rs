//! The keys of host-local stand in docs/CNI.md, and are read.

use cni_plugin::NetConf;
use ipam_host_local::{Config, KEYS, routes};
use serde_json::json;
use tests::cni_keys::{assert_documented, assert_read};

#[test]
fn the_document_has_the_keys_of_host_local_and_each_is_read() {
    assert_documented("host-local", KEYS);
    let base = json!({"name": "n", "ipam": {"subnet": "10.0.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]}});
    assert_read(KEYS, &base, |configuration| {
        let conf = NetConf::parse(configuration.to_string().into_bytes()).unwrap();
        let read = Config::read_for_status(&conf, "").and_then(|_config| routes(&conf));
        read.map(drop).map_err(|e| e.to_string())
    });
}
