use proptest::prelude::*;

use super::*;

fn v4(conditions: &[&str]) -> Option<Vec<Vec<Match>>> {
    let conditions: Vec<String> = conditions.iter().map(|text| (*text).to_owned()).collect();
    parse(&conditions, Family::V4)
}

fn is(subject: Subject) -> Match {
    Match { subject, negated: false }
}

fn is_not(subject: Subject) -> Match {
    Match { subject, negated: true }
}

fn source(text: &str) -> Subject {
    Subject::Address(Side::Source, text.parse().unwrap())
}

fn named(name: &str) -> Subject {
    Subject::Interface(Direction::In, InterfaceName::Exact(name.to_owned()))
}

#[test]
fn no_conditions_are_one_rule_without_matches() {
    assert_eq!(v4(&[]), Some(vec![vec![]]));
    assert_eq!(v4(&[""]), Some(vec![vec![]]));
}

#[test]
fn words_may_come_in_one_string_or_in_many() {
    let wanted = Some(vec![vec![is_not(source("192.168.0.0/20")), is(named("eth0"))]]);
    assert_eq!(v4(&["ip saddr != 192.168.0.0/20 iifname eth0"]), wanted);
    assert_eq!(v4(&["ip", "saddr", "!=", "192.168.0.0/20", "meta iifname", "\"eth0\""]), wanted);
    assert_eq!(v4(&["ip saddr ne 192.168.1.1/20", "iifname == eth0"]), wanted);
}

#[test]
fn each_common_match_is_known() {
    let one = |text: &str| v4(&[text]).unwrap().remove(0).remove(0);
    let bare = |text: &str| is(Subject::Address(Side::Destination, text.parse().unwrap()));
    assert_eq!(one("ip daddr 10.0.0.1"), bare("10.0.0.1/32"));
    let veth = InterfaceName::StartsWith("veth".to_owned());
    assert_eq!(one("oifname != \"veth*\""), is_not(Subject::Interface(Direction::Out, veth)));
    assert_eq!(one("meta mark 0x10"), is(Subject::Mark(16)));
    assert_eq!(one("mark != 7"), is_not(Subject::Mark(7)));
    assert_eq!(one("meta l4proto udp"), is(Subject::L4Protocol(17)));
    assert_eq!(one("tcp dport 80"), is(Subject::Port(Protocol::Tcp, Side::Destination, 80)));
    assert_eq!(one("sctp sport 0x50"), is(Subject::Port(Protocol::Sctp, Side::Source, 80)));
    let v6 = parse(&["ip6 saddr fd00::/8".to_owned()], Family::V6).unwrap().remove(0).remove(0);
    assert_eq!(v6, is(source("fd00::/8")));
}

#[test]
fn a_set_is_a_rule_for_each_value_and_an_excluded_set_a_match_for_each() {
    let each = Some(vec![vec![is(source("10.0.0.1/32"))], vec![is(source("10.1.0.0/16"))]]);
    assert_eq!(v4(&["ip saddr { 10.0.0.1, 10.1.0.0/16 }"]), each);
    assert_eq!(v4(&["ip saddr {10.0.0.1,10.1.0.0/16,}"]), each);
    let none = Some(vec![vec![is_not(source("10.0.0.1/32")), is_not(source("10.1.0.0/16"))]]);
    assert_eq!(v4(&["ip saddr != { 10.0.0.1, 10.1.0.0/16 }"]), none);
    assert_eq!(v4(&["ip saddr {10.0.0.1,10.0.0.2} iifname {a,b}"]).unwrap().len(), 4);
    assert_eq!(v4(&["tcp dport {1,2,3,4,5} tcp sport {1,2,3,4}"]), None, "20 rules are too many");
}

#[test]
fn what_is_not_surely_understood_is_left_to_nft() {
    for text in [
        "ip6 saddr fd00::1",
        "ip saddr fd00::1",
        "ip saddr 0.0.0.0/0",
        "ip saddr localhost",
        "ip saddr 10.0.0.1-10.0.0.9",
        "ip saddr",
        "ip saddr {}",
        "ip saddr { 10.0.0.1",
        "ip saddr { 10.0.0.1 10.0.0.2 }",
        "ip saddr @allowed",
        "ip saddr 10.0.0.1; flush ruleset",
        "ip protocol tcp",
        "iifname \"eth0",
        "iifname *",
        "iif eth0",
        "tcp dport http",
        "tcp dport 010",
        "TCP dport 80",
        "tcp dport 65536",
        "meta ip",
        "meta mark and 0x1 == 0x1",
        "ct state new",
        "fib saddr type local",
        "ip saddr < 10.0.0.1",
        "é",
    ] {
        assert_eq!(v4(&[text]), None, "{text}");
    }
}

/// A condition as a user would write it, and what it has to become.
fn written() -> impl Strategy<Value = (String, Match)> {
    let address = (any::<[u8; 4]>(), 1u8..=32, any::<bool>()).prop_map(|(octets, prefix, negated)| {
        let network = IpNetwork::new(octets.into(), prefix).unwrap();
        let operator = if negated { "!= " } else { "" };
        let text = format!("ip saddr {operator}{network}");
        let network = IpNetwork::new(network.network(), prefix).unwrap();
        (text, Match { subject: Subject::Address(Side::Source, network), negated })
    });
    let port = (any::<u16>(), any::<bool>()).prop_map(|(port, negated)| {
        let operator = if negated { "!=" } else { "==" };
        let subject = Subject::Port(Protocol::Udp, Side::Destination, port);
        (format!("udp dport {operator} {port}"), Match { subject, negated })
    });
    let interface = ("[a-z][a-z0-9.-]{0,14}", any::<bool>()).prop_map(|(name, negated)| {
        let operator = if negated { "!= " } else { "" };
        (format!("iifname {operator}\"{name}\""), Match { subject: named(&name), negated })
    });
    prop_oneof![address, port, interface]
}

proptest! {
    #[test]
    fn written_conditions_come_back(conditions in prop::collection::vec(written(), 0..6)) {
        let (texts, wanted): (Vec<String>, Vec<Match>) = conditions.into_iter().unzip();
        prop_assert_eq!(parse(&texts, Family::V4), Some(vec![wanted.clone()]));
        prop_assert_eq!(parse(&[texts.join("\t")], Family::V4), Some(vec![wanted]));
    }

    #[test]
    fn any_text_is_parsed_or_left_alone(text in ".{0,60}", words in prop::collection::vec(
        prop::sample::select(vec![
            "ip", "ip6", "saddr", "daddr", "{", "}", ",", "!=", "==", "10.0.0.1", "fd00::1/8", "meta",
            "mark", "0x1", "iifname", "\"a\"", "eth*", "tcp", "dport", "80", "l4proto", "udp",
        ]), 0..12)) {
        for family in Family::BOTH {
            parse(std::slice::from_ref(&text), family);
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            for rule in parse(&words, family).into_iter().flatten() {
                for one in rule {
                    if let Subject::Address(_, network) = one.subject {
                        prop_assert_eq!(Family::of(network.ip()), family);
                    }
                }
            }
        }
    }
}
