//! The keys of portmap stand in docs/CNI.md.

#[path = "../../cni-plugin/tests/kit/documents.rs"]
mod documents;

use cni_plugin::conf::KeysAsked;

use crate::config::{Config, Purpose};

#[test]
fn the_document_has_the_keys_of_portmap() {
    let asked = KeysAsked::default();
    let call = documents::call(
        &asked,
        r#"{
            "cniVersion": "1.1.0",
            "name": "n",
            "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
        }"#,
    );
    Config::read(&call, Purpose::Keep).unwrap();
    documents::assert_section("portmap", &asked);
}
