//! The keys of host-local stand in docs/CNI.md.

#[path = "../../cni-plugin/tests/kit/documents.rs"]
mod documents;

use cni_plugin::conf::KeysAsked;
use ipam_host_local::{Config, routes};

#[test]
fn the_document_has_the_keys_of_host_local() {
    let asked = KeysAsked::default();
    let call = documents::call(
        &asked,
        r#"{
            "cniVersion": "1.1.0",
            "name": "n",
            "ipam": {
                "subnet": "10.0.0.0/24",
                "ranges": [[{"subnet": "10.0.1.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}]
            },
            "args": {"cni": {"ips": ["10.0.0.2"]}},
            "runtimeConfig": {"ips": ["10.0.1.2"], "ipRanges": [[{"subnet": "10.0.2.0/24"}]]}
        }"#,
    );
    Config::read(&call.conf, &call.args).unwrap();
    routes(&call.conf).unwrap();
    documents::assert_section("host-local", &asked);
}
