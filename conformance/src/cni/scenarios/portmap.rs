//! `portmap` behind `bridge`: every key, both backends, and who reaches the port.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::probe::Probe;
use super::super::scenario::{Call, PrevResult, Scenario, Step, Verb, add, check, del, list, network};
use super::super::world::Filters;
use super::expected::{answers, del_leaves_veth, never_attached, ours_has, reference_has, says, succeeds};
use super::networks::{bridge_plugin, dual, v4, v6, with};

/// A bridge with its default gateway, and behind it `portmap` with `keys`.
fn mapped(keys: &Value, ipam: &Value) -> Value {
    let portmap = with(&json!({ "type": "portmap", "capabilities": { "portMappings": true } }), keys);
    // Without hairpin mode a container does not reach itself through the host.
    let bridge = bridge_plugin(&json!({ "isDefaultGateway": true, "hairpinMode": true }), ipam);
    list("1.0.0", [bridge, portmap])
}

fn mapping(host: i64, container: i64, protocol: &str) -> Value {
    json!({ "hostPort": host, "containerPort": container, "protocol": protocol })
}

fn ports(mappings: Value) -> Value {
    json!({ "portMappings": mappings })
}

/// ADD, CHECK, whatever `probes` are, DEL twice.
fn life(scenario: Scenario, mappings: &Value, probes: Vec<Probe>) -> Scenario {
    let runtime = || ports(mappings.clone());
    let scenario = scenario.call(add("c1").runtime(runtime())).call(check("c1").runtime(runtime()));
    let scenario = probes.into_iter().fold(scenario, Scenario::probe);
    scenario.call(del("c1").runtime(runtime())).call(del("c1").runtime(runtime()))
}

/// From outside, from the host by each of its addresses, from a neighbour on the
/// bridge, and from the container itself.
fn everyone(port: u16) -> Vec<Probe> {
    vec![
        Probe::tcp("outside", "203.0.113.1:8080", "c1").port(port).sees("203.0.113.2"),
        Probe::tcp("host", "203.0.113.1:8080", "c1").port(port).sees("203.0.113.1"),
        Probe::tcp("host", "127.0.0.1:8080", "c1").port(port).sees("10.1.0.1"),
        Probe::tcp("c1", "203.0.113.1:8080", "c1").port(port).sees("10.1.0.1"),
    ]
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = refused();
    for backend in ["nftables", "iptables"] {
        scenarios.extend(of_backend(backend));
    }
    scenarios.extend(choice_of_backend());
    let with_differences = |scenario: Scenario| {
        let differences = differences(&scenario.name);
        scenario.differs(differences)
    };
    scenarios.into_iter().map(with_differences).collect()
}

/// What differs on purpose in the scenario of this name.
fn differences(name: &str) -> Vec<Difference> {
    let by_nft = "999: unable to set up nftables rules for port mappings: /dev/stdin:*";
    let by_iptables = "999: unable to setup DNAT: running [*";
    let failed_late = |ours: &str| {
        vec![
            says("own-words", "2 ADD c1/portmap", by_iptables, ours),
            // Half of the rules are there when iptables refuses the rest.
            reference_has("atomic-add", "*/iptables/nat"),
        ]
    };
    let seen = |id, probe: &str, reference: &str| {
        Difference::new(id, probe).reference(format!("from {reference}")).ours("as it should be")
    };
    match name {
        "portmap: conditions that nft does not know" => {
            vec![says("own-words", "1 ADD c1/portmap", by_nft, by_nft)]
        }
        "portmap: host port too big" => vec![says(
            "own-words",
            "1 ADD c1/portmap",
            by_nft,
            "999: failed to parse config: Invalid host port number: 65536",
        )],
        "portmap: a port that is no number" => vec![says(
            "own-words",
            "* c1/portmap",
            "999: failed to parse config: failed to parse network configuration: json: cannot unmarshal string *",
            "999: failed to parse config: failed to parse network configuration: \
             runtimeConfig.portMappings[0].hostPort: expected a whole number, found \"8080\"",
        )],
        "portmap nftables: the protocol in capitals" => {
            let mut differences = never_attached("portmap-capitals", "3 CHECK c1", []);
            differences.extend([
                answers("portmap-capitals", "2 ADD c1/portmap", by_nft),
                ours_has("portmap-capitals", "*/nft/ip cni_hostport"),
            ]);
            differences
        }
        "portmap nftables: an unknown protocol" => {
            vec![says("own-words", "2 ADD c1/portmap", by_nft, "999: protocol \"icmp\" has no ports to map")]
        }
        "portmap nftables: no protocol" => {
            vec![says("own-words", "2 ADD c1/portmap", by_nft, "999: protocol \"\" has no ports to map")]
        }
        "portmap iptables: an unknown protocol" => failed_late("999: protocol \"icmp\" has no ports to map"),
        "portmap iptables: no protocol" => failed_late("999: protocol \"\" has no ports to map"),
        "portmap nftables: masqAll" => vec![
            seen("portmap-masq-all", "4 tcp outside -> 203.0.113.1:8080 (c1:80)", "203.0.113.2"),
            seen("portmap-masq-all", "5 tcp host -> 203.0.113.1:8080 (c1:80)", "203.0.113.1"),
            Difference::new("portmap-masq-all", "*/nft/ip cni_hostport/chain masquerading").extra_lines(
                "ip daddr 10.1.0.2 meta l4proto tcp ct original proto-dst 8080 ct status dnat masquerade \
                     comment \"c1\"",
            ),
        ],
        "portmap nftables: two containers" => {
            vec![seen("portmap-hairpin", "5 tcp c1 -> 203.0.113.1:8081 (c2:80)", "10.1.0.2")]
        }
        "portmap nftables: DEL without a result" | "portmap iptables: DEL without a result" => {
            del_leaves_veth("3 DEL c1")
        }
        "portmap iptables: a datagram before ADD" => vec![
            Difference::new("portmap-conntrack", "7 udp outside -> 203.0.113.1:8080 (host:8080)")
                .reference("nothing arrives")
                .ours("as it should be"),
        ],
        "portmap nftables: a container sends to 127.0.0.1 of the host"
        | "portmap iptables: a container sends to 127.0.0.1 of the host" => {
            vec![seen("portmap-localnet-guard", "5 tcp c1 -> 127.0.0.1:7777 (host:7777)", "10.1.0.2")]
        }
        "portmap iptables: a rule is gone at CHECK" => vec![says(
            "own-words",
            "4 CHECK c1/portmap",
            "999: could not check ipv4 dnat: rule [[-m comment --comment dnat name: \"net\" id: \"c1\" *",
            "999: could not check ipv4 dnat: rule -m comment --comment dnat name: \"net\" id: \"c1\" *",
        )],
        "portmap: no backend named" => vec![
            reference_has("default-backend", "*/iptables/nat"),
            ours_has("default-backend", "*/nft/ip cni_hostport"),
        ],
        "portmap: iptables, without iptables" => {
            let id = "iptables-beyond-path";
            let mut differences = never_attached(id, "2 CHECK c1", ["3 DEL c1", "4 DEL c1"]);
            differences.extend([
                answers(
                    id,
                    "1 ADD c1/portmap",
                    "999: failed to open iptables: exec: \"iptables\": executable file not found in $PATH",
                ),
                succeeds(id, "* DEL c1/portmap", "999: neither iptables nor ip6tables is usable, *"),
                ours_has(id, "*/iptables/nat"),
            ]);
            differences
        }
        "portmap: externalSetMarkChain, no backend named" => vec![
            says(
                "own-words",
                "1 ADD c1/portmap",
                by_iptables,
                "999: unable to setup DNAT: *Chain 'KUBE-MARK-MASQ' does not exist*",
            ),
            reference_has("atomic-add", "*/iptables/nat"),
        ],
        "portmap: conditions of nftables, no backend named" => {
            let id = "default-backend";
            let refused = "999: failed to parse config: iptables backend was requested but configuration contains \
                           nftables-specific options [conditionsV4]";
            let mut differences = never_attached(id, "2 CHECK c1", ["4 DEL c1", "5 DEL c1"]);
            differences.extend([
                Difference::new(id, "3 tcp outside -> 203.0.113.1:8080 (c1:80)")
                    .reference("nothing arrives")
                    .ours("as it should be"),
                answers(id, "1 ADD c1/portmap", refused),
                succeeds(id, "* DEL c1/portmap", refused),
                ours_has(id, "*/nft/ip cni_hostport"),
            ]);
            differences
        }
        _ => Vec::new(),
    }
}

fn of_backend(backend: &'static str) -> Vec<Scenario> {
    let tcp = json!([mapping(8080, 80, "tcp")]);
    let scenario = |name: &str, keys: Value, ipam: &Value| {
        let keys = with(&json!({ "backend": backend }), &keys);
        Scenario::new(format!("portmap {backend}: {name}"), mapped(&keys, ipam)).ip("host", "link set lo up")
    };
    let plain = |name: &str| scenario(name, json!({}), &v4());
    let runtime = |mappings: &Value| ports(mappings.clone());
    let (condition4, condition6) = match backend {
        "nftables" => (json!(["ip", "saddr", "203.0.113.0/24"]), json!(["ip6", "saddr", "2001:db8:f::/64"])),
        _ => (json!(["-s", "203.0.113.0/24"]), json!(["-s", "2001:db8:f::/64"])),
    };
    let of_two = |verb| Call::new(verb, "c2").runtime(ports(json!([mapping(8081, 80, "tcp")])));
    vec![
        life(plain("tcp"), &tcp, everyone(80)),
        life(
            plain("udp"),
            &json!([mapping(8080, 53, "udp")]),
            vec![
                Probe::udp("outside", "203.0.113.1:8080", "c1").port(53).sees("203.0.113.2"),
                Probe::udp("c1", "203.0.113.1:8080", "c1").port(53).sees("10.1.0.1"),
            ],
        ),
        life(plain("sctp"), &json!([mapping(8080, 80, "sctp")]), vec![]),
        life(plain("the protocol in capitals"), &json!([mapping(8080, 80, "TCP")]), vec![]),
        life(plain("an unknown protocol"), &json!([mapping(8080, 80, "icmp")]), vec![]),
        life(plain("no protocol"), &json!([{ "hostPort": 8080, "containerPort": 80 }]), vec![]),
        life(
            scenario("v6", json!({}), &v6()),
            &tcp,
            vec![
                Probe::tcp("outside", "[2001:db8:f::1]:8080", "c1").port(80).sees("2001:db8:f::2"),
                Probe::tcp("c1", "[2001:db8:f::1]:8080", "c1").port(80).sees("fd00:1::1"),
            ],
        ),
        life(
            scenario("dual stack", json!({}), &dual()),
            &json!([mapping(8080, 80, "tcp"), mapping(8080, 53, "udp")]),
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"),
                Probe::tcp("outside", "[2001:db8:f::1]:8080", "c1").port(80).sees("2001:db8:f::2"),
                Probe::udp("outside", "[2001:db8:f::1]:8080", "c1").port(53).sees("2001:db8:f::2"),
            ],
        ),
        life(
            plain("many ports"),
            &Value::Array((0..17).map(|n| mapping(9000 + n, 100 + n, "tcp")).collect()),
            vec![Probe::tcp("outside", "203.0.113.1:9016", "c1").port(116).sees("203.0.113.2")],
        ),
        life(
            plain("hostIP"),
            &json!([with(&mapping(8080, 80, "tcp"), &json!({ "hostIP": "203.0.113.1" }))]),
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"),
                Probe::tcp("outside", "198.51.100.1:8080", "c1").port(80),
            ],
        ),
        life(
            scenario("hostIP of one family", json!({}), &dual()),
            &json!([
                with(&mapping(8080, 80, "tcp"), &json!({ "hostIP": "203.0.113.1" })),
                with(&mapping(8081, 80, "tcp"), &json!({ "hostIP": "2001:db8:f::1" })),
            ]),
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"),
                Probe::tcp("outside", "[2001:db8:f::1]:8081", "c1").port(80).sees("2001:db8:f::2"),
                Probe::tcp("outside", "[2001:db8:f::1]:8080", "c1").port(80),
            ],
        ),
        life(
            scenario("hostIP of all addresses", json!({}), &dual()),
            &json!([
                with(&mapping(8080, 80, "tcp"), &json!({ "hostIP": "0.0.0.0" })),
                with(&mapping(8081, 80, "tcp"), &json!({ "hostIP": "::" })),
                with(&mapping(8082, 80, "tcp"), &json!({ "hostIP": "" })),
            ]),
            vec![Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2")],
        ),
        life(
            plain("hostIP that is none"),
            &json!([with(&mapping(8080, 80, "tcp"), &json!({ "hostIP": "host" }))]),
            vec![Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80)],
        ),
        life(
            scenario("masqAll", json!({ "masqAll": true }), &v4()),
            &tcp,
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("10.1.0.1"),
                Probe::tcp("host", "203.0.113.1:8080", "c1").port(80).sees("10.1.0.1"),
            ],
        ),
        life(
            scenario("snat off", json!({ "snat": false }), &dual()),
            &tcp,
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"),
                Probe::tcp("host", "127.0.0.1:8080", "c1").port(80),
            ],
        ),
        life(
            scenario(
                "conditions",
                json!({ "conditionsV4": condition4, "conditionsV6": condition6 }),
                &dual(),
            ),
            &tcp,
            vec![
                Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"),
                Probe::tcp("outside", "[2001:db8:f::1]:8080", "c1").port(80).sees("2001:db8:f::2"),
            ],
        ),
        life(
            scenario(
                "conditions that are not met",
                json!({
                    "conditionsV4": if backend == "nftables" { json!(["ip saddr 192.0.2.0/24"]) } else { json!(["-s", "192.0.2.0/24"]) }
                }),
                &v4(),
            ),
            &tcp,
            vec![Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80)],
        ),
        life(scenario("markMasqBit", json!({ "markMasqBit": 5 }), &v4()), &tcp, everyone(80)),
        plain("no ports").add("c1").check("c1").del("c1"),
        plain("an empty list of ports")
            .call(add("c1").runtime(ports(json!([]))))
            .call(del("c1").runtime(ports(json!([])))),
        plain("two containers")
            .call(add("c1").runtime(runtime(&tcp)))
            .call(of_two(Verb::Add))
            .probe(Probe::tcp("outside", "203.0.113.1:8081", "c2").port(80).sees("203.0.113.2"))
            .probe(Probe::tcp("c1", "203.0.113.1:8081", "c2").port(80).sees("10.1.0.1"))
            .call(del("c1").runtime(runtime(&tcp)))
            .probe(Probe::tcp("outside", "203.0.113.1:8081", "c2").port(80).sees("203.0.113.2"))
            .call(of_two(Verb::Check))
            .call(of_two(Verb::Del)),
        plain("two containers want one port")
            .call(add("c1").runtime(runtime(&tcp)))
            .call(add("c2").runtime(runtime(&tcp)))
            .probe(Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2"))
            .call(del("c1").runtime(runtime(&tcp)))
            .probe(Probe::tcp("outside", "203.0.113.1:8080", "c2").port(80).sees("203.0.113.2"))
            .call(del("c2").runtime(runtime(&tcp))),
        plain("DEL without a result")
            .call(add("c1").runtime(runtime(&tcp)))
            .call(del("c1").runtime(runtime(&tcp)).netns("").prev_result(PrevResult::Missing)),
        plain("the container vanishes")
            .call(add("c1").runtime(runtime(&tcp)))
            .step(Step::Vanish("c1"))
            .call(del("c1").runtime(runtime(&tcp))),
        plain("a datagram before ADD")
            .ip("c1", "link set lo up")
            .probe(Probe::udp("outside", "203.0.113.1:8080", "c1").port(53).by_port(5555))
            .call(add("c1").runtime(ports(json!([mapping(8080, 53, "udp")]))))
            .probe(Probe::udp("outside", "203.0.113.1:8080", "c1").port(53).by_port(5555).sees("203.0.113.2"))
            .call(del("c1").runtime(ports(json!([mapping(8080, 53, "udp")]))))
            .probe(
                Probe::udp("outside", "203.0.113.1:8080", "host")
                    .port(8080)
                    .by_port(5555)
                    .sees("203.0.113.2"),
            ),
        plain("a container sends to 127.0.0.1 of the host")
            .call(add("c1").runtime(runtime(&tcp)))
            .step(Step::Sysctl { netns: "c1", name: "net/ipv4/conf/all/route_localnet", value: "1" })
            .ip("c1", "route add 127.0.0.1/32 via 10.1.0.1")
            .probe(Probe::tcp("c1", "127.0.0.1:7777", "host").port(7777))
            .call(del("c1").runtime(runtime(&tcp))),
        plain("a rule is gone at CHECK")
            .call(add("c1").runtime(runtime(&tcp)))
            .step(Step::Filter(if backend == "nftables" {
                "nft flush chain ip cni_hostport hostports".to_owned()
            } else {
                "iptables -t nat -F CNI-HOSTPORT-DNAT".to_owned()
            }))
            .call(check("c1").runtime(runtime(&tcp)))
            .call(del("c1").runtime(runtime(&tcp))),
    ]
}

fn choice_of_backend() -> Vec<Scenario> {
    let tcp = json!([mapping(8080, 80, "tcp")]);
    let outside = || vec![Probe::tcp("outside", "203.0.113.1:8080", "c1").port(80).sees("203.0.113.2")];
    let of_chain = json!({ "externalSetMarkChain": "KUBE-MARK-MASQ" });
    vec![
        life(Scenario::new("portmap: no backend named", mapped(&json!({}), &v4())), &tcp, outside()),
        life(
            Scenario::new("portmap: no backend named, without iptables", mapped(&json!({}), &v4()))
                .filters(Filters::WithoutIptables),
            &tcp,
            outside(),
        ),
        life(
            Scenario::new("portmap: iptables of old", mapped(&json!({ "backend": "iptables" }), &v4()))
                .filters(Filters::Legacy),
            &tcp,
            outside(),
        ),
        life(
            Scenario::new(
                "portmap: iptables, without iptables",
                mapped(&json!({ "backend": "iptables" }), &v4()),
            )
            .filters(Filters::WithoutIptables),
            &tcp,
            vec![],
        ),
        life(
            Scenario::new(
                "portmap: externalSetMarkChain",
                mapped(&with(&of_chain, &json!({ "backend": "iptables" })), &v4()),
            )
            .step(Step::Filter("iptables -t nat -N KUBE-MARK-MASQ".to_owned())),
            &tcp,
            outside(),
        ),
        life(
            Scenario::new("portmap: externalSetMarkChain, no backend named", mapped(&of_chain, &v4())),
            &tcp,
            vec![],
        ),
        life(
            Scenario::new(
                "portmap: conditions of iptables, no backend named",
                mapped(&json!({ "conditionsV4": ["-s", "203.0.113.0/24"] }), &v4()),
            ),
            &tcp,
            outside(),
        ),
        life(
            Scenario::new(
                "portmap: conditions of nftables, no backend named",
                mapped(&json!({ "conditionsV4": ["ip saddr 203.0.113.0/24"] }), &v4()),
            ),
            &tcp,
            outside(),
        ),
    ]
}

fn refused() -> Vec<Scenario> {
    let tcp = json!([mapping(8080, 80, "tcp")]);
    let bad_keys = |name: &str, keys: Value| {
        life(Scenario::new(format!("portmap: {name}"), mapped(&keys, &v4())), &tcp, vec![])
    };
    let bad_ports = |name: &str, mapping: Value| {
        let keys = json!({ "backend": "nftables" });
        life(Scenario::new(format!("portmap: {name}"), mapped(&keys, &v4())), &json!([mapping]), vec![])
    };
    vec![
        Scenario::new("portmap: alone", network(json!({ "type": "portmap" }))).add("c1").del("c1"),
        bad_keys("an unknown backend", json!({ "backend": "pf" })),
        bad_keys("markMasqBit too big", json!({ "markMasqBit": 32 })),
        bad_keys("markMasqBit negative", json!({ "markMasqBit": -1 })),
        bad_keys(
            "markMasqBit and externalSetMarkChain",
            json!({ "markMasqBit": 5, "externalSetMarkChain": "X" }),
        ),
        bad_keys(
            "externalSetMarkChain for nftables",
            json!({ "backend": "nftables", "externalSetMarkChain": "X" }),
        ),
        bad_keys(
            "conditions of iptables for nftables",
            json!({ "backend": "nftables", "conditionsV4": ["-s", "10.0.0.0/8"] }),
        ),
        bad_keys(
            "conditions of nftables for iptables",
            json!({ "backend": "iptables", "conditionsV6": ["ip6 saddr ::/0"] }),
        ),
        bad_keys(
            "conditions of both",
            json!({ "conditionsV4": ["-s", "10.0.0.0/8"], "conditionsV6": ["ip6 saddr ::/0"] }),
        ),
        bad_keys(
            "conditions that nft does not know",
            json!({ "backend": "nftables", "conditionsV4": ["no such words"] }),
        ),
        bad_ports("host port 0", mapping(0, 80, "tcp")),
        bad_ports("host port negative", mapping(-1, 80, "tcp")),
        bad_ports("host port too big", mapping(65536, 80, "tcp")),
        bad_ports("container port 0", mapping(8080, 0, "tcp")),
        bad_ports("container port missing", json!({ "hostPort": 8080, "protocol": "tcp" })),
        bad_ports(
            "a port that is no number",
            json!({ "hostPort": "8080", "containerPort": 80, "protocol": "tcp" }),
        ),
        Scenario::new("portmap: CHECK without a result", mapped(&json!({ "backend": "nftables" }), &v4()))
            .call(add("c1").runtime(ports(tcp.clone())))
            .call(check("c1").runtime(ports(tcp.clone())).prev_result(PrevResult::Missing))
            .call(del("c1").runtime(ports(tcp.clone()))),
        Scenario::new(
            "portmap: every verb at 1.1.0",
            with(&mapped(&json!({ "backend": "nftables" }), &v4()), &json!({ "cniVersion": "1.1.0" })),
        )
        .call(Call::new(Verb::Version, "c1"))
        .call(Call::new(Verb::Status, "c1"))
        .call(add("c1").runtime(ports(tcp.clone())))
        .call(Call::new(Verb::Gc, "c1").valid(json!([{ "containerID": "c1", "ifname": "eth0" }])))
        .call(check("c1").runtime(ports(tcp.clone())))
        .call(del("c1").runtime(ports(tcp))),
    ]
}
