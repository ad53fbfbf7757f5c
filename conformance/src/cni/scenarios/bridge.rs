//! `bridge`: every key, with addresses of host-local and without.

use serde_json::json;

use super::super::differences::Difference;
use super::super::probe::Probe;
use super::super::scenario::{Scenario, Step, add, check, del, network};
use super::expected::{
    asked_ipam, del_leaves_veth, learns_no_link_local, leaves_bridge, leaves_links, leaves_veth, says,
    succeeds,
};
use super::networks::{bridge, dual, v4, v6, with};

pub(super) fn scenarios() -> Vec<Scenario> {
    [links(), gateways(), addresses(), routes(), isolation()].concat()
}

/// What the links are like.
fn links() -> Vec<Scenario> {
    vec![
        Scenario::new("bridge: nothing but addresses", bridge(&json!({}), &v4()))
            .add("c1")
            .check("c1")
            .add("c2")
            .del("c1")
            .del("c1")
            .del("c2"),
        // The reference's bridge has the lowest hardware address of its ports.
        Scenario::new("bridge: CHECK after another port came", bridge(&json!({}), &v4()))
            .add("c1")
            .ip(
                "host",
                "link add low0 address 02:00:00:00:00:01 type veth peer name low1\nlink set low0 master cni0 up",
            )
            .check("c1")
            .del("c1")
            .differs([
                succeeds(
                    "bridge-mac",
                    "3 CHECK c1/bridge",
                    "999: Bridge interface cni0 Mac doesn't match: <mac host.<veth c1.eth0>>",
                ),
                Difference::new("bridge-mac", "* c1/host/link/cni0/address")
                    .reference("02:00:00:00:00:01")
                    .ours("<mac host.cni0>"),
            ]),
        Scenario::new("bridge: another name", bridge(&json!({ "bridge": "other0" }), &v4())).add("c1").del("c1"),
        Scenario::new("bridge: layer 2", network(json!({ "type": "bridge" }))).add("c1").check("c1").del("c1")
            .differs([succeeds("check-layer-2", "2 CHECK c1/bridge", "999: no plugin name provided")]),
        Scenario::new("bridge: mtu", bridge(&json!({ "mtu": 1400, "isGateway": true }), &dual()))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: an existing bridge keeps its mtu", bridge(&json!({ "mtu": 1400 }), &v4()))
            .ip("host", "link add cni0 mtu 1450 type bridge")
            .add("c1")
            .del("c1"),
        Scenario::new("bridge: hairpinMode", bridge(&json!({ "hairpinMode": true, "isGateway": true }), &v4()))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: promiscMode", bridge(&json!({ "promiscMode": true }), &v4()))
            .add("c1")
            .check("c1")
            .ip("host", "link set cni0 promisc off")
            .check("c1")
            .del("c1"),
        Scenario::new(
            "bridge: promiscMode and hairpinMode",
            bridge(&json!({ "promiscMode": true, "hairpinMode": true }), &v4()),
        )
        .add("c1")
        .del("c1"),
        Scenario::new("bridge: the name is taken by no bridge", bridge(&json!({}), &v4()))
            .ip("host", "link add cni0 type veth peer name peer0")
            .add("c1")
            .del("c1")
            .differs(asked_ipam()),
        Scenario::new("bridge: a second interface", bridge(&json!({ "isGateway": true }), &dual()))
            .add("c1")
            .call(add("c1").ifname("net1"))
            .check("c1")
            .call(check("c1").ifname("net1"))
            .del("c1")
            .call(check("c1").ifname("net1"))
            .call(del("c1").ifname("net1")),
        Scenario::new("bridge: an interface of that name exists", bridge(&json!({}), &v4()))
            .ip("c1", "link add eth0 type veth peer name peer0")
            .add("c1")
            .del("c1")
            .differs([leaves_bridge("cni0")]),
        Scenario::new("bridge: ADD twice", bridge(&json!({ "isGateway": true }), &v4())).add("c1").add("c1").del("c1"),
        Scenario::new("bridge: args.cni.mac", bridge(&json!({ "args": { "cni": { "mac": "c2:11:22:33:44:01" } } }), &v4()))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: MAC of CNI_ARGS", network(json!({ "type": "bridge" })))
            .call(add("c1").args("MAC=c2:11:22:33:44:02"))
            .call(del("c1").args("MAC=c2:11:22:33:44:02")),
        Scenario::new("bridge: MAC of CNI_ARGS, unknown to host-local", bridge(&json!({}), &v4()))
            .call(add("c1").args("MAC=c2:11:22:33:44:02"))
            .call(del("c1").args("MAC=c2:11:22:33:44:02"))
            .differs(leaves_links()),
        Scenario::new("bridge: MAC of CNI_ARGS, IgnoreUnknown", bridge(&json!({}), &v4()))
            .call(add("c1").args("IgnoreUnknown=1;MAC=c2:11:22:33:44:02;K8S_POD_NAME=web"))
            .check("c1")
            .call(del("c1").args("IgnoreUnknown=1;MAC=c2:11:22:33:44:02")),
        Scenario::new(
            "bridge: mac of the runtime before args.cni before CNI_ARGS",
            bridge(&json!({ "capabilities": { "mac": true }, "args": { "cni": { "mac": "c2:11:22:33:44:01" } } }), &v4()),
        )
        .call(add("c1").args("IgnoreUnknown=true;MAC=c2:11:22:33:44:02").runtime(json!({ "mac": "c2:11:22:33:44:03" })))
        .call(add("c2").args("IgnoreUnknown=true;MAC=c2:11:22:33:44:02"))
        .del("c1")
        .del("c2"),
        Scenario::new("bridge: a mac that is none", bridge(&json!({ "args": { "cni": { "mac": "c2:11" } } }), &v4()))
            .add("c1")
            .del("c1")
            .differs([leaves_bridge("cni0")]),
        Scenario::new("bridge: enabledad", bridge(&json!({ "enabledad": true, "isGateway": true }), &v6()))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new(
            "bridge: disableContainerInterface",
            network(json!({ "type": "bridge", "disableContainerInterface": true })),
        )
        .add("c1")
        .del("c1"),
        Scenario::new(
            "bridge: disableContainerInterface with ipam",
            bridge(&json!({ "disableContainerInterface": true }), &v4()),
        )
        .add("c1")
        .del("c1"),
        Scenario::new("bridge: dns", bridge(&json!({ "dns": { "nameservers": ["10.1.0.1"], "domain": "d", "search": ["s"], "options": ["o"] } }), &v4()))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new(
            "bridge: dns over ipam's resolvConf",
            bridge(&json!({ "dns": { "search": ["s"] } }), &with(&v4(), &json!({ "resolvConf": "/run/suite/resolv.conf" }))),
        )
        .step(Step::File("/run/suite/resolv.conf".to_owned(), "nameserver 192.0.2.1\nsearch a b\n".to_owned()))
        .add("c1")
        .del("c1"),
    ]
}

/// Addresses of the bridge itself.
fn gateways() -> Vec<Scenario> {
    vec![
        Scenario::new("bridge: isGateway", bridge(&json!({ "isGateway": true }), &v4()))
            .add("c1")
            .probe(Probe::tcp("host", "10.1.0.2:80", "c1").sees("10.1.0.1"))
            .probe(Probe::tcp("c1", "10.1.0.1:80", "host").sees("10.1.0.2"))
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: isGateway v6", bridge(&json!({ "isGateway": true }), &v6()))
            .add("c1")
            .probe(Probe::tcp("host", "[fd00:1::2]:80", "c1").sees("fd00:1::1"))
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: isDefaultGateway, dual stack", bridge(&json!({ "isDefaultGateway": true }), &dual()))
            .add("c1")
            .add("c2")
            .probe(Probe::tcp("c1", "10.1.0.3:80", "c2").sees("10.1.0.2"))
            .probe(Probe::udp("c1", "[fd00:1::3]:53", "c2").sees("fd00:1::2"))
            .probe(Probe::tcp("c1", "203.0.113.2:80", "outside").sees("10.1.0.2"))
            .probe(Probe::tcp("outside", "[fd00:1::2]:80", "c1").sees("2001:db8:f::2"))
            .check("c1")
            .del("c1")
            .check("c2")
            .del("c2"),
        Scenario::new("bridge: isDefaultGateway with a default route of ipam", bridge(
            &json!({ "isDefaultGateway": true }),
            &with(&v4(), &json!({ "routes": [{ "dst": "0.0.0.0/0", "gw": "10.1.0.7" }] })),
        ))
        .add("c1")
        .check("c1")
        .del("c1"),
        Scenario::new("bridge: isDefaultGateway with a default route without gateway", bridge(
            &json!({ "isDefaultGateway": true }),
            &with(&v4(), &json!({ "routes": [{ "dst": "0.0.0.0/0" }] })),
        ))
        .add("c1")
        .check("c1")
        .del("c1")
            .differs(leaves_links()).differs([says(
                "own-words",
                "1 ADD c1/bridge",
                "999: failed to add route '{0.0.0.0 00000000000000000000ffff00000000} via 10.1.0.1 dev eth0 metric 0 (Scope: universe, Table: 0)': file exists",
                "999: failed to add route '0.0.0.0/0 via 10.1.0.1 dev eth0': file exists",
            )]),
        Scenario::new("bridge: a gateway of ipam", bridge(
            &json!({ "isGateway": true }),
            &with(&v4(), &json!({ "gateway": "10.1.0.254" })),
        ))
        .add("c1")
        .check("c1")
        .del("c1"),
        Scenario::new("bridge: the address is there already", bridge(&json!({ "isGateway": true }), &dual()))
            .ip("host", "link add cni0 type bridge\naddr add 10.1.0.1/24 dev cni0\naddr add fd00:1::1/64 dev cni0 nodad\nlink set cni0 up")
            .add("c1")
            .del("c1"),
        Scenario::new("bridge: another address in the way", bridge(&json!({ "isGateway": true }), &v4()))
            .ip("host", "link add cni0 type bridge\naddr add 10.9.0.1/24 dev cni0\nlink set cni0 up")
            .add("c1")
            .del("c1")
            .differs(leaves_veth("c1")).differs([Difference::new("atomic-add", "2 ADD c1/host/link/cni0/address").reference("<mac host.<veth c1.eth0>>").ours("00:00:00:00:00:00")]),
        Scenario::new("bridge: forceAddress", bridge(&json!({ "isGateway": true, "forceAddress": true }), &v4()))
            .ip("host", "link add cni0 type bridge\naddr add 10.9.0.1/24 dev cni0\nlink set cni0 up")
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: another v6 network is not in the way", bridge(&json!({ "isGateway": true }), &v6()))
            .ip("host", "link add cni0 type bridge\naddr add fd00:9::1/64 dev cni0 nodad\nlink set cni0 up")
            .add("c1")
            .del("c1"),
        Scenario::new("bridge: an overlapping v6 network in the way", bridge(&json!({ "isGateway": true }), &v6()))
            .ip("host", "link add cni0 type bridge\naddr add fd00:1::9/64 dev cni0 nodad\nlink set cni0 up")
            .add("c1")
            .del("c1")
            .differs(leaves_veth("c1")).differs([Difference::new("atomic-add", "2 ADD c1/host/link/cni0/address").reference("<mac host.<veth c1.eth0>>").ours("00:00:00:00:00:00")]),
        Scenario::new("bridge: forceAddress v6", bridge(&json!({ "isGateway": true, "forceAddress": true }), &v6()))
            .ip("host", "link add cni0 type bridge\naddr add fd00:1::9/64 dev cni0 nodad\naddr add fd00:9::1/64 dev cni0 nodad\nlink set cni0 up")
            .add("c1")
            .del("c1"),
        Scenario::new("bridge: a bridge down with a hardware address of its own", bridge(&json!({ "isGateway": true }), &v4()))
            .ip("host", "link add cni0 address c2:11:22:33:44:0b type bridge")
            .add("c1")
            .check("c1")
            .del("c1"),
    ]
}

/// What ipam answers with.
fn addresses() -> Vec<Scenario> {
    vec![
        Scenario::new("bridge: two addresses of one family", bridge(
            &json!({ "isGateway": true }),
            &json!({ "type": "host-local", "ranges": [[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "10.1.1.0/24" }]] }),
        ))
        .add("c1")
        .del("c1")
            .differs(leaves_links()),
        Scenario::new("bridge: a requested address", bridge(&json!({}), &v4()))
            .call(add("c1").args("IgnoreUnknown=1;IP=10.1.0.77"))
            .check("c1")
            .call(del("c1").args("IgnoreUnknown=1;IP=10.1.0.77")),
        Scenario::new("bridge: the pool is exhausted", bridge(&json!({}), &json!({ "type": "host-local", "subnet": "10.1.0.0/30" })))
            .add("c1")
            .add("c2")
            .del("c2")
            .del("c1")
            .add("c2")
            .del("c2")
            .differs(leaves_veth("c2")),
        Scenario::new("bridge: an ipam plugin that is not there", bridge(&json!({}), &json!({ "type": "absent" })))
            .add("c1")
            .check("c1")
            .del("c1")
            .differs(leaves_links()),
        Scenario::new("bridge: an ipam plugin with an error", bridge(&json!({}), &json!({ "type": "host-local", "subnet": "10.1.0.1/24" })))
            .add("c1")
            .del("c1")
            .differs(leaves_links()),
        Scenario::new("bridge: an address is missing at CHECK", bridge(&json!({ "isGateway": true }), &dual()))
            .add("c1")
            .ip("c1", "addr del 10.1.0.2/24 dev eth0")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: the interface is missing at CHECK", bridge(&json!({}), &v4()))
            .add("c1")
            .ip("c1", "link del eth0")
            .check("c1")
            .del("c1")
            .differs([says(
                "bridge-mac",
                "3 CHECK c1/bridge",
                "999: Bridge interface cni0 Mac doesn't match: <mac host.<veth c1.eth0>>",
                "999: Interface name eth0 not found",
            )]),
        Scenario::new("bridge: the lease is missing at CHECK", bridge(&json!({}), &v4()))
            .add("c1")
            .step(Step::Remove("/var/lib/cni/networks/net/10.1.0.2".to_owned()))
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: the container vanishes", bridge(&json!({ "isGateway": true }), &v4()))
            .add("c1")
            .step(Step::Vanish("c1"))
            .del("c1")
            .del("c1"),
        Scenario::new("bridge: DEL without a namespace", bridge(&json!({}), &v4()))
            .call(del("c1").netns(""))
            .add("c1")
            .call(del("c1").netns(""))
            .del("c1")
            .differs(del_leaves_veth("3 DEL c1")),
    ]
}

fn routes() -> Vec<Scenario> {
    let routes = |routes| bridge(&json!({ "isGateway": true }), &with(&dual(), &json!({ "routes": routes })));
    vec![
        Scenario::new(
            "bridge: routes of ipam",
            routes(json!([
                { "dst": "0.0.0.0/0" }, { "dst": "192.0.2.0/24", "gw": "10.1.0.9" }, { "dst": "::/0" },
                { "dst": "2001:db8:9::/48", "gw": "fd00:1::9" }
            ])),
        )
        .add("c1")
        .check("c1")
        .ip("c1", "route del 192.0.2.0/24")
        .check("c1")
        .del("c1"),
        Scenario::new("bridge: routes with priority", routes(json!([{ "dst": "192.0.2.0/24", "priority": 7 }])))
            .add("c1")
            .check("c1")
            .del("c1"),
        Scenario::new("bridge: routes with a table", routes(json!([{ "dst": "198.51.100.0/24", "table": 100 }])))
            .add("c1")
            .check("c1")
            .del("c1")
            .differs([succeeds(
                "check-other-tables",
                "2 CHECK c1/bridge",
                "999: Expected Route {Dst:{IP:198.51.100.0 Mask:ffffff00} GW:<nil> MTU:0 AdvMSS:0 Priority:0 Table:100 Scope:<nil>} not found in routing table",
            )]),
        Scenario::new(
            "bridge: routes with a scope",
            routes(json!([{ "dst": "192.168.9.0/24", "scope": 253, "gw": "0.0.0.0" }])),
        )
        .add("c1")
        .del("c1"),
        Scenario::new(
            "bridge: routes with mtu and advmss",
            routes(json!([
                { "dst": "192.0.2.0/24", "mtu": 1300, "advmss": 1200 }
            ])),
        )
        .add("c1")
        .check("c1")
        .del("c1")
            .differs([Difference::new("route-metrics", "*/c1/route/main 192.0.2.0/24 dev eth0")
                .reference("dev=eth0 flags=[] gateway=10.1.0.1 protocol=boot scope=global type=unicast")
                .ours(r#"dev=eth0 flags=[] gateway=10.1.0.1 metrics=[{"advmss":1200,"mtu":1300}] protocol=boot scope=global type=unicast"#)]),
        Scenario::new(
            "bridge: a route through a gateway that is not reachable",
            routes(json!([
                { "dst": "192.0.2.0/24", "gw": "172.31.0.1" }
            ])),
        )
        .add("c1")
        .del("c1")
            .differs(leaves_links()).differs([says(
                "own-words",
                "1 ADD c1/bridge",
                "999: failed to add route '{192.0.2.0 ffffff00} via 172.31.0.1 dev eth0 metric 0 (Scope: universe, Table: 0)': network is unreachable",
                "999: failed to add route '192.0.2.0/24 via 172.31.0.1 dev eth0': network is unreachable",
            )]),
        Scenario::new(
            "bridge: one route twice",
            routes(json!([{ "dst": "192.0.2.0/24" }, { "dst": "192.0.2.0/24" }])),
        )
        .add("c1")
        .del("c1")
            .differs(leaves_links()).differs([says(
                "own-words",
                "1 ADD c1/bridge",
                "999: failed to add route '{192.0.2.0 ffffff00} via 10.1.0.1 dev eth0 metric 0 (Scope: universe, Table: 0)': file exists",
                "999: failed to add route '192.0.2.0/24 via 10.1.0.1 dev eth0': file exists",
            )]),
    ]
}

/// Who may speak to whom.
fn isolation() -> Vec<Scenario> {
    vec![
        Scenario::new(
            "bridge: portIsolation",
            bridge(&json!({ "portIsolation": true, "isGateway": true }), &v4()),
        )
        .add("c1")
        .add("c2")
        .probe(Probe::tcp("c1", "10.1.0.3:80", "c2"))
        .probe(Probe::tcp("c1", "10.1.0.1:80", "host").sees("10.1.0.2"))
        .check("c1")
        .del("c1")
        .del("c2"),
        Scenario::new(
            "bridge: macspoofchk",
            bridge(&json!({ "macspoofchk": true, "isGateway": true }), &v4()),
        )
        .add("c1")
        .add("c2")
        .probe(Probe::tcp("c1", "10.1.0.1:80", "host").sees("10.1.0.2"))
        .ip("c2", "link set eth0 address c2:11:22:33:44:66")
        .probe(Probe::udp("c2", "10.1.0.1:53", "host"))
        .check("c1")
        .del("c1")
        .del("c1")
        .del("c2")
        .differs([learns_no_link_local()]),
        Scenario::new(
            "bridge: macspoofchk with a given mac, layer 2",
            network(json!({
                "type": "bridge", "macspoofchk": true, "args": { "cni": { "mac": "c2:11:22:33:44:01" } }
            })),
        )
        .add("c1")
        .del("c1")
        .differs([learns_no_link_local()]),
        Scenario::new(
            "bridge: macspoofchk and a vanished container",
            bridge(&json!({ "macspoofchk": true }), &v4()),
        )
        .add("c1")
        .step(Step::Vanish("c1"))
        .del("c1")
            .differs([
                learns_no_link_local(),
                Difference::new("del-cleans-up", "3 DEL c1/nft/bridge nat/chain PREROUTING")
                    .reference("type filter hook prerouting priority dstnat; policy accept;\niifname \"<veth c1.eth0>\" jump cni-br-iface-c1-eth0 comment \"macspoofchk-c1-eth0\"")
                    .ours("type filter hook prerouting priority dstnat; policy accept;"),
                Difference::new("del-cleans-up", "3 DEL c1/nft/bridge nat/chain cni-br-iface-c1-eth0")
                    .reference("jump cni-br-iface-c1-eth0-mac comment \"macspoofchk-c1-eth0\""),
                Difference::new("del-cleans-up", "3 DEL c1/nft/bridge nat/chain cni-br-iface-c1-eth0-mac")
                    .reference("ether saddr <mac c1.eth0> return comment \"macspoofchk-c1-eth0\"\ndrop comment \"macspoofchk-c1-eth0\""),
            ]),
        Scenario::new("bridge: vlan", bridge(&json!({ "vlan": 100 }), &v4())).add("c1").del("c1")
            .differs([says("no-vlan-yet", "1 ADD c1/bridge", "999: failed to create bridge \"cni0\": could not add \"cni0\": operation not supported", "2: vlan: 100 is not supported: this bridge plugin has no VLANs yet")]),
        Scenario::new(
            "bridge: vlanTrunk",
            bridge(&json!({ "vlanTrunk": [{ "minID": 5, "maxID": 7 }, { "id": 9 }] }), &v4()),
        )
        .add("c1")
        .del("c1")
            .differs([says("no-vlan-yet", "1 ADD c1/bridge", "999: failed to create bridge \"cni0\": could not add \"cni0\": operation not supported", "2: vlanTrunk: [{\"maxID\":7,\"minID\":5},{\"id\":9}] is not supported: this bridge plugin has no VLANs yet")]),
        Scenario::new(
            "bridge: preserveDefaultVlan alone",
            bridge(&json!({ "preserveDefaultVlan": true }), &v4()),
        )
        .add("c1")
        .del("c1"),
    ]
}
