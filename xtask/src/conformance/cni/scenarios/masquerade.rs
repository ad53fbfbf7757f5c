//! `ipMasq` of `bridge`, by both backends, and what the far end sees.

use serde_json::{Value, json};

use super::super::probe::Probe;
use super::super::scenario::{Scenario, Step, add, del};
use super::super::world::Filters;
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
        life(Scenario::new("ipMasq: no backend named", masquerading(None, &v4()))),
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
        ),
        Scenario::new("ipMasq: an unknown backend", masquerading(Some("pf"), &v4())).add("c1").del("c1"),
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
                .del("c1"),
            Scenario::new(format!("ipMasq: {backend}, DEL without a namespace"), dual.clone())
                .add("c1")
                .call(del("c1").netns(""))
                .del("c1"),
            Scenario::new(format!("ipMasq: {backend}, the interface is gone before DEL"), dual.clone())
                .add("c1")
                .ip("c1", "link del eth0")
                .del("c1"),
            Scenario::new(format!("ipMasq: {backend}, two interfaces of one container"), dual)
                .add("c1")
                .call(add("c1").ifname("net1"))
                .del("c1")
                .call(del("c1").ifname("net1")),
        ]);
    }
    scenarios
}
