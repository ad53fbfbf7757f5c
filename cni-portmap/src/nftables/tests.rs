//! Decisions of this backend, over rules as the kernel would list them.

use serde_json::{Value, json};

use super::plan::{self, Found, is_removed, is_stale};
use super::rules::{
    HOSTPORTS, HOSTPORTS_ALL, MASQUERADING, OUTPUT, PREROUTING, all_rules, guard_rules, network_tag, tag,
};
use super::*;
use netfilter::nftables::{Expression, Rule};

const CONTAINER: &str = "10.7.2.4/24";

fn config(value: Value) -> Config {
    Config::of_json(value, &[CONTAINER, "fd00::4/64"])
}

fn two_ports() -> Config {
    config(json!({"runtimeConfig": {"portMappings": [
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostPort": 53, "containerPort": 5353, "protocol": "udp", "hostIP": "10.9.9.9"}
    ]}}))
}

fn owner() -> Owner {
    Owner { container_id: "cid".to_owned(), tag: tag("net", "eth0") }
}

fn texts(config: &Config, family: Family) -> Vec<String> {
    let (_, container) = config.container.each().find(|(of, _)| *of == family).unwrap();
    let rules = container_rules(config, family, container).unwrap();
    rules.into_iter().map(|wanted| format!("{}: {}", wanted.chain, wanted.text)).collect()
}

fn listed(chain: &str, owner: Option<&Owner>, expressions: &[Expression]) -> Rule {
    Rule {
        chain: chain.to_owned(),
        handle: 7,
        comment: owner.map(|owner| owner.container_id.clone()),
        tag: owner.map(|owner| owner.tag.clone()).filter(|tag| !tag.is_empty()),
        expressions: expressions.to_vec(),
    }
}

/// What the kernel lists after an ADD of `config` by `owner`.
fn after_add(config: &Config, owner: &Owner) -> Found {
    let mut rules: Vec<Rule> = all_rules().iter().map(|jump| listed(HOSTPORTS_ALL, None, jump)).collect();
    for hook in [PREROUTING, OUTPUT] {
        rules.extend(unconditional().iter().map(|rule| listed(hook, None, rule)));
    }
    rules.extend(guard_rules().iter().map(|(rule, _)| listed(LOCALNET_GUARD, None, rule)));
    let wanted = container_rules(config, Family::V4, CONTAINER.parse().unwrap()).unwrap();
    rules.extend(wanted.iter().map(|wanted| listed(wanted.chain, Some(owner), &wanted.expressions)));
    Found { rules, has_masquerading: true }
}

fn unconditional() -> Vec<Vec<Expression>> {
    hook_rules(&[vec![]], Family::V4)
}

fn changes(config: &Config, found: &Found, hooks: &[Vec<Expression>]) -> Batch {
    let mut batch = Batch::new();
    let wanted = container_rules(config, Family::V4, CONTAINER.parse().unwrap()).unwrap();
    let shared = Shared { hook_rules: hooks, guarded: config.opens_localnet(Family::V4) };
    plan::add(&mut batch, Family::V4, found, &owner(), shared, &wanted);
    batch
}

#[test]
fn the_rules_are_the_references_and_one_of_each_port_for_the_containers_neighbours() {
    assert_eq!(
        texts(&two_ports(), Family::V4),
        [
            "hostports: tcp dport 8080 dnat to 10.7.2.4:80",
            "hostports: ip daddr 10.9.9.9 udp dport 53 dnat to 10.7.2.4:5353",
            "masquerading: ip saddr 10.7.2.4 ip daddr 10.7.2.4 masquerade",
            "masquerading: ip saddr 127.0.0.1 ip daddr 10.7.2.4 masquerade",
            "masquerading: ip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto tcp \
             ct original proto-dst 8080 ct status dnat masquerade",
            "masquerading: ip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto udp \
             ct original ip daddr 10.9.9.9 ct original proto-dst 53 ct status dnat masquerade",
        ]
    );
    assert_eq!(
        texts(&two_ports(), Family::V6),
        [
            "hostports: tcp dport 8080 dnat to [fd00::4]:80",
            "masquerading: ip6 saddr fd00::4 ip6 daddr fd00::4 masquerade",
            "masquerading: ip6 saddr fd00::/64 ip6 daddr fd00::4 meta l4proto tcp \
             ct original proto-dst 8080 ct status dnat masquerade",
        ]
    );
}

#[test]
fn masq_all_replaces_the_neighbours_and_snat_off_all_masquerading() {
    let mappings = json!([{"hostPort": 1, "containerPort": 2, "protocol": "sctp"}]);
    let all = config(json!({"masqAll": true, "runtimeConfig": {"portMappings": mappings}}));
    assert_eq!(
        texts(&all, Family::V4)[3..],
        [
            "masquerading: ip daddr 10.7.2.4 meta l4proto sctp ct original proto-dst 1 ct status dnat masquerade"
        ]
    );
    let none = config(json!({"snat": false, "masqAll": true, "runtimeConfig": {"portMappings": mappings}}));
    assert_eq!(texts(&none, Family::V4), ["hostports: sctp dport 1 dnat to 10.7.2.4:2"]);
}

#[test]
fn a_deed_is_read_back_from_the_bytecode() {
    let wanted = container_rules(&two_ports(), Family::V4, CONTAINER.parse().unwrap()).unwrap();
    let effects: Vec<Option<Effect>> =
        wanted.iter().map(|wanted| Effect::of(&listed(wanted.chain, None, &wanted.expressions))).collect();
    let container = "10.7.2.4".parse().unwrap();
    let forward = |protocol, host_ip: Option<&str>, host_port, port| {
        let host_ip = host_ip.map(|ip| ip.parse().unwrap());
        Some(Effect::Forward { protocol, host_ip, host_port, to: (container, port).into() })
    };
    use crate::mapping::Protocol;
    assert_eq!(effects[0], forward(Protocol::Tcp, None, 8080, 80));
    assert_eq!(effects[1], forward(Protocol::Udp, Some("10.9.9.9"), 53, 5353));
    let ports = [None, None, Some(8080), Some(53)];
    assert_eq!(effects[2..], ports.map(|host_port| Some(Effect::Masquerade { to: container, host_port })));
    assert_eq!(Effect::of(&listed(PREROUTING, None, &unconditional()[0])), None);
    assert!(wanted.iter().zip(effects).all(|(wanted, effect)| Some(wanted.effect) == effect));
}

#[test]
fn an_add_that_is_repeated_changes_nothing() {
    let found = after_add(&two_ports(), &owner());
    assert!(changes(&two_ports(), &found, &unconditional()).is_empty());
    let by_reference = after_add(&two_ports(), &Owner { tag: Vec::new(), ..owner() });
    assert!(changes(&two_ports(), &by_reference, &unconditional()).is_empty());
}

#[test]
fn other_conditions_or_a_missing_rule_are_a_change() {
    let found = after_add(&two_ports(), &owner());
    let conditions = conditions::parse(&["iifname eth0".to_owned()], Family::V4).unwrap();
    assert!(!changes(&two_ports(), &found, &hook_rules(&conditions, Family::V4)).is_empty());
    for chain in [HOSTPORTS, MASQUERADING, HOSTPORTS_ALL, OUTPUT, LOCALNET_GUARD] {
        let mut found = found.clone();
        let at = found.rules.iter().position(|rule| rule.chain == chain).unwrap();
        found.rules.remove(at);
        assert!(!changes(&two_ports(), &found, &unconditional()).is_empty(), "{chain}");
    }
}

#[test]
fn rules_of_an_earlier_address_of_the_attachment_are_outdated() {
    let found = after_add(&two_ports(), &owner());
    let wanted = container_rules(&two_ports(), Family::V4, "10.7.2.9/24".parse().unwrap()).unwrap();
    assert_eq!(found.outdated(&owner(), &wanted).count(), 6);
    let other = Owner { tag: tag("net", "eth1"), ..owner() };
    assert_eq!(found.outdated(&other, &wanted).count(), 0, "another interface's rules stay");
}

/// Earlier versions masqueraded every rewritten connection of the neighbours.
#[test]
fn a_rule_of_the_former_form_is_replaced_and_removed() {
    let mut found = after_add(&two_ports(), &owner());
    let wanted = container_rules(&two_ports(), Family::V4, CONTAINER.parse().unwrap()).unwrap();
    let mut former = wanted[4].expressions.clone();
    former.drain(4..8);
    let former = listed(MASQUERADING, Some(&owner()), &former);
    found.rules.push(former.clone());
    assert_eq!(found.outdated(&owner(), &wanted).collect::<Vec<_>>(), [&former]);
    assert!(is_removed(&owner(), &[], &former));
    assert!(is_stale("net", |_, _| false, &former));
}

#[test]
fn mappings_of_one_host_port_share_a_rule_for_the_neighbours() {
    let mappings = json!([
        {"hostPort": 1, "containerPort": 2, "protocol": "tcp"},
        {"hostPort": 1, "containerPort": 3, "protocol": "tcp", "hostIP": "0.0.0.0"},
        {"hostPort": 1, "containerPort": 2, "protocol": "tcp", "hostIP": "10.9.9.9"}
    ]);
    let config = config(json!({"runtimeConfig": {"portMappings": mappings}}));
    assert_eq!(
        texts(&config, Family::V4)[5..],
        [
            "masquerading: ip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto tcp \
             ct original proto-dst 1 ct status dnat masquerade",
            "masquerading: ip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto tcp \
             ct original ip daddr 10.9.9.9 ct original proto-dst 1 ct status dnat masquerade",
        ]
    );
}

#[test]
fn del_takes_the_attachments_rules_only() {
    let removed = |made_by: &Owner, known: &[&str]| {
        let known: Vec<std::net::IpAddr> = known.iter().map(|ip| ip.parse().unwrap()).collect();
        let found = after_add(&two_ports(), made_by);
        found.rules.iter().filter(|rule| is_removed(&owner(), &known, rule)).count()
    };
    assert_eq!(removed(&owner(), &[]), 6);
    assert_eq!(removed(&owner(), &["10.0.0.1"]), 6, "the tag decides");
    assert_eq!(removed(&Owner { tag: tag("net", "eth1"), ..owner() }, &[]), 0);
    assert_eq!(removed(&Owner { tag: tag("other", "eth0"), ..owner() }, &[]), 0);
    assert_eq!(removed(&Owner { container_id: "cid2".into(), tag: Vec::new() }, &[]), 0);
    let reference = Owner { tag: Vec::new(), ..owner() };
    assert_eq!(removed(&reference, &[]), 6);
    assert_eq!(removed(&reference, &["10.7.2.4"]), 6);
    assert_eq!(removed(&reference, &["10.7.2.5"]), 0, "another attachment of the container");
}

#[test]
fn gc_takes_what_is_surely_of_this_network_and_in_no_list() {
    let stale = |made_by: &Owner, valid: &[(&str, &str)]| {
        let found = after_add(&two_ports(), made_by);
        let is_valid = |id: &str, ifname: &str| valid.contains(&(id, ifname));
        found.rules.iter().filter(|rule| is_stale("net", is_valid, rule)).count()
    };
    assert_eq!(stale(&owner(), &[]), 6);
    assert_eq!(stale(&owner(), &[("cid", "eth0")]), 0);
    assert_eq!(stale(&owner(), &[("cid", "eth1"), ("other", "eth0")]), 6);
    assert_eq!(stale(&Owner { tag: tag("other", "eth0"), ..owner() }, &[]), 0);
    assert_eq!(stale(&Owner { tag: Vec::new(), ..owner() }, &[]), 0, "of the reference");
    assert_eq!(network_tag("net").len(), 16);
}
