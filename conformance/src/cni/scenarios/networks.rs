//! The networks that scenarios are written with.

use serde_json::{Value, json};

use super::super::scenario::network;

/// `base` with `keys` on top.
pub(super) fn with(base: &Value, keys: &Value) -> Value {
    let mut merged = base.clone();
    for (key, value) in keys.as_object().into_iter().flatten() {
        merged[key] = value.clone();
    }
    merged
}

pub(super) fn v4() -> Value {
    json!({ "type": "host-local", "subnet": "10.1.0.0/24" })
}

pub(super) fn v6() -> Value {
    json!({ "type": "host-local", "subnet": "fd00:1::/64" })
}

pub(super) fn dual() -> Value {
    json!({ "type": "host-local", "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "fd00:1::/64" }]] })
}

/// The configuration of a `bridge` with `keys` and this `ipam`.
pub(super) fn bridge_plugin(keys: &Value, ipam: &Value) -> Value {
    with(&json!({ "type": "bridge", "ipam": ipam }), keys)
}

/// A network of that plugin alone.
pub(super) fn bridge(keys: &Value, ipam: &Value) -> Value {
    network(bridge_plugin(keys, ipam))
}

/// host-local as a runtime never calls it: alone.
pub(super) fn host_local(ipam: &Value) -> Value {
    network(json!({ "type": "host-local", "ipam": with(&json!({ "type": "host-local" }), ipam) }))
}

/// `network` in another version of the specification.
pub(super) fn at_version(network: &Value, version: &str) -> Value {
    with(network, &json!({ "cniVersion": version }))
}
