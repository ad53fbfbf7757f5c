//! The keys of bridge stand in docs/CNI.md.

#[path = "../../cni-plugin/tests/kit/documents.rs"]
mod documents;

use cni_plugin::conf::KeysAsked;

use crate::config::Config;

#[test]
fn the_document_has_the_keys_of_bridge() {
    let asked = KeysAsked::default();
    let call = documents::call(
        &asked,
        r#"{
            "cniVersion": "1.1.0",
            "name": "n",
            "ipMasq": true,
            "ipam": {"type": "host-local"},
            "dns": {"domain": "d"},
            "args": {"cni": {"mac": "02:00:00:00:00:01"}},
            "runtimeConfig": {"mac": "02:00:00:00:00:02"}
        }"#,
    );
    Config::read(&call).unwrap();
    let call = documents::call(&asked, r#"{"name": "n", "vlanTrunk": [{"id": 7}]}"#);
    assert_eq!(Config::read(&call).unwrap_err().code, 2);
    documents::assert_section("bridge", &asked);
}
