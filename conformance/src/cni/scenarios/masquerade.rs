//! `ipMasq` of `bridge`, by both backends, and what the far end sees.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::probe::Probe;
use super::super::scenario::{Scenario, Step, add, del};
use super::super::world::Filters;
use super::expected::{
    answers, asked_ipam_in_vain, del_leaves_veth, leaves_links, ours_has, reference_has, succeeds,
};
use super::networks::{bridge, dual, v4, v6, with};

fn masquerading(backend: Option<&str>, ipam: &Value) -> Value {
    let keys = json!({ "isDefaultGateway": true, "ipMasq": true });
    let keys = match backend {
        Some(backend) => with(&keys, &json!({ "ipMasqBackend": backend })),
        None => keys,
    };
    bridge(&keys, ipam)
}

/// A life in which the neighbour sees the host, and the host the container.
fn life(scenario: Scenario) -> Scenario {
    scenario
        .add("c1")
        .add("c2")
        .probe(Probe::tcp("c1", "203.0.113.2:80", "outside").sees("203.0.113.1"))
        .probe(Probe::udp("c2", "203.0.113.2:53", "outside").sees("203.0.113.1"))
        .probe(Probe::tcp("c1", "10.1.0.3:80", "c2").sees("10.1.0.2"))
        .probe(Probe::tcp("c1", "10.1.0.1:80", "host").sees("10.1.0.2"))
        .check("c1")
        .del("c1")
        .probe(Probe::tcp("c2", "203.0.113.2:80", "outside").sees("203.0.113.1"))
        .del("c1")
        .del("c2")
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = vec![
        life(Scenario::new("ipMasq: nftables", masquerading(Some("nftables"), &v4()))),
        life(Scenario::new("ipMasq: iptables", masquerading(Some("iptables"), &v4()))),
        life(Scenario::new("ipMasq: no backend named", masquerading(None, &v4()))).differs([
            reference_has("default-backend", "*/iptables/nat"),
            ours_has("default-backend", "*/nft/inet cni_plugins_masquerade"),
        ]),
        life(
            Scenario::new("ipMasq: no backend named, without iptables", masquerading(None, &v4()))
                .filters(Filters::WithoutIptables),
        ),
        life(
            Scenario::new("ipMasq: iptables of old", masquerading(Some("iptables"), &v4()))
                .filters(Filters::Legacy),
        ),
        life(
            Scenario::new("ipMasq: iptables, without iptables", masquerading(Some("iptables"), &v4()))
                .filters(Filters::WithoutIptables),
        )
        .differs(without_iptables()),
        Scenario::new("ipMasq: an unknown backend", masquerading(Some("pf"), &v4()))
            .add("c1")
            .del("c1")
            .differs(leaves_links())
            .differs([
                asked_ipam_in_vain(),
                Difference::new("config-first", "*/host/sysctl/ipv4/ip_forward").reference("1").ours("0"),
                Difference::new("config-first", "*/host/sysctl/ipv4/conf/all/forwarding")
                    .reference("1")
                    .ours("0"),
                Difference::new("config-first", "*/host/sysctl/ipv4/conf/default/forwarding")
                    .reference("1")
                    .ours("0"),
                Difference::new("config-first", "*/host/sysctl/ipv4/conf/all/accept_redirects")
                    .reference("0")
                    .ours("1"),
            ]),
    ];
    for backend in ["nftables", "iptables"] {
        let dual = masquerading(Some(backend), &dual());
        scenarios.extend([
            Scenario::new(format!("ipMasq: {backend}, dual stack"), dual.clone())
                .add("c1")
                .probe(Probe::tcp("c1", "203.0.113.2:80", "outside").sees("203.0.113.1"))
                .probe(Probe::tcp("c1", "[2001:db8:f::2]:80", "outside").sees("2001:db8:f::1"))
                .probe(Probe::udp("c1", "[2001:db8:f::2]:53", "outside").sees("2001:db8:f::1"))
                .check("c1")
                .del("c1"),
            Scenario::new(format!("ipMasq: {backend}, v6"), masquerading(Some(backend), &v6()))
                .add("c1")
                .probe(Probe::tcp("c1", "[2001:db8:f::2]:80", "outside").sees("2001:db8:f::1"))
                .check("c1")
                .del("c1"),
            Scenario::new(format!("ipMasq: {backend}, the container vanishes"), dual.clone())
                .add("c1")
                .step(Step::Vanish("c1"))
                .del("c1")
                .differs(rules_leak(backend, "3 DEL c1")),
            Scenario::new(format!("ipMasq: {backend}, DEL without a namespace"), dual.clone())
                .add("c1")
                .call(del("c1").netns(""))
                .del("c1")
                .differs(rules_leak(backend, "2 DEL c1"))
                .differs(del_leaves_veth("2 DEL c1")),
            {
                let scenario = Scenario::new(
                    format!("ipMasq: {backend}, the interface is gone before DEL"),
                    dual.clone(),
                );
                let scenario = scenario.add("c1").ip("c1", "link del eth0").del("c1");
                // The reference finds rules of nftables by their comment, those of iptables by the addresses.
                if backend == "iptables" {
                    scenario.differs(rules_leak(backend, "3 DEL c1"))
                } else {
                    scenario
                }
            },
            {
                let scenario =
                    Scenario::new(format!("ipMasq: {backend}, two interfaces of one container"), dual);
                let scenario = scenario
                    .add("c1")
                    .call(add("c1").ifname("net1"))
                    .del("c1")
                    .call(del("c1").ifname("net1"));
                if backend == "iptables" { scenario.differs(one_chain_for_two()) } else { scenario }
            },
        ]);
    }
    scenarios
}

/// The reference's DEL leaves the rules of `c1`.
fn rules_leak(backend: &str, step: &str) -> Vec<Difference> {
    if backend == "iptables" {
        return vec![
            reference_has("del-cleans-up", &format!("{step}/iptables/nat")),
            reference_has("del-cleans-up", &format!("{step}/ip6tables/nat")),
        ];
    }
    let comment =
        "comment \"Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet\"";
    let rules = "ip saddr 10.1.0.2 ip daddr != 10.1.0.0/24 masquerade comment \"*-*, net: net, if: eth0, id: c1\"\n\
                 ip6 saddr fd00:1::2 ip6 daddr != fd00:1::/64 masquerade comment \"*-*, net: net, if: eth0, id: c1\"";
    vec![
        Difference::new("del-cleans-up", format!("{step}/nft/inet cni_plugins_masquerade/chain masq_checks"))
            .reference(format!("{comment}\n{rules}"))
            .ours(comment),
    ]
}

/// Both interfaces of a container share one chain of iptables: the reference
/// empties it with the first, fails, and leaves the second without masquerading.
fn one_chain_for_two() -> Vec<Difference> {
    let rules = "policy -\n-d * -m comment --comment \"name: \\\"net\\\" id: \\\"c1\\\"\" -j ACCEPT\n\
                 ! -d * -m comment --comment \"name: \\\"net\\\" id: \\\"c1\\\"\" -j MASQUERADE";
    let chain = |family: &str| {
        Difference::new(
            "iptables-shared-chain",
            format!("3 DEL c1/{family}/nat/CNI-623e1c388032b20529218ecc"),
        )
        .reference("policy -")
        .ours(rules)
    };
    vec![
        succeeds(
            "iptables-shared-chain",
            "3 DEL c1/bridge",
            "999: running [*CHAIN_DEL failed (Device or resource busy)*",
        ),
        chain("iptables"),
        chain("ip6tables"),
    ]
}

/// `iptables` is installed, but not where `PATH` says.
fn without_iptables() -> Vec<Difference> {
    let lease = |step: &str, address: &str, id: &str| {
        let lease = format!("0600 \"{id}\\r\\neth0\"");
        Difference::new("iptables-beyond-path", format!("{step}/file/var/lib/cni/networks/net/{address}"))
            .ours(lease)
    };
    let seen = |probe: &str, address: &str| {
        Difference::new("iptables-beyond-path", probe)
            .reference(format!("from {address}"))
            .ours("as it should be")
    };
    let absent = "999: failed to locate iptables: exec: \"iptables\": executable file not found in $PATH";
    vec![
        answers("iptables-beyond-path", "* ADD c*/bridge", absent),
        succeeds(
            "iptables-beyond-path",
            "7 CHECK c1/bridge",
            "999: host-local: Failed to find address added by container c1",
        ),
        lease("* c*", "10.1.0.2", "c1"),
        lease("* c*", "10.1.0.3", "c2"),
        ours_has("iptables-beyond-path", "*/iptables/nat"),
        seen("3 tcp c1 -> 203.0.113.2:80 (outside:80)", "10.1.0.2"),
        seen("4 udp c2 -> 203.0.113.2:53 (outside:53)", "10.1.0.3"),
        seen("9 tcp c2 -> 203.0.113.2:80 (outside:80)", "10.1.0.3"),
    ]
}
