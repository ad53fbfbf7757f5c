//! Each version of the specification: results, `prevResult`, and which verbs there are.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::scenario::{Call, Scenario, Verb, list};
use super::expected::leaves_links;
use super::networks::{bridge_plugin, dual, v4, with};

const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios: Vec<Scenario> = VERSIONS.into_iter().flat_map(of_version).collect();
    let without = |plugin: Value| json!({ "name": "net", "plugins": [plugin] });
    let keys = json!({ "isDefaultGateway": true });
    scenarios.extend([
        Scenario::new("version: none, bridge", without(bridge_plugin(&keys, &v4())))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("version: none, loopback", without(json!({ "type": "loopback" })))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("version: empty", list("", [bridge_plugin(&keys, &v4())])).add("c1").del("c1"),
        Scenario::new("version: unknown", list("9.0.0", [bridge_plugin(&keys, &v4())])).add("c1").del("c1"),
        Scenario::new("version: unknown, loopback", list("0.3.2", [json!({ "type": "loopback" })]))
            .add("c1")
            .del("c1"),
        Scenario::new("version: no version at all", list("one", [bridge_plugin(&keys, &v4())]))
            .add("c1")
            .del("c1"),
    ]);
    scenarios
}

fn of_version(version: &'static str) -> Vec<Scenario> {
    let dns = json!({ "isDefaultGateway": true, "dns": { "nameservers": ["10.1.0.1"], "search": ["s"] } });
    let routes = json!({ "routes": [{ "dst": "192.0.2.0/24", "priority": 7 }] });
    let portmap =
        json!({ "type": "portmap", "backend": "nftables", "capabilities": { "portMappings": true } });
    let verbs = |plugin: Value, what: &str| {
        let call = |verb| Call::new(verb, "c1");
        let valid = json!([{ "containerID": "c1", "ifname": "eth0" }]);
        Scenario::new(format!("version: {version}, {what}: every verb"), list(version, [plugin]))
            .call(call(Verb::Version))
            .call(call(Verb::Status))
            .add("c1")
            .check("c1")
            .call(call(Verb::Gc).valid(valid))
            .check("c1")
            .del("c1")
    };
    vec![
        verbs(json!({ "type": "loopback" }), "loopback").differs(shape_of_loopback(version)),
        verbs(json!({ "type": "host-local", "ipam": dual() }), "host-local"),
        verbs(bridge_plugin(&json!({ "isGateway": true }), &v4()), "bridge"),
        Scenario::new(
            format!("version: {version}, dual stack behind portmap"),
            list(version, [bridge_plugin(&dns, &with(&dual(), &routes)), portmap]),
        )
        .add("c1")
        .check("c1")
        .del("c1"),
        Scenario::new(format!("version: {version}, layer 2"), list(version, [json!({ "type": "bridge" })]))
            .add("c1")
            .del("c1")
            .differs(if version < "0.3.0" { leaves_links() } else { Vec::new() }),
    ]
}

/// The reference answers every version in the shape of 1.0.0.
fn shape_of_loopback(version: &str) -> Vec<Difference> {
    let at = |field: &str| Difference::new("loopback-shape", format!("3 ADD c1/loopback/stdout.{field}"));
    match version {
        "0.1.0" | "0.2.0" => vec![
            at("interfaces[0].mac").reference("00:00:00:00:00:00"),
            at("interfaces[0].name").reference("lo"),
            at("interfaces[0].sandbox").reference("/run/netns/c1"),
            at("ips[0].address").reference("127.0.0.1/8"),
            at("ips[0].interface").reference("0"),
            at("ips[1].address").reference("::1/128"),
            at("ips[1].interface").reference("0"),
            at("ip4.ip").ours("127.0.0.1/8"),
            at("ip6.ip").ours("::1/128"),
            at("dns").ours("{}"),
        ],
        "0.3.0" | "0.3.1" | "0.4.0" => {
            vec![at("dns").ours("{}"), at("ips[0].version").ours("4"), at("ips[1].version").ours("6")]
        }
        _ => Vec::new(),
    }
}
