//! The keys that every plugin shares stand in docs/CNI.md.

#[path = "kit/documents.rs"]
mod documents;

use cni_plugin::ValidAttachments;
use cni_plugin::conf::KeysAsked;

#[test]
fn the_document_has_the_keys_of_every_configuration() {
    let asked = KeysAsked::default();
    let call = documents::call(
        &asked,
        r#"{
            "cniVersion": "1.1.0",
            "name": "n",
            "cni.dev/valid-attachments": [{"containerID": "c", "ifname": "eth0"}],
            "prevResult": {
                "cniVersion": "1.1.0",
                "interfaces": [{"name": "eth0"}],
                "ips": [{"address": "10.0.0.2/24"}],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dns": {"domain": "d"}
            }
        }"#,
    );
    ValidAttachments::read(&call.conf).unwrap();
    call.conf.prev_result().unwrap().unwrap();
    documents::assert_section(documents::COMMON, &asked);
    assert_eq!(asked.leaves(), documents::keys(documents::COMMON));
}
