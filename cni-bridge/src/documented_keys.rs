//! The keys of bridge are listed in docs/CNI.md, and are read.

use serde_json::json;
use tests::cni_keys::{assert_documented, assert_read};

use crate::keys::{KEYS, Keys, tests::call};

#[test]
fn the_document_has_the_keys_of_bridge_and_each_is_read() {
    assert_documented("bridge", KEYS);
    assert_read(KEYS, &json!({}), |configuration| {
        let call = call("n", "c", "eth0", &configuration.to_string());
        Keys::read(&call.conf).map(drop).map_err(|e| e.to_string())
    });
}
