//! The networks that both sides serve on one node, at the newest version, which
//! has GC and STATUS.

use serde_json::{Value, json};

use super::super::mixed::Shared;
use super::super::scenario::list;
use super::super::world::Filters;
use super::networks::{bridge_plugin, dual, v4};

pub(in super::super) fn shared() -> Vec<Shared> {
    let of = |name, plugins: Vec<Value>| Shared {
        name,
        network: list("1.1.0", plugins),
        filters: Filters::Nft,
        ports: false,
        reference_checks: true,
    };
    let mapped = |name, keys: Value, backend: &str, ipam: &Value| {
        let portmap =
            json!({ "type": "portmap", "backend": backend, "capabilities": { "portMappings": true } });
        Shared { ports: true, ..of(name, vec![bridge_plugin(&keys, ipam), portmap]) }
    };
    let masquerading =
        |backend: &str| json!({ "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": backend });
    vec![
        of("mixed: addresses alone", vec![bridge_plugin(&json!({ "isGateway": true }), &v4())]),
        Shared {
            // "no plugin name provided"; and its bridge changes its hardware address with its ports.
            reference_checks: false,
            ..of("mixed: layer 2", vec![json!({ "type": "bridge" })])
        },
        of(
            "mixed: macspoofchk",
            vec![bridge_plugin(&json!({ "isGateway": true, "macspoofchk": true }), &v4())],
        ),
        of("mixed: ipMasq iptables", vec![bridge_plugin(&masquerading("iptables"), &dual())]),
        mapped("mixed: ipMasq and ports, nftables", masquerading("nftables"), "nftables", &dual()),
        mapped("mixed: ipMasq and ports, iptables", masquerading("iptables"), "iptables", &v4()),
        Shared {
            filters: Filters::Legacy,
            ..mapped("mixed: ipMasq and ports, iptables of old", masquerading("iptables"), "iptables", &v4())
        },
        mapped(
            "mixed: no backend named",
            json!({ "isDefaultGateway": true, "ipMasq": true }),
            "nftables",
            &v4(),
        ),
    ]
}
